"""The graph branch on a ball: small encoders whose results are known, and all perturbations of theirs."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from holonomy.layers import GCN, Propagation
from holonomy.theory.affine.arithmetic import backward
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.attention import linear
from holonomy.theory.affine.encoders import graph, whole_graph
from holonomy.theory.affine.encoders.graph import Convolved, GraphBranch
from holonomy.theory.affine.encoders.traced import graph_branch
from holonomy.theory.affine.encoders.whole_graph import enclose_all

pytestmark = pytest.mark.usefixtures("without_shape_checks")

ALONE = torch.empty(2, 0, dtype=torch.int64)
THREATS: tuple[Threat, ...] = ("node", "frobenius", "each")


def enclosed(branch: GraphBranch, x: Tensor, node: int, radius: float, threat: Threat) -> Form:
    """The output of a node whose own features move, or all."""
    noise, basis = Noise.of(1, x.shape[1], x), torch.eye(x.shape[1]).double()[None]
    if threat == "node":
        place = torch.tensor([node])
        return branch.enclose(noise, place, place, basis, torch.tensor([radius]).double())
    noise.tokens = torch.tensor([node])
    return enclose_all(branch, noise, node, basis[0], radius, threat)


@pytest.mark.parametrize("threat", THREATS)
@torch.no_grad()
def test_sums_that_cancel_are_held_with_their_rounding(threat: Threat) -> None:
    """Each of these features has the sum one, and float64 gives zero or two where the small one comes first."""
    encoder = Propagation(3, 2, 2, steps=1).double()
    for part, weight in ((encoder.first, [[1.0, 1, 1], [1, 1, 0]]), (encoder.second, [[1.0, 0], [0, 1]])):
        part.weight.copy_(torch.tensor(weight))
        part.bias.zero_()
    encoder.first.bias[1] = -1e16
    x = torch.tensor([[1.0, 1e16, -1e16], [1e16, 1.0, -1e16]], dtype=torch.float64)
    branch = graph_branch(encoder, x, ALONE)
    for node in range(2):
        found = enclosed(branch, x, node, 0.0, threat)
        assert ((found.center - 1).abs() <= found.spread()).all()


@pytest.mark.parametrize("threat", THREATS)
@torch.no_grad()
def test_biases_of_other_convolutions_are_counted(threat: Threat) -> None:
    """Where a user put linear maps in their place, which GCN adds before it propagates."""
    encoder = GCN(2, 3, 3, residual=True)
    encoder.convolutions[0], encoder.skips[0] = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    encoder, x = encoder.double(), torch.randn(2, 2).double()
    edges = torch.tensor([[0, 1], [1, 0]])
    found = enclosed(graph_branch(encoder, x, edges), x, 0, 0.0, threat)
    torch.testing.assert_close(found.center[0], encoder(x, edges)[0])


@pytest.mark.parametrize("residual", [True, False])
@torch.no_grad()
def test_the_change_of_a_convolution_is_held_with_its_rounding(*, residual: bool) -> None:
    """In exact arithmetic, from what the encoder gives."""
    encoder = GCN(2, 3, 3, layers=1, residual=residual).double()
    x = torch.randn(1, 2).double()
    found = enclosed(graph_branch(encoder, x, ALONE), x, 0, 0.75, "node")
    weights = [encoder.convolutions[0].weight, *([encoder.skips[0].weight] if residual else [])]
    noise, start = [Fraction(1, 2), Fraction(-3, 4)], encoder(x, ALONE)[0]
    for entry in range(3):
        rows = [sum(Fraction(w[entry, j].item()) for w in weights) for j in range(2)]
        truth = sum((w * Fraction(0.75) * n for w, n in zip(rows, noise, strict=True)), Fraction(start[entry].item()))
        columns = [Fraction(value) for value in found.columns[0, entry].tolist()]
        held = sum((c * n for c, n in zip(columns, noise, strict=False)), Fraction(found.center[0, entry].item()))
        assert abs(truth - held) <= Fraction(found.box[0, entry].item())


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("threat", THREATS)
@torch.no_grad()
def test_a_unit_that_may_switch_on_is_not_taken_for_dead(threat: Threat, *, residual: bool) -> None:
    """relu(4 x - 5) at one is zero and flat, and three where x moves by one: on the way are skips, or weights."""
    encoder = GCN(1, 2, 1, layers=3, residual=residual).double()
    wide, same, narrow = torch.tensor([[4.0], [0.0]]), torch.eye(2), torch.tensor([[1.0, 0.0]])
    for convolution, weight in zip(encoder.convolutions, (wide, same, narrow), strict=True):
        convolution.weight.copy_(0 * weight if residual else weight)
    if residual:
        encoder.skips[0].weight.copy_(wide)
        encoder.skips[2].weight.copy_(narrow)
    for bias in encoder.biases:
        bias.zero_()
    encoder.biases[1][0] = -5.0
    x = torch.ones(1, 1).double()
    assert encoder(2 * x, ALONE).item() == 3.0
    found = enclosed(graph_branch(encoder, x, ALONE), x, 0, 1.0, threat)
    assert (found.center + found.spread()).item() >= 3.0
    assert (found.center - found.spread()).item() <= 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("kind", ["GCN", "residual GCN", "propagation"])
@torch.no_grad()
def test_no_change_leads_out_of_the_enclosure(kind: str, threat: Threat, seed: int) -> None:
    """Drawn ones, and the steepest of the linear part, over a radius at which units switch."""
    torch.manual_seed(seed)
    edges, nodes, radius = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), 4, 1.5
    plain = kind == "propagation"
    encoder = Propagation(2, 5, 2, steps=2) if plain else GCN(2, 5, 2, layers=3, residual="res" in kind)
    encoder, x = encoder.double(), torch.randn(nodes, 2).double()

    def output(change: Tensor) -> Tensor:
        return encoder(x + change, edges)[1]

    with torch.enable_grad():
        slopes = torch.autograd.functional.jacobian(output, torch.zeros_like(x))
    changes = torch.cat([torch.randn(100, nodes, 2).double(), slopes, -slopes])
    if threat == "node":
        changes = changes * (torch.arange(nodes) == 1)[:, None]
    axes = -1 if threat == "each" else (-2, -1)
    changes = changes * radius / changes.norm(dim=axes, keepdim=True).clamp(min=1e-30)
    found = enclosed(graph_branch(encoder, x, edges), x, 1, radius, threat)
    truth = torch.stack([output(change) for change in changes])
    assert ((truth - found.center).abs() <= found.spread()).all()


@torch.no_grad()
def test_a_node_moves_nothing_beyond_the_depth_of_the_convolutions() -> None:
    """Two convolutions on a path of five nodes: the last one has the constant that it has anyway."""
    path = torch.stack([torch.arange(4), torch.arange(1, 5)])
    x, edges = torch.randn(5, 2).double(), torch.cat([path, path.flip(0)], 1)
    encoder = GCN(2, 3, 3).double()
    branch, ends, radius = graph_branch(encoder, x, edges), torch.tensor([4, 2]), torch.ones(2).double()
    noise, basis = Noise.of(2, 2, x), torch.eye(2).double().expand(2, -1, -1)
    found = branch.enclose(noise, torch.zeros_like(ends), ends, basis, radius)
    torch.testing.assert_close(found.center[0], encoder(x, edges)[4])
    assert not found.spread()[0].any()
    assert (found.spread()[1] > 0).all()
    below = branch.below(0, torch.eye(3).double(), x.new_zeros(3, 1, 2))
    torch.testing.assert_close(below.least()[0], encoder(x, edges)[4])


@pytest.mark.parametrize("threat", THREATS)
@torch.no_grad()
def test_units_that_switch_at_once_are_counted_each(threat: Threat) -> None:
    """2 relu(x) within one of zero lies in [0, 2], a sum of two intervals; a ball of both would be too small."""
    encoder = GCN(1, 2, 1, layers=2).double()
    for convolution, weight in zip(encoder.convolutions, (torch.ones(2, 1), torch.ones(1, 2)), strict=True):
        convolution.weight.copy_(weight)
    x = torch.zeros(1, 1).double()
    found = enclosed(graph_branch(encoder, x, ALONE), x, 0, 1.0, threat)
    assert 2.0 <= (found.center + found.spread()).item() <= 2.0 + 1e-9
    # To its own linear part, which is x, a half is added.
    assert -1.0 - 1e-9 <= (found.center - found.spread()).item() <= 0.0


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("threat", THREATS)
@torch.no_grad()
def test_a_unit_moves_as_far_as_its_own_row_says(threat: Threat, *, residual: bool) -> None:
    """relu(x) at two stays linear within one, whatever the unit beside it does, which moves ten times as far."""
    encoder = GCN(1, 2, 1, layers=2, residual=residual).double()
    wide, narrow = torch.tensor([[1.0], [10.0]]), torch.tensor([[1.0, 0.0]])
    for convolution, weight in zip(encoder.convolutions, (wide, narrow), strict=True):
        convolution.weight.copy_(0 * weight if residual else weight)
    if residual:
        encoder.skips[0].weight.copy_(wide)
        encoder.skips[1].weight.copy_(narrow)
    x = torch.full((1, 1), 2.0).double()
    found = enclosed(graph_branch(encoder, x, ALONE), x, 0, 1.0, threat)
    assert found.center.item() == pytest.approx(2.0)
    assert found.spread().item() == pytest.approx(1.0)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("threat", ["frobenius", "each"])
@torch.no_grad()
def test_values_before_a_relu_stay_in_their_range(threat: Threat, *, residual: bool) -> None:
    """Of every node and layer; of the first layer, which is linear, the range is attained."""
    torch.manual_seed(3)
    edges, radius = torch.tensor([[0, 1, 1, 2, 2, 3, 4, 0], [1, 0, 2, 1, 3, 2, 0, 4]]), 0.7
    encoder, x = GCN(2, 5, 3, layers=4, residual=residual).double(), torch.randn(5, 2).double()
    branch, everyone = graph_branch(encoder, x, edges), torch.arange(5)
    assert isinstance(branch, Convolved)
    units = whole_graph._units(branch, everyone, radius, threat)
    axes = -1 if threat == "each" else (-2, -1)
    for number, layer in enumerate(branch.layers[:-1]):

        def before(change: Tensor, number: int = number) -> Tensor:
            moved = graph_branch(encoder, x + change, edges)
            assert isinstance(moved, Convolved)
            return moved.layers[number].before

        with torch.enable_grad():
            slopes = torch.autograd.functional.jacobian(before, torch.zeros_like(x)).flatten(0, 1)
        changes = torch.cat([torch.randn(200, 5, 2).double(), slopes, -slopes])
        changes = changes * radius / changes.norm(dim=axes, keepdim=True).clamp(min=1e-30)
        middle, reach = whole_graph._range(branch, number, everyone, units, radius, threat)
        used = ((torch.stack([before(change) for change in changes]) - layer.before - middle).abs() / reach).amax(0)
        assert (used <= 1 + 1e-9).all()
        assert number or (used >= 1 - 1e-9).all()


def test_a_range_that_is_nan_is_not_taken_for_a_unit_that_is_dead() -> None:
    """A difference of infinities: comparisons with it are False, and such a unit would count as constant."""
    one, nan = torch.ones(1, 1).double(), torch.full((1, 1), torch.nan).double()
    assert whole_graph._relaxed(one, one, nan).half.isnan().all()
    assert graph._switch(one, 0 * one, nan[..., None], 0 * one, 1)[1].isnan().any()
    assert backward.Switch.of(one, one, nan[..., None], 0 * one).entries.tolist() == [0]
    noise = Noise.of(1, 1, one)
    assert linear.live(Form(noise, one, nan[..., None], 0 * one)).all()
