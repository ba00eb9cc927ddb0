"""Bounds of graph encoders from below: they hold at every point, are attained, and make certificates larger."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from holonomy.layers import GCN, Propagation
from holonomy.models import Hypformer
from holonomy.theory.affine.arithmetic import backward
from holonomy.theory.affine.arithmetic.forms import Noise
from holonomy.theory.affine.arithmetic.quadratics import Quadratic, least
from holonomy.theory.affine.enclosure import Enclosure
from holonomy.theory.affine.encoders.graph import Convolved
from holonomy.theory.affine.encoders.traced import graph_branch

pytestmark = pytest.mark.usefixtures("without_shape_checks")

FEATURES, NODES = 4, 9
RING = torch.stack([torch.arange(NODES), torch.arange(NODES).roll(1)])
EDGES = torch.cat([RING, RING.flip(0)], 1)


def values(found: Quadratic, points: Tensor) -> Tensor:
    """Quadratic functions at points, ``(point, row)``."""
    square = torch.einsum("pi,rij,pj->pr", points, found.matrix, points)
    return found.center + points @ found.gradient.T + square


@pytest.mark.parametrize("case", ["all", "no gradient", "linear", "nothing", "hard", "convex"])
def test_the_least_of_a_quadratic_is_a_bound_that_is_attained(case: str) -> None:
    """In the hard case the gradient has no part along the least curvature, so that the multiplier is at a pole."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(50, 3, generator=generator).double()
    matrix = torch.randn(50, 3, 3, generator=generator).double()
    matrix = matrix + matrix.mT
    if case == "hard":
        matrix = torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1).sort().values)
        gradient[:, 0] = 0
    if case == "convex":
        matrix = matrix @ matrix
    gradient = gradient * (case not in {"no gradient", "nothing"})
    matrix = matrix * (case not in {"linear", "nothing"})
    bound, point = least(gradient, matrix)
    assert (point.norm(dim=-1) <= 1 + 1e-12).all()
    at = (gradient * point).sum(-1) + torch.einsum("bi,bij,bj->b", point, matrix, point)
    assert (bound <= at).all()
    size = gradient.norm(dim=-1) + matrix.norm(dim=(-2, -1))
    assert (at - bound <= 1e-6 * size).all()


def test_what_is_not_finite_has_no_bound() -> None:
    matrix = torch.tensor([[[torch.nan]], [[torch.inf]], [[1.0]]]).double()
    assert least(torch.ones(3, 1).double(), matrix)[0].isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_lines_and_parabolas_are_on_their_side_and_touch(factor: float) -> None:
    """Nine tenths of what they are off is too little; the ends of the grid and of x are where the lower ones touch."""
    generator = torch.Generator().manual_seed(1)
    c, gamma, rho = (torch.rand(200, generator=generator).double() for _ in range(3))
    c, gamma, rho = 2 * c - 1, gamma + 0.1, rho * (torch.arange(200) % 3)
    grid = torch.linspace(-1, 1, 401).double()
    kinks = torch.stack([-c - rho, -c + rho], -1).clamp(-gamma[:, None], gamma[:, None])
    x = torch.cat([gamma[:, None] * grid, kinks], -1)[:, :, None]
    z = c[:, None, None] + x + rho[:, None, None] * torch.linspace(-1, 1, 21).double()
    ends = (c - gamma - rho, c + gamma + rho)
    for sign, lines in ((1, backward.above(c, gamma, rho, ends)), (-1, backward.below(c, gamma, rho))):
        held, touched = [], []
        for s, q, m in zip(*lines, strict=True):
            s, q, m = (part[:, None, None] for part in (s, q, m))  # noqa: PLW2901
            off = (sign * (torch.relu(z) - s * z - q * x.square())).amax((1, 2))
            crossing = (c.abs() < gamma + rho) & (m.flatten().abs() > 1e-3)
            held.append((off <= factor * sign * m.flatten() + 1e-12)[crossing].all())
            touched.append((off >= sign * m.flatten() - 1e-4)[crossing].any())
        assert bool(torch.stack(held).all()) is (factor == 1.0)
        assert torch.stack(touched).any()


@pytest.mark.parametrize("reached", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("points", [0, 3])
def test_lines_are_made_of_numbers_of_the_size_that_rounding_is_taken_of(points: int, reached: float) -> None:
    """Whatever lies before a ReLU, and whichever points its lines are to be good at."""
    generator = torch.Generator().manual_seed(2)
    center, rest = torch.randn(1, 300, generator=generator).double(), torch.rand(1, 300, generator=generator).double()
    gradient = reached * torch.randn(1, 300, 3, generator=generator).double()
    center, rest = center * (gradient.norm(dim=-1) + rest), rest * (torch.arange(300) % 2)
    switch = backward.Switch.of(center, center, gradient, rest)
    asked = torch.randn(5, len(switch.entries), generator=generator).double()
    s, q, m = switch.lines(asked, normalize(torch.randn(5, points, 3, generator=generator).double(), dim=-1))
    size = m.abs() + q * switch.reached.square() + s * center[0, switch.entries].abs()
    assert (size <= switch.sizes[0, switch.entries]).all()


def encoder_of(name: str, width: int) -> GCN | Propagation:
    """A graph encoder in evaluation."""
    if name == "propagation":
        return Propagation(FEATURES, 7, width, steps=2).eval()
    return GCN(FEATURES, 7, width, layers=3, residual=name == "residual").eval()


@pytest.mark.parametrize("radius", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", ["gcn", "residual", "propagation"])
@torch.no_grad()
def test_graph_encoders_are_above_the_quadratic_at_every_point(name: str, victim: int, radius: float) -> None:
    torch.manual_seed(3)
    encoder = encoder_of(name, 3).double()
    for parameter in encoder.parameters():
        parameter.mul_(2).add_(0.1 * torch.randn_like(parameter))
    x, rows = torch.randn(NODES, FEATURES).double(), torch.randn(3, 3).double()
    branch = graph_branch(encoder, x, EDGES)
    basis, noise = torch.eye(FEATURES).double()[None], Noise.of(1, FEATURES, x)
    branch.enclose(noise, torch.tensor([0]), torch.tensor([victim]), basis, x.new_tensor([radius]))
    points = normalize(torch.randn(400, FEATURES).double(), dim=-1) * torch.rand(400, 1).double() ** 0.2
    truth = torch.stack([encoder(x.index_add(0, torch.tensor([0]), radius * d[None]), EDGES)[victim] for d in points])
    for bad in (points[:0], points[:3]):
        found = branch.below(0, rows, bad.expand(3, -1, -1))
        assert (values(found, points) - found.loss <= truth @ rows.T).all()
        assert (found.loss < 1e-8 * (1 + truth.abs().amax())).all()
        assert (found.least()[0] <= (truth @ rows.T).amin(0)).all()


@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("residual", [True, False])
@torch.no_grad()
def test_values_before_relus_stay_where_they_are_sharper(radius: float, *, residual: bool) -> None:
    """At random points and where values move farthest; where many units switch, some are enclosed better."""
    torch.manual_seed(5)
    encoder = GCN(FEATURES, 7, 3, layers=4, residual=residual).double().eval()
    for parameter in encoder.parameters():
        parameter.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
    x, node = torch.randn(NODES, FEATURES).double(), torch.tensor([0])
    branch = cast("Convolved", graph_branch(encoder, x, EDGES))
    branch.enclose(Noise.of(1, FEATURES, x), node, node, torch.eye(FEATURES).double()[None], x.new_tensor([radius]))
    wide, rows = branch.last[0].switches, [step.rows for step in branch.last[0].steps]
    rest = x.new_zeros(1, 0, FEATURES)
    before = branch.below(0, torch.ones(1, 3).double(), rest).least()[0]
    branch.sharpen(0)
    assert branch.last[0].sharp
    assert (branch.below(0, torch.ones(1, 3).double(), rest).least()[0] > before - 1e-9).all()
    sharp, narrower, less = branch.last[0].switches, 0, 0
    directions = [normalize(torch.randn(40, FEATURES).double(), dim=-1)]
    directions += [sign * normalize(each.gradient[:8], dim=-1) for each in wide for sign in (1, -1)]
    points = torch.cat([size * each for each in directions for size in (0.5, 1.0)])
    for d in points:
        moved = cast("Convolved", graph_branch(encoder, x.index_add(0, node, radius * d[None]), EDGES))
        for number, (one, other) in enumerate(zip(wide, sharp, strict=True)):
            value = moved.layers[number].before[rows[number]].flatten()
            off = value[other.entries] - other.gradient @ d - other.center
            assert (off.abs() <= other.rest + 1e-12).all()
            low, high = other.between
            assert ((low - 1e-12 <= value[other.entries]) & (value[other.entries] <= high + 1e-12)).all()
            less += int(((high - low) / 2 < other.rest + other.reached - 1e-6).sum())
            still = torch.ones(len(value)).bool().index_fill(0, other.entries, value=False)
            assert ((value > 0) == other.on.flatten())[still].all()
            narrower += int(other.rest.sum() < one.rest.sum() * (1 - 1e-6))
    assert narrower > 0 or radius < 1 or not residual
    assert less > 0 or radius < 1


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_the_chord_is_above_between_all_that_is_known(factor: float) -> None:
    """And touches at both ends."""
    generator = torch.Generator().manual_seed(4)
    c, gamma, rho = (torch.rand(200, generator=generator).double() for _ in range(3))
    low, high = (c - gamma - rho).clamp(max=-1e-3) * factor, (c + gamma + rho) * 0.7 * factor
    wide = (low / factor, high / factor)
    s, q, m = (part[0] for part in backward.above(c, gamma, rho, (low, high)))
    off = torch.stack([torch.relu(z) - s * z for z in wide])
    assert bool((off <= m + 1e-12).all()) is (factor == 1.0)
    assert (q == 0).all()
    if factor == 1.0:
        torch.testing.assert_close(off, m.expand(2, -1))


def test_what_is_not_known_changes_nothing() -> None:
    """A bound of what overflows is nan: it may neither replace a number nor make a ReLU linear."""
    one = torch.ones(1, 1).double()
    switch = backward.Switch.of(0.5 * one, 0.5 * one, one[..., None], 0.25 * one)
    same = switch.within(*(torch.full((2, 1), torch.nan).double() for _ in range(2)))
    assert same.entries.tolist() == [0]
    torch.testing.assert_close((same.center, same.rest, *same.between), (switch.center, switch.rest, *switch.between))
    nothing = backward.Switch.of(one, one, torch.full((1, 1, 1), torch.nan).double(), 0 * one)
    assert nothing.within(*(torch.full((2, 1), torch.nan).double() for _ in range(2))).entries.tolist() == [0]


@pytest.mark.parametrize("value", [0.1, -0.1])
def test_a_relu_of_known_sign_is_linear(value: float) -> None:
    """Whatever its first-order part says."""
    one, bounds = torch.ones(1, 1).double(), torch.tensor([[-9.0], [-9.0]]).double()
    switch = backward.Switch.of(0 * one, 0 * one, one[..., None], one)
    bounds[int(value < 0)] = abs(value)
    found = switch.within(torch.full((2, 1), -9.0).double(), bounds)
    assert not len(found.entries)
    assert found.on.item() is (value > 0)


@pytest.mark.parametrize("name", ["gcn", "residual", "propagation"])
@torch.no_grad()
def test_certificates_are_never_smaller_than_without(name: str) -> None:
    """And larger for some node and class, where units switch."""
    torch.manual_seed(0)
    encoder = encoder_of(name, 8)
    model = Hypformer(FEATURES, 8, 3, layers=1, graph_encoder=encoder, graph_weight=0.8).eval()
    x = torch.randn(NODES, FEATURES)
    enclosure = Enclosure(model, x, EDGES)
    nodes, target, gains = torch.arange(NODES), enclosure.logits.argmax(-1), list[torch.Tensor]()
    for size in (0.1, 0.4):
        radius = torch.full((NODES,), size).double()
        enough = (torch.inf, -torch.inf)
        with_it, without = (enclosure.margins(nodes, nodes, radius, target, enough=each) for each in enough)
        for one, other in ((with_it.best, without.best), (with_it.affine, without.affine), (with_it.cap, without.cap)):
            assert (one >= other).all()
        assert (with_it.cap > without.cap + 1e-4).any()
        gains.append(with_it.affine - without.affine)
    assert (torch.stack(gains).nan_to_num(0.0) > 1e-4).any()


@pytest.mark.parametrize("name", ["gcn", "propagation"])
@torch.no_grad()
def test_bounds_that_are_not_looked_for_decide_nothing(name: str) -> None:
    """Whether all margins are above a number is the same where no better bounds are looked for beyond it."""
    torch.manual_seed(0)
    model = Hypformer(FEATURES, 8, 3, layers=1, graph_encoder=encoder_of(name, 8), graph_weight=0.8).eval()
    enclosure = Enclosure(model, torch.randn(NODES, FEATURES), EDGES)
    nodes, target, held = torch.arange(NODES), enclosure.logits.argmax(-1), list[bool]()
    for size in torch.logspace(-1.5, 0.5, 3).tolist():
        radius = torch.full((NODES,), size).double()
        all_of, asked = (enclosure.margins(nodes, nodes, radius, target, enough=each) for each in (torch.inf, 0.0))
        assert ((all_of.best > 0).all(-1) == (asked.best > 0).all(-1)).all()
        held += (asked.best > 0).all(-1).tolist()
        by_cap = enclosure.margins(nodes, nodes, radius, target, known="cap")
        assert torch.isneginf(by_cap.affine.amin(-1)).all()
        assert (all_of.cap >= by_cap.cap - 1e-9).all()
        assert (all_of.best >= by_cap.best - 1e-9).all()
        assert (all_of.steepest > 0).all()
    assert any(held)
    assert not all(held)
