"""Closed forms of single functions of the theory: bounds, shares and searches at inputs that can be done by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    HypLinearAttention,
    HypPositionalEncoding,
    HypResidual,
    HypSoftmaxAttention,
    TangentLinear,
)
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory import certify, lipschitz_bound, local_lipschitz, measure_stretch, stretch
from holonomy.theory.attention import rank_collapse
from holonomy.theory.attention.chained_collapse import chain
from holonomy.theory.attention.lipschitz import plus_bound
from holonomy.theory.attention.measured import _starts, jacobian_norm, measure_lipschitz
from holonomy.theory.attention.printed_collapse import _printed, outnumbered_tokens, residual_upper, split_queries
from holonomy.theory.attention.projections import NotCoveredError, Projections, attend, attention_heads
from holonomy.theory.certificates import heads
from holonomy.theory.certificates.composition import Tape, _local_residual
from holonomy.theory.certificates.constants.affine import _dual, linear_stretch
from holonomy.theory.certificates.constants.functions import Entrywise, entrywise
from holonomy.theory.certificates.constants.midpoint import midpoint_shares
from holonomy.theory.certificates.constants.softmax_attention import (
    Extent,
    _directions,
    _slopes,
    local_softmax_stretch,
)
from holonomy.theory.certificates.constants.tangent import shift_stretch
from holonomy.theory.certificates.refinements import grown
from holonomy.theory.certificates.regions import Region, Setting, follow, root, token_stretch
from holonomy.theory.certificates.stretching import Ends
from holonomy.theory.claims.search import draw_input
from holonomy.theory.claims.statements.lipschitz import sharp_family
from holonomy.theory.claims.verdict import Claim, Draws, Trial, judge
from holonomy.theory.graphs.topology import chung_bound

DOUBLE = {"dtype": torch.float64}
UNIT = Lorentz(-1.0, **DOUBLE)
STEEP = Lorentz(-4.0, **DOUBLE)
FLAT = Ends(None, None)


def numbers(*rows):
    return torch.tensor(rows, **DOUBLE)


def on_a_line(*rapidities):
    return UNIT.lift(torch.tensor(rapidities, **DOUBLE).sinh()[:, None])


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), **DOUBLE)


def layer_of(order, features, channels, factor=1.0):
    return Projections(factor * drawn(order + 1, 1, features, channels), drawn(order, 1, features, channels))


def test_constants_of_maps_of_a_ball():
    assert linear_stretch(0.5, 1.0) == pytest.approx(0.5 * math.cosh(1) / math.sqrt(1 + math.sinh(1) ** 2 / 4))
    # The larger of 3 mu and 1 - mu is least at a quarter.
    least = _dual(torch.zeros(2, 2, **DOUBLE), numbers([3.0, 0.0], [0.0, 0.0]), numbers([0.0, 0.0], [0.0, 1.0]))
    assert least == pytest.approx(0.75)
    assert grown(1.0, 2.0) == pytest.approx(math.asinh(2 * math.sinh(1)))
    assert grown(1.0, 1.0, 0.5) == pytest.approx(math.asinh(math.sinh(1) + 0.5))
    assert grown(1.0, 1.0) == 1.0
    # Softplus has slopes up to 1, is 1 times its input far out, and |z s(z) - softplus(z)| is largest at 0.
    assert entrywise(nn.Softplus()) == Entrywise(1.0, ((1.0, math.log(2)),), offset=math.log(2))


def test_lengths_in_unit_coordinates():
    layer = HRC(nn.Identity(), STEEP, UNIT)
    assert token_stretch(layer, STEEP.lift(drawn(3, 2))).tolist() == pytest.approx([1.0] * 3)
    embedding = ExpMapHTC(2, 2, UNIT, bias=False, **DOUBLE)
    with torch.no_grad():
        embedding.weight.copy_(numbers([0.0, 3.0, 0.0], [0.0, 0.0, 3.0]))
    about = replace(Region(2.0, 2), points=numbers([1.5, 0.0]), spread=0.5)
    for region in (about, Region(2.0, 2)):
        assert follow(embedding, region, Setting()).constant == pytest.approx(3 * math.sinh(2) / 2)


@pytest.mark.parametrize("kind", [TangentLinear, HypPositionalEncoding])
def test_a_layer_at_an_input_has_its_stretch_there_and_about_it_a_bound(kind):
    torch.manual_seed(0)
    layer = kind(2, 2, UNIT, **DOUBLE) if kind is TangentLinear else kind(2, UNIT, **DOUBLE)
    x = UNIT.lift(drawn(3, 2))
    exact, ball = stretch(layer, x).amax().item(), follow(layer, Region(2.0, 2), Setting()).constant
    at = follow(layer, Region.about(x, UNIT), Setting())
    assert at.constant == pytest.approx(exact)
    about = follow(layer, replace(Region.about(x, UNIT), radius=2.0, spread=0.1), Setting())
    assert exact * 1.001 < about.constant <= ball * 1.001


def test_a_tangent_map_by_its_formulas():
    """On balls of radius 6 and 1.5; two equal singular values attain the second formula, at the rim across the ray."""
    layer = TangentLinear(2, 2, STEEP, STEEP, bias=False, **DOUBLE)
    turn = numbers([0.6, -0.8], [0.8, 0.6])
    for size, radius, wanted in ((0.9, 6.0, 0.9), (1.7, 1.5, math.sinh(1.7 * 1.5) / math.sinh(1.5))):
        with torch.no_grad():
            layer.linear.weight.copy_(size * turn)
        assert lipschitz_bound(layer, radius / root(STEEP)) == pytest.approx(wanted)
        x = STEEP.expmap0(numbers([0.0, radius / root(STEEP), 0.0]))
        assert stretch(layer, x).item() == pytest.approx(wanted if size > 1 else size, rel=1e-9)
    row = TangentLinear(3, 1, UNIT, **DOUBLE)
    assert lipschitz_bound(row) == pytest.approx(row.linear.weight.norm().item())
    assert shift_stretch(0.3, 0.0) == pytest.approx(math.sinh(0.3) / 0.3)
    assert math.isinf(lipschitz_bound(layer))
    assert math.isinf(shift_stretch(0.3, math.inf))


def test_slopes_of_logits_by_the_lorentzian_distance():
    sinh, cosh = math.sinh(1.1), math.cosh(1.1)
    wanted = (0.6 * 0.7 * cosh, 0.6 * sinh, 0.6 * (cosh - 1))
    assert _slopes("lorentz_squared", 0.3, Extent(0.7, 1.1, 0.0)) == pytest.approx(wanted)
    wanted = (0.6 * 2 * sinh, 0.6 * sinh, 0.6 * (cosh - 1))
    assert _slopes("lorentz_squared", 0.3, Extent(5.0, 1.1, 0.0)) == pytest.approx(wanted)


def test_directions_are_those_of_the_frame_carried_from_the_origin():
    x, cos, sin = UNIT.lift(numbers([math.sinh(1.0), 0.0])), math.cos(0.6), math.sin(0.6)
    # A boost along the first axis takes (0, cos, sin) to this vector at x.
    tangent = numbers([math.sinh(1.0) * cos, math.cosh(1.0) * cos, sin])
    torch.testing.assert_close(_directions(x, UNIT.expmap(x, 0.5 * tangent))[0, 0], numbers(cos, sin))


def test_keys_and_values_alone_move_a_head_by_the_sum_over_each_row():
    q, k, v = on_a_line(0.2, -0.5), on_a_line(0.4, -1.0), on_a_line(1.0, -0.3)
    weights = (-UNIT.cdist(q, k)).softmax(-1)
    shares, away = midpoint_shares(weights, v[:, 1:])
    speed, still = numbers(1.0, 0.2), torch.zeros(2, **DOUBLE)
    spaces = (q[:, 1:], k[:, 1:], v[:, 1:])
    for speeds, part in (((still, speed, still), shares * away.tanh()), ((still, still, speed), shares)):
        found = local_softmax_stretch(*spaces, speeds, scale=1.0, similarity="geodesic", metric="sup")
        rows, columns = ((part * speed).sum(axis).amax().item() for axis in (1, 0))
        assert found == pytest.approx(rows)
        assert abs(rows - columns) > 0.01


def test_a_head_at_an_input():
    layer = HypSoftmaxAttention(2, 1, UNIT, dropout=0.5, **DOUBLE)
    x = UNIT.lift(drawn(3, 2))
    region = Region.about(x, UNIT)
    with pytest.raises(NotCoveredError, match="call eval"):
        follow(layer.train(), region, Setting())
    assert follow(layer.eval(), region, Setting()).theorem == "H8 local"
    assert follow(layer, Region(1.0, 2), Setting()).theorem == "H8"
    _, far = heads._local_head(layer, slice(0, 2), x, Setting(), 1.0)
    assert far == pytest.approx(UNIT.dist0(layer.value(x)).amax().item())


def test_linear_attention_hands_on_queries_keys_and_values_in_order(monkeypatch):
    layer, seen = HypLinearAttention(2, 1, UNIT, **DOUBLE), []
    x = UNIT.lift(drawn(3, 2))
    monkeypatch.setattr(heads, "local_linear", lambda *given: seen.append(given) or 1.0)
    heads._local_linear(layer, x, Setting())
    values, stretches, _ = seen[0]
    for value, size, htc in zip(values[:2], stretches[:2], (layer.query, layer.key), strict=True):

        def features(z, htc=htc):
            return power_features(htc.space(z), layer.power)

        torch.testing.assert_close(value[0], features(x).detach())
        torch.testing.assert_close(size[0], stretch(features, x, ends=Ends(UNIT, None)))
    assert (values[1] - values[2]).abs().amax() > 0.01
    assert (stretches[1] - stretches[2]).abs().amax() > 0.01


def test_a_residual_at_and_about_an_input():
    residual = HypResidual(UNIT, epsilon=3.0)
    # Where both ends meet the shares are 1/4 and 3/4; far apart both tend to a half.
    x, branch = on_a_line(0.0, 0.0), on_a_line(0.0, 6.0)
    assert _local_residual(residual, x, branch, 3.0, "sup") == pytest.approx(2.5)
    tape = Tape(Region.about(on_a_line(0.5), UNIT, 0.1), Setting())
    layer = HTC(1, 1, UNIT, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(numbers([0.0, 3.0]))
    tape.residual("residual", residual, lambda branch: branch.take("map", layer))
    middle = residual(on_a_line(0.5), layer(on_a_line(0.5)))
    wanted = UNIT.dist0(middle).item() + 0.1 * tape.rows[-1].constant
    assert tape.rows[-1].constant > 1.5
    assert tape.region.radius == pytest.approx(wanted, rel=1e-6)


def test_a_mask_that_leaves_one_simplex_leaves_the_path_through_values():
    layer = layer_of(1, 2, 2)
    alone = plus_bound(layer, 1.0, 3, torch.eye(3, dtype=torch.bool)).item()
    assert alone == pytest.approx(torch.linalg.matrix_norm(layer.values[0, 0], 2).item())


def test_blocks_are_read_off_the_jacobian_where_sums_are_known_too():
    layer, x = layer_of(1, 2, 2), drawn(3, 2)
    jacobian = torch.func.jacrev(lambda z: attend(z, layer))(x)
    gram = torch.einsum("iajb,kcjb->ikac", jacobian, jacobian)
    wanted = torch.linalg.matrix_norm(torch.linalg.matrix_norm(gram, 2), 2).sqrt()
    torch.testing.assert_close(local_lipschitz(layer, x, form="blocks"), wanted)


def test_a_search_depends_on_its_seed_alone():
    def function(x):
        return x @ numbers([1.0, 0.0], [0.0, 3.0])

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append((jacobian_norm(function, drawn(2, 2), steps=1)[0], draw_input(Draws(0), 3, 2).tolist()))
        found[-1] += tuple(draw_input(Draws(n), 5, 1).tolist() for n in range(9))
    assert found[0] == found[1]


def test_starts_of_a_search():
    starts = list(_starts(4, 2, 2.0, 4, torch.Generator().manual_seed(0)))
    assert starts[0][:, 0].tolist() == [2, -2, -2, -2]
    assert starts[1][:, 1].tolist() == [2, 2, -2, -2]
    assert starts[2].norm(dim=1).tolist() == pytest.approx([2, 1, 1, 1])
    assert starts[5].norm(dim=1).tolist() == pytest.approx([2] * 4)
    layer = layer_of(1, 3, 2, factor=2.0)
    best = measure_lipschitz(layer, 1.0, 3, starts=4, ascend=1, steps=0)
    assert best.x.shape == (3, 3)
    assert best.value == pytest.approx(measure_lipschitz(layer, 1.0, 3, starts=4, ascend=8, steps=0).value)


def test_printed_bounds_by_hand():
    size, middle = residual_upper(numbers([0.0], [0.0], [1.0]))
    assert (size.item(), middle.item()) == (pytest.approx(math.sqrt(0.75)), 0.5)
    layer = Projections(0.5 * torch.ones(3, 1, 1, 1, **DOUBLE), 0.7 * torch.ones(2, 1, 1, 1, **DOUBLE))
    printed = _printed(torch.tensor(1.5, **DOUBLE), [layer], torch.tensor(3.0, **DOUBLE))
    assert printed.item() == pytest.approx(4 * 1.5 * 1.0**3 * 1.4**2 * 3**2)
    # 64 gamma sqrt(n) abc eps^3 with gamma = 1 / sqrt(n), up to delta.
    a, n = 2.0**-7, 64
    assert split_queries(n)[1] == pytest.approx(64 * a * a * math.sqrt(n / 2), rel=1e-3)
    assert outnumbered_tokens(2, 10, 0.3, 5.0, 3.0)[1] == pytest.approx(0.3 * 2 / 4 * 5**2 * 2**3)


def test_the_chain_of_two_in_closed_form():
    def log_cosh(x):
        return math.log(math.cosh(x))

    field, z = 8.0, 6.0
    shift = 2 * (log_cosh((field + z) / 4) - log_cosh((field - z) / 4))
    wanted = math.tanh(field / 4) + (1 + math.tanh(z / 4)) * math.tanh((field + shift) / 4)
    assert chain(2, torch.tensor(field, **DOUBLE), torch.tensor(z, **DOUBLE)).item() == pytest.approx(wanted)


def test_long_lists_of_products_are_telescoped(monkeypatch):
    monkeypatch.setattr(rank_collapse, "_LIMIT", 4)
    factors = drawn(2, 1, 3, 2)
    products = (factors[0][:, :, None] * factors[1][:, None]).flatten(1, 2)
    longest = factors.norm(dim=-1).amax(-1)[:, 0]
    apart = [torch.cdist(f[0], f[0]).amax() for f in factors]
    wanted = apart[0] * longest[1] + apart[1] * longest[0]
    torch.testing.assert_close(rank_collapse._diameter_of_products(products, factors).squeeze(), wanted)


def test_the_crowd_of_the_sharp_family_gives_half_its_attention_to_one():
    layer, x = sharp_family(16, 10.0)
    weights = attention_heads(x, layer, None).weights[0]
    assert weights[-1, 0].item() == pytest.approx(0.5)
    torch.testing.assert_close(attend(x, layer)[-1], torch.zeros(2, **DOUBLE), atol=1e-12, rtol=0)


def test_the_sup_metric_of_a_sum_counts_its_tokens():
    x = drawn(1, 3, 1)
    for metric, wanted in (("sup", 3.0), ("l2", math.sqrt(3))):
        found = stretch(lambda z: z.sum(-2, keepdim=True), x, ends=FLAT, joint=True, metric=metric)
        assert found.item() == pytest.approx(wanted)


def test_an_ascent_keeps_its_points_and_their_dtype():
    shapes = set()

    def seen(x):
        shapes.add(x.shape)
        return x.sin()

    assert 0.9 < measure_stretch(seen, 1.0, 2, ends=FLAT, starts=3, steps=2) <= 1
    assert shapes == {(3, 2)}
    linear = nn.Linear(2, 2)  # in float32, and without a second derivative
    norm = torch.linalg.matrix_norm(linear.weight, 2).item()
    assert measure_stretch(linear, 1.0, 2, ends=FLAT, starts=1, steps=1) == pytest.approx(norm)


def test_a_value_that_meets_its_bound_and_the_sentence_of_a_claim():
    assert judge("claim", "source", [Trial(1.0, 1.0)], kind="upper").holds is True
    claim = Claim("family.claim", "source", "1 <= 1", lambda _: [Trial(1.0, 1.0)], note="by hand")
    assert claim.measure(Draws())[0].note == "by hand"


def test_the_diameter_of_a_path_by_chung():
    path = torch.diag(torch.ones(8), 1).bool()
    assert chung_bound((path | path.T).double()) == 8


def test_a_decoder_at_an_input_has_the_stretch_of_its_worst_token():
    torch.manual_seed(0)
    model = Hypformer(2, 3, 2, layers=1, attention="softmax", graph_encoder=None, dtype=torch.float64).eval()
    x = drawn(4, 2)
    row = next(row for row in certify(model, x=x).rows if "decoder" in row.name)
    seen = []
    model.encoder.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    model(x)
    manifold, points = model.manifold_out, seen[-1]
    wanted = stretch(lambda z: model.decoder(manifold.logmap0(z)[..., 1:]), points, ends=Ends(manifold, None))
    assert row.constant == pytest.approx(wanted.amax().item(), rel=1e-6)
