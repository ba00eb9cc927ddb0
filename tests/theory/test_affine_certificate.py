"""Certified nodes: no sampled or attacked point of a ball is below its bounds; what is not covered is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from holonomy.layers import GCN, HRC, HTC, HypDropout, HypLinearAttention, HypMLR, Propagation
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer, HypformerBlock
from holonomy.theory import NotCoveredError, certified_accuracy, certified_radius, certify, certify_node
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.attention.linear import crowd_of
from holonomy.theory.affine.enclosure import Enclosure

pytestmark = pytest.mark.usefixtures("without_shape_checks")

NODES, FEATURES = 9, 4
EDGES = torch.tensor(
    [[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6, 8, 7]]
)

MODELS: dict[str, dict[str, Any]] = {
    "alone": {"graph_encoder": None},
    "heads, cubes": {"heads": 2, "power": 3.0, "graph_weight": 0.3},
    "power 1": {"power": 1.0, "norm_eps": 0.5, "graph_encoder": None},
    "power 1.5": {"power": 1.5, "graph_encoder": None},
    "residual GCN": {"graph_encoder": GCN(FEATURES, 6, 8, layers=3, residual=True), "norm_eps": 0.1},
    "propagation": {"graph_encoder": Propagation(FEATURES, 6, 8, steps=2), "curvature": -0.5},
    "graph alone": {"transformer": False},
    "midpoint average": {"average": "midpoint", "heads": 2},
    "hyperplanes": {"decoder": "mlr"},
    "prototypes": {"decoder": "prototypes", "graph_encoder": None},
    "softmax": {"attention": "softmax", "graph_encoder": None},
    "two blocks, softmax": {"attention": "softmax", "layers": 2, "heads": 4},
    "lorentzian": {"attention": "softmax", "similarity": "lorentz_squared", "layers": 2, "decoder": "mlr"},
    "distances": {"attention": "softmax", "similarity": "geodesic", "heads": 2, "norm_eps": 0.1},
    "two blocks": {"layers": 2, "heads": 2, "graph_encoder": None},
    "RMS norm": {"norm": "rms", "heads": 2},
    "two blocks, RMS norm": {"norm": "rms", "layers": 2, "attention": "softmax", "graph_encoder": None},
    "two blocks, midpoint": {"layers": 2, "average": "midpoint", "norm_eps": 0.1, "curvature": -2.0},
}  # fmt: skip


@cache
def trained(name: str, seed: int = 0, steps: int = 6) -> tuple[Hypformer, Tensor]:
    """A tiny model of float64 after a few steps, in evaluation, and its features."""
    torch.manual_seed(seed)
    model = Hypformer(FEATURES, 8, 3, **{"layers": 1, **MODELS[name]}).double()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    x, y = torch.randn(NODES, FEATURES).double(), torch.arange(NODES) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, EDGES), y).backward()
        optimizer.step()
    return model.eval(), x


def logits(model: Hypformer, x: Tensor, node: int, victim: int) -> Callable[[Tensor], Tensor]:
    """The victim's logits as a function of many changes of a node's features."""

    def one(change: Tensor) -> Tensor:
        moved = torch.cat([x[:node], x[node : node + 1] + change, x[node + 1 :]])
        return model(moved, EDGES)[victim]

    return torch.func.vmap(one)


def within(change: Tensor, radius: float) -> Tensor:
    return change * (radius / change.norm(dim=-1, keepdim=True)).clamp(max=1.0)


def hardest(model: Hypformer, x: Tensor, node: int, victim: int, radius: float, target: int) -> Tensor:
    """The least margin of each class that random points and gradient ascent find in a ball."""
    function = logits(model, x, node, victim)
    change = torch.randn(12, FEATURES).double()
    change = change / change.norm(dim=-1, keepdim=True) * radius
    least = torch.full((3,), torch.inf).double()
    for step in range(3):
        change = change.detach().requires_grad_()
        scores = function(change)
        margins = scores[:, target : target + 1] - scores
        least = torch.minimum(least, margins.detach().amin(0))
        other = torch.arange(len(change)) % 3
        (grad,) = torch.autograd.grad(margins.gather(1, other[:, None]).sum(), change)
        pull = grad / grad.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        change = within(change - radius * (0.5 if step < 2 else 0.1) * pull, radius)
    return least


@pytest.mark.parametrize("name", MODELS)
def test_no_point_of_a_ball_is_below_its_bounds(name: str) -> None:
    model, x = trained(name)
    for radius, victim in ((0.05, 4), (0.3, 3)):
        found = certify_node(model, x, EDGES, 4, radius, victim=victim)
        least = hardest(model, x, 4, victim, radius, found.target)
        others = torch.arange(3) != found.target
        for bound in (found.margins, found.affine, found.cap):
            assert (bound <= least)[others].all()


@pytest.mark.parametrize("name", ["residual GCN", "graph alone", "softmax"])
def test_a_radius_that_was_found_is_certified_and_not_much_larger_ones(name: str) -> None:
    model, x = trained(name)
    certified = certified_radius(model, x, EDGES, torch.tensor([4])).item()
    assert certified > 0
    assert certify_node(model, x, EDGES, 4, certified).holds
    assert not certify_node(model, x, EDGES, 4, 1.06 * certified).holds


@pytest.mark.parametrize("name", MODELS)
def test_the_centre_is_the_model_and_the_linear_part_its_gradient(name: str) -> None:
    model, x = trained(name)
    truth = model(x, EDGES)[4]
    found = certify_node(model, x, EDGES, 4, 0.0)
    others = torch.arange(3) != found.target
    gap = (truth[found.target] - truth - found.margins)[others]
    assert gap.min() >= 0
    # Rounding is followed in intervals, which grow from block to block.
    deep = MODELS[name].get("layers", 1) > 1
    # The bound without its own rounding budget is the model's margin.
    off = abs((truth[found.target] - truth)[others].min() - found.affine.min() - sum(found.layers.values()))
    assert off < (1e-8 if deep else 1e-9)
    assert gap.max() < (1e-5 if deep else 1e-8)
    radius = 1e-3 if deep else 1e-4
    slopes = torch.autograd.functional.jacobian(
        lambda change: logits(model, x, 4, 4)(change[None])[0], torch.zeros(FEATURES).double()
    )
    linear = truth[found.target] - truth - radius * (slopes[found.target] - slopes).norm(dim=-1)
    certified = certify_node(model, x, EDGES, 4, radius).affine
    torch.testing.assert_close(certified[others], linear[others], rtol=0, atol=0.02 * radius * slopes.norm().item())


def whole(change: Tensor, radius: float, threat: Threat) -> Tensor:
    """Changes of all features, scaled to the ball of a threat."""
    size = change.norm(dim=-1, keepdim=True) if threat == "each" else change.norm(dim=(-2, -1), keepdim=True)
    return change * (radius / size)


@pytest.mark.parametrize("threat", ["frobenius", "each"])
@pytest.mark.parametrize("name", ["alone", "heads, cubes", "residual GCN", "propagation", "graph alone", "hyperplanes",
                                  "two blocks, softmax", "two blocks"])  # fmt: skip
def test_no_change_of_all_features_breaks_a_bound(name: str, threat: Threat) -> None:
    model, x = trained(name)
    function = torch.func.vmap(lambda change: model(x + change, EDGES)[4])
    for radius in (1e-4, 0.05):
        found = certify_node(model, x, EDGES, 4, radius, threat=threat)
        target, others = found.target, torch.arange(3) != found.target
        start = model(x, EDGES)[4]
        least = torch.full((3,), torch.inf).double()
        change = whole(torch.randn(12, NODES, FEATURES).double(), radius, threat)
        for _ in range(3):
            change = change.detach().requires_grad_()
            scores = function(change)
            margins = scores[:, target : target + 1] - scores
            least = torch.minimum(least, margins.detach().amin(0))
            (grad,) = torch.autograd.grad(margins.gather(1, others.nonzero()[torch.arange(12) % 2]).sum(), change)
            change = -whole(grad, radius, threat).nan_to_num()
        for bound in (found.margins, found.affine, found.cap):
            assert (bound <= least)[others].all()
        if radius == 1e-4:
            margin = (start[target] - start)[others]
            reached, certified = (margin - least[others]).amax(), (margin - found.affine[others]).amax()
            assert certified <= 3 * reached + 2e-5


def test_the_linear_part_of_the_graph_is_exact_for_all_nodes() -> None:
    model, x = trained("graph alone")
    slopes = torch.autograd.functional.jacobian(lambda change: model(x + change, EDGES)[4], torch.zeros_like(x))
    radius = 1e-5
    for threat in ("frobenius", "each"):
        found = certify_node(model, x, EDGES, 4, radius, threat=threat)
        steps = (slopes[found.target] - slopes).norm(dim=-1)
        steps = steps.norm(dim=-1) if threat == "frobenius" else steps.sum(-1)
        start = model(x, EDGES)[4]
        margin = start[found.target] - start
        others = torch.arange(3) != found.target
        # The node's own features are one ball and those of all others a second one.
        assert ((margin - found.margins)[others] <= 1.45 * radius * steps[others]).all()
        assert ((margin - found.margins)[others] >= 0.999 * radius * steps[others]).all()


@pytest.mark.parametrize("name", ["alone", "residual GCN", "graph alone"])
def test_a_radius_does_not_depend_on_the_unit_of_logits(name: str) -> None:
    model, x = trained(name)
    small = deepcopy(model)
    with torch.no_grad():
        for parameter in small.decoder.parameters():
            parameter.mul_(1e-15)
    found, radii = (certified_radius(each, x, EDGES, torch.arange(NODES)) for each in (small, model))
    torch.testing.assert_close(found, radii, rtol=0.03, atol=0.0)


def test_logits_whose_squares_are_no_numbers_are_not_certified() -> None:
    model, x = trained("alone")
    small = deepcopy(model)
    with torch.no_grad():
        for parameter in small.decoder.parameters():
            parameter.mul_(1e-170)
    for threat in ("node", "frobenius", "each"):
        assert not certify_node(small, x, None, 4, 100.0, threat=threat).holds


def test_radii_of_all_nodes_are_smaller_than_of_one() -> None:
    model, x = trained("graph alone")
    threats: tuple[Threat, ...] = ("node", "frobenius", "each")
    found = [certified_radius(model, x, EDGES, [4], threat=threat).item() for threat in threats]
    assert found[0] >= found[1] >= found[2] > 0
    model, x = trained("alone")
    margins = [certify_node(model, x, EDGES, 4, 0.002, threat=threat).affine for threat in threats]
    assert (margins[0] >= margins[1]).all()
    assert (margins[1] >= margins[2]).all()
    assert (margins[2] > 0).all()
    shares = certified_accuracy(
        model, x, EDGES, [4], model(x, EDGES)[4:5].argmax(-1), torch.tensor([0.0, 10.0]), threat="each"
    )
    assert shares.tolist() == [1.0, 0.0]


def test_the_crowd_beside_a_token_far_out_keeps_its_digits() -> None:
    model, x = trained("heads, cubes")
    block = cast("HypformerBlock", cast("Any", model.encoder).blocks[0])
    points = block.manifold_in.lift(torch.cat([1e20 * torch.ones(1, 8).double(), torch.cat([x, x], 1)[1:]])).detach()
    origin = block.manifold_in.lift(torch.zeros(1, 8).double())
    attention = cast("HypLinearAttention", block.attention)
    found = crowd_of(attention, points, torch.tensor([0, 3, 0]))
    # The same tokens without the far one.
    near = crowd_of(attention, torch.cat([origin, points[1:]]), torch.tensor([0]))
    for each in (0, 2):
        torch.testing.assert_close(found.keys[each], near.keys[0])
        torch.testing.assert_close(found.products[each], near.products[0])
    assert found.keys[1].max() > 1e15


def test_float32_weights_and_sparse_features_are_taken_as_they_are() -> None:
    model, x = trained("heads, cubes")
    narrow = deepcopy(model).float()
    wide = certify_node(narrow, x.float().to_sparse(), EDGES, 2, 0.02)
    torch.testing.assert_close(wide.margins, certify_node(narrow.double(), x.float(), EDGES, 2, 0.02).margins)


@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"layers": 2, "attention": "softmax"}])
@pytest.mark.parametrize(("own", "others"), [(3.0, 100.0), (100.0, 3.0)])
def test_a_float32_model_is_not_followed_where_its_layers_draw_points_nearer(options, own, others) -> None:
    """Its logits are others than those of the weights, by much more than rounding."""
    torch.manual_seed(0)
    model, x = Hypformer(FEATURES, 8, 3, **{"layers": 1, "graph_encoder": None, **options}).eval(), torch.randn(6, 4)
    x *= torch.tensor([own, *5 * [others]])[:, None] / x.norm(dim=1, keepdim=True)
    wide = deepcopy(model).double()
    assert (model(x) - wide(x.double()))[0].abs().amax() > 0.01
    for threat in ("node", "frobenius", "each"):
        assert certify_node(model, x, None, 0, 0.001, threat=threat).affine.isinf().all()
        assert certify_node(wide, x.double(), None, 0, 0.001, threat=threat).affine.isfinite().any()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_refused(half) -> None:
    model, x = trained("alone", steps=0)
    for one, features in ((deepcopy(model).to(half), x.to(half)), (model, x.to(half))):
        with pytest.raises(NotCoveredError, match=r"^model and x must be of float32 or float64, got torch\.\w+\.$"):
            certify_node(one, features, None, 0, 0.1)


def test_features_wider_than_what_is_read_are_rotated() -> None:
    torch.manual_seed(1)
    model = Hypformer(60, 4, 2, layers=1, graph_encoder=None).double().eval()
    x = torch.randn(6, 60).double()
    enclosure = Enclosure(model, x, None)
    assert enclosure.span is not None
    nodes, target, radius = torch.arange(6), model(x).argmax(-1), torch.full((6,), 0.3).double()
    rotated = enclosure.margins(nodes, nodes, radius, target).affine
    enclosure.span = None
    torch.testing.assert_close(enclosure.margins(nodes, nodes, radius, target).affine, rotated)


def test_a_curve_of_certified_accuracy_falls() -> None:
    model, x = trained("alone")
    labels = model(x).argmax(-1)
    labels[0] = (labels[0] + 1) % 3
    radii = torch.tensor([0.5, 0.0, 0.01, 100.0]).double()
    shares = certified_accuracy(model, x, EDGES, torch.arange(NODES), labels, radii)
    assert shares[1].item() == pytest.approx(8 / 9)
    assert shares[1] >= shares[2] >= shares[0] >= shares[3]


@pytest.mark.parametrize("threat", ["node", "frobenius"])
def test_a_curve_of_certified_accuracy_is_what_each_certificate_says(threat: str) -> None:
    model, x = trained("alone")
    labels, radii, told = model(x).argmax(-1), [0.02, 0.3, 0.001, 0.1], list[tuple[int, int]]()
    shares = certified_accuracy(
        model, x, EDGES, range(NODES), labels, radii, threat=threat, progress=lambda *done: told.append(done)
    )
    each = [[certify_node(model, x, EDGES, node, r, threat=threat).holds for node in range(NODES)] for r in radii]
    assert shares.tolist() == pytest.approx([sum(held) / NODES for held in each])
    assert len(set(shares.tolist())) > 1
    assert told == [(NODES, NODES)]


def test_the_table_names_layers() -> None:
    model, x = trained("residual GCN")
    told = str(certify_node(model, x, EDGES, 1, 0.05))
    assert "block0.attention" in told
    assert "graph encoder" in told


def refused(**options: Any) -> Hypformer:
    return Hypformer(FEATURES, 8, 3, **{"layers": 1, **options}).eval()


class Strange(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        del edge_index
        return torch.sin(x).new_ones(len(x), 8)


wrapped = GCN(FEATURES, 8, 8)
wrapped.convolutions[0] = nn.Sequential(wrapped.convolutions[0])


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (refused(activation=torch.tanh), "tanh"),
        (refused(graph_encoder=Strange()), "graph_encoder must be made of linear maps and ReLU, got aten::sin"),
        (refused(graph_encoder=wrapped), "layer must be a Linear, got Sequential"),
        (Hypformer(FEATURES, 8, 3, dropout=0.5), "eval"),
        (AveragedModel(refused()), "of an AveragedModel its .module"),
        (torch.compile(refused(), backend="eager"), "of a compiled one its ._orig_mod"),
    ],
)
def test_what_is_not_covered_is_named(model: Hypformer, named: str) -> None:
    with pytest.raises(NotCoveredError, match=named):
        certify_node(model, torch.randn(NODES, FEATURES), EDGES, 0, 0.1)


def flipped(base: type[nn.Module], name: str) -> type[nn.Module]:
    """A class of one's own that turns around what a method of its base gives."""
    method = getattr(base, name)
    return type("Own", (base,), {name: lambda self, *given, **more: -method(self, *given, **more)})


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("", "_mix"),
        ("encoder", "forward"),
        ("encoder", "points"),
        ("encoder.refine.function", "forward"),
        ("encoder.refine.function.activation", "forward"),
        ("encoder.blocks.0", "forward"),
        ("encoder.blocks.0", "_fed_forward"),
        ("encoder.blocks.0.attention", "forward"),
        ("encoder.blocks.0.norm_attention.function", "forward"),
        ("encoder.blocks.0.norm_attention.function.norm", "forward"),
        ("encoder.blocks.0.feedforward.1.function.dropout", "forward"),
        ("manifold_out", "logmap0"),
    ],
)
@pytest.mark.parametrize("of_class", [True, False])
def test_a_part_that_computes_something_else_is_named(part: str, name: str, *, of_class: bool) -> None:
    model = refused(attention="softmax", graph_encoder=None, activation=nn.ReLU())
    module = model.get_submodule(part)
    if of_class:
        module.__class__ = flipped(type(module), name)
    else:
        method = getattr(module, name)
        setattr(module, name, lambda *given, **more: -method(*given, **more))
    x, message = torch.randn(NODES, FEATURES), f"^layer must compute what .* does, got .* with a {name} of its own"
    with pytest.raises(NotCoveredError, match=message):
        certify_node(model, x, None, 0, 0.1)
    with pytest.raises(NotCoveredError, match=message):
        certify(model, x=x)


@pytest.mark.parametrize("part", ["encoder.embedding", "encoder.blocks.0.attention.residual", "decoder"])
def test_the_weights_of_parametrizations_are_read(part: str) -> None:
    model, x = refused(graph_encoder=None).double(), torch.randn(NODES, FEATURES).double()
    plain = certify_node(model, x, None, 0, 0.01).margins
    parametrizations.weight_norm(model.get_submodule(part))
    torch.testing.assert_close(certify_node(model, x, None, 0, 0.01).margins, plain)


def test_an_activation_after_the_last_norm_is_refused() -> None:
    # The cap is of what that norm gives: minus the sum of its entries is zero, that of their positive parts is not.
    model = refused(curvature=-1.0)
    manifold = model.encoder.drop.manifold_in
    for output in (HRC(torch.relu, manifold), HypDropout(0.0, manifold)):
        output.function = nn.ReLU()
        model.encoder.drop = output
        with pytest.raises(NotCoveredError, match=r"^encoder\.drop must be HypDropout of nn\.Dropout, got ReLU"):
            certify_node(model, torch.randn(NODES, FEATURES), EDGES, 0, 0.1)


@pytest.mark.parametrize(
    "part",
    [
        "encoder.embedding",
        "encoder.refine",
        "encoder.drop",
        "encoder.blocks.0.position",
        "encoder.blocks.0.drop",
        "encoder.blocks.0.attention.query",
        "encoder.blocks.0.norm_attention",
        "encoder.blocks.0.feedforward.1",
    ],
)
def test_a_part_that_names_no_manifolds_is_named(part: str) -> None:
    model = refused()
    before, _, name = part.rpartition(".")
    setattr(model.get_submodule(before), name, nn.Sequential(model.get_submodule(part)))
    with pytest.raises(NotCoveredError, match=r"must be .*, got Sequential"):
        certify_node(model, torch.randn(NODES, FEATURES), EDGES, 0, 0.1)


class Noisy(nn.Module):
    """Weights that are drawn anew whenever they are read."""

    def forward(self, weight: Tensor) -> Tensor:
        """With noise."""
        return weight + torch.randn_like(weight)


@pytest.mark.parametrize("part", ["encoder.blocks.0.attention.residual", "graph_encoder.convolutions.0", "decoder"])
def test_weights_that_change_when_they_are_read_are_refused(part: str) -> None:
    model, x = refused().double(), torch.randn(NODES, FEATURES).double()
    parametrizations.spectral_norm(model.get_submodule(part))
    with pytest.raises(NotCoveredError, match="model must be in evaluation, with weights that stay"):
        certify_node(model.train(), x, EDGES, 0, 0.1)
    assert certify_node(model.eval(), x, EDGES, 0, 0.0).margins.isfinite().any()
    nn.utils.parametrize.register_parametrization(model.get_submodule(part), "weight", Noisy(), unsafe=True)
    with pytest.raises(NotCoveredError, match="weight differs each time it is read"):
        certify_node(model, x, EDGES, 0, 0.1)


def test_weights_made_in_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        model = refused(graph_encoder=None).double()
    assert certify_node(model, torch.zeros(NODES, FEATURES).double(), None, 0, 0.0).radius == 0


ELSEWHERE = Lorentz(-4.0)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("manifold_out", ELSEWHERE),
        ("decoder", HypMLR(8, 3, ELSEWHERE)),
        ("encoder.drop", HypDropout(0.0, Lorentz(-1.0), ELSEWHERE)),
        ("encoder.blocks.0.manifold_in", ELSEWHERE),
        ("encoder.blocks.0.drop", HypDropout(0.0, ELSEWHERE)),
        ("encoder.blocks.0.attention", HypLinearAttention(8, 1, Lorentz(-1.0), ELSEWHERE)),
        ("encoder.blocks.0.attention", HypLinearAttention(8, 1, ELSEWHERE, Lorentz(-1.0))),
        ("encoder.blocks.0.attention.value", HTC(8, 8, Lorentz(-1.0), ELSEWHERE)),
        ("encoder.blocks.0.feedforward.0", HTC(8, 32, ELSEWHERE, Lorentz(-1.0))),
        ("encoder.blocks.0.feedforward.1", HRC(torch.relu, ELSEWHERE)),
        ("encoder.blocks.0.feedforward.2", HTC(32, 8, ELSEWHERE, Lorentz(-1.0))),
    ],
)
def test_a_part_of_another_curvature_is_refused(part: str, other: nn.Module) -> None:
    model = refused(decoder="mlr", graph_encoder=None)
    model.set_submodule(part, other)
    with pytest.raises(ValueError, match=r"^model must hand points on in one curvature"):
        certify_node(model, torch.randn(NODES, FEATURES), None, 0, 0.1)


@pytest.mark.parametrize(
    ("norm", "other", "named"),
    [
        ("layer", nn.RMSNorm(8, eps=1e-5), "layer must be a LayerNorm, got RMSNorm"),
        ("rms", nn.LayerNorm(8), "layer must be a RMSNorm, got LayerNorm"),
        ("layer", nn.BatchNorm1d(8).eval(), "layer must be a LayerNorm, got BatchNorm1d"),
        ("layer", nn.LayerNorm((NODES, 8)), "layer must normalise 8 entries"),
    ],
)
def test_a_norm_that_holds_another_one_is_refused(norm: str, other: nn.Module, named: str) -> None:
    model = refused(norm=norm, graph_encoder=None)
    model.set_submodule("encoder.blocks.0.norm_feedforward.function.norm", other)
    with pytest.raises(NotCoveredError, match=named):
        certify_node(model, torch.randn(NODES, FEATURES), None, 0, 0.1)


@pytest.mark.parametrize(
    ("made_for", "other", "taken"),
    [("mlr", nn.Linear(9, 3), "points"), ("linear", HypMLR(7, 3, Lorentz()), "tangent vectors")],
)
def test_a_decoder_that_takes_something_else_is_refused(made_for: str, other: nn.Module, taken: str) -> None:
    model = refused(decoder=made_for, graph_encoder=None)
    model.decoder = other
    with pytest.raises(NotCoveredError, match=f"^decoder must take {taken}"):
        certify_node(model, torch.randn(NODES, FEATURES), None, 0, 0.1)
    with pytest.raises(NotCoveredError, match=r"^layer must be "):
        certify(model, 1.0, starts=0)


@pytest.mark.parametrize("part", ["encoder.refine", "encoder.blocks.0.drop", "graph_encoder"])
def test_a_part_in_training_that_drops_everything_is_refused(part: str) -> None:
    model = refused(dropout=1)
    model.get_submodule(part).train()
    with pytest.raises(NotCoveredError, match="eval"):
        certify_node(model, torch.randn(NODES, FEATURES), EDGES, 0, 0.1)


@pytest.mark.parametrize(
    "wrong",
    [{"node": 9}, {"node": -1}, {"radius": -1.0}, {"radius": torch.inf}, {"target": 3}, {"victim": 12}],
    ids=lambda w: next(iter(w)),
)
def test_an_argument_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    model, x = trained("alone", steps=0)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        certify_node(model, x, EDGES, **{"node": 0, "radius": 0.1, **wrong})


@torch.no_grad()
def test_where_the_model_has_no_result_nothing_is_certified() -> None:
    """The cap does not depend on the features, nor on most of the weights."""
    model, x = refused().double(), torch.randn(NODES, FEATURES).double()
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"^x must be finite"):
            certified_radius(model, x.index_fill(0, torch.tensor([3]), wrong), EDGES, [0])
    model.encoder.blocks[0].attention.query.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^model\(x\) must be finite"):
        certify_node(model, x, EDGES, 0, 0.1)


def test_changes_of_edges_are_refused() -> None:
    model, x = trained("alone", steps=0)
    with pytest.raises(
        NotCoveredError, match=r"^threat must be one of node, frobenius, each: changes of edges are not"
    ):
        certify_node(model, x, EDGES, 0, 0.1, threat="edges")
    with pytest.raises(ValueError, match="threat"):
        certify_node(model, x, EDGES, 0, 0.1, threat="all")
    with pytest.raises(ValueError, match="victim must be left out"):
        certify_node(model, x, EDGES, 0, 0.1, victim=1, threat="each")


def test_a_model_of_graphs_is_refused():
    model, x = Hypformer(3, 4, 2, layers=1, graph_encoder=None, level="graph").eval(), torch.randn(5, 3)
    with pytest.raises(NotCoveredError, match=r"^model must have a row for each node, got level='graph'\.$"):
        certify_node(model, x, None, 0, 0.1)
    with pytest.raises(NotCoveredError, match=r"^model must have a row for each node"):
        certify(model, radius=1.0)
