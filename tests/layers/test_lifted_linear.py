"""The linear map of points given by their space parts: its gradient in closed form is that of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from holonomy.layers import HTC, HypDropout
from holonomy.layers.hyperbolic.feedforward import ActivationDropout, FeedForward
from holonomy.layers.hyperbolic.refinement import HRC
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz import lifted
from holonomy.ops.lorentz.lifted_linear import lifted_linear, lifted_linear_reference

D = torch.float64


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)])
def test_every_gradient_is_that_of_the_definition(rows, relu, monkeypatch):
    """The first and the second one; with ReLU the map may write over its argument."""
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    shapes = {"x": (*rows, 4), "weight": (3, 5), "bias": (3,)}
    inputs = {name: torch.randn(*shape, dtype=D, requires_grad=True) for name, shape in shapes.items()}
    inputs |= {name: torch.tensor([k], dtype=D, requires_grad=True) for name, k in (("here", -0.4), ("last", -2.5))}
    names, (x, *others) = [*inputs], [*inputs.values()]
    weights = torch.randn(*rows, 4, dtype=D)
    results = []
    for function in (lifted_linear, lifted_linear_reference):
        value = (function(x.clone(), *others, relu=relu) * weights).sum()
        first = torch.autograd.grad(value, [x, *others], create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), [x, *others])
        results.append((value, *first, *second))
    labels = ["value", *names, *(f"second, {name}" for name in names)]
    for name, one, other in zip(labels, *results, strict=True):
        torch.testing.assert_close(one, other, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "refinement", [torch.tanh, ActivationDropout(torch.relu, 0.5), ActivationDropout(nn.ReLU(), 0.0)]
)
def test_a_feed_forward_is_its_four_layers_one_after_the_other(bias, refinement, monkeypatch):
    """Without a bias as with one, whatever is between the maps, with its gradients."""
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    here, hidden, after = (Lorentz(k, learnable=True, dtype=D) for k in (-0.7, -1.3, -0.4))
    layers = FeedForward(
        HTC(4, 6, here, hidden, bias=bias, dtype=D),
        HRC(refinement, hidden, after),
        HTC(6, 4, after, here, bias=bias, dtype=D),
        HypDropout(0.0, here),
    )
    x = here.lift(torch.randn(5, 4, dtype=D)).detach().requires_grad_()
    torch.manual_seed(1)
    expected = x
    for layer in layers:
        expected = layer(expected)
    torch.manual_seed(1)
    ours = layers(x)
    torch.testing.assert_close(ours, expected)
    tensors = [x, *layers.parameters()]
    gradients = (torch.autograd.grad(y.square().sum(), tensors) for y in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_relu_in_a_feed_forward_makes_no_table(monkeypatch):
    """Its result takes the place of its argument."""
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    here = Lorentz()
    layers = FeedForward(
        HTC(4, 32, here), HRC(ActivationDropout(torch.relu, 0.0), here), HTC(32, 4, here), HypDropout(0.0, here)
    )
    x = here.lift(torch.randn(50, 4)).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        layers(x).sum().backward()
    wide = [event.name for event in seen.events() if [50, 32] in event.input_shapes]
    assert "aten::relu_" in wide
    assert "aten::relu" not in wide


@pytest.mark.parametrize("place", ["activation", "dropout"])
def test_hooks_inside_a_refinement_see_what_they_always_saw(place):
    refinement = ActivationDropout(nn.ReLU(), 0.0)
    here = Lorentz()
    layers = FeedForward(HTC(4, 6, here), HRC(refinement, here), HTC(6, 4, here), HypDropout(0.0, here))
    seen = []
    getattr(refinement, place).register_forward_hook(lambda _, __, output: seen.append(output))
    layers(here.lift(torch.randn(5, 4)))
    assert len(seen) == 1
    assert bool((seen[0] >= 0).all())


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
