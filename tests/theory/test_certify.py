"""Certificates of whole models: rows that multiply, scopes that hold, parts named where nothing covers them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from holonomy.layers import (
    HRC,
    HTC,
    ExpMapHTC,
    HypActivation,
    HypBatchNorm,
    HypDropout,
    HypLayerNorm,
    HypLinearAttention,
    HypPositionalEncoding,
    HypResidual,
    HypSoftmaxAttention,
)
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer, HypformerBlock
from holonomy.theory import certified_radius, certify, lipschitz_bound, stretch
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.certificates.stretching import Ends, ends_of
from holonomy.theory.claims.verdict import Draws

pytestmark = pytest.mark.usefixtures("without_shape_checks")

DOUBLE = {"dtype": torch.float64}
seeds = st.integers(0, 10**6)


def hypformer(seed=0, **options):
    torch.manual_seed(seed)
    settled = {
        "layers": 2,
        "attention": "softmax",
        "graph_encoder": None,
        "feedforward": 5,
        "curvature": -0.7,
    } | options
    return Hypformer(3, 4, 2, **settled, **DOUBLE).eval()


def test_the_constant_is_the_product_of_the_rows():
    model = hypformer(similarity="geodesic", norm_eps=0.5)
    for certificate in (certify(model, 0.8, starts=0), certify(model, x=torch.randn(4, 3, **DOUBLE))):
        product = math.prod(row.constant for row in certificate.rows if not row.branch)
        assert certificate.constant == pytest.approx(product)
        names = [row.name for row in certificate.rows]
        assert {"embedding", "block0.attention", "block1.norm_feedforward", "logarithm, decoder"} <= set(names)
        assert str(certificate).count("\n") == len(certificate.rows) + 1


@settings(max_examples=3)
@given(seed=seeds, metric=st.sampled_from(["sup", "l2"]), similarity=st.sampled_from(["geodesic", "geodesic_squared"]))
def test_every_scope_holds(seed, metric, similarity):
    model = hypformer(seed, similarity=similarity, norm_eps=0.1, layers=1, decoder="mlr")
    x = 0.5 * torch.randn(4, 3, **DOUBLE)
    at = certify(model, x=x, metric=metric)
    assert at.scope == "at the input"
    assert 0 < at.measured <= at.constant * (1 + 1e-9)
    radius = 0.1
    about = certify(model, radius, x=x, metric=metric, starts=0)
    step = torch.randn(4, 3, **DOUBLE)
    y = x + radius * step / step.norm(dim=-1, keepdim=True) * torch.rand(4, 1, **DOUBLE)
    assert certify(model, x=y, metric=metric).measured <= about.constant
    moved = model(x) - model(y)
    before, after = ((z.norm(dim=-1).max() if metric == "sup" else z.norm()).item() for z in (x - y, moved))
    assert after <= about.constant * before
    far = max(z.norm(dim=-1).max().item() for z in (x, y))
    prior = certify(model, far, tokens=4, metric=metric, starts=0)
    assert max(at.constant, at.measured) <= prior.constant
    assert after <= prior.constant * before


def test_runs_of_layers_keep_their_alignment():
    """One map that stretches one axis, then one that stretches another: the product is 4, the run is 2."""
    m = Lorentz(-1.0, **DOUBLE)
    first, second = (HTC(2, 2, m, bias=False, **DOUBLE) for _ in range(2))
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]))
        second.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    model = nn.Sequential(first, second)
    origin = m.lift(torch.zeros(1, 2, **DOUBLE))
    assert certify(model, x=origin).constant == pytest.approx(2)
    assert certify(model, 1.0, starts=0).constant == pytest.approx(4)
    rows = certify(model, x=origin).rows
    assert [round(row.constant, 6) for row in rows] == [2, 2, 2]
    assert [row.branch for row in rows] == [True, True, False]


def scaled(m, size, features=1):
    """HTC that multiplies space parts."""
    layer = HTC(features, features, m, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(torch.cat([torch.zeros(features, 1), size * torch.eye(features)], 1))
    return layer


def test_what_contracts_at_an_input_sends_it_no_nearer_to_the_origin():
    """The second map contracts at the origin alone, which the constant of the first at a far point said was near."""
    m = Lorentz(-1.0, **DOUBLE)
    model = nn.Sequential(scaled(m, 10.0), scaled(m, 0.1))
    x = m.lift(torch.tensor([[math.sinh(1.0)]], **DOUBLE))
    for radius in (1e-6, 0.1):
        assert certify(model, radius, x=x, starts=0).constant >= certify(model, x=x).measured == pytest.approx(1)


def test_attention_about_an_input_knows_how_far_out_its_values_are():
    m = Lorentz(-1.0, **DOUBLE)
    layer = HypSoftmaxAttention(2, 2, m, similarity="geodesic", **DOUBLE).eval()
    for name, size in (("query", 1e-6), ("key", 1e-6), ("value", 100.0)):
        setattr(layer, name, scaled(m, size, 2))
    x = m.lift(torch.full((1, 2), math.sinh(1) / math.sqrt(2), **DOUBLE))
    truth = certify(layer, x=x).measured
    assert truth == pytest.approx(100)
    assert certify(layer, 1e-6, x=x, starts=0).constant >= truth


def test_functions_of_one_refinement_hand_on_stretched_balls():
    """The linear map carries points of the ball to where the variance is small: LayerNorm must know."""
    m = Lorentz(-1.0, **DOUBLE)
    linear, norm = nn.Linear(2, 2, bias=False, **DOUBLE), nn.LayerNorm(2, eps=1e-4, **DOUBLE)
    with torch.no_grad():
        linear.weight.copy_(10 * torch.eye(2))
    layer = HRC(nn.Sequential(linear, norm), m)
    x, near = (m.lift(torch.tensor([[0.2 + gap, 0.2 - gap]], **DOUBLE)) for gap in (0.02, 0.0))
    radius = m.dist(x, near).item() * (1 + 1e-9)
    assert certify(layer, x=near).measured <= certify(layer, radius, x=x, starts=0).constant * (1 + 1e-9)


def test_the_documented_choices_make_it_smaller():
    """Logits by distance against squared distance, a larger eps against a small one."""
    by = {
        (similarity, eps): certify(hypformer(similarity=similarity, norm_eps=eps), 1.0, starts=0).constant
        for similarity in ("geodesic", "geodesic_squared")
        for eps in (1e-5, 0.5)
    }
    assert by["geodesic", 0.5] < by["geodesic_squared", 0.5]
    assert by["geodesic", 0.5] < 1e-6 * by["geodesic", 1e-5]
    assert by["geodesic", 0.5] < 100


def test_what_is_not_covered_is_named():
    x = torch.zeros(2, 3, **DOUBLE)
    for options in ({}, {"transformer": False}):
        model = hypformer(graph_encoder="gcn", **options)
        for ask, how in ((certify, {"x": x}), (certify, {"radius": 1.0}), (lipschitz_bound, {"radius": 1.0})):
            with pytest.raises(NotCoveredError, match="no theorem covers graph_encoder, a GCN"):
                ask(model, **how)
    with pytest.raises(NotCoveredError, match="known activation"):
        certify(hypformer(activation=torch.sin), 1.0, starts=0)
    with pytest.raises(NotCoveredError, match="got RMSNorm"):
        certify(hypformer(norm="rms"), 1.0, starts=0)
    m = Lorentz(dtype=torch.float64)
    with pytest.raises(NotCoveredError, match="no theorem covers cross_attention"):
        certify(HypformerBlock(3, 1, m, manifold_memory=m, **DOUBLE).eval(), x=m.lift(x))
    for ask, how in ((certify, {"x": m.lift(x)}), (certify, {"radius": 1.0}), (lipschitz_bound, {"radius": 1.0})):
        with pytest.raises(NotCoveredError, match="made without rope"):
            ask(HypSoftmaxAttention(3, 1, m, rope=True, similarity="geodesic", **DOUBLE), **how)
    with pytest.raises(NotCoveredError, match="call eval"):
        certify(hypformer(dropout=0.1).train(), x=x)
    with pytest.raises(NotCoveredError, match="H10 has no such form"):
        certify(hypformer(attention="linear"), 0.1, x=x)
    with pytest.raises(ValueError, match="radius must be positive"):
        certify(hypformer())


def test_an_activation_alone_is_told_its_features():
    """It asked for them and did not take them."""
    m = Lorentz(-1.0, **DOUBLE)
    layer = HypActivation(nn.functional.gelu, m)
    with pytest.raises(ValueError, match="features must be given"):
        certify(layer, 1.0)
    found = certify(layer, 1.0, features=3, starts=2, steps=4)
    assert 0 < found.measured <= found.constant == lipschitz_bound(layer, 1.0, features=3)
    assert lipschitz_bound(nn.Sequential(layer), 1.0, features=3) == found.constant


def random_model(seed):
    """Layers in a row whose sizes lie far apart, the tokens of an input for them, and a radius about these."""
    draws = Draws(seed)
    m, features = Lorentz(-draws.logarithmic(0.25, 4.0), **DOUBLE), draws.integer(1, 3)
    torch.manual_seed(seed)
    kinds = (
        lambda: HTC(features, features, m, **DOUBLE),
        lambda: HRC(nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.LayerNorm(features)).double(), m),
        lambda: HypLayerNorm(features, m, eps=draws.logarithmic(1e-4, 1.0), dtype=torch.float64),
        lambda: HypSoftmaxAttention(features, features, m, similarity="geodesic", **DOUBLE),
        lambda: HypPositionalEncoding(features, m, epsilon=0.5, **DOUBLE),
        lambda: HypformerBlock(features, 1, m, attention="softmax", **DOUBLE),
        lambda: HypDropout(0.5, m),
    )
    model = nn.Sequential(*(kinds[draws.integer(0, len(kinds) - 1)]() for _ in range(3))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(draws.logarithmic(0.1, 10.0))
    x = draws.normal(3, features)
    x = m.lift(x / x.norm(dim=-1, keepdim=True) * math.sinh(draws.logarithmic(0.1, 20.0)))
    return model, x, draws.logarithmic(1e-6, 10.0)


@settings(max_examples=6)
@given(seed=seeds, metric=st.sampled_from(["sup", "l2"]))
@example(seed=1, metric="l2")
@example(seed=2, metric="sup")
def test_no_row_is_above_that_of_the_ball_about_the_origin(seed, metric):
    """One was 1e231 beside 1e8: the radius of the values was forgotten, and balls about them grew."""
    model, x, radius = random_model(seed)
    far = ends_of(model[0]).source.dist0(x).max().item()
    prior = certify(model, far + radius, tokens=3, metric=metric, starts=0)
    whole = {row.name: row for row in prior.rows}
    for spread in (0.0, radius):
        found = certify(model, spread, x=x, metric=metric, starts=0)
        for row in found.rows:
            if row.name in whole:
                assert row.constant <= whole[row.name].constant * (1 + 1e-6), row.name
                assert row.radius_out <= whole[row.name].radius_out * (1 + 1e-6), row.name
        assert found.constant <= prior.constant * (1 + 1e-6)


@pytest.mark.parametrize("radius", [0.0, 1.0])
def test_an_identity_costs_nothing_however_far_out(radius):
    """Its stretch is no difference of large numbers: at a rapidity of 100 the row was 1e28."""
    m = Lorentz(-1.0, **DOUBLE)
    x = m.lift(torch.full((2, 3), math.sinh(100.0), **DOUBLE))
    assert certify(HypDropout(0.5, m).eval(), radius, x=x, starts=0).constant <= 1 + 1e-12


def test_linear_attention_has_a_certificate_at_an_input_only():
    model = hypformer(attention="linear", norm_eps=0.1)
    assert certify(model, 1.0, starts=0).constant == math.inf
    m = Lorentz(-0.8, **DOUBLE)
    torch.manual_seed(1)
    layer = HypLinearAttention(4, 2, m, **DOUBLE)
    with torch.no_grad():
        for htc in (layer.query, layer.key, layer.value):
            htc.bias.add_(1.0)
    found = certify(layer, x=m.lift(0.3 * torch.randn(5, 4, **DOUBLE)))
    assert 0 < found.measured <= found.constant < 20 * found.measured


def test_any_layer_and_any_activation_at_an_input():
    m = Lorentz(-1.3, **DOUBLE)
    x = m.lift(torch.randn(4, 3, **DOUBLE))
    sine = certify(HypActivation(torch.sin, m), x=x)
    assert sine.constant == pytest.approx(sine.measured)
    # The input tells the number of features, on which the constant about it depends.
    assert (
        certify(HypActivation(torch.tanh, m), x=x).constant
        <= certify(HypActivation(torch.tanh, m), 0.2, x=x).constant
        < math.inf
    )
    model = nn.Sequential(HTC(3, 3, m, **DOUBLE), HypLayerNorm(3, m, eps=0.1, dtype=torch.float64))
    assert certify(model, 1.0, tokens=2, starts=2, steps=4).slack >= 1
    assert lipschitz_bound(model, 1.0) == certify(model, 1.0, starts=0).constant
    block = HypformerBlock(4, 1, m, attention="softmax", norm_eps=0.5, **DOUBLE).eval()
    assert lipschitz_bound(block, 1.0) == certify(block, 1.0, starts=0).constant
    for several in (block, nn.Sequential(HypSoftmaxAttention(4, 1, m, **DOUBLE))):
        for scope in ({"tokens": 7, "metric": "l2"}, {"tokens": 2, "metric": "l2"}, {"metric": "sup"}):
            assert lipschitz_bound(several, 1.0, **scope) == certify(several, 1.0, starts=0, **scope).constant
    assert certify(block, x=m.lift(torch.randn(3, 4, **DOUBLE))).slack >= 1


def test_a_layer_that_forgets_its_input_makes_the_constant_zero():
    m = Lorentz(-1.0, **DOUBLE)
    first, second = HTC(3, 3, m, bias=False, **DOUBLE), HTC(3, 3, m, **DOUBLE)
    with torch.no_grad():
        first.weight.zero_()
    assert certify(nn.Sequential(first, second), 1.0, starts=0).constant == 0


def test_equal_tokens_lie_as_far_out_as_one():
    layer = ExpMapHTC(3, 2, Lorentz(-1.3, **DOUBLE), **DOUBLE)
    one, five = (certify(layer, 0.1, x=torch.ones(count, 3), starts=0).constant for count in (1, 5))
    assert one == pytest.approx(five)


@pytest.mark.parametrize("radius", [0.0, 0.05])
def test_a_model_in_float32_is_certified_as_the_same_model_in_float64(radius):
    model = hypformer(norm_eps=0.1).float()
    x = torch.randn(4, 3)
    narrow = certify(model, radius, x=x, starts=0)
    assert model.encoder.embedding.weight.dtype == torch.float32, "certified from a copy"
    assert narrow.constant == certify(model.double(), radius, x=x.double(), starts=0).constant
    if radius == 0:
        # Without an input there is nothing that the radius about one could change.
        assert certify(model.float(), 1.0, starts=0).constant == certify(model.double(), 1.0, starts=0).constant


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("rapidity", [1.0, 8.0, 12.0, 15.0])
def test_a_certificate_far_out_is_no_smaller_than_the_truth(kind, rapidity):
    """A boost is an isometry: its constant is 1. In float32 the stretch itself was 0.5 off at a rapidity of 15."""
    m = Lorentz(-1.0, dtype=kind)
    layer = HTC(2, 2, m, bias=False, dtype=kind)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[math.sinh(1), math.cosh(1), 0.0], [0.0, 0.0, 1.0]]))
    exact = copy.deepcopy(layer).double()
    u = torch.randn(6, 2, **DOUBLE)
    x = m.lift((math.sinh(rapidity) * u / u.norm(dim=1, keepdim=True)).to(kind))
    truth = math.sqrt(max(1.0, torch.linalg.eigvalsh(gram(exact.weight))[-1].item()))
    found = certify(layer, x=x).constant
    # The weights' own rounding moves the truth at a point, by as much as it moves the constant of all of space.
    spread = 1e-7 if kind == torch.float32 else 0.0
    assert (1 - spread) / truth <= found <= truth * (1 + spread) + 1e-6


def gram(weight):
    """W eta W' of H2."""
    return weight[:, 1:] @ weight[:, 1:].mT - weight[:, :1] @ weight[:, :1].mT


def test_a_block_between_two_manifolds():
    """Its constant is in the distances of both: it was that of a block that stays where it is."""
    m, to = Lorentz(-1.0, **DOUBLE), Lorentz(-0.01, **DOUBLE)
    blocks: list[HypformerBlock] = []
    for out in (None, to):
        torch.manual_seed(0)
        options = {"attention": "softmax", "similarity": "geodesic", "norm_eps": 1.0, **DOUBLE}
        blocks.append(HypformerBlock(3, 1, m, out, **options).eval())
    stays, leaves = blocks
    assert lipschitz_bound(leaves, 1.0) == pytest.approx(10 * lipschitz_bound(stays, 1.0))
    x = m.lift(torch.randn(2, 3, **DOUBLE))
    there = stretch(leaves, x, ends=Ends(m, to), joint=True).item()
    assert there <= certify(leaves, x=x, metric="l2").constant


@pytest.mark.parametrize("radius", [0.0, 0.1])
def test_what_is_random_or_mixes_tokens_has_no_certificate_at_an_input(radius):
    m = Lorentz(-1.0, **DOUBLE)
    x = m.lift(torch.randn(4, 3, **DOUBLE))
    for layer in (
        HypBatchNorm(3, m, **DOUBLE),
        HypBatchNorm(3, m, track_running_stats=False, **DOUBLE).eval(),
        HypDropout(0.5, m),
        nn.Sequential(HypDropout(0.5, m), HypSoftmaxAttention(3, 1, m, **DOUBLE)),
    ):
        with pytest.raises(NotCoveredError):
            certify(layer, radius, x=x)


def test_layers_of_a_sequence_meet_in_one_curvature():
    """Points read in another curvature than they were made in are moved by that: the product says nothing of it."""
    a, b, c = (Lorentz(kappa, **DOUBLE) for kappa in (-1.0, -2.0, -5.0))
    first, second = HTC(3, 3, a, b, **DOUBLE), HTC(3, 3, c, **DOUBLE)
    with pytest.raises(ValueError, match=r"got -2 before 1\.0\.HTC, which takes points of -5"):
        certify(nn.Sequential(first, nn.Sequential(second)), 1.0)
    equal = HTC(3, 3, Lorentz(-2.0, **DOUBLE), c, **DOUBLE)
    assert certify(nn.Sequential(first, nn.Sequential(equal), second), 1.0, starts=0).constant > 0


def test_inputs_that_do_not_fit_get_one_sentence():
    model = hypformer()
    for shape in ((3,), (1, 2, 3), (0, 3)):
        with pytest.raises(ValueError, match=r"x must have shape \(tokens, dim\), with one token at least"):
            certify(model, x=torch.zeros(shape, **DOUBLE))
    with pytest.raises(ValueError, match="tokens must be a positive integer"):
        certify(model, 1.0, tokens=0)
    with pytest.raises(
        TypeError, match=r"radius must be a number, got a tensor of shape \(5, 3\): an input goes to x="
    ):
        certify(model, torch.zeros(5, 3, **DOUBLE))
    with pytest.raises(ValueError, match="features must be a positive integer"):
        certify(model, 1.0, features=0)
    with pytest.raises(ValueError, match="starts must be at least 0, got -1"):
        certify(model, 1.0, starts=-1)


@pytest.mark.parametrize("name", ["position", "attention", "drop", "residual", "norm_attention", "feedforward"])
def test_a_part_of_a_block_on_another_manifold_is_refused(name):
    """It would read points of one curvature as points of another, which stretches by more than the part does."""
    model, other = hypformer(layers=1), Lorentz(-50.0, **DOUBLE)
    block = model.encoder.blocks[0]
    if name == "feedforward":
        block.feedforward[1] = HRC(nn.ReLU(), other)
    else:
        old = getattr(block, name)
        new = {
            "position": lambda: HypPositionalEncoding(4, other, **DOUBLE),
            "attention": lambda: HypSoftmaxAttention(4, 1, other, **DOUBLE),
            "drop": lambda: HypDropout(0.0, other),
            "residual": lambda: HypResidual(other),
            "norm_attention": lambda: HypLayerNorm(4, other, **DOUBLE),
        }[name]().eval()
        assert type(new) is type(old)
        setattr(block, name, new)
    refused = pytest.raises(ValueError, match=r"^model must hand points on in one curvature, got -.* before .*block0")
    with refused:
        certify(model, 0.5, starts=0)
    if name in {"position", "residual", "norm_attention"}:  # the others are bounded as they are
        with refused:
            certified_radius(model, torch.zeros(2, 3, **DOUBLE), None, [0])


class Twice(nn.Sequential):
    """Its layers, and then something else."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_a_feed_forward_that_is_no_sequence_of_its_layers_is_refused():
    model, x = hypformer(layers=1), torch.zeros(2, 3, **DOUBLE)
    block = model.encoder.blocks[0]
    for other in (HTC(4, 4, block.manifold_in, **DOUBLE), Twice(*block.feedforward)):
        block.feedforward = other
        assert model(torch.zeros(1, 3, **DOUBLE), None).isfinite().all()
        for bound in (lambda: certify(model, 1.0, starts=0), lambda: certified_radius(model, x, None, [0])):
            with pytest.raises(NotCoveredError, match=rf"must .*, got {type(other).__name__}"):
                bound()


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_a_hook_may_change_is_refused_wherever_it_is(register):
    """Of certificates of a whole model, of a layer, of a node and of a Lipschitz constant."""
    edges, x = torch.tensor([[0, 1], [1, 0]]), torch.randn(2, 3, **DOUBLE)
    model = hypformer(layers=1, attention="linear", graph_encoder="gcn")
    for part in model.modules():
        hook = getattr(part, register)(lambda *_: None)
        with pytest.raises(NotCoveredError, match=rf"no forward hooks.*, got some at {type(part).__name__}\.$"):
            certified_radius(model, x, edges, [0])
        hook.remove()
    model = hypformer(layers=1)
    multihead = nn.MultiheadAttention(4, 2, **DOUBLE)
    for whole, bound in (
        (model, lambda: certify(model, 1.0, starts=0)),
        (multihead, lambda: lipschitz_bound(multihead, 1.0, tokens=3)),
    ):
        for part in whole.modules():
            hook = getattr(part, register)(lambda *_: None)
            with pytest.raises(NotCoveredError, match="no forward hooks"):
                bound()
            hook.remove()
        bound()


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_are_refused(register):
    hook = getattr(nn.modules.module, register)(lambda *_: None)
    with pytest.raises(NotCoveredError, match="no forward hooks"):
        certify(HTC(3, 3, Lorentz(-1.0, **DOUBLE), **DOUBLE), 1.0)
    hook.remove()


@pytest.mark.parametrize("name", ["forward", "space"])
def test_a_method_set_on_one_layer_is_refused(name):
    layer = HTC(3, 3, Lorentz(-1.0, **DOUBLE), **DOUBLE)
    setattr(layer, name, lambda x: x)
    with pytest.raises(NotCoveredError, match=f"got HTC with a {name} of its own"):
        certify(layer, 1.0)


def test_weights_that_a_hook_computes_are_refused():
    """The bound would read those of the last call."""
    layer = HTC(3, 3, Lorentz(-1.0, **DOUBLE), **DOUBLE)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    with torch.no_grad():
        layer.weight_orig.mul_(100)
    for each in (layer, nn.Sequential(HTC(3, 3, Lorentz(-1.0)))):
        if each is not layer:
            prune.l1_unstructured(each[0], "weight", amount=0.5)
        with pytest.raises(NotCoveredError, match="no forward hooks"):
            certify(each, 1.0)
    prune.remove(layer, "weight")
    assert certify(layer, 1.0, starts=0).constant > 10


@pytest.mark.parametrize("mixing", [lambda s: s - 3 * s.mean(0, keepdim=True), lambda s: s.cumsum(0)])
def test_a_refinement_that_mixes_rows_is_refused_at_an_input(mixing):
    """The stretch of each row by itself is below that of all."""
    manifold = Lorentz(-1.0, **DOUBLE)
    with pytest.raises(NotCoveredError, match="function must take each row by itself"):
        certify(HRC(mixing, manifold), x=manifold.lift(torch.randn(5, 3, **DOUBLE)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_input_that_is_not_finite_is_refused(wrong):
    layer = HTC(3, 3, Lorentz(-1.0, **DOUBLE), **DOUBLE)
    with pytest.raises(ValueError, match=r"^x must be finite"):
        certify(layer, x=torch.full((2, 4), wrong, **DOUBLE))


def test_a_model_is_certified_in_inference_mode(dtype):
    def certified():
        at = [certify(model, x=x.clone(), starts=1), certify(model, 0.1, x=x.clone(), starts=0)]
        generator = torch.Generator().manual_seed(0)
        return [*at, certify(model, 1.0, tokens=2, starts=2, steps=2, generator=generator)]

    options = {"layers": 1, "attention": "softmax", "similarity": "geodesic", "graph_encoder": None, "dtype": dtype}
    model, x = Hypformer(3, 4, 2, **options).eval(), torch.randn(4, 3, dtype=dtype)
    expected = certified()
    with torch.inference_mode():
        assert certified() == expected
        model = copy.deepcopy(model)
        found = certified()
    assert [each.constant for each in found] == pytest.approx([each.constant for each in expected])
