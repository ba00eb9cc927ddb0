"""Graph encoders of one's own: every number they can give lies in the enclosure, and what has no rule is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy.layers import GCN
from holonomy.models import Hypformer
from holonomy.ops.propagation import edge_list, normalised_edges
from holonomy.theory import NotCoveredError, certified_radius, certify_node, margin_bounds
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.encoders.traced import TracedBranch
from holonomy.theory.affine.encoders.whole_graph import enclose_all

pytestmark = pytest.mark.usefixtures("without_shape_checks")

NODES, FEATURES, HIDDEN, WIDE = 7, 3, 4, 20
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5]])


class Own(nn.Module):
    """A function of features, edges and three linear maps."""

    def __init__(self, function: Callable[..., Tensor], features: int = FEATURES) -> None:
        super().__init__()
        self.function = function
        self.one, self.two = nn.Linear(features, HIDDEN), nn.Linear(features, HIDDEN, bias=False)
        self.three = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(x, edge_index, self.one, self.two, self.three)


Linear = Callable[[Tensor], Tensor]


def added(x: Tensor, edge_index: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])


def degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    return x.new_zeros(len(x)).index_add_(0, edge_index[1], x.new_ones(edge_index.shape[1])).clamp_(min=1)[:, None]


def matrix(x: Tensor, edge_index: Tensor) -> Tensor:
    one = torch.ones(edge_index.shape[1]).double()
    return torch.zeros(len(x), len(x)).double().index_put((edge_index[1], edge_index[0]), one, accumulate=True)


def sage(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    hidden = torch.relu(one(x) + two(added(x, e) / degrees(x, e)))
    return three(hidden) - 0.5 * three(added(hidden, e) / degrees(x, e)).relu_()


def attended(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Products with dense and sparse matrices, and heads side by side."""
    heads = functional.relu(one(x)).view(len(x), 2, -1).transpose(0, 1)
    mixed = torch.bmm(matrix(x, e).expand(2, -1, -1), heads).permute(1, 0, 2).reshape(len(x), -1)
    return three(functional.relu(mixed + (-matrix(x, e)).to_sparse() @ two(x)))


def beside(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Parts side by side, totals and scatters."""
    source = e[0][:, None].expand(-1, HIDDEN)
    sums = x.new_zeros(len(x), HIDDEN).scatter_add(0, e[1][:, None].expand(-1, HIDDEN), one(x).gather(0, source))
    both = torch.cat([sums.relu(), torch.stack([two(x), -sums], 1).sum(1)], -1)
    whole = both[:, :HIDDEN] + 2 * both.index_select(1, torch.arange(HIDDEN, 2 * HIDDEN)).mul_(0.3)
    return functional.relu(whole + whole.mean(0, keepdim=True)) @ three.weight.T + 1.5  # type: ignore[attr-defined]


def normed(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Batch normalisation in evaluation, and parts that are cut out."""
    mean, variance = torch.linspace(-1, 1, HIDDEN).double(), torch.linspace(0.1, 2, HIDDEN).double()
    hidden = functional.batch_norm(one(x) + added(two(x), e), mean, variance, mean + 2, -mean, eps=0.1)
    first, second = functional.relu(hidden).chunk(2, -1)
    return three(torch.cat([second, *(first - second).unbind(1)[:1][0][:, None].split([1], 1), first[:, 1:]], -1))


def mixed(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Rows one after the other, and products with a matrix of what is no longer linear."""
    both = torch.cat([one(x), two(x)]).relu()
    hidden = matrix(x, e) @ both[len(x) :] - both[: len(x)]
    return three(matrix(x, e) @ hidden.relu())


def linear(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Without a ReLU: exact."""
    del three
    return one(x) + added(two(x), e)


def still(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Of no features at all."""
    del one, two
    return three(torch.log1p(degrees(x, e)).expand(-1, HIDDEN))


def masked(x: Tensor, e: Tensor, one: Linear, two: Linear, three: Linear) -> Tensor:
    """Masks of truths, of rows and of channels."""
    hidden = torch.relu((degrees(x, e) > 1) * one(x) + two(x) * (torch.arange(HIDDEN) % 3 > 0))
    return three(hidden * (torch.arange(len(x)) < len(x) - 1)[:, None])


ENCODERS = {part.__name__: part for part in (sage, attended, beside, normed, mixed, masked, linear, still)}


def branch_of(function: Callable[..., Tensor], seed: int = 0, features: int = FEATURES) -> TracedBranch:
    torch.manual_seed(seed)
    with torch.no_grad():
        return TracedBranch(Own(function, features).double(), torch.randn(NODES, features).double(), EDGES)


def enclosed(branch: TracedBranch, radius: float, victim: int = 2) -> Any:
    """The result of a node where node 1 and where node 2 moves."""
    features = branch.x.shape[1]
    moving, basis = torch.tensor([1, 2]), torch.eye(features).double().expand(2, -1, -1)
    noise, radii = Noise.of(2, features, branch.x), torch.full((2,), radius, dtype=torch.float64)
    return branch.enclose(noise, moving, torch.tensor([victim, victim]), basis, radii)


def reached(branch: TracedBranch, node: int, change: Tensor, victim: int = 2) -> Tensor:
    moved = branch.x.index_add(0, torch.tensor([node]), change[None])
    return branch.encoder(moved, branch.edge_index)[victim]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("radius", [1e-3, 0.3, 3.0])
@torch.no_grad()
def test_every_result_lies_in_the_enclosure(name: str, radius: float) -> None:
    for seed in range(3):
        branch = branch_of(ENCODERS[name], seed)
        found = enclosed(branch, radius)
        turns = functional.normalize(torch.randn(200, FEATURES).double(), dim=-1)
        turns = torch.cat([turns, turns * torch.rand(200, 1).double()])
        for problem, node in enumerate((1, 2)):
            at = found.center[problem] + turns @ found.columns[problem].T
            truth = torch.stack([reached(branch, node, radius * turn) for turn in turns])
            assert ((truth - at).abs() <= found.box[problem]).all()


@pytest.mark.parametrize("features", [FEATURES, HIDDEN, NODES])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_results_of_all_nodes_lie_in_their_enclosures(name: str, features: int) -> None:
    """Those that are far away, too, and where there are as many features as nodes."""
    branch = branch_of(ENCODERS[name], features=features)
    turns = functional.normalize(torch.randn(20, features).double(), dim=-1)
    for victim in range(NODES):
        found = enclosed(branch, 0.5, victim)
        for problem, node in enumerate((1, 2)):
            at = found.center[problem] + turns @ found.columns[problem].T
            truth = torch.stack([reached(branch, node, 0.5 * turn, victim) for turn in turns])
            assert ((truth - at).abs() <= found.box[problem] + 1e-13).all()


@torch.no_grad()
def test_linear_encoders_are_exact_and_still_ones_do_not_move() -> None:
    found = enclosed(branch_of(linear), 1e3)
    assert (found.box < 1e-8).all()
    assert (found.spread() > 1).all()
    assert (enclosed(branch_of(still), 1e3).spread() < 1e-8).all()


@pytest.mark.parametrize("name", ["sage", "attended", "beside", "normed", "mixed"])
@torch.no_grad()
def test_to_first_order_the_enclosure_is_the_derivative(name: str) -> None:
    branch = branch_of(ENCODERS[name])
    found = enclosed(branch, 1e-7)
    with torch.enable_grad():
        slopes = torch.autograd.functional.jacobian(
            lambda change: reached(branch, 2, change), torch.zeros(FEATURES).double()
        )
    torch.testing.assert_close(found.columns[1] / 1e-7, slopes, rtol=1e-6, atol=1e-6)
    assert (found.box[1] < 1e-12).all()


@torch.no_grad()
def test_a_relu_is_enclosed_to_both_ends() -> None:
    """A sharp family: of one number between -l and u both sides are attained, so that any smaller box is noticed."""

    class One(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            del edge_index
            return torch.relu(x)

    for center in (-0.4, 0.0, 0.7):
        x = torch.full((1, 1), center, dtype=torch.float64)
        found = TracedBranch(One(), x, EDGES[:, :0]).enclose(
            Noise.of(1, 1, x), *2 * [torch.tensor([0])], torch.ones(1, 1, 1).double(), torch.ones(1).double()
        )
        places = torch.tensor([-1.0, -center, 1.0], dtype=torch.float64)
        off = torch.relu(center + places) - (found.center + found.columns * places).flatten()
        torch.testing.assert_close(off.abs(), found.box.flatten().expand(3), rtol=1e-12, atol=1e-12)


def _scattered_apart(x: Tensor, e: Tensor, one: Linear, *_: Linear) -> Tensor:
    """Each feature goes to rows of its own."""
    to = (e[1][:, None] + torch.arange(WIDE)) % NODES
    return one(torch.zeros_like(x).scatter_add(0, to, x[e[0]]))


def _scattered_partly(x: Tensor, e: Tensor, one: Linear, *_: Linear) -> Tensor:
    return one(torch.zeros_like(x).scatter_add_(0, e[1][:, None].expand(-1, WIDE - 3), x[e[0]]))


def _overwritten_features(x: Tensor, e: Tensor, one: Linear, *_: Linear) -> Tensor:
    del e
    return one((2 * x).mul_(torch.linspace(0, 1, WIDE).double()))


def _square(x: Tensor, e: Tensor, one: Linear, *_: Linear) -> Tensor:
    del e
    other = torch.arange(x.shape[1] ** 2).view(len(x.T), -1).double().sin()
    return one(2 * x - x @ other)


# Encoders that read features in other ways than by products of their sums.
READERS: dict[str, Callable[..., Tensor]] = {
    "scattered apart": _scattered_apart,
    "scattered partly": _scattered_partly,
    "overwritten": _overwritten_features,
    "square": _square,
    "features": lambda x, e, *_: added(2 * x, e),
    "some features": lambda x, e, one, *_: one(x)[:, :2] + x[:, 3:5],
    "relu": lambda x, e, one, *_: one(x.relu()),
    "scaled": lambda x, e, one, *_: one(x * torch.linspace(0, 2, WIDE).double()),
    "scaled apart": lambda x, e, one, *_: one(x / (1 + torch.arange(NODES * WIDE).view(NODES, WIDE).double())),
    "turned": lambda x, e, one, *_: (one.weight @ x.T).T,
    "flat": lambda x, e, one, *_: one(x.reshape(WIDE, NODES).reshape(NODES, WIDE)),
    "rolled": lambda x, e, one, *_: one(torch.cat([x[:, 1:], x[:, :1]], 1)),
    "gathered": lambda x, e, one, *_: one(x.gather(1, torch.arange(NODES * WIDE).view(NODES, WIDE) % 5)),
    "chosen": lambda x, e, one, *_: one(x[:, torch.arange(WIDE - 1, -1, -1)]),
    "normed": lambda x, e, one, *_: one(
        functional.batch_norm(x, torch.zeros(WIDE).double(), torch.arange(1.0, 21).double())
    ),
    "mean": lambda x, e, one, *_: one(x + x.mean(0, keepdim=True)),
    "mean feature": lambda x, e, one, *_: one(x + x.mean(1, keepdim=True)),
    "heads": lambda x, e, one, *_: torch.bmm(x[None].expand(2, -1, -1), one.weight.T.expand(2, -1, -1)).sum(0),
}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*ENCODERS, *READERS])
@torch.no_grad()
def test_across_what_is_read_nothing_moves(name: str) -> None:
    function = (ENCODERS | READERS)[name]
    branch = branch_of(function, features=WIDE)
    rows = torch.cat([torch.zeros(1, WIDE).double(), *branch.reads])
    across = torch.eye(WIDE).double() - torch.linalg.pinv(rows) @ rows
    for node in range(NODES):
        for _ in range(3):
            change = across @ (10 * torch.randn(WIDE).double())
            moved = branch.x.index_add(0, torch.tensor([node]), change[None])
            torch.testing.assert_close(branch.encoder(moved, EDGES), branch.result, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["sage", "attended", "linear", "still"])
def test_few_features_are_read_of_many(name: str) -> None:
    reads = branch_of(ENCODERS[name], features=WIDE).reads
    assert sum(map(len, reads)) <= 2 * HIDDEN


@torch.no_grad()
def test_a_row_that_only_its_box_moves_is_kept() -> None:
    """Both ReLUs of numbers around zero: an absolute value, whose enclosure has no slope."""
    encoder = Own(lambda x, e, one, two, three: (two(x).relu() + (-two(x)).relu()).T.T).double()
    branch = TracedBranch(encoder, torch.zeros(NODES, FEATURES).double(), EDGES)
    found, change = enclosed(branch, 1.0), functional.normalize(encoder.two.weight[0], dim=0)
    assert (found.columns[1] == 0).all()
    assert (found.center[1] + found.box[1])[0] >= reached(branch, 2, change)[0]


class Rewritten(nn.Module):
    """A GCN whose convolutions are products with a matrix."""

    def __init__(self, gcn: GCN) -> None:
        super().__init__()
        self.gcn = gcn

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target, weight = normalised_edges(edge_list(edge_index), len(x), torch.float64)
        mix = torch.zeros(len(x), len(x)).double().index_put((target, source), weight, accumulate=True)
        last = len(self.gcn.convolutions) - 1
        for i, (convolution, bias) in enumerate(zip(self.gcn.convolutions, self.gcn.biases, strict=True)):
            x = mix @ convolution(x) + bias
            x = torch.relu(x) if i < last else x
        return x


def models() -> tuple[Hypformer, Hypformer, Tensor]:
    torch.manual_seed(0)
    gcn = GCN(FEATURES, 6, 8, layers=3)
    known, own = (
        Hypformer(FEATURES, 8, 3, layers=1, graph_encoder=encoder).double().eval() for encoder in (gcn, Rewritten(gcn))
    )
    own.load_state_dict(
        {name.replace("graph_encoder.", "graph_encoder.gcn."): x for name, x in known.state_dict().items()}
    )
    return known, own, torch.randn(NODES, FEATURES).double()


def test_a_rewritten_gcn_has_nearly_the_radius_of_the_library_s() -> None:
    known, own, x = models()
    torch.testing.assert_close(own(x, EDGES), known(x, EDGES))
    radii = certified_radius(own, x, EDGES, range(NODES)) / certified_radius(known, x, EDGES, range(NODES))
    assert (radii > 0.7).all()
    assert (radii < 1.2).all()


def test_no_point_of_a_certified_ball_breaks_a_margin() -> None:
    torch.manual_seed(0)
    for name, features in (("sage", FEATURES), ("attended", FEATURES), ("beside", FEATURES), ("sage", WIDE)):
        encoder = Own(ENCODERS[name], features)
        model = Hypformer(features, HIDDEN, 3, layers=1, graph_encoder=encoder).double().eval()
        x = torch.randn(NODES, features).double()
        for node, victim in ((2, 2), (1, 2)):
            certificate = certify_node(model, x, EDGES, node, 0.2, victim=victim)
            change = 0.2 * functional.normalize(torch.randn(100, features).double(), dim=-1)
            for one in change:
                with torch.no_grad():
                    logits = model(x.index_add(0, torch.tensor([node]), one[None]), EDGES)[victim]
                below = logits[certificate.target] - logits < certificate.margins
                below[certificate.target] = False
                assert not below.any()


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_encoders_of_pytorch_geometric_are_covered(name: str) -> None:
    geometric = pytest.importorskip("torch_geometric.nn").models
    torch.manual_seed(0)
    encoder = getattr(geometric, name)(FEATURES, 6, 2, 8, norm="batch_norm")
    model = Hypformer(FEATURES, 8, 3, layers=1, graph_encoder=encoder).double().eval()
    x = torch.randn(NODES, FEATURES).double()
    radius = certified_radius(model, x, EDGES, [2])
    assert radius > 0
    kept = model(x, EDGES)[2].argmax()
    for change in radius * functional.normalize(torch.randn(100, FEATURES).double(), dim=-1):
        assert model(x.index_add(0, torch.tensor([2]), change[None]), EDGES)[2].argmax() == kept


def _in_view(x: Tensor) -> Tensor:
    result = x.new_zeros(len(x), 2, FEATURES)
    result.unbind(1)[0].add_(x)
    return result[:, 0]


def _after_a_view(x: Tensor) -> Tensor:
    hidden = 2 * x
    part = hidden[:]
    hidden.relu_()
    return part


def _overwritten(x: Tensor) -> Tensor:
    result = torch.zeros(len(x), FEATURES).double()
    result.index_add_(0, torch.arange(len(x)), x)
    return result


def _by_value(x: Tensor) -> Tensor:
    return x if float(x.sum()) > 0 else -x


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "square": lambda x: x * x,
    "product": lambda x: x @ x.T @ x,
    "quotient": lambda x: 1 / x,
    "largest": lambda x: x.amax(0, keepdim=True).expand_as(x),
    "sorted": lambda x: x.sort(0).values,
    "branch": _by_value,
    "indexed by features": lambda x: torch.arange(6.0).double()[x.long() % 6],
    "chosen by features": lambda x: torch.where(x > 0, x, 0.0),
    "in a view": _in_view,
    "after a view": _after_a_view,
    "features themselves": lambda x: x.relu_(),
    "plain tensor": _overwritten,
    "float32": lambda x: x.float().double(),
    "numbers": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "data": lambda x: torch.tanh(x.data),
    "detached": lambda x: torch.tanh(x.detach()),
    "of a batch": lambda x: functional.batch_norm(x, None, None, training=True),
    "given": lambda x: torch.add(x, x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_has_no_rule_is_refused(name: str) -> None:
    encoder = Own(lambda x, *_: REFUSED[name](x))
    with pytest.raises((NotCoveredError, RuntimeError, TypeError)):
        TracedBranch(encoder, torch.randn(NODES, FEATURES).double(), EDGES)


@torch.no_grad()
def test_numbers_of_an_encoder_keep_their_digits() -> None:
    branch = branch_of(lambda x, e, one, *_: (one(x) + 16777217.25) - 16777217.0)
    found = enclosed(branch, 1e-3)
    torch.testing.assert_close(found.center[1], branch.result[2], rtol=0.0, atol=1e-7)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.randn(HIDDEN).double(), lambda x: functional.dropout(torch.ones(HIDDEN).double(), training=True)],
)
@torch.no_grad()
def test_encoders_that_give_two_results_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotCoveredError, match="the same result whenever"):
        branch_of(lambda x, e, one, *_: one(x) + function(x))


def test_an_encoder_that_reads_no_features_has_any_radius() -> None:
    encoder = Own(lambda x, *_: torch.arange(HIDDEN).double().expand(len(x), -1))
    model = Hypformer(FEATURES, HIDDEN, 2, graph_encoder=encoder, transformer=False).double().eval()
    x = torch.randn(NODES, FEATURES).double()
    logits = model(x, EDGES)[0]
    margins = certify_node(model, x, EDGES, 0, 100.0).margins
    torch.testing.assert_close(margins.amin(), logits.amax() - logits.amin())


@torch.no_grad()
def test_an_encoder_may_make_no_rows_of_its_features() -> None:
    """As of messages along no edges, or of a kind of nodes of which there are none."""
    plain = branch_of(lambda x, e, one, *_: one(x))
    cut = branch_of(lambda x, e, one, *_: torch.cat([one(x), one(x)[len(x) :]]))
    torch.testing.assert_close(enclosed(cut, 0.1).center, enclosed(plain, 0.1).center)


def test_a_graph_without_nodes_has_none_to_certify() -> None:
    _, own, x = models()
    with pytest.raises(ValueError, match=r"node must lie in \[0, nodes = 0\), got 0"):
        certify_node(own, x[:0], EDGES[:, :0], 0, 0.1)


def test_gradients_are_refused() -> None:
    _, own, x = models()
    with pytest.raises(NotCoveredError, match="graph_encoder must be a GCN or a Propagation where bounds"):
        margin_bounds(own, x, EDGES, [0], 0.1, torch.tensor([0]))


def in_ball(change: Tensor, threat: Threat) -> Tensor:
    """Changes of all nodes on the border of the ball."""
    return (
        functional.normalize(change, dim=-1)
        if threat == "each"
        else change / change.flatten(1).norm(dim=1)[:, None, None]
    )


def slopes(branch: TracedBranch, rows: Tensor) -> Tensor:
    """Of rows times the result of node 2, by all features: ``(row, node, feature)``."""
    with torch.enable_grad():
        x = branch.x.requires_grad_()
        found = rows @ branch.encoder(x, EDGES)[2]
        return torch.stack([torch.autograd.grad(one, x, retain_graph=True, allow_unused=True)[0] for one in found])


@pytest.mark.parametrize("name", ["sage", "attended", "beside", "normed", "mixed", "linear"])
@pytest.mark.parametrize("threat", ["frobenius", "each"])
@torch.no_grad()
def test_every_result_lies_in_the_enclosure_where_all_nodes_move(name: str, threat: Threat) -> None:
    for features in (FEATURES, NODES):
        branch = branch_of(ENCODERS[name], features=features)
        rows = torch.randn(20, HIDDEN).double()
        steep = in_ball(slopes(branch, rows), threat)
        for radius in (1e-3, 0.3, 3.0):
            found = together(branch, radius, threat).linear(rows)
            changes = torch.cat([steep, -steep, in_ball(torch.randn(100, *branch.x.shape).double(), threat)])
            truth = torch.stack([branch.encoder(branch.x + radius * change, EDGES)[2] for change in changes])
            assert ((truth @ rows.T - found.center).abs() <= found.spread() * (1 + 1e-12)).all()


def together(branch: TracedBranch, radius: float, threat: Threat) -> Form:
    """The result of node 2 where all move."""
    noise = Noise.of(1, branch.x.shape[1], branch.x)
    noise.tokens = torch.tensor([2])
    return enclose_all(branch, noise, 2, torch.eye(branch.x.shape[1]).double(), radius, threat)


@torch.no_grad()
def test_a_relu_of_two_nodes_has_the_range_that_their_balls_have() -> None:
    """Of a number between -u and u, the box is u / 4; u is the length or the sum of the two changes."""
    own, x = Own(lambda x, *_: (x + x[torch.tensor([1, 0])]).relu()), torch.zeros(2, 1).double()
    for threat, reach in (("frobenius", 2**0.5), ("each", 2.0)):
        noise = Noise.of(1, 1, x)
        noise.tokens = torch.tensor([0])
        found = enclose_all(TracedBranch(own, x, EDGES[:, :0]), noise, 0, torch.ones(1, 1).double(), 1.0, threat)
        torch.testing.assert_close(found.box, torch.full((1, 1), reach / 4).double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["sage", "attended", "beside", "normed", "mixed", "linear"])
@pytest.mark.parametrize("threat", ["frobenius", "each"])
@torch.no_grad()
def test_to_first_order_all_nodes_move_a_result_as_its_slopes_do(name: str, threat: Threat) -> None:
    branch, rows = branch_of(ENCODERS[name]), torch.randn(5, HIDDEN).double()
    found, steep = together(branch, 1e-5, threat).linear(rows).spread(), slopes(branch, rows)
    sizes = steep.norm(dim=-1).sum(-1) if threat == "each" else steep.flatten(1).norm(dim=-1)
    if threat == "each":  # those of other nodes are enclosed in an ellipsoid
        assert (found[0] >= 1e-5 * sizes * (1 - 1e-6)).all()
        assert (found[0] <= 1e-5 * sizes * 1.5).all()
    else:
        torch.testing.assert_close(found[0], 1e-5 * sizes, rtol=1e-6, atol=1e-11)


def test_where_all_nodes_move_a_rewritten_gcn_has_nearly_the_radius_of_the_library_s() -> None:
    known, own, x = models()
    for threat in ("frobenius", "each"):
        radii = certified_radius(own, x, EDGES, [1, 3], threat=threat) / certified_radius(
            known, x, EDGES, [1, 3], threat=threat
        )
        assert (radii > 0.9).all()
        assert (radii < 1.2).all()


@pytest.mark.parametrize("threat", ["frobenius", "each"])
def test_no_features_of_all_nodes_break_a_margin(threat: Threat) -> None:
    for name, features in (("sage", FEATURES), ("beside", FEATURES), ("sage", WIDE)):
        torch.manual_seed(0)
        encoder = Own(ENCODERS[name], features)
        model = Hypformer(features, HIDDEN, 3, layers=1, graph_encoder=encoder).double().eval()
        x = torch.randn(NODES, features).double()
        certificate = certify_node(model, x, EDGES, 2, 0.05, threat=threat)
        with torch.no_grad():
            for change in in_ball(torch.randn(200, *x.shape).double(), threat):
                logits = model(x + 0.05 * change, EDGES)[2]
                below = logits[certificate.target] - logits < certificate.margins
                below[certificate.target] = False
                assert not below.any()
