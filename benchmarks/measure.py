"""Contenders that take turns, so that whatever else the machine does meets all of them; time, memory, equality."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Case, Contenders, Figure, Growth, Line, Step

__all__ = ["Measured", "Memory", "Row", "check_equal", "figures", "measured", "rows"]

MOST_ROUNDS, FEWEST_ROUNDS = 25, 3
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds of the profiler speak on standard error


class Memory(NamedTuple):
    """Bytes of one turn: the most above what was there before, and what is left when only its results live."""

    peak: int
    results: int

    def of(self, kind: str) -> float:
        return float(self.peak if kind == "memory" else self.peak - self.results)


class Measured(NamedTuple):
    """One size: the seconds of each contender in each round, and the memory of one turn."""

    seconds: dict[str, list[float]]
    memory: dict[str, Memory]


class Row(NamedTuple):
    """One number of the table; without quartiles where it was measured once."""

    size: int | None
    name: str
    value: float
    quartiles: tuple[float, float] | None
    target: str
    note: str

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        sign, limit = self.target.split()
        return self.value <= float(limit) if sign == "<=" else self.value >= float(limit)


def measured(case: Case, size: int, device: torch.device, threads: int, budget: float) -> Measured:
    """Take turns at one size for about ``budget`` seconds, equality first."""
    torch.set_num_threads(threads)
    contenders = case.contenders(size, device)
    for group in case.equal:
        check_equal(case, size, [(name, contenders[name]) for name in group if name in contenders])
    seconds = _turns(contenders, _clock(device, threads), budget)
    memory = {name: _memory(step, device) for name, step in contenders.items()} if threads == 1 else {}
    return Measured(seconds, memory)


def check_equal(case: Case, size: int, group: list[tuple[str, Step]]) -> None:
    """Refuse contenders that do not do the same work.

    Lengths are compared, not entries: a ReLU that rounding switches changes a row of a gradient by some 1e-3.
    """
    found = [(name, [x.detach() for x in step()]) for name, step in group]
    for (one, expected), (other, got) in pairwise(found):
        for place, (x, y) in enumerate(zip(expected, got, strict=True)):
            error = float((x - y).norm() / x.norm().clamp_min(torch.finfo(x.dtype).tiny))
            if not error <= case.tolerance:
                raise AssertionError(
                    f"{case.name}, {size} {case.unit}: {one!r} and {other!r} must do the same work, but their results "
                    f"{place} are {error:.1e} of their length apart."
                )


def _clock(device: torch.device, threads: int) -> Callable[[Step], float]:
    if device.type == "cuda":
        return _events
    now = time.thread_time if threads == 1 else time.perf_counter

    def clock(step: Step) -> float:
        start = now()
        step()
        return now() - start

    return clock


def _events(step: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _turns(contenders: Contenders, clock: Callable[[Step], float], budget: float) -> dict[str, list[float]]:
    start = time.perf_counter()
    for step in contenders.values():
        clock(step)
    slow = time.perf_counter() - start > budget / 5
    if not slow:  # a second warm-up costs little
        for step in contenders.values():
            clock(step)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - start > budget:
            break
        for name, step in contenders.items():
            taken[name].append(clock(step))
    return taken


def _memory(step: Step, device: torch.device) -> Memory:
    """By the allocator's own accounting."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            results = step()
        events = profiled.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        held = peak = 0
        for _, change in changes:
            held += change
            peak = max(peak, held)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results}
    return Memory(peak, sum(storages.values()))


def rows(case: Case, found: dict[int, Measured], *, memory: bool) -> list[Row]:
    """The numbers of a case's ratios and growths; of memory where it was measured."""
    made: list[Row] = []
    for line in case.lines:
        if isinstance(line, Line) and (memory or line.of == "time"):
            made += [
                _ratio(line, size, at) for size, at in found.items() if {line.above, line.below} <= set(at.seconds)
            ]
        elif isinstance(line, Growth):
            made += _growth(case, line, found, memory=memory)
    return made


def _ratio(line: Line, size: int, at: Measured) -> Row:
    target = line.targets.get(size, "")
    if line.of != "time":
        value = at.memory[line.above].of(line.of) / max(at.memory[line.below].of(line.of), 1.0)
        return Row(size, line.name, value, None, target, line.note)
    within = [a / b for a, b in zip(at.seconds[line.above], at.seconds[line.below], strict=True)]
    low, middle, high = statistics.quantiles(within, n=4)
    return Row(size, line.name, middle, (low, high), target, line.note)


def _growth(case: Case, line: Growth, found: dict[int, Measured], *, memory: bool) -> list[Row]:
    sizes = [size for size, at in found.items() if line.of in at.seconds]
    each = [statistics.median(found[size].seconds[line.of]) for size in sizes]
    first, last = (each[0] / sizes[0], each[-1] / sizes[-1]) if sizes else (math.nan, math.nan)
    made: list[Row] = []
    if len(sizes) > 1:
        made.append(Row(None, f"{line.of}, exponent of time", exponent(sizes, each), None, line.exponent, line.note))
    made += [
        Row(size, f"{line.of}, a {case.unit[:-1]} over one at {sizes[0]:,}", t / size / first, None, limit, line.note)
        for size, t in zip(sizes, each, strict=True)
        if (limit := line.per_unit.get(size, ""))
    ]
    if line.microseconds_per_unit:
        name = f"{line.of}, microseconds a {case.unit[:-1]}"
        made.append(Row(sizes[-1], name, 1e6 * last, None, line.microseconds_per_unit, line.note))
    if line.bytes_per_unit and memory:
        each_byte = found[sizes[-1]].memory[line.of].peak / sizes[-1]
        name = f"{line.of}, bytes a {case.unit[:-1]}"
        made.append(Row(sizes[-1], name, each_byte, None, line.bytes_per_unit, line.note))
    return made


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms."""
    x, y = (torch.tensor(list(v), dtype=torch.float64).log() for v in (sizes, values))
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def figures(case: Case, device: torch.device) -> list[Row]:
    return [
        Row(size, line.name, line.measure(size, device), None, line.targets.get(size, ""), line.note)
        for line in case.lines
        if isinstance(line, Figure)
        for size in case.sizes
    ]
