"""Constants as functions of the layer: known answers, exactness, curvatures, what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    FullyLorentzLinear,
    HypActivation,
    HypBatchNorm,
    HypConcat,
    HypDropout,
    HypLayerNorm,
    HypLinearAttention,
    HypMLR,
    HypPositionalEncoding,
    HypPrototypes,
    HypResidual,
    HypSoftmaxAttention,
    TangentLinear,
)
from holonomy.manifolds import Lorentz
from holonomy.theory import lipschitz_bound, measure_stretch, stretch
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.certificates.constants.affine import affine_stretch, ball_stretch, reach, transformation_stretch
from holonomy.theory.certificates.constants.functions import (
    entrywise,
    entrywise_stretch,
    layer_norm_stretch,
)
from holonomy.theory.certificates.distances import boost
from holonomy.theory.certificates.regions import Region, Setting, follow

pytestmark = pytest.mark.usefixtures("without_shape_checks")

DOUBLE = {"dtype": torch.float64}
seeds = st.integers(0, 10**6)
few = settings(max_examples=8)
fewer = settings(max_examples=3)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def transformation(seed, sizes, source, target, *, bias=True, scale=1.0):
    layer = HTC(*sizes, source, target, bias=bias, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(scale * draw(seed, sizes[1], sizes[0] + 1))
        if bias:
            layer.bias.copy_(draw(seed + 1, sizes[1]))
    return layer


# H1


@fewer
@given(seed=seeds, radius=st.floats(0.1, 4.0))
def test_refinement_on_a_ball_is_attained(seed, radius):
    m = Lorentz(-1.7, **DOUBLE)
    layer = HRC(nn.Linear(2, 2, **DOUBLE), m, Lorentz(-0.6, **DOUBLE))
    with torch.no_grad():
        layer.function.weight.copy_(draw(seed, 2, 2))
        layer.function.bias.copy_(draw(seed + 1, 2))
    bound = lipschitz_bound(layer, radius / math.sqrt(1.7))
    found = measure_stretch(
        layer, radius / math.sqrt(1.7), 2, starts=8, steps=60, generator=torch.Generator().manual_seed(seed)
    )
    assert found == pytest.approx(bound, rel=1e-6)
    assert found <= bound * (1 + 1e-9)


def test_refinement_known_answers():
    turn = torch.linalg.qr(draw(0, 3, 3)).Q
    assert affine_stretch(turn) == pytest.approx(1)
    assert affine_stretch(turn, None, 1.0) == pytest.approx(1)
    assert affine_stretch(2 * turn) == pytest.approx(2)
    assert affine_stretch(0.5 * turn) == 1  # far out a contraction of the space part contracts nothing
    assert affine_stretch(0.5 * turn, None, 0.0) == pytest.approx(0.5)
    assert affine_stretch(torch.zeros(2, 3), torch.ones(2)) == 0
    for size in (0.1, 1.0, 5.0):
        shift = torch.tensor([size, 0.0], **DOUBLE)
        assert affine_stretch(torch.eye(2, **DOUBLE), shift) == pytest.approx(math.exp(math.asinh(size / 2)))


@few
@given(seed=seeds)
def test_balls_grow_to_all_of_space_and_a_vanishing_bias_is_none(seed):
    weight, bias = draw(seed, 3, 2), draw(seed + 1, 3)
    radii = (0.0, 0.5, 1.0, 2.0, 5.0, 40.0, math.inf)
    values = [affine_stretch(weight, bias, r) for r in radii]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))
    assert values[-2] == pytest.approx(values[-1], rel=1e-6)
    assert affine_stretch(weight, 1e-9 * bias, 1.0) == pytest.approx(affine_stretch(weight, None, 1.0), rel=1e-6)


# H2


@few
@given(seed=seeds, features=st.integers(1, 4), kappa=st.floats(-4.0, -0.25))
def test_a_boost_is_an_isometry_of_unit_coordinates(seed, features, kappa):
    source, target = Lorentz(-1.0, **DOUBLE), Lorentz(kappa, **DOUBLE)
    layer = HTC(features, features, source, target, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(boost(draw(seed, features)))
    assert lipschitz_bound(layer) == pytest.approx(math.sqrt(-1 / kappa))


@fewer
@given(seed=seeds, outs=st.integers(1, 3))
def test_transformation_everywhere_without_bias_is_attained(seed, outs):
    """Exactly sqrt(max(1, lmax S)): on a large ball already."""
    m = Lorentz(-1.0, **DOUBLE)
    layer = transformation(seed, (3, outs), m, m, bias=False)
    bound = lipschitz_bound(layer)
    found = measure_stretch(layer, 5.0, 3, starts=8, steps=60, generator=torch.Generator().manual_seed(seed))
    assert found <= bound * (1 + 1e-9)
    if bound > 1:
        assert found == pytest.approx(bound, rel=1e-6)


@few
@given(seed=seeds)
def test_the_time_column_never_hurts(seed):
    weight, bias = draw(seed, 3, 4), draw(seed + 1, 3)
    without = torch.cat([torch.zeros(3, 1), weight[:, 1:]], 1)
    assert transformation_stretch(weight, bias) <= transformation_stretch(without, bias) * (1 + 1e-12)


@few
@given(seed=seeds, radius=st.floats(0.05, 3.0))
def test_images_of_balls_lie_within_reach(seed, radius):
    m = Lorentz(-1.0, **DOUBLE)
    layer = transformation(seed, (3, 2), m, m)
    constant = lipschitz_bound(layer, radius)
    far = reach(layer.weight, layer.bias, radius, constant)
    u = functional.normalize(draw(seed + 2, 500, 3), dim=-1) * radius
    assert m.dist0(layer(m.expmap0(functional.pad(u, (1, 0))))).max().item() <= far * (1 + 1e-9)


def test_constants_do_not_overflow():
    m = Lorentz(-1.0)
    layer = HTC(3, 3, m)
    assert lipschitz_bound(layer, 1e6) == pytest.approx(lipschitz_bound(layer))
    assert lipschitz_bound(layer, 250.0) == pytest.approx(lipschitz_bound(layer), rel=1e-6)
    assert math.isfinite(reach(layer.weight, layer.bias, 1e6, 1.0))


# H2'


@pytest.mark.parametrize("length", [1e3, 1e6])
@pytest.mark.parametrize("timed", [False, True])
def test_rounding_takes_nothing_from_the_constant_of_a_long_bias(length, timed):
    """About the origin the layer stretches by no less than at it: a bias of 1e6 rounded that to zero."""
    m = Lorentz(-1.0, **DOUBLE)
    origin = m.lift(torch.zeros(1, 3, **DOUBLE))
    for scale in (1e-3, 1.0):
        layer = transformation(3, (3, 3), m, m, scale=scale)
        with torch.no_grad():
            layer.bias.mul_(length)
            layer.weight[:, 0].mul_(1.0 if timed else 0.0)
        at = stretch(layer, origin).item()
        for radius in (0.0, 1e-8, 1e-2, 1.0):
            assert at <= lipschitz_bound(layer, radius) * (1 + 1e-9)


@pytest.mark.parametrize("start", [0.1, 0.9, 1.0, 1.5])
def test_the_stretch_about_a_point_solves_its_equation(start):
    """Small steps of lambda' = sqrt((lambda^2 - 1)^2 + b^2), against the closed forms at b = 0."""
    for b in (0.0, 0.3):
        value, steps = start, 20000
        for _ in range(steps):
            value += 0.2 / steps * math.hypot(value**2 - 1, b)
        assert ball_stretch(start, b, 0.2) == pytest.approx(value, rel=1e-4)
    assert ball_stretch(start, 0.0, 0.0) == start
    assert ball_stretch(1.0, 0.0, 0.2) == 1  # an isometry is one everywhere
    assert ball_stretch(3.0, 0.0, 1.0) == math.inf  # leaves for infinity at artanh(1/3)
    assert ball_stretch(3.0, 0.1, 1.0) == math.inf


@pytest.mark.parametrize(
    ("start", "bias", "radius", "value"),
    [  # integrated by another method with errors of 1e-11
        (0.5, 100.0, 0.15, 32.41801677),
        (0.5, 1e3, 0.05, 122.7327834),
        (0.5, 1e4, 0.015, 286.0126501),
        (0.5, 1e6, 0.001, 1109.896229),
    ],
)
def test_long_biases_do_not_make_the_ball_too_small(start, bias, radius, value):
    """With a fixed number of steps it came out 1e-4 too low."""
    assert value * (1 - 1e-9) <= ball_stretch(start, bias, radius) <= value * (1 + 1e-4)


def test_a_ball_without_end_has_no_constant():
    """It was an error of the cosine."""
    for bias in (1e-3, 1.0, 1e9):
        assert ball_stretch(0.5, bias, math.inf) == math.inf


# H3


def test_constants_of_activations_bound_a_finer_scan():
    z = torch.linspace(-30, 30, 600_001, **DOUBLE, requires_grad=True)
    for function in (torch.relu, functional.leaky_relu, torch.tanh, functional.gelu, functional.silu, functional.elu):
        facts = entrywise(function)
        value = function(z)
        (slope,) = torch.autograd.grad(value.sum(), z)
        assert slope.abs().max().item() <= facts.slope * (1 + 1e-9)
        for e, gap in facts.gaps:
            assert (z * slope - e * value).abs().max().item() <= gap + 1e-9
        assert (value.abs() <= facts.growth * z.abs() + facts.offset + 1e-12).all()
    assert [round(entrywise(f).slope, 3) for f in (functional.gelu, functional.silu)] == [1.129, 1.1]
    assert [round(entrywise(f).gaps[0][1], 4) for f in (functional.gelu, functional.silu)] == [0.2935, 0.4392]


def test_tanh_and_gelu_do_not_contract():
    """Nearly 1-Lipschitz in Euclidean space, not in hyperbolic space: some coordinates small, some large."""
    m = Lorentz(-1.0, **DOUBLE)
    for function, counts, values, least in (
        (torch.tanh, (24, 8), (0.5, 3.0), 1.6),
        (functional.gelu, (8, 24), (1.2, -1.0), 1.78),
    ):
        x = torch.cat([torch.full((count,), value, **DOUBLE) for count, value in zip(counts, values, strict=True)])
        found = stretch(HypActivation(function, m), m.lift(x)).item()
        assert least < found <= entrywise_stretch(entrywise(function), 32, 1.0)


# H4


@pytest.mark.parametrize("eps", [1e-3, 0.1, 1.0])
def test_plain_layer_norm_is_attained_at_zero_variance(eps):
    source, target = Lorentz(-1.7, **DOUBLE), Lorentz(-0.6, **DOUBLE)
    layer = HypLayerNorm(4, source, target, eps=eps, elementwise_affine=False, dtype=torch.float64)
    bound = lipschitz_bound(layer)
    assert bound == pytest.approx(math.sqrt(1.7 / 0.6 / eps))
    assert stretch(layer, source.lift(torch.full((4,), 0.3, **DOUBLE))).item() == pytest.approx(bound)


@few
@given(seed=seeds, spread=st.floats(0.01, 0.5))
def test_layer_norm_about_points_knows_their_variance(seed, spread):
    m = Lorentz(-1.0, **DOUBLE)
    layer = HypLayerNorm(3, m, eps=1e-3, dtype=torch.float64)
    with torch.no_grad():
        layer.function.norm.weight.copy_(draw(seed, 3))
        layer.function.norm.bias.copy_(draw(seed + 1, 3))
    x = m.lift(draw(seed + 2, 1, 3))
    step = follow(layer, Region.about(x, m, spread), Setting())
    v = m.proju(x.expand(200, -1), draw(seed + 3, 200, 4))
    near = m.expmap(x.expand(200, -1), spread * v / m.norm(v)[:, None])
    assert stretch(layer, near).max().item() <= step.constant * (1 + 1e-9)
    assert m.dist(layer(near), layer(x)).max().item() <= step.region.spread * (1 + 1e-9)
    assert m.dist0(layer(near)).max().item() <= step.region.radius * (1 + 1e-9)


# What composes of it


def test_layers_known_answers():
    source, target = Lorentz(-4.0, **DOUBLE), Lorentz(-1.0, **DOUBLE)
    assert lipschitz_bound(HypActivation(torch.relu, source, target)) == 2
    assert lipschitz_bound(HypDropout(0.75, source).eval()) == 1
    assert lipschitz_bound(HypDropout(0.75, source).train()) == 4
    assert lipschitz_bound(HypDropout(1.0, source).train()) == 0
    assert lipschitz_bound(HypConcat(source, target), 0.5) == pytest.approx(2 * math.cosh(1.0))
    assert lipschitz_bound(HypResidual(source, target)) == 2
    assert lipschitz_bound(HypLayerNorm(1, source)) == 0
    norm = HypBatchNorm(2, source, dtype=torch.float64).eval()
    assert lipschitz_bound(norm) == pytest.approx(1, rel=1e-4)
    both = HRC(nn.Sequential(nn.Linear(2, 2, **DOUBLE), nn.ReLU()), source)
    assert lipschitz_bound(both, 1.0) == pytest.approx(lipschitz_bound(HRC(both.function[0], source), 1.0))


def test_activations_in_other_curvatures_are_not_those_in_unit_coordinates():
    flat, curved = (lipschitz_bound(HypActivation(torch.tanh, Lorentz(k)), features=8) for k in (-0.01, -4.0))
    assert 1 <= flat < 1.1 < 1.5 < curved


@fewer
@given(seed=seeds, radius=st.floats(0.1, 2.0))
def test_ends_and_heads_of_models_are_bounded(seed, radius):
    torch.manual_seed(seed)
    source, target = Lorentz(-1.7, **DOUBLE), Lorentz(-0.6, **DOUBLE)
    layers = [
        ExpMapHTC(3, 2, source, target, **DOUBLE),
        TangentLinear(3, 2, source, target, **DOUBLE),
        HypMLR(3, 4, source, **DOUBLE),
        HypPrototypes(3, 4, source, **DOUBLE),
        HypPositionalEncoding(3, source, epsilon=0.5, **DOUBLE),
    ]
    for layer in layers:
        found = measure_stretch(layer, radius, 3, starts=4, steps=8, generator=torch.Generator().manual_seed(seed))
        assert 0 < found <= lipschitz_bound(layer, radius) * (1 + 1e-9)


def test_far_out_hyperplanes_pull_together():
    """The constant |Z|_F of HypMLR is reached where all distances grow along the ray."""
    m = Lorentz(-1.0, **DOUBLE)
    torch.manual_seed(0)
    layer = HypMLR(2, 5, m, **DOUBLE)
    assert stretch(layer, m.lift(torch.tensor([[4000.0, 3000.0]], **DOUBLE))).item() == pytest.approx(
        lipschitz_bound(layer), rel=1e-4
    )


def test_one_prototype_by_its_formula():
    """Twice the scale times the farthest distance."""
    m = Lorentz(-4.0, **DOUBLE)
    layer = HypPrototypes(3, 1, m, **DOUBLE)
    with torch.no_grad():
        layer.log_scale.fill_(0.3)
    far = m.dist0(layer.prototypes()).item() + 0.5
    assert lipschitz_bound(layer, 0.5) == pytest.approx(2 * math.exp(0.3) * far)


def test_what_is_not_covered_says_so():
    m = Lorentz(-1.0)
    with pytest.raises(NotCoveredError, match="known activation"):
        lipschitz_bound(HypActivation(torch.sin, m))
    with pytest.raises(NotCoveredError, match="batch normalisation mixes"):
        lipschitz_bound(HypBatchNorm(2, m))
    with pytest.raises(NotCoveredError, match="eps must be at most 1"):
        lipschitz_bound(HypLayerNorm(2, m, eps=2.0))
    with pytest.raises(NotCoveredError):
        lipschitz_bound(FullyLorentzLinear(2, 2, m))
    with pytest.raises(ValueError, match="features must be given"):
        lipschitz_bound(HypActivation(torch.tanh, m))
    with pytest.raises(ValueError, match="radius must lie in"):
        lipschitz_bound(HTC(2, 2, m), -1.0)
    for wrong in ({"radius": "1"}, {"radius": True}, {"tokens": 2.5}, {"features": 2.5}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))} must be a "):
            lipschitz_bound(HTC(2, 2, m), **wrong)
    with pytest.raises(ValueError, match="tokens must be a positive integer, got -2"):
        lipschitz_bound(HTC(2, 2, m), 1.0, tokens=-2, metric="l2")
    with pytest.raises(ValueError, match="eps must be at most 1"):
        layer_norm_stretch(3, 1.5, None, None, 1.0)


class Stranger(nn.Linear):
    """A class of one's own that inherits a known layer's weights and not what it computes."""

    def forward(self, x):
        return 10 * super().forward(x)


class Named(nn.Module):
    """Attributes called as those of the library's own functions, and more than they would tell."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return 100 * x


@pytest.mark.parametrize(
    "function",
    [
        Stranger(3, 3),
        Named(norm=nn.LayerNorm(3)),
        Named(activation=nn.ReLU(), dropout=nn.Dropout(0.1)),
        nn.TransformerEncoderLayer(3, 1, batch_first=True),
        nn.LayerNorm((2, 3)),
        nn.Softplus(threshold=0.1),
        type("Chain", (nn.Sequential,), {"forward": lambda self, x: 7 * self[0](x)})(nn.ReLU()),
    ],
    ids=lambda function: type(function).__name__,
)
def test_a_function_is_not_taken_for_one_it_resembles(function):
    m = Lorentz(-1.0)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(HRC(function, m), 1.0, features=3)


def test_a_module_of_ones_own_names_its_functions():
    m = Lorentz(-1.0, **DOUBLE)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3, **DOUBLE)

        def refinements(self):
            return self.inner, torch.tanh

        def forward(self, x):
            return self.inner(x).tanh()

    both = Both()
    plain = nn.Sequential(both.inner, nn.Tanh())
    assert lipschitz_bound(HRC(both, m), 1.0) == lipschitz_bound(HRC(plain, m), 1.0)


def test_a_layer_of_ones_own_is_not_taken_for_what_it_inherits_from():
    m = Lorentz(-1.0)
    tripled = type("Tripled", (HTC,), {"space": lambda self, x, factor=None: 3 * HTC.space(self, x, factor)})
    with pytest.raises(NotCoveredError, match="Tripled"):
        lipschitz_bound(tripled(2, 2, m), 1.0)
    replaced = HTC(2, 2, m)
    replaced.forward = lambda x: 3 * x
    with pytest.raises(NotCoveredError, match="HTC"):
        lipschitz_bound(replaced, 1.0)
    renamed = type("Renamed", (HTC,), {})(2, 2, m)
    assert lipschitz_bound(renamed, 1.0) > 0
    type(renamed).space = tripled.space  # as where a cell of a notebook is changed and run again
    with pytest.raises(NotCoveredError, match="Renamed with a space"):
        lipschitz_bound(renamed, 1.0)


class Adapted(nn.Module):
    """A layer and something beside it, with the weights of the layer alone, as low-rank adapters have them."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.features, self.weight, self.bias = base.out_features, base.weight, base.bias
        self.out_features = base.out_features
        if isinstance(base, HTC):
            self.manifold_in, self.manifold_out = base.manifold_in, base.manifold_out

    def space(self, x, factor=None):
        return self.base.space(x, factor) + 1000 * x[..., 1:]

    def forward(self, x):
        if isinstance(self.base, HTC):
            return self.manifold_out.lift(self.space(x))
        return self.base(x) + 1000 * x


@pytest.mark.parametrize("part", ["query", "key", "value", "linear", "residual"])
def test_a_part_that_has_the_weights_of_another_is_not_taken_for_it(part):
    """Attention with such values was stretched 3000 times more than its bound said."""
    m = Lorentz(-1.0, **DOUBLE)
    kind = {"linear": TangentLinear, "residual": HypLinearAttention}.get(part, HypSoftmaxAttention)
    layer = kind(4, 4, m, **DOUBLE) if part == "linear" else kind(4, 1, m, **DOUBLE)
    assert lipschitz_bound(layer, 1.0) > 0
    before = getattr(layer, part)
    setattr(layer, part, Adapted(before))
    with pytest.raises(NotCoveredError, match=f"^layer must be a {type(before).__name__}, got Adapted"):
        lipschitz_bound(layer, 1.0)


@pytest.mark.parametrize("part", ["position", "query", "key", "value"])
@pytest.mark.parametrize("ends", [(-1.0, -25.0), (-25.0, -1.0), (-25.0, -25.0)])
def test_a_part_between_other_manifolds_is_refused(part, ends):
    """A position from curvature -25 was stretched 1.6 times more than the bound of its encoding said."""
    m = Lorentz(-1.0, **DOUBLE)
    layer = HypPositionalEncoding(4, m, **DOUBLE) if part == "position" else HypSoftmaxAttention(4, 1, m, **DOUBLE)
    manifolds = {-1.0: m, -25.0: Lorentz(-25.0, **DOUBLE)}
    setattr(layer, part, HTC(4, 4, *(manifolds[end] for end in ends), **DOUBLE))
    with pytest.raises(ValueError, match=r"^model must hand points on in one curvature, got -.* before Hyp"):
        lipschitz_bound(layer, 2.0)


def test_layer_norm_without_bias():
    m = Lorentz(-1.0, **DOUBLE)
    layer = HRC(nn.LayerNorm(3, eps=0.5, bias=False, **DOUBLE), m)
    bound = lipschitz_bound(layer, 1.0)
    assert 0 < measure_stretch(layer, 1.0, 3, starts=4, steps=10) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("kind", [HypConcat, HypResidual])
def test_what_joins_points_is_bounded_as_it_is_stated(kind):
    """A radius that is none, and a class that computes something else, had the bounds of the layer."""
    manifold = Lorentz(-1.0)
    for radius in (math.nan, -1.0):
        with pytest.raises(ValueError, match=r"^radius must lie in"):
            lipschitz_bound(kind(manifold), radius)
    other = type("Other", (kind,), {"forward": lambda self, *points: 5 * points[0]})
    with pytest.raises(NotCoveredError, match="got Other with a forward of its own"):
        lipschitz_bound(other(manifold), 1.0)
