"""What the laws share: which cases they run on, settings drawn for each case, and the comparison of two modules."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holonomy.manifolds import Lorentz
from tests.cases import CASES, Case, Setting

# On which cases each law runs, by the name of its test.
LAWS: dict[str, list[Case]] = {}


def cases_where(condition: Callable[[Case], bool]):
    """Parametrise a law over the cases that satisfy a condition, which asks for what a case is and never for a name."""
    chosen = [case for case in CASES if condition(case)]

    def over_cases(law):
        LAWS[law.__name__] = chosen
        return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)(law)

    return over_cases


every_case = cases_where(lambda case: True)


# What a case is, found by building it.


@cache
def module_of(case: Case) -> nn.Module:
    """Return the case's module, to ask what it has."""
    return build(case, torch.device("cpu"), torch.float64)[1]


@cache
def node_axes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the arguments of a case by name, each with its axes of nodes: those whose size is the number of nodes."""
    sizes = (Setting(nodes=nodes) for nodes in _sizes(case))
    few, many = (named(module_of(case), case.inputs(setting)) for setting in sizes)
    return {name: _of_sizes(case, few[name].shape, many[name].shape) for name in few}


@cache
def result_axes(case: Case) -> tuple[int, ...]:
    """Return the result's axes of nodes."""
    cpu = torch.device("cpu")
    few, many = (output(*build(case, cpu, torch.float64, nodes=nodes)[1:]).shape for nodes in _sizes(case))
    return _of_sizes(case, few, many)


def named(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the inputs by the names of the arguments of ``forward``."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return {f"{parameters[0].name}{i}": x for i, x in enumerate(inputs)}
    return {parameter.name: x for parameter, x in zip(parameters, inputs, strict=False)}


def _sizes(case: Case) -> tuple[int, int]:
    most = min(case.most_nodes, 7)
    return most - 1 - (most > 3), most


def _of_sizes(case: Case, few: torch.Size, many: torch.Size) -> tuple[int, ...]:
    return tuple(axis for axis, both in enumerate(zip(few, many, strict=True)) if both == _sizes(case))


# Masks by the names of their arguments, and what they say of padding.
_PADDING = {"key_padding_mask": True, "src_key_padding_mask": True, "padding": True, "mask": False}


def mask_of(case: Case) -> str | None:
    """Return the name of the argument that says which nodes are padding; a mask of pairs has two axes of nodes."""
    return next((name for name, axes in node_axes(case).items() if name in _PADDING and len(axes) == 1), None)


def padding_in(case: Case, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return which nodes are padding."""
    name = mask_of(case)
    return named(module, inputs)[name] ^ (not _PADDING[name])


def manifolds_of(module: nn.Module) -> list[Lorentz]:
    """Return the manifolds of a module, each once."""
    return [part for part in module.modules() if isinstance(part, Lorentz)]


def norms_of(module: nn.Module) -> list[nn.Module]:
    """Return the parts that keep running statistics."""
    return [part for part in module.modules() if getattr(part, "running_mean", None) is not None]


def changes_in_training(case: Case, module: nn.Module) -> bool:
    """Whether training mode computes something else than evaluation mode."""
    return case.drawn or bool(norms_of(module))


def richest_of_its_class(case: Case) -> bool:
    """Whether no case of the class has more arguments, or as many and more kinds of parts, or as many and more options.

    A class that is called in several ways, through several modules of the cases, has one case of each.
    """
    alike = (other for other in CASES if other.kind is case.kind)
    return case is max((other for other in alike if type(module_of(other)) is type(module_of(case))), key=_riches)


@cache
def _riches(case: Case) -> tuple[int, int, int]:
    return len(node_axes(case)), len({type(part) for part in module_of(case).modules()}), len(case.options)


# Settings drawn at random.


def drawn_settings(most: int, **how: Any):
    """Decorate a law that is tried with ``most`` drawn settings a case, or with one under the profile ``quick``.

    Hypothesis draws a number, from which :func:`drawn_setting` makes the setting of each case: a strategy of
    sizes, curvatures and radii would start from its least example, the same trivial one for every case.
    """

    def decorate(law):
        # A smaller number is no simpler setting.
        phases = (Phase.explicit, Phase.generate)
        tried = settings(max_examples=min(most, settings.default.max_examples), phases=phases)
        return tried(given(drawn=st.integers(0, 2**32 - 1).map(lambda draw: {"draw": draw} | how))(law))

    return decorate


def drawn_setting(case: Case, draw: int, *, most_nodes: int = 7, far: bool = False) -> dict[str, Any]:
    """Return the sizes, curvatures and radius that a number stands for in a case.

    Curvatures lie between -100 and -0.01, often at the ends, no two of a ratio near one; ``features`` is a multiple
    of 6, for the heads. A radius of one is left as it is unless ``far``: then it runs from where squares underflow
    in float64 to where they overflow in float32, with a zero now and then.
    """
    source = random.Random(f"{case.name} {draw}")

    def curvature() -> float:
        return source.choice([-0.01, -1.0, -100.0, -(10.0 ** source.uniform(-2, 2))])

    curvatures = curvature(), curvature(), curvature()
    while any(0.8 < a / b < 1.25 for a, b in zip(curvatures, curvatures[1:] + curvatures[:1], strict=True)):
        curvatures = curvature(), curvature(), curvature()
    radius = 10.0 ** source.uniform(-30, 18) if source.random() > 0.1 else 0.0
    return {
        "nodes": source.randint(2, most_nodes),
        "features": source.choice([6, 12]),
        "curvatures": curvatures,
        "radius": radius if far else 1.0,
    }


def build(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0, **given_: Any) -> Any:
    """Return setting, shaken module in evaluation mode and inputs, from a seed or from the number of a draw."""
    draw = given_.pop("draw", None)
    if draw is not None:
        how = {name: given_.pop(name) for name in ("most_nodes", "far") if name in given_}
        seed, given_ = draw, drawn_setting(case, draw, **how) | given_
        if currently_in_test_context():
            note(f"{case.name} with {given_}")
    torch.manual_seed(seed)
    setting = Setting(device=device, dtype=dtype, **given_)
    module, inputs = case.build(setting)
    return setting, module.eval(), inputs


# Modules at work.


def output(module: nn.Module, inputs: tuple[Tensor, ...], seed: int = 1) -> Tensor:
    """Return the output under a seed."""
    torch.manual_seed(seed)
    return module(*inputs)


def leaves(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return everything that can receive a gradient, by name."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return parameters | {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}


def differentiable(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies of the inputs, the floating-point ones asking for gradients."""
    return tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)


def cotangent(result: Tensor) -> Tensor:
    """Return fixed numbers of order one in the shape of a result."""
    flat = torch.arange(result.numel(), dtype=torch.float64, device=result.device)
    return torch.cos(1.0 + 2.3 * flat).reshape(result.shape).to(result.dtype)


def gradients(module: nn.Module, inputs: tuple[Tensor, ...], function: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result and the gradient of everything that can have one, zero where there is none."""
    inputs = differentiable(inputs)
    torch.manual_seed(1)
    result = module(*inputs) if function is None else function(module, *inputs)
    named = leaves(module, inputs)
    found = torch.autograd.grad(result, list(named.values()), cotangent(result), allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return result.detach(), {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}


def in_chunks(patch: pytest.MonkeyPatch) -> None:
    """Take the forms in chunks at any size, also where the reference is faster."""
    patch.setattr("holonomy.ops.lorentz.lifted._FEWEST_ROWS", 1)
    patch.setattr("holonomy.ops.chromatic_attention._FEWEST_ENTRIES", 1)
    patch.setattr("holonomy.ops.performer.chunked._FEWEST_FEATURES", 1)
    patch.setattr("holonomy.ops.simplicial_attention.paths.GATHERED", 1)


def assert_near(ours: Tensor, theirs: Tensor, rtol: float, what: str, *, floor: float = 0.0) -> None:
    """Compare in the norm of the whole tensor, at least ``floor``: an entry that cancels has no digits of its own."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    assert ours.shape == theirs.shape, what
    error = (ours - theirs).norm().item()
    scale = max(theirs.norm().item(), math.sqrt(theirs.numel()) * rtol, floor)
    assert error <= rtol * scale, f"{what}: off by {error / scale:.1e} of its size"


def modes(case: Case, module: nn.Module) -> Iterator[nn.Module]:
    """Yield copies in each mode that computes something of its own; tests/laws/test_values.py has which ones do."""
    for training in (True, False) if changes_in_training(case, module) else (False,):
        yield copy.deepcopy(module).train(training)
