"""The linear map of tangent vectors at the origin: float32 numbers and gradients are those of the definition."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import ExpMapHTC
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz import exponential_linear as module
from holonomy.ops.lorentz import lifted
from holonomy.ops.lorentz.exponential_linear import exponential_linear, exponential_linear_reference

D = torch.float64
WIDTH, OUT = 6, 5


def problem(rows, length, kappa=-0.7, *, bias=True):
    """Vectors of about this rapidity, a map and a gradient, as float32 numbers in float64."""
    torch.manual_seed(len(rows))
    u = torch.nn.functional.normalize(torch.randn(*rows, WIDTH), dim=-1) * (length / math.sqrt(-kappa))
    tensors = {
        "u": u,
        "weight": torch.randn(OUT, WIDTH + 1),
        "bias": torch.randn(OUT),
        "curvature": torch.tensor([kappa]),
    }
    if not bias:
        del tensors["bias"]
    return {name: x.to(D) for name, x in tensors.items()}, torch.randn(*rows, OUT).to(D)


def found(function, tensors, g, dtype):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    y = function(*(leaves.get(name) for name in ("u", "weight", "bias", "curvature")))
    return [y, *torch.autograd.grad(y, [*leaves.values()], g.to(dtype))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kappa", [-1e-4, -0.7, -1e4])
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-3, 1.0, 10.0, 40.0, 60.0])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
def test_float32_has_its_digits_of_the_definition_in_float64(rows, length, kappa, bias, monkeypatch):
    monkeypatch.setattr(lifted, "_CHUNK", 4 * OUT * 3)
    tensors, g = problem(rows, length, kappa, bias=bias)
    ours, theirs = (
        found(exponential_linear, tensors, g, torch.float32),
        found(exponential_linear_reference, tensors, g, D),
    )
    for name, one, other in zip(("result", *tensors), ours, theirs, strict=True):
        # A rapidity has the rounding of the length; what it is the exponent of, as many times more.
        limit = 1e-6 * max(1.0, length)
        assert (one.double() - other).norm() <= limit * other.norm() + 1e-30, name


def test_rows_up_to_half_of_the_range_have_a_gradient_written_by_hand(monkeypatch):
    monkeypatch.setattr(module, "exponential_linear_reference", None)
    tensors, g = problem((4,), 43.0)
    assert all(x.isfinite().all() for x in found(exponential_linear, tensors, g, torch.float32))
    with pytest.raises(TypeError):
        found(exponential_linear, problem((4,), 45.0)[0], g, torch.float32)


@pytest.mark.parametrize(("size", "weight", "length"), [(1e20, 1.0, 30.0), (1e36, 1.0, 30.0), (1e20, 1e20, 1.0)])
def test_gradients_leave_the_range_where_those_of_the_definition_do(size, weight, length):
    tensors, g = problem((4,), length)
    tensors["weight"] *= weight
    both = (found(f, tensors, g * size, torch.float32) for f in (exponential_linear, exponential_linear_reference))
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        torch.testing.assert_close(one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0), rtol=1e-4, atol=0)


def test_it_can_be_taken_back_twice_and_differentiated_twice():
    tensors, g = problem((3,), 1.0)
    leaves = [x.float().requires_grad_() for x in tensors.values()]
    y = exponential_linear(*leaves)
    once, again = (torch.autograd.grad(y, leaves, g.float(), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    second = []
    for function in (exponential_linear, exponential_linear_reference):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for one, other in zip(*second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("std", [1e17, 1e25])
def test_long_weights_hold_float32_rows_where_the_definition_does(std):
    layer = ExpMapHTC(WIDTH, OUT, Lorentz(-1.0))
    torch.nn.init.normal_(layer.weight, std=std)
    u = torch.nn.functional.normalize(torch.randn(5, WIDTH), dim=-1) * 43.0
    expected = exponential_linear_reference(u, layer.weight, layer.bias, layer.manifold_in.curvature)
    assert torch.equal(layer.space(u), expected) == (std == 1e25)
    torch.testing.assert_close(layer.space(u), expected, rtol=1e-4, atol=0)
