"""What a certificate says of a model as it is: at its centre, where nothing is known, and what each layer takes."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from holonomy.layers import GCN, ExpMapHTC, HypBatchNorm, HypLayerNorm, HypSoftmaxAttention
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from holonomy.theory import NotCoveredError, certified_accuracy, certified_radius, certify_node
from holonomy.theory.affine import blocks, points
from holonomy.theory.affine.arithmetic import forms, margins
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.attention.mixing import heads_of
from holonomy.theory.affine.enclosure import Enclosure

pytestmark = pytest.mark.usefixtures("without_shape_checks")

NODES, FEATURES = 5, 3
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
MODELS: dict[str, dict[str, Any]] = {
    "one block": {},
    "one block, midpoint": {"average": "midpoint", "heads": 2},
    "two blocks": {"layers": 2},
    "softmax": {"attention": "softmax", "curvature": -0.6},
    "prototypes": {"decoder": "prototypes", "curvature": -0.5},
    "graph": {"graph_encoder": partial(GCN, FEATURES, 4, 4, layers=2)},
    "hyperplanes": {"decoder": "mlr"},
}


@cache
def model_of(name: str) -> tuple[Hypformer, Tensor]:
    torch.manual_seed(0)
    options = {"layers": 1, "graph_encoder": lambda: None, **MODELS[name]}
    options["graph_encoder"] = options["graph_encoder"]()
    return Hypformer(FEATURES, 4, 3, **options).double().eval(), torch.randn(NODES, FEATURES).double()


def bounds(name: str, radius: float, moving: list[int], victim: list[int]) -> tuple[margins.Margins, Tensor]:
    """Bounds of a batch of problems, and the margins of the victims' logits against the first class."""
    model, x = model_of(name)
    held = Enclosure(model, x, EDGES)
    places, radii = (torch.tensor(each) for each in (moving, victim)), torch.full((len(moving),), radius).double()
    truth = held.logits[victim][:, :1] - held.logits[victim]
    return held.margins(*places, radii, torch.zeros(len(moving), dtype=torch.int64)), truth[:, 1:]


@pytest.mark.parametrize("victim", [[0, 3], [1, 4]], ids=["themselves", "others"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_at_the_centre_the_bounds_are_the_margins(name: str, victim: list[int]) -> None:
    """Of nodes that move themselves, and of others; the bound of each is of itself, not of the batch."""
    found, truth = bounds(name, 0.0, [0, 3], victim)
    assert (found.affine[:, 1:] <= truth).all()
    torch.testing.assert_close(found.affine[:, 1:], truth, rtol=0, atol=1e-5 if name == "two blocks" else 1e-8)
    assert (found.affine[:, 0] == torch.inf).all()


@pytest.mark.parametrize("name", ["one block", "hyperplanes"])
@torch.no_grad()
def test_far_out_only_the_cap_is_left(name: str) -> None:
    """It reads no features, so that it is the same in every ball; an enclosure that failed proves nothing."""
    near, far = (bounds(name, radius, [0, 3], [0, 3])[0] for radius in (1e-3, 1e9))
    if name == "hyperplanes":
        assert (far.affine[:, 1:] == -torch.inf).all()
    assert (far.affine[:, 1:] < far.cap[:, 1:]).all()
    assert (far.best[:, 1:] == far.cap[:, 1:]).all()
    assert far.cap[:, 1:].isfinite().all()
    torch.testing.assert_close(near.cap, far.cap)
    assert (near.best[:, 1:] >= near.affine[:, 1:]).all()
    assert not certify_node(*model_of(name), None, 0, 1e9).holds


def test_a_share_of_nodes_that_are_certified() -> None:
    model, x = model_of("one block")
    labels, radii = model(x).argmax(-1), torch.tensor([1e9, 0.0])
    assert certified_accuracy(model, x, None, range(NODES), labels, radii).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="radii must be numbers from 0 on"):
        certified_accuracy(model, x, None, range(NODES), labels, torch.tensor([0.1, -0.1]))
    with pytest.raises(ValueError, match=r"radii must be .* one at least, got \[\]"):
        certified_accuracy(model, x, None, range(NODES), labels, [])


def test_slow_bounds_report_each_node() -> None:
    """Models whose bounds enclose all tokens, of which a batch can take an hour; the others report each batch."""
    done: dict[str, list[tuple[int, int]]] = {"two blocks": [], "one block": []}
    for name, reports in done.items():
        certified_radius(
            *model_of(name), None, [0, 3], limit=1e-3, progress=lambda *report, to=reports: to.append(report)
        )
    assert done == {"two blocks": [(1, 2), (2, 2)], "one block": [(2, 2)]}


def test_nodes_may_be_a_mask_and_radii_a_list() -> None:
    model, x = model_of("one block")
    mask = torch.arange(NODES) % 2 == 1
    nodes, labels = mask.nonzero()[:, 0], model(x).argmax(-1)[mask]
    wanted = certified_radius(model, x, None, nodes)
    # A list of truths is a mask too, no list of the nodes 0 and 1.
    for same in (mask, mask.tolist(), mask.numpy(), nodes.tolist(), nodes.numpy()):
        torch.testing.assert_close(certified_radius(model, x, None, same), wanted, rtol=0, atol=0)
    radii = [0.0, wanted.max().item() / 2]
    shares = certified_accuracy(model, x, None, mask, labels, radii)
    assert shares.tolist() == certified_accuracy(model, x, None, nodes, labels, torch.tensor(radii).double()).tolist()
    with pytest.raises(ValueError, match=rf"nodes must have shape \(n,\) = \({NODES},\), got \({NODES - 1},\)"):
        certified_radius(model, x, None, mask[1:])


def test_what_is_read_of_short_features_is_spanned_by_unit_vectors() -> None:
    """And so are the features themselves, along which the model is asked how long they are."""
    torch.manual_seed(1)
    model, x = Hypformer(20, 4, 2, layers=1, graph_encoder=None).double().eval(), 1e-3 * torch.randn(3, 20).double()
    basis = Enclosure(model, x, None)._basis(x)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1]).double().expand(3, -1, -1))
    torch.testing.assert_close(basis @ (basis.mT @ x[..., None]), x[..., None])


def test_rotary_positions_are_refused() -> None:
    layer, zero = HypSoftmaxAttention(4, 2, Lorentz(-1.0), rope=True), torch.zeros(3, 4, 1).double()
    tokens = TokenForms(zero[..., 0], torch.arange(3), zero, zero.expand(-1, -1, 4))
    with pytest.raises(NotCoveredError, match="rope"):
        heads_of(layer, tokens)


def test_no_nodes_have_no_radii() -> None:
    assert certified_radius(*model_of("one block"), None, []).shape == (0,)


def test_what_the_layers_take_is_what_is_taken() -> None:
    """The shares of all owners, some of which own several groups, add up to how far the worst entry is spread."""
    noise = Noise.of(1, 2, torch.zeros(1).double())
    form = forms.constant(noise, torch.tensor([[5.0, 1.0]], dtype=torch.float64))
    form = Form(noise, form.center, torch.tensor([[[0.0, 1.0], [3.0, 4.0]]], dtype=torch.float64), form.box)
    noise.owner = "a layer"
    form = form.with_ball(torch.tensor([[[0.0], [2.0]]], dtype=torch.float64))
    form = form.apart(torch.zeros(1, 2).double(), torch.tensor([[1.0, 0.5]], dtype=torch.float64))
    found = margins._layers(form, form.center)
    assert {name: pytest.approx(value.item(), abs=1e-12) for name, value in found.items()} == {
        "input": 5.0, "a layer": 2.5, "rounding": 0.0
    }  # fmt: skip


@torch.no_grad()
def test_tokens_of_an_earlier_bound_serve_a_smaller_ball() -> None:
    """To first order nothing is lost: they are held on a larger ball, and shrunk with it."""
    model, x = model_of("two blocks")
    node, target, alone, reusing = torch.tensor([0]), torch.tensor([0]), *(Enclosure(model, x, EDGES) for _ in range(2))
    reusing.reuse = True
    gaps = []
    for radius in (4e-4, 3e-4):
        each = [held.margins(node, node, torch.tensor([radius]).double(), target) for held in (alone, reusing)]
        gaps.append([(alone.logits[0, :1] - alone.logits[0] - bound.affine[0])[1:] for bound in each])
    assert reusing._known[0] == ("node", 0, pytest.approx(5e-4))
    for once, again in gaps:
        assert (again >= 0.99 * once).all()
        assert (again <= 1.1 * once).all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_what_is_around_one_node_says_nothing_of_the_next(attention: str) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"layers": 2, "attention": attention, "graph_encoder": None}
    model, x = Hypformer(FEATURES, 8, 3, **options).double().eval(), torch.randn(NODES, FEATURES).double()
    together, alone = (Enclosure(model, x, EDGES) for _ in range(2))
    together.reuse = alone.reuse = True
    radius, target = torch.tensor([1e-3]).double(), torch.tensor([0])
    first, second = torch.tensor([0]), torch.tensor([1])
    together.margins(first, first, radius, target)
    found, wanted = (held.margins(second, second, radius, target).affine for held in (together, alone))
    assert wanted[0, 1:].isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_where_all_tokens_move_they_are_enclosed_once_a_ball(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound is the one that a search for it alone finds, whichever were asked before."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"layers": 2, "attention": attention, "graph_encoder": None}
    model, x = Hypformer(FEATURES, 8, 3, **options).double().eval(), torch.randn(NODES, FEATURES).double()
    made = list[TokenForms]()
    rest = blocks._rest
    monkeypatch.setattr(blocks, "_rest", lambda *parts: made.append(rest(*parts)) or made[-1])
    together = Enclosure(model, x, EDGES)
    asked: list[tuple[int, float, Threat]] = [
        (0, 1e-3, "frobenius"), (1, 1e-3, "frobenius"), (1, 2e-3, "frobenius"), (1, 2e-3, "each"), (2, 2e-3, "each"),
        (2, 2e-3, "node"), (2, 2e-3, "each"),
    ]  # fmt: skip
    for node, size, threat in asked:
        question = *2 * (torch.tensor([node]),), torch.tensor([size]).double(), torch.tensor([0]), threat
        found = together.margins(*question).affine
        count = len(made)
        wanted = Enclosure(model, x, EDGES).margins(*question).affine
        del made[count:]
        assert wanted[0, 1:].isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(made) == 5


@torch.no_grad()
def test_after_a_block_tokens_are_bounded_however_large_the_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_of("two blocks")
    held, node, tokens = Enclosure(model, x, EDGES), torch.tensor([0]), list[TokenForms]()
    rest = blocks._rest
    monkeypatch.setattr(blocks, "_rest", lambda *parts: tokens.append(rest(*parts)) or tokens[-1])
    held.margins(node, node, torch.tensor([1e9]).double(), node)
    (found,) = tokens
    encoder = cast("HypformerEncoder", model.encoder)
    norm = cast("HypLayerNorm", cast("Any", encoder.blocks[0]).norm_feedforward)
    gain, shift = points.gain_of(norm)
    assert (found.center.norm(dim=-1) + found.reach <= 4 * (2 * gain.abs().amax() + shift.norm()) + 1e-9).all()


@torch.no_grad()
def test_batch_normalisation_is_a_map_of_each_row() -> None:
    layer = HypBatchNorm(3, Lorentz(-0.6), Lorentz(-2.0), dtype=torch.float64).eval()
    norm = cast("nn.BatchNorm1d", cast("Any", layer.function).norm)
    for held in (norm.weight, norm.bias, norm.running_mean):
        cast("Tensor", held).normal_()
    cast("Tensor", norm.running_var).uniform_(0.5, 2.0)
    center, columns = torch.randn(2, 3).double(), torch.randn(2, 3, 2).double()
    point = points.unscaled(Form(Noise.of(2, 2, center), center, columns, torch.zeros_like(center)), layer.manifold_in)
    found = points.normalised(layer, point).form()
    for turn in torch.eye(2).double():
        truth = layer(layer.manifold_in.lift(center + columns @ turn))[:, 1:]
        torch.testing.assert_close(found.center + found.columns[..., :2] @ turn, truth)
    assert (found.remainders() < 1e-12).all()


@pytest.mark.parametrize("missing", ["running_mean", "running_var", "evaluation"])
def test_batch_normalisation_by_what_is_in_the_batch_is_refused(missing: str) -> None:
    layer = HypBatchNorm(3, Lorentz(-0.6), dtype=torch.float64).train(missing == "evaluation")
    if missing != "evaluation":
        setattr(cast("Any", layer.function).norm, missing, None)
    center = torch.randn(1, 3).double()
    point = points.unscaled(forms.constant(Noise.of(1, 1, center), center), layer.manifold_in)
    with pytest.raises(NotCoveredError, match="running statistics"):
        points.normalised(layer, point)


@torch.no_grad()
def test_the_first_layer_at_the_origin_is_enclosed_exactly() -> None:
    """1/T lies between that of the farthest features and one over the radius; the least is said beside it."""
    layer, radius = ExpMapHTC(2, 3, Lorentz(-0.3, dtype=torch.float64), dtype=torch.float64), 0.75
    k = points.root(layer.manifold_in).item()
    x = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    weight = layer.weight[:, 1:].expand(2, -1, -1)
    moved, along = weight * radius, x * radius
    noise = Noise.of(2, 2, x)
    _, scaling, floor = points.exponential(layer, noise, x, moved, along, torch.full((2,), radius).double())
    low, high = (k / math.cosh(k * reach) for reach in (radius, 0.0))
    # The third column is the square of what moves, and a convex function lies below its secant.
    square, added = scaling.columns[0, 0, 2], scaling.columns[0, 0, 3:].abs().sum()
    assert (scaling.center[0, 0] + square + added).item() == pytest.approx(low, rel=1e-12)
    assert (scaling.center[0, 0] - square + added).item() == pytest.approx(high, rel=1e-12)
    least = k / torch.tensor([[radius], [1 + radius]], dtype=torch.float64).mul(k).cosh()
    assert (floor <= least).all()
    torch.testing.assert_close(floor, least)
