"""The linear map of points given by their space parts: its gradient in closed form is that of the definition."""

from __future__ import annotations

import pytest
import torch

from holonomy.layers import HTC, HypDropout
from holonomy.layers.hyperbolic.feedforward import FeedForward
from holonomy.layers.hyperbolic.refinement import HRC
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz import lifted
from holonomy.ops.lorentz.lifted_linear import lifted_linear, lifted_linear_reference

D = torch.float64


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
def test_every_gradient_is_that_of_the_definition(rows, monkeypatch):
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    shapes = {"x": (*rows, 4), "weight": (3, 5), "bias": (3,)}
    inputs = {name: torch.randn(*shape, dtype=D, requires_grad=True) for name, shape in shapes.items()}
    inputs |= {name: torch.tensor([k], dtype=D, requires_grad=True) for name, k in (("here", -0.4), ("last", -2.5))}
    weights = torch.randn(*rows, 4, dtype=D)
    ours, theirs = (
        torch.autograd.grad((function(*inputs.values()) * weights).sum(), [*inputs.values()])
        for function in (lifted_linear, lifted_linear_reference)
    )
    for name, one, other in zip(inputs, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("bias", [True, False])
def test_a_feed_forward_is_its_four_layers_one_after_the_other(bias):
    """Without a bias as with one."""
    here, hidden = Lorentz(-0.7, dtype=D), Lorentz(-1.3, dtype=D)
    layers = FeedForward(
        HTC(4, 6, here, hidden, bias=bias, dtype=D),
        HRC(torch.tanh, hidden),
        HTC(6, 4, hidden, here, bias=bias, dtype=D),
        HypDropout(0.0, here),
    )
    x = here.lift(torch.randn(5, 4, dtype=D))
    expected = x
    for layer in layers:
        expected = layer(expected)
    torch.testing.assert_close(layers(x), expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_what_the_compiler_sees_is_the_definition(autocast, monkeypatch):
    """Under autocast, whose products are rounded, autograd derives the gradient."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((5, 4), (3, 5), (3,))]
    tensors += [torch.tensor([k], requires_grad=True) for k in (-0.4, -2.5)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = lifted_linear(*tensors), lifted_linear_reference(*tensors)
    torch.testing.assert_close(ours, theirs)
    (before, _), *_ = ours.grad_fn.next_functions
    assert ("LiftedLinear" in before.name()) == (not autocast)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), tensors) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_row_of_nan_leaves_the_map_of_far_rows_finite():
    layer = HTC(4, 4, Lorentz(), bias=False)
    torch.nn.init.constant_(layer.weight, 50.0)
    far = layer.manifold_in.lift(torch.full((2, 4), 1e38))
    x = torch.cat([far, torch.full((1, 5), torch.nan)])
    torch.testing.assert_close(layer(x)[:2], layer(far))
    assert layer(far).isfinite().all()
    assert layer(x)[2].isnan().any()
