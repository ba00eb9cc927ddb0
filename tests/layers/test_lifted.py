"""Midpoints and blocks in chunks: the numbers of their plain forms, at any size and radius."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from holonomy.layers import HypPositionalEncoding, HypResidual
from holonomy.manifolds import Lorentz
from holonomy.models import HypformerBlock
from holonomy.ops.lorentz import lifted, midpoint
from tests.laws.laws import assert_near, cotangent, gradients

D = torch.float64
DIM = 6


def manifold(kappa, dtype):
    return Lorentz(kappa, learnable=True, dtype=dtype)


def build(name, dtype):
    """A layer on manifolds of its own, and how many points it takes."""
    one, two = manifold(-1.0, dtype), manifold(-0.6, dtype)
    made = {
        "HypResidual": lambda: HypResidual(one, epsilon=0.7),
        "HypResidual, two manifolds": lambda: HypResidual(one, two),
        "HypPositionalEncoding": lambda: HypPositionalEncoding(DIM, two, dtype=dtype),
        "HypformerBlock": lambda: HypformerBlock(DIM, 2, one, two, manifold_feedforward=two, dtype=dtype),
    }
    return made[name](), 2 if "Residual" in name else 1


LAYERS = ("HypResidual", "HypResidual, two manifolds", "HypPositionalEncoding", "HypformerBlock")
layers = pytest.mark.parametrize("name", LAYERS)


def both_forms(name, dtype, nodes, device, monkeypatch, *, radius=1.0):
    """Results and gradients in parts and by definition."""
    torch.manual_seed(nodes)
    layer, count = build(name, dtype)
    layer = layer.to(device)
    source = Lorentz(-1.0, dtype=dtype, device=device)
    size = torch.as_tensor(radius, dtype=dtype, device=device)
    points = tuple(
        source.lift(torch.randn(nodes, DIM, dtype=dtype, device=device) * size).detach() for _ in range(count)
    )
    found = []
    for fewest, size in ((1, 2**13), (10**9, 2**40)):
        monkeypatch.setattr(lifted, "_FEWEST_ROWS", fewest)
        monkeypatch.setattr(lifted, "_CHUNK_CUDA" if device.type == "cuda" else "_CHUNK", size)
        found.append(gradients(layer, points))
    return found


@layers
@pytest.mark.parametrize("nodes", [1, 7, 1025, 2049])
def test_parts_give_what_the_definition_gives(name, nodes, dtype, device, monkeypatch):
    (ours, ours_grads), (theirs, their_grads) = both_forms(name, dtype, nodes, device, monkeypatch)
    limit = 1e-10 if dtype == D else 5e-4
    assert_near(ours, theirs, limit, "result")
    # The attention of one node has gradients that are all cancellation.
    floor = 1e-3 * max(grad.norm().item() for grad in their_grads.values())
    for key, grad in their_grads.items():
        assert_near(ours_grads[key], grad, 10 * limit, key, floor=floor)


@pytest.mark.parametrize("name", LAYERS[:3])
def test_tables_with_far_points_keep_their_digits(name, device, monkeypatch):
    """Rows far out take their chunks to float64, and leave the others as they are."""
    radius = torch.ones(1300, 1)
    radius[3], radius[4], radius[1200] = 1e12, 1e25, 3e3
    (ours, ours_grads), (theirs, their_grads) = both_forms(
        name, torch.float32, 1300, device, monkeypatch, radius=radius
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for key, grad in their_grads.items():
        assert ours_grads[key].isfinite().all()
        assert_near(ours_grads[key], grad, 1e-3, key)


def pairs(kind, size):
    """Points at most so far out, and their partners."""
    u, w = torch.nn.functional.normalize(torch.randn(2, 500, 16, dtype=D), dim=-1)
    share = torch.rand(500, 1, dtype=D)
    x, y = {
        "any": (u, w),
        "close": (u, torch.nn.functional.normalize(u + 1e-3 * w, dim=-1)),
        "one ray": (u, u * share),
        "short": (u, w * 10 ** (-4 * share)),
        "opposite": (u, 1e-4 * w - u * share),
    }[kind]
    return (size * x).float(), (size * y).float()


@pytest.mark.parametrize("size", [1.0, 16.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("epsilon", [1.0, 0.3, 1e-4, 1e3])
@pytest.mark.parametrize("kind", ["any", "close", "one ray", "short", "opposite"])
def test_float32_points_keep_float32_digits_of_float64(kind, epsilon, size):
    found, points = [], pairs(kind, size)
    for dtype in (torch.float32, D):
        x, y = (z.to(dtype).requires_grad_() for z in points)
        m = manifold(-1.0, dtype)
        out = midpoint.midpoint(x, y, m.curvature, epsilon)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32).to(dtype)
        found.append([out, *torch.autograd.grad(out, (x, y, *m.parameters()), weight)])
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        apart = (ours.double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert apart.max() < (1e-6 if place == 0 else 1e-5)


def test_rows_in_different_directions_are_computed_in_float32():
    """And so are all rows of most tables; those on one ray, and those far out, alone go to float64."""
    x, y = pairs("any", 1e4)
    y[3], y[70], x[400] = 0.3 * x[3], 2 * x[70], 1e8 * x[400]
    _, beyond = midpoint._plain_forward(x, y, torch.tensor([-1.0]), 1.0, x.new_empty(len(x), x.shape[1] + 1))
    assert beyond.tolist() == [3, 70, 400]


def test_rows_of_later_chunks_go_to_float64_too(monkeypatch):
    (x, y), found = pairs("any", 1e4), []
    y[-3] = 0.3 * x[-3]
    monkeypatch.setattr(lifted, "_CHUNK", 100 * x.shape[1] * 4)
    for dtype in (torch.float32, D):
        leaves = [z.to(dtype).requires_grad_() for z in (x, y)]
        out = midpoint.midpoint(*leaves, torch.tensor([-1.0], dtype=dtype), 1.0)
        found.append(torch.cat(torch.autograd.grad(out, leaves, torch.ones_like(out))).double())
    assert ((found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)).max() < 1e-5


@pytest.mark.parametrize("length", [1e38, math.nan])
def test_gradients_of_float32_rows_fit_beside_long_ones(length):
    found, (x, y) = [], pairs("close", 30.0)
    for dtype in (torch.float32, D):
        leaves = [z.to(dtype).requires_grad_() for z in (x, y)]
        weight = torch.ones(len(x), 17, dtype=dtype)
        weight[7] = length
        out = midpoint.midpoint(*leaves, torch.tensor([-1.0], dtype=dtype), 1.0)
        found.append(torch.autograd.grad(out, leaves, weight))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_rows_of_float64_whose_squares_do_not_fit(size):
    """Far out beside a point near the origin the midpoint is halfway between them, in rapidity."""
    ray = torch.tensor([[0.6, 0.8]], dtype=D)
    ours = midpoint.midpoint(ray * size, ray * 0, torch.tensor([-1.0], dtype=D), 1.0)[:, 1:]
    rapidity = torch.asinh(torch.tensor(size, dtype=D))
    torch.testing.assert_close(ours, ray * torch.sinh(rapidity / 2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("far", [1.0, 1e3])
def test_midpoints_of_float32_points_are_the_same_under_autocast(far):
    """Matrix products, which autocast takes in bfloat16, have no place in them."""
    found, m = [], manifold(-1.0, torch.float32)
    points, weight = far * torch.randn(2, 50, DIM), torch.randn(50, DIM + 1)
    points[1, 7] = 0.3 * points[0, 7]  # which float64 takes where it is far out
    for enabled in (False, True):
        x, y = (z.clone().requires_grad_() for z in points)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = midpoint.midpoint(x, y, m.curvature, 1.0)
        found.append([out, *torch.autograd.grad(out, (x, y, *m.parameters()), weight)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@layers
def test_gradients_by_finite_differences(name, monkeypatch):
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    layer, count = build(name, D)
    source = Lorentz(-1.0, dtype=D)
    points = [source.lift(torch.randn(4, DIM, dtype=D)).requires_grad_() for _ in range(count)]
    named = dict(layer.named_parameters())

    def function(*tensors):
        parameters = dict(zip(named, tensors[count:], strict=True))
        return torch.func.functional_call(layer, parameters, tensors[:count])

    inputs = (*points, *(p.detach().clone().requires_grad_() for p in named.values()))
    assert torch.autograd.gradcheck(function, inputs, atol=1e-6, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_those_of_the_definition(name, monkeypatch):
    layer, count = build(name, D)
    source = Lorentz(-1.0, dtype=D)
    points = [source.lift(torch.randn(5, DIM, dtype=D)).detach().requires_grad_() for _ in range(count)]
    found = []
    for fewest in (1, 10**9):
        monkeypatch.setattr(lifted, "_FEWEST_ROWS", fewest)
        twin = copy.deepcopy(layer)
        result = twin(*points)
        first = torch.autograd.grad((result * cotangent(result)).sin().sum(), points, create_graph=True)
        leaves = [*points, *twin.parameters()]
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, materialize_grads=True)
        found.append(second)
    floor = 1e-3 * max(grad.norm().item() for grad in found[1])
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-9, "second derivative", floor=floor)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
def test_a_block_on_one_manifold_compiles_whole(device):
    """The compiler refused a curvature that came twice."""
    block = HypformerBlock(DIM, 2, manifold(-1.0, D), dtype=D).to(device)
    x = block.manifold_in.lift(torch.randn(3, DIM, dtype=D, device=device)).detach()
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, expected = gradients(compiled, (x,)), gradients(block, (x,))
    assert_near(found[0], expected[0], 1e-10, "result")
    for ours, theirs in zip(found[1].values(), expected[1].values(), strict=True):
        assert_near(ours, theirs, 1e-8, "gradient", floor=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("without_decorators")
@pytest.mark.parametrize("dim", [16, 48, 20])
def test_compiled_midpoints_and_times_keep_their_digits(dim, device):
    """At every radius and at the origin; where 16 divides the width, rows are summed by a product."""
    size = 10.0 ** torch.tensor([-25.0, -3, 0, 1, 3, 6, 12, 25], device=device).repeat_interleave(6)[:, None]
    u, w = (torch.randn(len(size), dim, device=device) for _ in range(2))
    share = torch.tensor([0.0, 1, 0.5, 1e-3, 1e-6, -1], device=device).repeat(8)[:, None]
    leaves = [z.requires_grad_() for z in (size * u, size * (share * u + (1 - share.abs()) * 1e-3 * w))]
    m = manifold(-0.7, torch.float32).to(device)

    def function(x, y):
        return m.lift(midpoint.midpoint(x, y, m.curvature, 1.0)[:, 1:])

    torch.compiler.reset()
    found = []
    for form in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        out = form(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, cotangent(out))])
    for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
        apart = (ours - theirs).double().norm(dim=-1) / theirs.double().norm(dim=-1)
        assert apart.max() < (1e-6 if place == 0 else 1e-5)


@pytest.mark.parametrize(("radius", "length", "on_time"), [(1.0, 1e6, 1e-20), (1.0, 1e30, 1e-20), (1e-9, 1e-9, 1e30)])
def test_a_gradient_of_a_time_is_not_lost_in_its_quotient(radius, length, on_time):
    m = Lorentz(-(radius**-2))
    point = m.lift(torch.tensor([[length, 0.0], [0.0, radius]]))
    grad = torch.tensor([[on_time, 0.0, 2e-20], [0.0, 1.0, 2.0]])
    share = length / math.hypot(length, radius)
    expected = torch.tensor([[on_time * share, 2e-20], [1.0, 2.0]])
    torch.testing.assert_close(lifted.space_gradient(grad, point), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("attends_within", [True, False])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_block_between_curvatures_whose_quotient_leaves_the_range_is_finite(norm, attends_within):
    outer, inner = Lorentz(-1e25), Lorentz(-1e-20)
    hidden = inner if attends_within else outer
    block = HypformerBlock(4, 2, outer, inner, manifold_attention=hidden, manifold_feedforward=inner, norm=norm)
    found = block(outer.lift(torch.randn(5, 4) * outer.curvature.neg().rsqrt()))
    assert found.isfinite().all()
    assert (inner.dist0(found) * inner.curvature.neg().sqrt() > 0.01).all()
