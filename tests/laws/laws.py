"""What the laws share: settings drawn by hypothesis, and the comparison of two modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.cases import CASES, Case, Setting

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def cases_where(condition):
    """Parametrise over the cases that satisfy a condition."""
    return pytest.mark.parametrize("case", [case for case in CASES if condition(case)], ids=lambda case: case.name)


@st.composite
def settings_of(draw: Any, *, most_nodes: int = 7, radii: st.SearchStrategy[float] | None = None) -> dict[str, Any]:
    """Draw sizes and curvatures between -100 and -0.01; ``features`` is a multiple of 6, for the heads."""
    # Curvatures cluster at their ends, where formulas break.
    curvature = st.one_of(st.sampled_from([-0.01, -1.0, -100.0]), st.floats(-100.0, -0.01))
    return {
        "nodes": draw(st.integers(2, most_nodes)),
        "features": draw(st.sampled_from([6, 12])),
        "curvatures": draw(st.tuples(curvature, curvature, curvature)),
        "radius": 1.0 if radii is None else draw(radii),
    }


def build(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0, **drawn: Any) -> Any:
    """Return setting, module in evaluation mode and inputs, from a seed."""
    torch.manual_seed(seed)
    setting = Setting(device=device, dtype=dtype, **drawn)
    module, inputs = case.build(setting)
    return setting, module.eval(), inputs


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
    result = output(module, inputs) if function is None else function(module, *inputs)
    named = leaves(module, inputs)
    found = torch.autograd.grad(result, list(named.values()), cotangent(result), allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return result.detach(), {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}


def assert_near(ours: Tensor, theirs: Tensor, rtol: float, what: str, *, floor: float = 0.0) -> None:
    """Compare in the norm of the whole tensor, at least ``floor``: an entry that cancels has no digits of its own."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    assert ours.shape == theirs.shape, what
    error = (ours - theirs).norm().item()
    scale = max(theirs.norm().item(), math.sqrt(theirs.numel()) * rtol, floor)
    assert error <= rtol * scale, f"{what}: off by {error / scale:.1e} of its size"


def twins(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module in training and in evaluation mode, as copies."""
    for training in (True, False):
        yield copy.deepcopy(module).train(training)
