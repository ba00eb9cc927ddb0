"""HypMLR against a search for the nearest point of its hyperplane; prototypes against distances."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize

from holonomy.layers import FullyLorentzLinear, HypLinearAttention, HypMLR, HypPrototypes
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz.hyperplanes import hyperplane_distances, hyperplane_distances_reference

D = torch.float64


@pytest.mark.parametrize("kappa", [-4.0, -1.0, -0.1])
@pytest.mark.parametrize("offset", [-0.7, 0.0, 0.4])
def test_logit_is_the_signed_distance_to_the_hyperplane(kappa, offset):
    """The hyperplane is what geodesics sweep that leave exp_o(a n) at right angles to n."""
    m = Lorentz(kappa, dtype=D)
    layer = HypMLR(3, 1, m, dtype=D)
    layer.offset.data.fill_(offset)
    normal = layer.weight.detach()[0] / layer.weight.detach().norm()
    across = torch.linalg.svd(normal[None])[2][1:]  # an orthonormal basis of the complement
    foot = m.expmap0(torch.nn.functional.pad(offset * normal, (1, 0)))

    def distance(s, x: torch.Tensor) -> tuple[float, torch.Tensor]:
        s = torch.tensor(s, dtype=D, requires_grad=True)
        step = torch.nn.functional.pad(s @ across, (1, 0))
        value = m.dist(x, m.expmap(foot, m.transp0(foot, step)))
        return value.item(), torch.autograd.grad(value, s)[0].numpy()

    for x in m.lift(torch.randn(2, 3, dtype=D)):
        found = minimize(distance, [0.0, 0.0], args=(x,), jac=True, method="BFGS")
        direction = m.transp0(foot, torch.nn.functional.pad(normal, (1, 0)))
        side = math.copysign(1.0, m.inner(foot, m.logmap(foot, x), direction).item())
        expected = side * found.fun * layer.weight.detach().norm().item()
        assert layer(x).item() == pytest.approx(expected, abs=1e-7)


def test_flat_limit_is_logistic_regression():
    m = Lorentz(-1e-8, dtype=D)
    layer = HypMLR(3, 4, m, dtype=D)
    layer.offset.data.normal_()
    space = torch.randn(5, 3, dtype=D)
    expected = space @ layer.weight.t() - layer.offset * layer.weight.norm(dim=-1)
    torch.testing.assert_close(layer(m.lift(space)), expected, rtol=1e-5, atol=1e-6)


def test_rescaling_everything_scales_the_logits():
    """Distances scale by sqrt(kappa_1/kappa_2), and so do logits whose offsets move along."""
    a, b = Lorentz(-4.0, dtype=D), Lorentz(-1.0, dtype=D)
    here, there = HypMLR(3, 2, a, dtype=D), HypMLR(3, 2, b, dtype=D)
    here.offset.data.normal_()
    there.weight.data.copy_(here.weight)
    there.offset.data.copy_(2 * here.offset)
    x = a.lift(torch.randn(5, 3, dtype=D))
    torch.testing.assert_close(there(a.rescale(x, b)), 2 * here(x))


def test_vanishing_normal_gives_zero_and_finite_gradients():
    m = Lorentz(-1.0, learnable=True)
    layer = HypMLR(3, 2, m)
    layer.weight.data[0] = 0
    x = m.lift(torch.randn(4, 3)).detach().requires_grad_()
    y = layer(x)
    assert (y[:, 0] == 0).all()
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("build", [HypMLR, HypPrototypes])
@pytest.mark.parametrize("points", [torch.bfloat16, torch.float32, D])
def test_points_of_any_dtype_have_logits_of_the_wider_one(build, points):
    m = Lorentz(-1.0)
    layer, x = build(3, 4, m), m.lift(torch.randn(5, 3).to(points))
    assert layer(x).dtype == torch.promote_types(points, torch.float32)
    torch.testing.assert_close(layer(x).double(), layer.double()(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [HypMLR, HypPrototypes])
@pytest.mark.parametrize("radius", [0.0, 1e-6, 1e4, 1e19, 1e33])
def test_any_radius_gives_finite_logits_and_gradients(build, radius):
    m = Lorentz(-1.0, learnable=True)
    layer = build(3, 4, m)
    space = (torch.randn(5, 3) * radius).requires_grad_()
    y = layer(m.lift(space))
    assert y.isfinite().all()
    y.logsumexp(-1).sum().backward()
    assert space.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_products_of_far_float64_points_and_far_hyperplanes_have_finite_gradients():
    m = Lorentz(-1.0, learnable=True, dtype=D)
    layer = HypMLR(3, 4, m, dtype=D)
    layer.offset.data.fill_(-300.0)
    space = (torch.randn(5, 3, dtype=D) * 5e307).clamp(-1e308, 1e308).requires_grad_()
    y = layer(m.lift(space))
    assert y.isfinite().all()
    y.logsumexp(-1).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in (space, *layer.parameters()))


def test_the_distance_changes_with_the_offset_by_as_much_at_1e200_as_at_1e100():
    """Far out the logarithm is exact, and the distance between two points of a ray leaves no trace in the gradient."""
    layer = HypMLR(2, 3, Lorentz(dtype=D), dtype=D)
    gradients = []
    for scale in (1e100, 1e200):
        points = layer.manifold.lift(scale * torch.tensor([[1.0, 2.0]], dtype=D))
        gradients.append(torch.autograd.grad(layer(points).sum(), layer.offset)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_prototype_logits_are_scaled_squared_distances(shape):
    m = Lorentz(-0.5, dtype=D)
    layer = HypPrototypes(3, 4, m, dtype=D)
    layer.log_scale.data.fill_(math.log(3.0))
    x = m.lift(torch.randn(*shape, 3, dtype=D))
    expected = -3 * m.dist(x[..., None, :], layer.prototypes()).square()
    torch.testing.assert_close(layer(x), expected)


def test_prototypes_follow_a_learning_curvature():
    m = Lorentz(-0.5, learnable=True)
    layer = HypPrototypes(3, 4, m)
    before = layer.prototypes().detach()
    m.curvature_parameter.log_ratio.data.fill_(math.log(4.0))
    after = layer.prototypes()
    torch.testing.assert_close(after, before * (0.5 / -m.curvature).sqrt())
    torch.testing.assert_close(after[:, :1], m.time(after))


@pytest.mark.parametrize("rapidity", [1.0, 5.0, 10.0, 12.0])
def test_far_hyperplanes_are_right_in_float32(rapidity):
    """On the hyperplane and one unit before it, where the two terms of the formula cancel; they left errors of 9."""
    m = Lorentz(-1.0)
    layer = HypMLR(3, 2, m)
    normal = torch.tensor([2.0, -1.0, 0.5])
    with torch.no_grad():
        layer.weight.copy_(normal)
        layer.offset.copy_(torch.tensor([rapidity, rapidity + 1]))
    x = m.expmap0(torch.nn.functional.pad(rapidity * normal / normal.norm(), (1, 0)))
    expected = torch.tensor([0.0, -1.0]) * normal.norm()
    torch.testing.assert_close(layer(x), expected, rtol=0.0, atol=1e-5 * rapidity)


@pytest.mark.parametrize("width", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [10.0, 1e3, -1e30])
@pytest.mark.parametrize("radius", [0.0, 1.0, 1e37])
def test_any_offset_gives_finite_logits_and_gradients(offset, radius, width):
    m = Lorentz(-1.0, learnable=True)
    layer = HypMLR(3, 4, m, dtype=width)
    layer.offset.data.fill_(offset)
    space = (torch.randn(5, 3, dtype=width) * radius).requires_grad_()
    y = layer(m.lift(space))
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (space, *layer.parameters()))


@pytest.mark.parametrize("radius", [0.0, 1e-3, 1.0, 1e4, 1e20])
@pytest.mark.parametrize("batch", [(), (1,), (3, 5), (0,), (1100,)])
def test_distances_in_portions_are_those_of_the_definition(batch, radius):
    space = (torch.randn(*batch, 65) * radius).requires_grad_()
    plane, gain = torch.randn(3, 66, dtype=D, requires_grad=True), torch.rand(3, dtype=D, requires_grad=True)
    kappa = torch.tensor([-0.3], dtype=D, requires_grad=True)
    leaves, found = (space, plane, gain, kappa), []
    for function in (hyperplane_distances, hyperplane_distances_reference):
        result = function(*leaves)
        weights = torch.linspace(-1, 1, result.numel(), dtype=D).view_as(result)
        first = torch.autograd.grad((result * weights).sum(), leaves)
        found.append([result.detach(), *first])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if ours.dtype == torch.float32 else 1e-9, atol=1e-12)


def test_distances_are_differentiated_twice_by_the_definition():
    leaves = (torch.randn(4, 3), torch.randn(2, 4, dtype=D), torch.rand(2, dtype=D), torch.tensor([-0.3], dtype=D))
    leaves, seconds = tuple(x.requires_grad_() for x in leaves), []
    for function in (hyperplane_distances, hyperplane_distances_reference):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("log_scale", [-1e3, 1e3])
@pytest.mark.parametrize("kind", [HypPrototypes, HypLinearAttention, FullyLorentzLinear])
def test_a_learned_scale_of_any_size_leaves_finite_numbers(kind: type, log_scale: float, dtype: torch.dtype) -> None:
    """Its exponential overflows; an optimizer with a large step makes such ones."""
    manifold = Lorentz(-1.0, learnable=True, dtype=dtype)
    layer = kind(4, 4, manifold, dtype=dtype)
    torch.nn.init.constant_(layer.log_scale, log_scale)
    x = manifold.lift(torch.randn(5, 4, dtype=dtype)).detach().requires_grad_()
    result = layer(x)
    assert result.isfinite().all()
    for gradient in torch.autograd.grad(result.sum(), (x, *layer.parameters()), allow_unused=True):
        assert gradient is None or gradient.isfinite().all()
