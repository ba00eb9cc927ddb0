"""HTC and its ancestors: isometries, curvature, sparse features, the far end of the dtype."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers import HTC, ExpMapHTC, FullyLorentzLinear, HypLinearAttention, HypPositionalEncoding, TangentLinear
from holonomy.manifolds import Lorentz
from holonomy.ops import csr


def boost(rapidity: float, dim: int) -> torch.Tensor:
    """Matrix of a Lorentz boost along the first space axis."""
    matrix = torch.eye(dim + 1, dtype=torch.float64)
    matrix[0, 0] = matrix[1, 1] = math.cosh(rapidity)
    matrix[0, 1] = matrix[1, 0] = math.sinh(rapidity)
    return matrix


def test_htc_with_identity_weight_is_the_identity():
    m = Lorentz(-0.7)
    layer = HTC(3, 3, m, bias=False)
    layer.weight.data.copy_(torch.eye(4)[1:])
    x = m.lift(torch.randn(5, 3))
    torch.testing.assert_close(layer(x), x)


@pytest.mark.parametrize("kappa", [-100.0, -1.0, -0.01])
def test_htc_with_the_space_rows_of_a_boost_is_an_isometry(kappa):
    m = Lorentz(kappa, dtype=torch.float64)
    to = Lorentz(-0.5, dtype=torch.float64)
    layer = HTC(3, 3, m, to, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(boost(1.3, 3)[1:])
    x = m.lift(torch.randn(6, 3, dtype=torch.float64))
    ratio = math.sqrt(kappa / -0.5)
    torch.testing.assert_close(to.cdist(layer(x), layer(x)), ratio * m.cdist(x, x))


def test_htc_starts_as_a_linear_layer_of_the_space_part():
    m = Lorentz(-0.01)
    layer = HTC(64, 32, m)
    x = torch.randn(7, 64)
    expected = torch.nn.functional.linear(x, layer.weight[:, 1:], layer.bias)
    torch.testing.assert_close(layer(m.lift(x))[:, 1:], expected)
    bound = 1 / math.sqrt(64)
    assert 0.9 * bound < layer.weight.abs().max() <= bound
    assert layer.bias.abs().max() <= bound


@pytest.mark.parametrize("kappa", [-4.0, -0.1])
def test_orthogonal_rows_keep_the_radius(kappa):
    m = Lorentz(kappa, dtype=torch.float64)
    sizes = [(5, 5), (5, 8), (8, 8)]
    layers = [HTC(*size, m, init="orthogonal", dtype=torch.float64) for size in sizes]
    x = m.expmap0(torch.nn.functional.pad(torch.randn(6, 5, dtype=torch.float64), (1, 0)))
    torch.testing.assert_close(m.dist0(torch.nn.Sequential(*layers)(x)), m.dist0(x))
    narrow = HTC(5, 3, m, init="orthogonal", dtype=torch.float64).weight[:, 1:]
    torch.testing.assert_close(narrow @ narrow.T, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("build", [HTC, TangentLinear, FullyLorentzLinear, ExpMapHTC])
def test_first_argument_after_the_manifolds_is_no_bias(build):
    with pytest.raises(TypeError):
        build(3, 3, Lorentz(), Lorentz(), Lorentz())


@pytest.mark.parametrize("build", [HTC, TangentLinear, FullyLorentzLinear, ExpMapHTC])
def test_errors_name_the_argument(build):
    with pytest.raises(TypeError, match="manifold_out"):
        build(3, 3, Lorentz(), -1.0)
    with pytest.raises(ValueError, match="out_features"):
        build(3, 0, Lorentz())
    with pytest.raises(ValueError, match="x must have shape"):
        build(3, 3, Lorentz())(torch.zeros(2, 9))


def test_tangent_linear_is_linear_along_geodesics_from_the_origin():
    m, to = Lorentz(-2.0, dtype=torch.float64), Lorentz(-0.3, dtype=torch.float64)
    layer = TangentLinear(4, 3, m, to, bias=False, dtype=torch.float64)
    u = torch.randn(5, 4, dtype=torch.float64)
    x = m.expmap0(torch.nn.functional.pad(u, (1, 0)))
    expected = torch.nn.functional.pad(u @ layer.linear.weight.t(), (1, 0))
    torch.testing.assert_close(to.logmap0(layer(x)), expected)


def test_fully_lorentz_linear_has_the_length_that_the_sigmoid_says():
    m = Lorentz(dtype=torch.float64)
    layer = FullyLorentzLinear(3, 4, m, scale=2.0, dtype=torch.float64)
    layer.length.weight.data.zero_()
    layer.length.bias.data.fill_(math.log(3.0))  # sigmoid 3/4
    y = layer(m.lift(torch.randn(5, 3, dtype=torch.float64)))
    torch.testing.assert_close(y[:, 1:].norm(dim=-1), torch.full((5,), 1.5, dtype=torch.float64))


def test_fully_lorentz_linear_without_direction_gives_the_origin():
    m = Lorentz()
    layer = FullyLorentzLinear(3, 2, m)
    layer.direction.weight.data.zero_()
    layer.direction.bias.data.zero_()
    x = m.lift(torch.randn(4, 3)).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y.detach(), torch.tensor([1.0, 0.0, 0.0]).expand(4, 3))
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert x.grad.isfinite().all()


def bag_of_words(rows: int, columns: int) -> torch.Tensor:
    table = (torch.rand(rows, columns) < 0.1) * torch.rand(rows, columns)
    table[0] = 0  # a row without a word
    return table


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr"])
def test_sparse_features_give_the_same_points_and_gradients(layout):
    m, to = Lorentz(-1.5, learnable=True), Lorentz(-0.5, learnable=True)
    layer = ExpMapHTC(30, 4, m, to)
    layer.weight.data.normal_()
    dense = bag_of_words(9, 30)
    table = as_csr(dense) if layout == "csr" else dense.to_sparse()
    if layout == "uncoalesced":
        halves = torch.cat([table.values(), table.values()]) / 2
        table = torch.sparse_coo_tensor(table.indices().repeat(1, 2), halves, dense.shape, check_invariants=False)
    direction = torch.randn(9, 5)
    results = []
    for features in (dense, table):
        layer.zero_grad()
        y = layer(features)
        (y * direction).sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def as_csr(dense: torch.Tensor) -> torch.Tensor:
    return csr.as_csr(dense.to_sparse())


def test_sparse_features_of_another_layout_are_refused():
    with pytest.raises(TypeError, match="CSR or COO"):
        ExpMapHTC(4, 2, Lorentz())(torch.eye(4).to_mkldnn())


@pytest.mark.parametrize("sparsely", [False, True], ids=["dense", "sparse"])
def test_exponential_map_holds_where_its_square_overflows(sparsely):
    """sqrt|kappa| |x| = 78: cosh is 3.7e33, its square no float32."""
    m = Lorentz(-1.0)
    layer = ExpMapHTC(4, 4, m, bias=False)
    layer.weight.data.copy_(torch.eye(5)[1:])
    features = torch.tensor([[78.0, 0, 0, 0], [0, 39.0, 0, 39.0], [1e-20, 0, 0, 0], [0, 0, 0, 0]])
    y = layer(features.to_sparse() if sparsely else features).detach().double()
    for row, u in zip(y, features.double(), strict=True):
        r = float(u.norm())
        factor = math.sinh(r) / r if r else 1.0
        torch.testing.assert_close(row[1:], factor * u, rtol=1e-5, atol=0)
        torch.testing.assert_close(row[0].item(), math.cosh(math.asinh(factor * r)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sparsely", [False, True], ids=["dense", "sparse"])
def test_exponential_map_beyond_the_dtype_stays_finite(sparsely):
    layer = ExpMapHTC(3, 2, Lorentz(-1.0, learnable=True))
    layer.weight.data.mul_(0.1)
    features = torch.full((2, 3), 1e4)
    y = layer(features.to_sparse() if sparsely else features)
    y.log().clamp(min=0).sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_position_is_the_midpoint_of_the_point_and_its_image():
    m = Lorentz(-0.8, dtype=torch.float64)
    layer = HypPositionalEncoding(3, m, dtype=torch.float64)
    x = m.lift(torch.randn(5, 3, dtype=torch.float64))
    y, p = layer(x), layer.position(x)
    torch.testing.assert_close(m.dist(x, y), m.dist(x, p) / 2)
    torch.testing.assert_close(m.dist(p, y), m.dist(x, p) / 2)


@pytest.mark.parametrize("kappa", [-1e-8, -1.0, -1e4])
def test_features_longer_than_the_dtype_can_map_end_on_their_ray(kappa, dtype):
    """The point saturates as a whole: time and space agree, and longer features of that direction end there too."""
    layer = ExpMapHTC(2, 3, Lorentz(kappa, dtype=dtype), bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
    lengths = torch.tensor([[1e8], [1e20], [1e30]], dtype=dtype)
    ends = layer.space(torch.tensor([[0.6, -0.8]], dtype=dtype) * lengths).detach().double()
    assert ends.isfinite().all()
    for end in ends:
        torch.testing.assert_close(end / end[0], torch.tensor([1.0, 0.6, -0.8]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-6, atol=0)


def test_a_tangent_map_whose_result_saturates_has_finite_gradients(device):
    torch.manual_seed(0)
    flat, steep = (Lorentz(kappa, device=device) for kappa in (-0.01, -100.0))
    layer = TangentLinear(4, 3, flat, steep).to(device)
    x = flat.lift(1e4 * torch.randn(5, 4, device=device)).requires_grad_()
    y = layer(x)
    assert float(y[..., 0].detach().max()) > 1e36
    y.backward(torch.randn(y.shape, device=device))
    assert all(g.isfinite().all() for g in (x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)))


@pytest.mark.parametrize(("std", "far"), [(1e3, 1.0), (1e8, 1.0), (1e27, 1e-20)])
@pytest.mark.parametrize("build", [HTC, ExpMapHTC, FullyLorentzLinear, HypLinearAttention])
def test_long_weights_of_both_signs_give_points_of_the_farthest_ones(build, std, far, dtype, device):
    """Products that overflow with opposite signs have no sum."""
    m, to = (Lorentz(kappa, learnable=True, dtype=dtype, device=device) for kappa in (-1e4, -1e-8))
    layer = build(4, 2, m, to, dtype=dtype, device=device)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.ndim == 2 and "residual" not in name:
                p.normal_(std=std)
    u = 1e3 * torch.randn(6, 4, dtype=dtype, device=device)
    y = layer(u if build is ExpMapHTC else m.lift(u * (far * torch.finfo(dtype).max / 1e5)))
    (y / torch.finfo(dtype).max).sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
