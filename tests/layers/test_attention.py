"""Hyperbolic attention: known answers, isometries, masks, empty rows, the far end of the dtype."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from holonomy.layers import HTC, HypLinearAttention, HypSoftmaxAttention, SimplicialAttention, TokenAttention
from holonomy.manifolds import Lorentz
from holonomy.ops.linear_attention import linear_average
from holonomy.ops.linear_attention.causal import linear_attention_weights
from holonomy.ops.linear_attention.reference import linear_attention, power_features
from holonomy.ops.softmax_attention import SIMILARITIES, hyperbolic_softmax_attention, weighted_midpoint

D = torch.float64
ATTENTIONS = {
    "linear": HypLinearAttention,
    **{
        name: lambda *args, name=name, **options: HypSoftmaxAttention(*args, similarity=name, **options)
        for name in SIMILARITIES
    },
}
attentions = pytest.mark.parametrize("build", ATTENTIONS.values(), ids=ATTENTIONS)
similarities = pytest.mark.parametrize("similarity", SIMILARITIES)


def set_linear(htc: HTC, matrix: torch.Tensor) -> None:
    """Give a map the space rows of a matrix of ambient space, and no bias."""
    htc.weight.data.copy_(matrix[1:])
    htc.bias.data.zero_()


def boost(rapidity: float, dim: int) -> torch.Tensor:
    matrix = torch.eye(dim + 1, dtype=D)
    matrix[0, 0] = matrix[1, 1] = math.cosh(rapidity)
    matrix[0, 1] = matrix[1, 0] = math.sinh(rapidity)
    return matrix


@pytest.mark.parametrize("nodes", [20, 500])
def test_linear_attention_in_float16(nodes):
    """What counts as zero there is a hundredth: at 64 channels nearly every row was."""
    q, k = (power_features(torch.randn(nodes, 64), 2.0) for _ in range(2))
    v = torch.randn(nodes, 8)
    expected = linear_attention(q, k, v)
    half = linear_attention(*(x.half() for x in (q, k, v)))
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=5e-3, atol=5e-3)
    m = Lorentz(-1.0)
    layer, x = HypLinearAttention(64, 1, m), m.lift(torch.randn(nodes, 64))
    with torch.autocast("cpu", dtype=torch.float16):
        rough = layer(x)
    torch.testing.assert_close(rough.float(), layer(x), rtol=2e-2, atol=2e-2)


def test_gradients_of_linear_attention_in_bfloat16():
    """That of a query is the small difference of large sums: made in bfloat16 it kept one digit."""
    features = [x.bfloat16() for x in (torch.rand(9, 6), torch.rand(9, 6), torch.randn(9, 4))]
    weights = torch.randn(9, 4).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in features]
        found.append(torch.autograd.grad(linear_attention(*given), given, weights.to(dtype)))
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 0.006 * exact.norm()


@similarities
def test_one_node_attends_to_itself(similarity):
    m, hidden, to = Lorentz(-1.0, dtype=D), Lorentz(-0.5, dtype=D), Lorentz(-2.0, dtype=D)
    layer = HypSoftmaxAttention(6, 2, m, to, manifold_hidden=hidden, similarity=similarity, dtype=D)
    x = m.lift(torch.randn(1, 6, dtype=D))
    torch.testing.assert_close(layer(x), hidden.rescale(layer.value(x), to))


@similarities
def test_coincident_points_stay_together(similarity):
    m = Lorentz(-1.0, learnable=True)
    layer = HypSoftmaxAttention(4, 2, m, similarity=similarity)
    space = torch.randn(4).expand(7, 4).clone().requires_grad_()
    y = layer(m.lift(space))
    torch.testing.assert_close(y, layer.value(m.lift(space)), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert space.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@similarities
def test_query_equal_to_its_key_has_finite_gradients(similarity):
    """The square root in the distance has no slope at zero; softmax of it must not notice."""
    m = Lorentz(-1.0, dtype=D)
    layer = HypSoftmaxAttention(3, 1, m, similarity=similarity, dtype=D)
    layer.key.load_state_dict(layer.query.state_dict())
    x = m.lift(torch.randn(5, 3, dtype=D)).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@similarities
def test_softmax_attention_commutes_with_boosts(similarity):
    m = Lorentz(-1.0, dtype=D)
    still = HypSoftmaxAttention(3, 1, m, similarity=similarity, dtype=D)
    moved = HypSoftmaxAttention(3, 1, m, similarity=similarity, dtype=D)
    turn = boost(0.8, 3)
    for name in ("query", "key", "value"):
        set_linear(getattr(still, name), torch.eye(4, dtype=D))
        set_linear(getattr(moved, name), turn)
    x = m.lift(torch.randn(5, 3, dtype=D))
    torch.testing.assert_close(moved(x), still(x) @ turn.T)


def test_geodesic_weights_of_three_points_on_a_line():
    """d = 1, positions -1, 0, 2: the weights of the middle query are softmax(-1, 0, -4)."""
    m = Lorentz(-1.0, dtype=D)
    layer = HypSoftmaxAttention(1, 1, m, dtype=D)
    for name in ("query", "key", "value"):
        set_linear(getattr(layer, name), torch.eye(2, dtype=D))
    position = torch.tensor([-1.0, 0.0, 2.0], dtype=D)
    x = m.lift(position.sinh()[:, None])
    weights = torch.softmax(-position.square(), 0)
    time, space = (weights * position.cosh()).sum(), (weights * position.sinh()).sum()
    torch.testing.assert_close(m.logmap0(layer(x))[1, 1], torch.atanh(space / time))


@similarities
def test_logits_of_ten_thousand_pick_the_nearest(similarity):
    m = Lorentz(-1.0)
    layer = HypSoftmaxAttention(2, 1, m, similarity=similarity)
    for name in ("query", "key", "value"):
        set_linear(getattr(layer, name), torch.eye(3))
    reach = {"geodesic": 80.0, "geodesic_squared": 60.0, "lorentz_squared": 6.0}[similarity]
    angle = torch.arange(5) * (2 * math.pi / 5)
    space = math.sinh(reach) * torch.stack([angle.cos(), angle.sin()], -1)
    space.requires_grad_()
    y = layer(m.lift(space))
    # Dot products leave the midpoint a relative error of the spacing times the square of the time, as documented.
    rtol = torch.finfo(torch.float32).eps * math.cosh(reach) ** 2 if similarity == "lorentz_squared" else 1e-4
    torch.testing.assert_close(y[:, 1:], space, rtol=rtol, atol=1e-4)
    y.mean().backward()
    assert space.grad.isfinite().all()


@attentions
@pytest.mark.parametrize("kappa", [-100.0, -1.0, -0.01])
@pytest.mark.parametrize("radius", [0.0, 1e-6, 1.0, 1e4, 1e12, 1e24, 1e33])
def test_any_radius_gives_finite_points_and_gradients(build, kappa, radius):
    m, to = Lorentz(kappa, learnable=True), Lorentz(-1.0, learnable=True)
    layer = build(4, 2, m, to)
    space = torch.randn(6, 4) * radius
    space[:2] = space[2]
    space.requires_grad_()
    y = layer(m.lift(space))
    assert y.isfinite().all()
    torch.testing.assert_close(y[:, :1], to.time(y))
    (y / y[:, :1]).sum().backward()
    assert space.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("build", [*ATTENTIONS.values(), partial(HypLinearAttention, average="midpoint")])
@pytest.mark.parametrize("radius", [1e30, 1e37])
def test_gradients_beside_the_end_of_the_range_are_finite(build, radius):
    for seed in range(8):
        torch.manual_seed(seed)
        m, to = Lorentz(-100.0, learnable=True), Lorentz(-0.01, learnable=True)
        layer = build(6, 2, m, to, manifold_hidden=Lorentz(-3.0))
        for p in layer.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.3)
        space = torch.cat([torch.zeros(1, 6), radius * torch.randn(2, 6)]).requires_grad_()
        y = layer(m.lift(space))
        assert y.isfinite().all()
        y.backward(torch.randn_like(y))
        assert space.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@attentions
def test_nodes_may_come_in_any_order(build):
    m = Lorentz(-0.8, dtype=D)
    layer = build(6, 3, m, dtype=D)
    x, order = m.lift(torch.randn(7, 6, dtype=D)), torch.randperm(7)
    torch.testing.assert_close(layer(x[order]), layer(x)[order])


@attentions
@pytest.mark.parametrize("filling", [0.0, 1e30, math.inf, math.nan])
def test_padding_changes_nothing_whatever_it_holds(build, filling):
    m, to = Lorentz(-0.8, learnable=True, dtype=D), Lorentz(-2.0, learnable=True, dtype=D)
    layer = build(6, 3, m, to, dtype=D)
    sizes = [5, 1, 0, 3]
    x = m.lift(torch.randn(4, 5, 6, dtype=D)).detach()
    mask = torch.stack([torch.arange(5) >= size for size in sizes])
    direction = torch.randn(4, 5, 7, dtype=D)

    alone, expected = [], [torch.zeros_like(p) for p in layer.parameters()]
    for i, size in enumerate(sizes):
        y = torch.cat([layer(x[i, :size]), to.origin(5 - size, 7).as_subclass(torch.Tensor)])
        gradients = torch.autograd.grad((y * direction[i]).sum(), tuple(layer.parameters()), materialize_grads=True)
        alone.append(y.detach())
        expected = [a + b for a, b in zip(expected, gradients, strict=True)]
    # The origin of the padding moves with the curvature of the output, and only that.
    padded = x.masked_fill(mask[..., None], filling).requires_grad_()
    y = layer(padded, mask)
    torch.testing.assert_close(y, torch.stack(alone))
    keep = ~mask[..., None] * direction
    gradients = torch.autograd.grad((y * keep).sum(), (padded, *layer.parameters()))
    assert (gradients[0][mask] == 0).all()
    for got, want in zip(gradients[1:], expected, strict=True):
        torch.testing.assert_close(got, want)


@attentions
def test_rows_that_are_all_masked_are_the_origin(build):
    m, to = Lorentz(-1.0), Lorentz(-0.25, learnable=True)
    layer = build(4, 2, m, to)
    x = m.lift(torch.randn(2, 3, 4)).requires_grad_()
    y = layer(x, torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(y.detach(), torch.tensor([2.0, 0, 0, 0, 0]).expand(2, 3, 5))
    y.sum().backward()
    assert (x.grad == 0).all()


@attentions
def test_a_batch_is_its_graphs(build):
    m = Lorentz(-1.0, dtype=D)
    layer = build(4, 2, m, dtype=D)
    x = m.lift(torch.randn(2, 3, 5, 4, dtype=D))
    torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2]))


@attentions
def test_errors_name_the_argument(build):
    with pytest.raises(ValueError, match="multiple of heads"):
        build(6, 4, Lorentz())
    with pytest.raises(TypeError, match="manifold_out"):
        build(6, 2, Lorentz(), 3.0)


@pytest.mark.usefixtures("without_shape_checks")
@attentions
@pytest.mark.parametrize("nodes", [5, 2100])
def test_masks_and_points_that_do_not_fit_get_one_sentence(build, nodes):
    """Some broadcast: (batch, 1) hid whole graphs, and (nodes,) was taken where nodes are few and not where many."""
    m = Lorentz()
    layer = build(4, 2, m)
    x = m.lift(torch.randn(2, nodes, 4))
    for shape in ((nodes,), (1, nodes), (2, 1), (2, nodes - 1), (2, nodes, nodes)):
        with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(\*batch, n\) = \(2, "):
            layer(x, torch.zeros(shape, dtype=torch.bool))
    for wrong in (torch.float32, torch.int64):
        with pytest.raises(TypeError, match="key_padding_mask must be boolean"):
            layer(x, torch.zeros(2, nodes, dtype=wrong))
    for few in (x[0, 0], x[..., :4], x.new_zeros(())):
        with pytest.raises(ValueError, match=r"x must have shape \(\*batch, n, features \+ 1 = 5\)"):
            layer(few)


def test_options_are_checked():
    with pytest.raises((ValueError, TypeError), match="similarity"):
        HypSoftmaxAttention(4, 2, Lorentz(), similarity="cosine")
    with pytest.raises(ValueError, match="dropout"):
        HypSoftmaxAttention(4, 2, Lorentz(), dropout=-0.1)
    with pytest.raises(ValueError, match="power"):
        HypLinearAttention(4, 2, Lorentz(), power=0.5)
    with pytest.raises(ValueError, match="power must be finite"):
        HypLinearAttention(4, 2, Lorentz(), power=math.inf)
    with pytest.raises((ValueError, TypeError), match="average"):
        HypLinearAttention(4, 2, Lorentz(), average="mean")


@similarities
def test_dropout_hides_keys_in_training_only(similarity):
    m = Lorentz(-1.0, dtype=D)
    layer = HypSoftmaxAttention(4, 2, m, similarity=similarity, dropout=0.5, dtype=D)
    x = m.lift(torch.randn(6, 4, dtype=D))
    assert not torch.allclose(layer(x), layer(x))
    plain = HypSoftmaxAttention(4, 2, m, similarity=similarity, dtype=D)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x), plain(x))
    layer.train().dropout = 1.0
    for found in (layer(x), layer.step(x)[0]):
        torch.testing.assert_close(found, m.projx(torch.zeros_like(x)))


@similarities
def test_dropped_weights_are_those_of_the_midpoint(similarity):
    """One head, two keys: each query gets the midpoint, one of the values, or nothing, in the right proportions."""
    m = Lorentz(-1.0, dtype=D)
    layer = HypSoftmaxAttention(1, 1, m, similarity=similarity, dropout=0.25, dtype=D)
    for name, value in (("query", 0.0), ("key", 0.0), ("value", 1.0)):
        set_linear(getattr(layer, name), value * torch.eye(2, dtype=D))
    x = m.lift(torch.tensor([[1.0], [3.0]], dtype=D)).expand(4000, 2, 2)
    space = layer(x)[:, 0, 1]
    middle = weighted_midpoint(m.space(x[0]), torch.ones(1, 2, dtype=D), curvature=m.curvature)
    for value, share in ((0.0, 1 / 16), (1.0, 3 / 16), (3.0, 3 / 16), (middle.item(), 9 / 16)):
        assert abs(((space - value).abs() < 1e-9).double().mean().item() - share) < 0.03


def test_linear_attention_of_one_node_is_the_sharpened_value():
    m, hidden, to = (Lorentz(k, dtype=D) for k in (-1.0, -0.5, -2.0))
    layer = HypLinearAttention(4, 1, m, to, manifold_hidden=hidden, power=3.0, dtype=D)
    layer.query.bias.data.fill_(3.0)
    layer.key.bias.data.fill_(3.0)  # something is positive, so the one weight is not zero
    layer.log_scale.data.fill_(math.log(2.0))
    x = m.lift(0.1 * torch.randn(1, 4, dtype=D))
    value = torch.relu(hidden.space(layer.value(x))) / 2
    value = value**3 * value.norm() / (value**3).norm()
    space = (value + layer.residual(value)) * 0.5
    torch.testing.assert_close(layer(x), to.lift(space))


def test_midpoints_of_linear_attention(dtype):
    """Of values that coincide, far out, that value; of two opposite ones the origin; without weight the origin."""
    kappa = torch.tensor([-2.0], dtype=dtype)
    ones, values = torch.ones(2, 1, dtype=dtype), torch.tensor([[1e4, 4.0], [1e4, 4.0]], dtype=dtype)
    torch.testing.assert_close(linear_average(ones, ones, values, curvature=kappa)[0], values, rtol=1e-6, atol=0)
    values[1] *= -1
    assert linear_average(ones, ones, values, curvature=kappa)[0].abs().max() < 1e-3
    assert linear_average(0 * ones, ones, values, curvature=kappa)[0].tolist() == [[0.0, 0.0]] * 2
    alone = linear_average(ones, ones, values, torch.tensor([False, True]), curvature=kappa)[0]
    torch.testing.assert_close(alone, values[:1].expand(2, 2), rtol=1e-6, atol=0)


def test_midpoint_is_the_centroid_of_the_manifold():
    m = Lorentz(-0.5, dtype=D)
    q, k, v = torch.rand(3, 4, dtype=D), torch.rand(6, 4, dtype=D), torch.randn(6, 2, dtype=D)
    expected = m.space(m.centroid(m.lift(v), q @ k.mT))
    torch.testing.assert_close(linear_average(q, k, v, curvature=m.curvature)[0], expected)


def test_scale_cancels_in_the_weights_and_acts_on_the_values():
    m = Lorentz(-1.0, dtype=D)
    layer = HypLinearAttention(4, 2, m, dtype=D)
    layer.residual.bias.data.zero_()
    x = m.lift(torch.randn(5, 4, dtype=D))
    before = m.space(layer(x))
    layer.log_scale.data.fill_(math.log(4.0))
    after = layer(x)
    torch.testing.assert_close(m.space(after), before / 4)
    after.sum().backward()
    assert layer.log_scale.grad.abs() > 0


def test_queries_without_a_matching_key_get_zero():
    query = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    key = torch.tensor([[0.0, 2.0], [0.0, 1.0]], requires_grad=True)
    value = torch.tensor([[1.0], [4.0]], requires_grad=True)
    out = linear_attention(query, key, value)
    assert out.tolist() == [[0.0], [0.0], [2.0]]
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (query, key, value))
    assert (query.grad[:2] == 0).all()


def test_no_keys_give_zero():
    assert linear_attention(torch.ones(3, 2), torch.ones(0, 2), torch.ones(0, 4)).tolist() == [[0.0] * 4] * 3


def test_weights_of_no_key_of_one_and_of_many_in_half_precision():
    """A row sums to one, however many keys there are, and has no entry where there is none."""
    manifold = Lorentz(-1.0, dtype=D)
    layer = HypLinearAttention(16, 1, manifold, dtype=D)
    x = manifold.lift(torch.randn(3, 16, dtype=D))
    assert layer.weights(x, memory=x[:0]).shape == (1, 3, 0)
    torch.testing.assert_close(layer.weights(x, memory=x[:1]), torch.ones(1, 3, 1, dtype=D))
    query, key = torch.rand(2, 1500, 64, dtype=torch.float16)
    for is_causal in (False, True):
        sums = linear_attention_weights(query, key, is_causal=is_causal).double().sum(-1)
        torch.testing.assert_close(sums, torch.ones(1500, dtype=D), rtol=0, atol=0.02)


def test_sums_over_many_large_keys_do_not_overflow():
    key = torch.full((1000, 2), 1e38)
    value = torch.full((1000, 1), 1e38)
    torch.testing.assert_close(linear_attention(torch.ones(1, 2), key, value), value[:1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5, 40.0])
def test_features_keep_the_length_and_sharpen_the_direction(power):
    x = torch.randn(50, 6, dtype=D)
    positive = torch.relu(x)
    out = power_features(x, power)
    torch.testing.assert_close(out.norm(dim=-1), positive.norm(dim=-1))
    ratio = (positive / positive.amax(-1, keepdim=True)).nan_to_num()
    torch.testing.assert_close((out / out.amax(-1, keepdim=True)).nan_to_num(), ratio**power)
    unit = power_features(x, power, unit=True)
    torch.testing.assert_close(unit * positive.norm(dim=-1, keepdim=True), out)
    torch.testing.assert_close(power_features(x / 7, power), out / 7)  # t leaves by degree one


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 1e38])
def test_features_neither_overflow_nor_underflow(size):
    x = (torch.tensor([[1.0, 0.5, -1.0], [-1.0, -2.0, -3.0]]) * size).requires_grad_()
    out = power_features(x, 3.0)
    expected = torch.tensor([1.0, 0.125, 0.0]) * math.sqrt(1.25 / (1 + 1 / 64))
    torch.testing.assert_close(out[0] / size, expected)
    assert (out[1] == 0).all()
    (out / size).sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()


def test_feature_map_gradients():
    x = torch.randn(4, 5, dtype=D, requires_grad=True)
    for power in (1.0, 2.0, 3.5):
        for unit in (False, True):
            assert torch.autograd.gradcheck(lambda s, p=power, u=unit: power_features(s, p, unit=u), (x,))
            assert torch.autograd.gradgradcheck(lambda s, p=power, u=unit: power_features(s, p, unit=u), (x,))


def test_second_derivatives_of_features_do_not_depend_on_the_size_of_a_gradient(dtype):
    """Not at entries that are not positive, where a quotient by the smallest number would leave the range."""
    x = torch.tensor([[1.0, 2.0, -1.0], [-1.0, 0.0, 1.0], [-1.0, -2.0, -3.0]], dtype=dtype, requires_grad=True)
    found = []
    for size in (1.0, 2.0**40):
        out = power_features(x, 2.0)
        (slope,) = torch.autograd.grad(out, x, size * torch.ones_like(out), create_graph=True)
        found.append(torch.autograd.grad(slope.sum() * size, x)[0] / size**2)
    torch.testing.assert_close(found[1], found[0])
    assert (found[0][0, :2] != 0).any()


@pytest.mark.parametrize("kappa", [-100.0, -1.0, -0.01])
def test_midpoint_agrees_with_the_exact_centroid(kappa):
    m = Lorentz(kappa)
    x = m.random(6, 4, std=2.0 / math.sqrt(-kappa)).as_subclass(torch.Tensor)
    weights = torch.rand(3, 6)
    weights[0] = 0
    space = weighted_midpoint(m.space(x), weights, curvature=m.curvature)
    torch.testing.assert_close(m.lift(space), m.centroid(x, weights), rtol=1e-5, atol=1e-6)


@similarities
@pytest.mark.parametrize("rapidity", [1.0, 4.0, 6.0])
@pytest.mark.parametrize("near", [False, True])
def test_what_float32_loses_far_out(similarity, rapidity, near):
    """Geodesic distances nothing; products of coordinates as much as is documented, of clustered points most."""
    draw = torch.Generator().manual_seed(0)
    spread, centre = torch.randn(2, 64, 4, generator=draw, dtype=D)
    points = centre[:1] + 0.3 / math.cosh(rapidity) * spread * centre[:1].norm() if near else spread
    points = (torch.nn.functional.normalize(points, dim=-1) * math.sinh(rapidity)).float()
    inputs = points, points.flip(0), points.roll(3, 0)
    found, exact = (
        hyperbolic_softmax_attention(
            *(x.to(dtype) for x in inputs), curvature=torch.tensor([-1.0], dtype=dtype), similarity=similarity
        )
        for dtype in (torch.float32, D)
    )
    error = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()
    spacing = torch.finfo(torch.float32).eps
    assert error < (10 * spacing * math.cosh(rapidity) ** 2 if similarity == "lorentz_squared" else 1e-6)


@pytest.mark.parametrize("faint", [1e-12, 1e-20, 1e-25, 1e-38, 1e-42])
def test_a_query_that_meets_only_faint_keys_has_finite_gradients(faint, device):
    """Its live channel is nearly dead in every key: the square of the inverse of the weights would overflow."""
    query = torch.tensor([[1.0, 0.0], [0.6, 0.8]], device=device, requires_grad=True)
    key = torch.tensor([[faint, 1.0], [0.0, 2.0], [faint, 0.5]], device=device, requires_grad=True)
    value = torch.tensor([[1.0], [2.0], [3.0]], device=device, requires_grad=True)
    result = linear_attention(query, key, value)
    for grad in torch.autograd.grad(result.sum(), [query, key, value]):
        assert grad.isfinite().all()
    # The average of the first and the third value, as long as their weights can be told from nothing.
    wanted = 2.0 if faint > 1e-18 else 0.0
    torch.testing.assert_close(result[0, 0].item(), wanted)


@pytest.mark.parametrize("part", ["query", "key"])
@pytest.mark.parametrize("digits", [0.25, 0.5, 0.6, 0.9])
def test_gradients_of_short_queries_and_keys_are_those_of_long_ones(part, digits, dtype):
    """The quotient has degree zero in both: their gradients are divided by what they are multiplied with."""
    q, k, v, direction = (torch.rand(5, 4, dtype=dtype) for _ in range(4))
    found = []
    for size in (1.0, torch.finfo(dtype).tiny ** digits):
        factors = [size if name == part else 1.0 for name in ("query", "key", "value")]
        leaves = [(x * factor).requires_grad_() for x, factor in zip((q, k, v), factors, strict=True)]
        grads = torch.autograd.grad((linear_attention(*leaves) * direction).sum(), leaves)
        found.append([grad * factor for grad, factor in zip(grads, factors, strict=True)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_queries_and_keys_of_any_size_are_finite():
    for seed in range(50):
        torch.manual_seed(seed)
        sizes = 10.0 ** (81 * torch.rand(3, 6, 1, dtype=D) - 44), 10.0 ** (-20 * torch.rand(3, 1, 4, dtype=D))
        x = (torch.rand(3, 6, 4) * sizes[0] * sizes[1]).clamp(max=1e20).float().requires_grad_()
        (grad,) = torch.autograd.grad(linear_attention(*x).sum(), x)
        assert grad.isfinite().all(), seed


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_has_the_result_of_torchs_reference(batch, masked):
    m = Lorentz(-0.7, learnable=True, dtype=D)
    layer = HypSoftmaxAttention(4, 2, m, similarity="lorentz_squared", dtype=D)
    x = m.lift(torch.randn(*batch, 33, 4, dtype=D)).detach().requires_grad_()
    mask = torch.rand(*batch, 33) < 0.3 if masked else None
    found = []
    for backends in ([SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH]):
        with sdpa_kernel(backends):
            result = layer(x, mask)
        found.append((result, *torch.autograd.grad(result.sin().sum(), (x, *layer.parameters()))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class _Masks(TorchDispatchMode):
    """The masks of torch's fused kernel for CPUs, None without one."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention_for_cpu" in str(func):
            self.found.append((kwargs or {}).get("attn_mask"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("kind", [TokenAttention, partial(SimplicialAttention, order=1)])
def test_any_batch_axes_take_the_fused_kernel_and_masks_no_more_than_they_hold(batch, kind):
    """Torch's other kernel stores all pairs and takes ten times as long; masks of every query and head, four times."""
    layer, x, padding = kind(4, 2), torch.randn(*batch, 5, 4), torch.zeros(*batch, 5, dtype=torch.bool)
    with _Masks() as masks:
        layer(x)
        layer(x, padding)
        layer(x, padding, is_causal=True)
    plain, padded, causal = masks.found
    assert plain is None
    assert padded.shape[-2:] == (1, 5)
    assert causal.stride(-3) == 0


@pytest.mark.usefixtures("without_shape_checks")
def test_a_memory_of_other_sizes_is_refused():
    """A single mark of padding was spread over all keys, and turned keys met queries that were not."""
    m = Lorentz(-1.0)
    layer, x = HypSoftmaxAttention(8, 2, m), m.lift(torch.randn(2, 5, 8))
    state = layer.remember(x)
    for wrong in (
        state._replace(hidden=torch.ones(2, 1, dtype=torch.bool)),
        state._replace(value=state.value[..., :1, :]),
    ):
        with pytest.raises(ValueError, match=r"^state must have as many values as keys, 5, and so many entries hidden"):
            layer.recall(x, wrong)
    with pytest.raises(TypeError, match=r"^state\.key must be a tensor, got NoneType"):
        layer.recall(x, state._replace(key=None))
    turned = HypSoftmaxAttention(8, 2, m, rope=True)
    with pytest.raises(ValueError, match=r"^memory must be None with rope"):
        turned.recall(x, turned.step(x)[1])


@similarities
def test_without_keys_there_is_the_origin_with_zero_gradients(similarity):
    m = Lorentz(-1.0)
    layer, x = HypSoftmaxAttention(4, 2, m, similarity=similarity), m.lift(torch.randn(5, 4)).requires_grad_()
    result = layer(x, memory=m.lift(torch.randn(0, 4)))
    assert torch.equal(result, m.lift(torch.zeros(5, 4)))
    for grad in torch.autograd.grad(result.sum(), [x, layer.query.weight]):
        assert torch.equal(grad, torch.zeros_like(grad))
