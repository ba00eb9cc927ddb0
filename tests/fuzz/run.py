"""Runs of many calls: every call from its own seed, in groups of one name that share what was built for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from holonomy.manifolds import Product
from tests.cases import public_classes
from tests.fuzz import calls, modules
from tests.fuzz.calls import Target
from tests.fuzz.judge import Failure, judged
from tests.fuzz.script import script
from tests.fuzz.source import Source, simplest

__all__ = ["GROUP", "Found", "Report", "run", "shrunk", "targets"]

GROUP = 25


@cache
def targets() -> dict[str, Target]:
    """Every public name."""
    made = [calls.method(name) for name in calls.METHODS] + [calls.function(path) for path in calls.FUNCTIONS]
    for kind in public_classes():
        if not issubclass(kind, nn.Module) or kind is Product:
            continue  # among the functions, with what it is given; factors of a product have no names
        made.append(modules.constructor(kind))
        if kind not in modules.WITHOUT_CASES:
            made += [modules.forward(kind, step=step) for step in (False, True) if not step or modules.steps(kind)]
    return {target.name: target for target in made}


@dataclass(frozen=True)
class Found:
    """A failure with the choices that led to it."""

    target: str
    choices: list[int]
    failure: Failure


@dataclass
class Report:
    """What a run did.

    Attributes:
        calls: how many calls of each name.
        fates: how many had valid, wrong and doubtful arguments.
        failures: how many failures of each key.
        first: the first failure of each key.
    """

    calls: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    first: dict[str, Found] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Add another report."""
        self.calls += other.calls
        self.fates += other.fates
        self.failures += other.failures
        self.first = other.first | self.first


def run(groups: Iterable[int], seed: int, names: tuple[str, ...] | None = None) -> Report:
    """Make the calls of some groups, of all names or of those that are given."""
    torch.set_num_threads(1)
    report = Report()
    known = [target for target in targets().values() if names is None or target.name in names]
    weights = [target.weight for target in known]
    for group in groups:
        target = random.Random(f"{seed} {group}").choices(known, weights)[0]
        opening = Source(seed=f"{seed} {group} opening")
        target.opening(opening)
        for place in range(GROUP):
            source = Source(opening.choices, f"{seed} {group} {place}")
            call = target.draw(source)
            failure = judged(call)
            report.calls[target.name] += 1
            report.fates["wrong" if call.wrong else "doubtful" if call.doubtful else "valid"] += 1
            if failure is not None:
                report.failures[failure.key] += 1
                report.first.setdefault(failure.key, Found(target.name, source.choices, failure))
    return report


def shrunk(found: Found) -> str:
    """The simplest call that fails in the same way, as a script."""
    target = targets()[found.target]

    def fails(choices: list[int]) -> bool:
        failure = judged(target.draw(Source(choices)))
        return failure is not None and failure.key == found.failure.key

    call = target.draw(Source(simplest(found.choices, fails)))
    detail = " ".join(found.failure.detail.split())[:200]
    return script(call.setup, call.written, call.arguments, f"{found.failure.what}: {detail}")
