"""Hyperbolic graph convolutions: what they do to a rotation, to weights and to points far out."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import HGATConv, HGCNConv, LGCNConv
from holonomy.manifolds import Lorentz, frechet_mean
from holonomy.ops.propagation import averaging, propagation
from holonomy.structures import Graph

EDGES = torch.tensor([[0, 1, 1, 2, 3, 3, 0], [1, 0, 2, 1, 1, 3, 1]])
KINDS = {
    "HGCN": HGCNConv,
    "HGCN, local": lambda *sizes, **how: HGCNConv(*sizes, aggregation="local", **how),
    "HGAT": HGATConv,
    "LGCN": LGCNConv,
}


def made(name: str, **how):
    torch.manual_seed(0)
    manifold = Lorentz(-0.6, dtype=torch.float64)
    return manifold, KINDS[name](4, 4, manifold, dtype=torch.float64, **how)


@pytest.mark.parametrize("name", ["HGCN", "HGCN, local", "HGAT"])
def test_rotations_about_the_origin_pass_through_a_multiple_of_the_identity(name: str) -> None:
    """The linear map scales all tangent vectors alike: what is left commutes with rotations."""
    manifold, layer = made(name, bias=False)
    with torch.no_grad():
        layer.linear.linear.weight.copy_(1.3 * torch.eye(4))
    turn, _ = torch.linalg.qr(torch.randn(4, 4).double())
    x = torch.randn(5, 4).double()
    turned = layer(manifold.lift(x @ turn), EDGES)
    torch.testing.assert_close(turned[:, 1:], layer(manifold.lift(x), EDGES)[:, 1:] @ turn)


def boost(dim: int, rapidity: float) -> torch.Tensor:
    """A translation of the hyperboloid along an axis, on ambient rows."""
    matrix = torch.eye(dim + 1, dtype=torch.float64)
    matrix[0, 0] = matrix[1, 1] = math.cosh(rapidity)
    matrix[0, 1] = matrix[1, 0] = math.sinh(rapidity)
    return matrix


def test_the_average_of_lgcn_commutes_with_every_isometry() -> None:
    class Same(torch.nn.Module):
        in_features, direction = 4, torch.nn.Linear(5, 4).double()

        def forward(self, x):
            return x

    manifold, layer = made("LGCN")
    layer.linear = Same()
    x = manifold.lift(torch.randn(5, 4).double())
    moved = x @ boost(4, 1.7)
    torch.testing.assert_close(layer(moved, EDGES), layer(x, EDGES) @ boost(4, 1.7))


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_repeated_edges_and_a_graph_is_its_edges(name: str) -> None:
    manifold, layer = made(name)
    x = manifold.lift(torch.randn(4, 4).double())
    expected = layer(x, EDGES)
    torch.testing.assert_close(layer(x, Graph(EDGES, 4)), expected)
    torch.testing.assert_close(layer(x, EDGES, torch.ones(7).double()), expected)
    once, times = EDGES.unique(dim=1, return_counts=True)
    torch.testing.assert_close(layer(x, once, times.double()), expected)
    kept = torch.tensor([1.0, 1, 1, 0, 1, 1, 1]).double()
    torch.testing.assert_close(layer(x, EDGES, kept), layer(x, EDGES[:, kept > 0]))
    weights = torch.rand(7).double()
    doubled = torch.cat([EDGES, torch.arange(4).expand(2, 4)], 1), torch.cat([weights, torch.ones(4).double()])
    doubled[1][5] = 0.0  # the loop of node 3 is listed twice now
    scaled = layer(x, doubled[0], 3 * doubled[1])
    torch.testing.assert_close(scaled, layer(x, *doubled))


@pytest.mark.parametrize("name", KINDS)
def test_weights_whose_sums_overflow_are_shares_all_the_same(name: str, dtype: torch.dtype) -> None:
    """They became zero; the loops of two nodes are listed twice."""
    torch.manual_seed(0)
    manifold = Lorentz(-0.6, dtype=dtype)
    layer, x = KINDS[name](4, 4, manifold, dtype=dtype), manifold.lift(torch.randn(4, 4, dtype=dtype))
    edges = torch.cat([EDGES, torch.tensor([0, 1, 2, 3, 0, 1]).expand(2, 6)], 1)
    weights, largest = torch.rand(13, dtype=dtype) / 2 + 0.5, torch.finfo(dtype).max
    torch.testing.assert_close(layer(x, edges, largest * weights), layer(x, edges, weights))
    torch.testing.assert_close(
        propagation(edges, 4, dtype, largest * weights)(x), propagation(edges, 4, dtype, weights)(x)
    )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_half_precision_sums_over_many_edges(name: str, half: torch.dtype) -> None:
    """Of a star: shares, and gradients of the node that has all edges, were summed in half precision."""
    _, layer = made(name)
    hub, others = torch.zeros(2999, dtype=torch.int64), torch.arange(1, 3000)
    edges = torch.stack([torch.cat([hub, others]), torch.cat([others, hub])])
    layer, found = layer.to(half), []
    x = layer.manifold_in.lift(torch.rand(3000, 4).to(half))
    for kind in (half, torch.float64):
        points = x.to(kind).detach().requires_grad_()
        y = layer.to(kind)(points, edges)
        found.append([z.double() for z in (y[:1, 1:], *torch.autograd.grad(y[:, 1:].sum(), points))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("name", KINDS)
def test_a_node_without_weights(name: str) -> None:
    """Its loop's is zero as well: the origin, or with local averages its own place."""
    manifold, layer = made(name, bias=False)
    edges, weights = torch.tensor([[0, 1, 1], [1, 0, 1]]), torch.tensor([0.0, 1.0, 0.0]).double().requires_grad_()
    x = manifold.lift(torch.randn(2, 4).double()).requires_grad_()
    y = layer(x, edges, weights)
    away = manifold.dist0(y[1])
    assert (away > 0) == (name == "HGCN, local")
    for grad in torch.autograd.grad(y.sum(), [x, weights]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_a_node_that_hears_nothing_is_heard(name: str) -> None:
    """Node 0 has weights of zero, its loop's among them: what it sends does not depend on them."""
    manifold, layer = made(name)
    edges, x = torch.tensor([[0, 0, 1], [0, 1, 0]]), manifold.lift(torch.randn(2, 4).double())
    sent, kept = (layer(x, edges, torch.tensor([loop, 2.0, 0.0]).double())[1] for loop in (0.0, 1.0))
    torch.testing.assert_close(sent, kept)


def test_a_node_without_a_loop_hears_its_only_neighbour_however_far_it_is() -> None:
    """The softmax has one entry, which is one; the exponential of its distance is no number of float64."""
    manifold, layer = made("HGAT", bias=False)
    with torch.no_grad():
        layer.linear.linear.weight.copy_(torch.eye(4))
    rays = torch.tensor([[300.0, 0, 0, 0], [-300.0, 0, 0, 0]]).double()
    x = manifold.expmap0(torch.nn.functional.pad(rays, (1, 0)))
    y = layer(x, torch.tensor([[1, 0], [0, 0]]), torch.tensor([1.0, 0.0]).double())
    torch.testing.assert_close(manifold.logmap0(y)[:, 1:], rays[[1, 1]])


def test_averages_are_means(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype)
    average = averaging(EDGES, 4, dtype)
    expected = [(x[0] + x[1]) / 2, (2 * x[0] + x[1] + x[2] + x[3]) / 5, (x[1] + x[2]) / 2, x[3]]
    torch.testing.assert_close(average(x), torch.stack(expected))


def test_local_averages_of_two_nodes_are_their_frechet_mean() -> None:
    """Halfway along the geodesic between them, seen from either side."""
    manifold, layer = made("HGCN, local", bias=False)
    with torch.no_grad():
        layer.linear.linear.weight.copy_(torch.eye(4))
    x = manifold.lift(3 * torch.randn(2, 4).double())
    y = layer(x, torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(y, frechet_mean(x, manifold).expand(2, 5))


@pytest.mark.parametrize(
    ("name", "radius"), [*((name, r) for name in ("HGCN", "HGAT") for r in (20.0, 40.0, 75.0)), ("HGCN, local", 5.0)]
)
def test_float32_is_right_far_out(name: str, radius: float) -> None:
    """As float64 is at the same points."""
    manifold, layer = made(name, bias=False)
    narrow = Lorentz(-0.6)
    float32 = KINDS[name](4, 4, narrow, bias=False)
    with torch.no_grad():
        layer.linear.linear.weight.copy_(torch.linalg.qr(torch.randn(4, 4).double())[0])
        float32.linear.linear.weight.copy_(layer.linear.linear.weight)
    rays = torch.nn.functional.normalize(torch.randn(4, 4).double()) * radius / math.sqrt(0.6)
    x = narrow.expmap0(torch.nn.functional.pad(rays.float(), (1, 0)))
    ours = narrow.logmap0(float32(x, EDGES))[:, 1:].double()
    theirs = manifold.logmap0(layer(manifold.lift(x[:, 1:].double()), EDGES))[:, 1:]
    assert (ours - theirs).norm() <= 2e-5 * theirs.norm()
