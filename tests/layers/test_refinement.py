"""HRC and the layers made of it: the curvature change, the Euclidean functions, the residual."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from mpmath import mp, mpf, sqrt
from torch import nn

from holonomy import layers
from holonomy.layers import HRC, HypBatchNorm, HypConcat, HypDropout, HypLayerNorm, HypResidual, HypRMSNorm
from holonomy.layers.hyperbolic import refinement
from holonomy.manifolds import Lorentz

D = torch.float64


def every_layer(m: Lorentz, to: Lorentz) -> dict[str, nn.Module]:
    return {
        "HTC": layers.HTC(6, 4, m, to),
        "ExpMapHTC": layers.ExpMapHTC(7, 4, m, to),
        "TangentLinear": layers.TangentLinear(6, 4, m, to),
        "FullyLorentzLinear": layers.FullyLorentzLinear(6, 4, m, to),
        "HRC": HRC(torch.tanh, m, to),
        "HypLayerNorm": HypLayerNorm(6, m, to),
        "HypBatchNorm": HypBatchNorm(6, m, to),
        "HypDropout": HypDropout(0.5, m, to),
        "HypActivation": layers.HypActivation(torch.relu, m, to),
        "HypConcat": HypConcat(m, to),
        "HypLinearAttention": layers.HypLinearAttention(6, 2, m, to),
        "HypSoftmaxAttention": layers.HypSoftmaxAttention(6, 2, m, to, dropout=0.3),
    }


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", list(every_layer(Lorentz(), Lorentz())))
def test_manifold_out_takes_effect(name, training):
    """The result lies on manifold_out, and is the one on manifold_in times sqrt(kappa_1/kappa_2)."""
    m, to = Lorentz(-2.0), Lorentz(-0.5)
    torch.manual_seed(0)
    moved = every_layer(m, to)[name].train(training)
    torch.manual_seed(0)
    stayed = every_layer(m, m)[name].train(training)
    x = m.lift(torch.randn(5, 6))
    torch.manual_seed(1)
    y = moved(x)
    torch.manual_seed(1)
    z = stayed(x)
    torch.testing.assert_close(y[..., :1], to.time(y))
    if name != "TangentLinear":  # its curvature change is a change of exponential map, not a scaling
        torch.testing.assert_close(y[..., 1:], 2 * z[..., 1:])
    assert not torch.allclose(y, z)


def test_refinement_reads_no_time():
    m = Lorentz(-2.0)
    x = m.lift(torch.randn(4, 3))
    moved = x.clone()
    moved[:, 0] += 1
    assert torch.equal(HRC(torch.sin, m)(x), HRC(torch.sin, m)(moved))


def test_a_module_as_function_is_registered():
    layer = HRC(nn.Linear(3, 2), Lorentz())
    assert {"function.weight", "function.bias"} <= set(layer.state_dict())
    with pytest.raises(TypeError, match="function"):
        HRC(3.0, Lorentz())


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("function", "sentence"),
    [(lambda _: None, "a tensor, got NoneType"), (lambda s: s > 0, "a floating-point tensor, got torch.bool")],
)
def test_a_function_that_returns_no_numbers_is_refused(function, sentence):
    m = Lorentz()
    with pytest.raises(TypeError, match=rf"^function\(x\) must be {sentence}\.$"):
        HRC(function, m)(m.lift(torch.ones(3)))


def test_a_function_that_returns_one_number_is_refused():
    m = Lorentz()
    with pytest.raises(ValueError, match=r"^function\(x\) must have shape \(\.\.\., width\), got \(\)\.$"):
        HRC(torch.sum, m)(m.lift(torch.ones(3)))


def test_two_refinements_are_one():
    m = Lorentz(-0.4, dtype=D)
    x = m.lift(torch.randn(4, 3, dtype=D))
    torch.testing.assert_close(HRC(torch.tanh, m)(HRC(torch.sin, m)(x)), HRC(lambda s: s.sin().tanh(), m)(x))


@pytest.mark.parametrize("kind", [HypLayerNorm, HypRMSNorm])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e12, 1e25, 1e36])
def test_norms_agree_with_float64_at_any_radius(kind, scale):
    m = Lorentz(-1.0)
    layer = kind(5, m)
    for parameter in layer.function.parameters():
        parameter.data.normal_()
    space = torch.randn(6, 5) * scale
    space.requires_grad_()
    y = layer(m.lift(space))
    direction = torch.randn_like(y)
    (y * direction).sum().backward()
    wide = space.detach().double().requires_grad_()
    z = copy.deepcopy(layer.function.norm).double()(wide)
    expected = Lorentz(-1.0, dtype=D).lift(z)
    (expected * direction.double()).sum().backward()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(space.grad.double(), wide.grad, rtol=1e-3, atol=1e-5 / scale)


@pytest.mark.parametrize("kind", [HypLayerNorm, HypRMSNorm])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_norms_take_points_in_half_precision_under_autocast(kind, half):
    """Torch warned of an RMS norm of two dtypes."""
    m = Lorentz(-1.0)
    layer, x = kind(5, m), m.lift(torch.randn(6, 5))
    with torch.autocast("cpu", half):
        y = layer(x.to(half))
    assert y.dtype == half
    torch.testing.assert_close(y.float(), layer(x), rtol=4 * torch.finfo(half).eps, atol=4 * torch.finfo(half).eps)


@pytest.mark.parametrize(("kappa", "eps", "over"), [(-1.0, 1.0, False), (-1e3, 0.5, False), (-1.0, 100.0, True)])
def test_layer_norm_stretches_by_the_root_of_eps_up_to_one_only(kappa, eps, over):
    manifold = Lorentz(kappa, dtype=torch.float64)
    norm = HypLayerNorm(3, manifold, eps=eps, elementwise_affine=False)
    size = torch.logspace(-3, 2, 200, dtype=torch.float64)[:, None] / math.sqrt(-kappa)
    space = size * torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    x, y = manifold.lift(space), manifold.lift(space * (1 + 1e-6))
    stretch = (manifold.dist(norm(x), norm(y)) / manifold.dist(x, y)).amax()
    assert (stretch > 1.1 / math.sqrt(eps)) if over else stretch == pytest.approx(1 / math.sqrt(eps), rel=1e-4)


def test_rms_norm_commutes_with_rotations_and_keeps_geodesics_through_the_origin():
    m = Lorentz(-0.7, dtype=D)
    layer, space = HypRMSNorm(5, m, elementwise_affine=False, dtype=D), torch.randn(4, 5, dtype=D)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=D)).Q
    torch.testing.assert_close(layer(m.lift(space @ turn)), m.lift(layer(m.lift(space))[:, 1:] @ turn))
    x, y = m.logmap0(m.lift(space)), m.logmap0(layer(m.lift(space)))
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(x, y), torch.ones(4, dtype=D))


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_batch_norm_of_processes_keeps_the_statistics_of_all(momentum, mesh):
    """Here of one: result, running mean and variance, and the number of batches are those without a group."""
    m = Lorentz(-2.0, dtype=D)
    shared, alone = (HypBatchNorm(3, m, momentum=momentum, dtype=D) for _ in range(2))
    for _ in range(2):
        x = m.lift(torch.randn(4, 5, 3, dtype=D))
        torch.testing.assert_close(shared(x, group=mesh.get_group()), alone(x))
    torch.testing.assert_close(shared.state_dict(), alone.state_dict())


def test_batch_norm_is_torchs_on_the_space_part_and_keeps_statistics():
    m = Lorentz(-0.6)
    layer, norm = HypBatchNorm(3, m), nn.BatchNorm1d(3)
    space = torch.randn(2, 5, 3) * 3 + 1
    for _ in range(3):
        y = layer(m.lift(space))
        torch.testing.assert_close(y[..., 1:].reshape(-1, 3), norm(space.reshape(-1, 3)))
    torch.testing.assert_close(layer.function.norm.running_var, norm.running_var)
    torch.testing.assert_close(layer.eval()(m.lift(space))[..., 1:].reshape(-1, 3), norm.eval()(space.reshape(-1, 3)))


def test_batch_norm_at_the_end_of_the_range(dtype):
    """The mean overflowed, stayed in the running one, and made nan of every later point in evaluation."""
    m, far = Lorentz(dtype=dtype), torch.finfo(dtype).max / 30
    layer, near = HypBatchNorm(3, m, dtype=dtype), torch.randn(8, 3, dtype=dtype)
    for space in (far * near, far * near.abs(), near):
        x = m.lift(space).requires_grad_()
        for mode in (True, False):
            y = layer.train(mode)(x)
            (grad,) = torch.autograd.grad(y.tanh().sum(), x)
            assert y.isfinite().all()
            assert grad.isfinite().all()


def test_one_batch_far_out_does_not_stay_in_the_running_variance():
    """A variance above the largest float32 was infinity, and the mean with it for ever: evaluation gave zeros."""
    m = Lorentz()
    layer = HypBatchNorm(3, m)
    layer(m.lift(torch.randn(8, 3) * 1e25))
    assert layer.function.norm.running_var.isfinite().all()
    near = m.lift(torch.randn(8, 3))
    for _ in range(1500):
        layer(near)
    assert layer.eval()(near)[:, 1:].std(0).sub(1).abs().amax() < 0.1


def test_batch_norm_of_bfloat16_rows_far_out_is_that_of_float32():
    """Their squares left float32, the deviation was infinity, and the result zero."""
    far = torch.randn(8, 3).bfloat16() * 2.0**100
    half, single = (HypBatchNorm(3, Lorentz(), dtype=x.dtype).function(x) for x in (far, far.float()))
    torch.testing.assert_close(half, single.bfloat16())


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("value", "points"), [(1e7, 3), (100.3, 1000), (1e10, 1000)])
def test_batch_norm_of_equal_points_is_the_shift(value, points, grouped, mesh):
    """Torch's was 105 for three of 1e7, and 0.22 for 1000 of 100.3, whose mean is rounded; with a group 0.003."""
    layer = HypBatchNorm(2, Lorentz())
    x = layer.manifold_in.lift(torch.full((points, 2), value))
    assert layer(x, group=mesh.get_group() if grouped else None)[:, 1:].abs().max() < (0.1 if grouped else 1e-6)
    running = dict(layer.named_buffers())
    torch.testing.assert_close(running["function.norm.running_mean"], torch.full((2,), 0.1 * value))
    assert running["function.norm.running_var"].sub(0.9).abs().max() < 1e-7 * value


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e7])
def test_batch_norm_far_out_is_that_of_float64(offset, grouped, momentum, mesh):
    """Result, gradients and running statistics of space parts that are exact in both."""
    points, weights = offset + torch.randint(-9, 10, (2, 50, 3)).double(), torch.randn(50, 3, dtype=D)
    found = []
    for dtype in (torch.float32, D):
        layer = HypBatchNorm(3, Lorentz(dtype=dtype), dtype=dtype)
        layer.function.norm.momentum = momentum  # as torch.optim.swa_utils.update_bn does
        for batch in points.to(dtype):
            rows = batch.requires_grad_()
            y = layer.function.over(rows, mesh.get_group()) if grouped else layer.function(rows)
        grads = torch.autograd.grad((y * weights.to(dtype)).sum(), (rows, *layer.function.parameters()))
        found.append([x.double() for x in (y, *grads, *layer.function.buffers())])
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("grouped", [False, True])
def test_batch_norm_that_is_told_not_to_track_does_not(grouped, mesh):
    """As torch's adaptation to a batch sets it; with a group the running statistics went on."""
    layer = HypBatchNorm(2, Lorentz())
    layer.function.norm.track_running_stats = False
    layer(layer.manifold_in.lift(3 + torch.randn(5, 2)), group=mesh.get_group() if grouped else None)
    assert layer.function.norm.running_mean.equal(torch.zeros(2))


def test_dropout_drops_scales_and_stops():
    m = Lorentz()
    layer = HypDropout(0.25, m)
    x = m.lift(torch.ones(2000, 3))
    space = layer(x)[:, 1:]
    assert set(space.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs((space == 0).double().mean().item() - 0.25) < 0.03
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(ValueError, match="p must lie in"):
        HypDropout(1.5, m)


@pytest.mark.parametrize("eps", [-1.0, math.nan])
@pytest.mark.parametrize("build", [HypLayerNorm, HypRMSNorm, HypBatchNorm])
def test_eps_that_makes_roots_of_negative_numbers_is_refused(build, eps):
    with pytest.raises(ValueError, match="eps must "):
        build(3, Lorentz(), eps=eps)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("rows", [5, 2100])
def test_points_of_another_width_are_refused(rows):
    """A longer branch lost its last coordinates, and many rows were normalised in any width."""
    m = Lorentz()
    x, wide = (m.lift(torch.randn(rows, d)) for d in (3, 4))
    for branch in (wide, x[:, 1:]):
        with pytest.raises(ValueError, match=r"branch must have shape \(\.\.\., features \+ 1 = 4\)"):
            HypResidual(m)(x, branch)
    for affine in (True, False):
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., features \+ 1 = 4\)"):
            HypLayerNorm(3, m, elementwise_affine=affine)(wide)


def test_concat_adds_squared_radii():
    m = Lorentz(-1.0)
    x, y, z = (m.lift(torch.full((1,), s)) for s in (1.0, 2.0, 2.0))
    torch.testing.assert_close(HypConcat(m)(x, y, z)[0], torch.tensor(math.sqrt(10.0)))
    with pytest.raises(ValueError, match="at least one"):
        HypConcat(m)()


@pytest.mark.parametrize("radius", [0.0, 1e-6, 1.0, 1e3, 1e19, 1e33])
def test_residual_of_a_point_with_itself_is_the_point(radius):
    m = Lorentz(-1.0)
    space = torch.nn.functional.normalize(torch.randn(5, 4), dim=-1) * radius
    space.requires_grad_()
    x = m.lift(space)
    y = HypResidual(m, epsilon=2.5)(x, x)
    torch.testing.assert_close(y, x)
    y[:, 1:].sum().backward()
    torch.testing.assert_close(space.grad, torch.ones_like(space))


@pytest.mark.parametrize("kappa", [-100.0, -1.0, -0.01])
@pytest.mark.parametrize("distance", [1e-6, 1e-2, 1.0, 20.0])
def test_residual_halves_the_distance_on_the_common_manifold(kappa, distance):
    a, b, c = Lorentz(-3.0, dtype=D), Lorentz(kappa, dtype=D), Lorentz(-0.2, dtype=D)
    x = c.random(4, 4, std=1.0)
    u = c.proju(x, torch.randn(4, 4, dtype=D))
    y = c.expmap(x, u * (distance / c.inner(x, u).sqrt())[:, None])
    residual = HypResidual(a, c, manifold_branch=b)
    z = residual(c.rescale(x, a), c.rescale(y, b))
    torch.testing.assert_close(c.dist(x, z), c.dist(x, y) / 2, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(c.dist(y, z), c.dist(x, y) / 2, rtol=1e-6, atol=1e-12)


def test_residual_weighs_the_branch():
    """H7: the midpoint divides the geodesic where sinh d(x, m) = eps sinh d(y, m)."""
    m = Lorentz(-1.0, dtype=D)
    x, y = m.random(5, 4), m.random(5, 4)
    z = HypResidual(m, epsilon=0.3)(x, y)
    torch.testing.assert_close(torch.sinh(m.dist(x, z)), 0.3 * torch.sinh(m.dist(y, z)))
    with pytest.raises(ValueError, match="epsilon must be positive"):
        HypResidual(m, epsilon=0.0)


def test_residual_gradient_is_right_at_the_origin():
    """Rows that ReLU or dropout emptied sit there, and polar coordinates would lose their gradient."""
    m = Lorentz(-1.5, learnable=True, dtype=D)
    residual = HypResidual(m, epsilon=0.7)
    x = torch.zeros(2, 3, dtype=D, requires_grad=True)
    y = torch.randn(2, 3, dtype=D, requires_grad=True)

    def midpoint(a, b, log_ratio):
        return torch.func.functional_call(
            residual,
            {"manifold_in.curvature_parameter.log_ratio": log_ratio},
            (m.lift(a), m.lift(b)),
        )

    ratio = torch.zeros(1, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(midpoint, (x, y, ratio))
    x = torch.randn(2, 3, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(midpoint, (x, y, ratio))


def test_residual_far_out_agrees_with_the_oracle():
    m = Lorentz(-1.0)
    residual = HypResidual(m)
    x, y = (torch.randn(20, 3) * torch.logspace(-3, 12, 20)[:, None] for _ in range(2))
    z = residual(m.lift(x), m.lift(y))
    with mp.workdps(80):
        for i in range(20):
            p, q = ([mpf(float(s)) for s in t[i]] for t in (x, y))
            time = sqrt(sum(s * s for s in p) + 1) + sqrt(sum(s * s for s in q) + 1)
            total = [s + t for s, t in zip(p, q, strict=True)]
            norm = sqrt(time**2 - sum(s * s for s in total))
            expected = torch.tensor([float(s / norm) for s in total])
            torch.testing.assert_close(z[i, 1:], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("spread", "mean"), [(1e-2, 1.0), (1.0, 3.0), (100.0, 200.0), (1e4, 0.0)])
def test_batch_norm_in_float16(spread, mean):
    """The mean was rounded to float16 before it was subtracted: 0.04 off for points far from it."""
    m = Lorentz()
    x = m.lift(mean + spread * torch.randn(500, 4, dtype=torch.float64)).half()
    half, wide = HypBatchNorm(4, m, dtype=torch.float16), HypBatchNorm(4, m, dtype=torch.float64)
    for mode in (True, False) if spread < 1e3 else (True,):  # the running variance leaves float16
        result, expected = half.train(mode)(x), wide.train(mode)(x.double())
        assert result.dtype == torch.float16
        torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-3 if mode else 2e-3 * (1 + abs(mean)))
    for name, statistic in half.function.norm.named_buffers():
        if statistic.is_floating_point():
            expected = getattr(wide.function.norm, name).clamp(max=torch.finfo(torch.float16).max)
            torch.testing.assert_close(statistic.double(), expected, rtol=2e-3, atol=2e-3)
    half(x).square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float16 for p in half.function.parameters())


def test_a_change_of_curvature_saturates(dtype: torch.dtype) -> None:
    largest = torch.tensor([-1.0, 1.0], dtype=dtype) * torch.finfo(dtype).max
    assert refinement.rescale_space(largest, Lorentz(-4.0), Lorentz(-1.0)).equal(largest)


def test_batch_norm_wants_a_dtype_of_numbers_with_fractions():
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        HypBatchNorm(2, Lorentz(), dtype=torch.int64)


@pytest.mark.parametrize("length", [0.0, 1e-6, 0.5, 1.5])
@pytest.mark.parametrize("rapidity", [0.0, 1.0, 10.0])
def test_a_translation_in_closed_form_is_the_exponential_of_the_carried_bias(rapidity, length):
    """Points, biases and curvatures of float32, with their gradients, beside the frames of float64."""
    torch.manual_seed(0)
    space, bias = (nn.functional.normalize(torch.randn(*size, 5), dim=-1) for size in ((7,), ()))
    space, bias = math.sinh(rapidity) * space, length * bias
    results = []
    for dtype in (torch.float32, torch.float64):
        manifold = Lorentz(-0.7, learnable=True, dtype=dtype)
        leaves = [space.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()]
        y = refinement.translated(manifold.lift(leaves[0]), leaves[1], manifold)
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append([y, *torch.autograd.grad(y, [*leaves, *manifold.parameters()], cotangent)])
    for name, mine, exact in zip(("y", "x", "b", "curvature"), *results, strict=True):
        assert (mine.double() - exact).norm().item() <= 1e-5 * exact.norm().item(), name


@pytest.mark.parametrize("rapidity", [3.0, 20.0, 40.0, 60.0, 100.0, 150.0])
def test_midpoints_of_float64_are_those_of_points_an_ulp_away(rapidity):
    """From the length of the midpoint of x and y follows which separation p it took them to have across x + y."""
    mp.dps = 160
    m, eps = Lorentz(-1.0, dtype=D), mpf(2) ** -52
    draw = torch.Generator().manual_seed(0)
    u = nn.functional.normalize(torch.randn(20, 5, generator=draw, dtype=D), dim=-1)
    sizes = rapidity + torch.stack([torch.zeros(20, dtype=D), torch.logspace(-8, 0.3, 20, dtype=D)])
    x, y = (size.sinh()[:, None] * u for size in sizes)
    y[::3] *= 1 + 40 * torch.finfo(D).eps * torch.randn(7, 5, generator=draw, dtype=D)
    out = HypResidual(m)(m.lift(x), m.lift(y))[:, 1:]
    for rows in zip(x.tolist(), y.tolist(), out.tolist(), strict=True):
        a, b, middle = ([mpf(z) for z in row] for row in rows)
        s, d = [p + q for p, q in zip(a, b, strict=True)], [p - q for p, q in zip(a, b, strict=True)]
        share = dot(d, s) / dot(s, s)
        across = sqrt(sum((p - share * q) ** 2 for p, q in zip(d, s, strict=True)))
        times = sqrt(1 + dot(a, a)), sqrt(1 + dot(b, b))
        total, rest = sum(times) ** 2, 2 + 2 * times[0] * times[1] + 2 * dot(a, b)
        square = dot(s, s) / dot(middle, middle)
        taken = sqrt(abs((square * rest - 4 * total) / (total - square)))
        assert abs(taken - across) <= eps * sqrt(max(dot(a, a), dot(b, b))) + mpf("1e-7")


def dot(a, b):
    return sum(p * q for p, q in zip(a, b, strict=True))
