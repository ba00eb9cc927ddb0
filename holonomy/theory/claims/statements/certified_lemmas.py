r"""Claims on the lemmas L5 to L8 and L10 to L18 of :mod:`holonomy.theory.affine`.

Where a lemma encloses what a layer gives, the ball is small and the change goes where the linear part is steepest: an
enclosure that is exact to first order is attained there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from holonomy import numerics
from holonomy.layers import GCN, HypLinearAttention, Propagation
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import HypformerBlock
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.arithmetic.backward import above, below, improved
from holonomy.theory.affine.arithmetic.ellipsoids import weighted, with_bounded
from holonomy.theory.affine.arithmetic.entrywise import parabola
from holonomy.theory.affine.arithmetic.forms import Form, Noise, constant
from holonomy.theory.affine.arithmetic.products import quotient
from holonomy.theory.affine.arithmetic.quadratics import least
from holonomy.theory.affine.arithmetic.ratios import lines_of_stretch, stretch
from holonomy.theory.affine.arithmetic.squares import products, rest_of, symmetric
from holonomy.theory.affine.attention.features import largest_angle
from holonomy.theory.affine.attention.linear import attended, crowd_of
from holonomy.theory.affine.branch import positioned
from holonomy.theory.affine.encoders.graph import Convolved
from holonomy.theory.affine.encoders.traced import TracedBranch, graph_branch
from holonomy.theory.affine.encoders.whole_graph import enclose_all
from holonomy.theory.affine.points import Scaled, affine_of, exponential, lifted, refined, settled
from holonomy.theory.claims.statements.certified_nodes import random_model, random_numbers, ring
from holonomy.theory.claims.verdict import Claims, Draws, Trial

CLAIMS = Claims()

_NODES, _FEATURES = 6, 3
_TOLERANCE = numerics.tolerance(torch.float64).rtol
# Of what balls are, beside numbers of about one.
_SMALL = 2.0**-16
# The square turns eight entries and a one farthest where they are a root of 8 r^4 - 16 r^3 - 2 r + 1.
_FARTHEST_ROUND = 0.30596

_Function = Callable[[Tensor], Tensor]


def _beside(found: Form, function: _Function, zero: Tensor) -> Trial:
    """The entry that a change goes farthest with, where it is steepest, beside its enclosure."""
    slopes = torch.autograd.functional.jacobian(function, zero)
    sizes = slopes.flatten(1).norm(dim=-1)
    alive = (sizes > 0).nonzero().squeeze(1).tolist()
    if not alive:
        return Trial(0.0, 1.0, floor=_TOLERANCE)
    off = torch.stack([
        (function(sign * _SMALL * slopes[entry] / sizes[entry]) - found.center[0])[entry].abs()
        for entry in alive
        for sign in (1, -1)
    ])  # fmt: skip
    bounds = found.spread()[0, alive].repeat_interleave(2)
    worst = int((off / bounds).argmax())
    return Trial(off[worst].item(), bounds[worst].item(), floor=_TOLERANCE * _SMALL)


def _ball(dim: int) -> Noise:
    return Noise.of(1, dim, torch.zeros(1, dtype=torch.float64))


@CLAIMS.add("certified.quotients", "L5", "lower", rounds=40)
def _quotients(draws: Draws, _: int) -> Iterable[Trial]:
    """y/N lies in y0/N0 + (1/N)(y - (y0/N0) N), 1/N by L1 and the product by L2; attained by small balls."""
    # A vector and a positive number that both move.
    center, matrix = random_numbers(draws, 5), random_numbers(draws, 5, 3)
    center[0] = center[0].abs() + 0.5
    form = Form(_ball(3), center[None], _SMALL * matrix[None], torch.zeros(1, 5).double())

    def ratio(change: Tensor) -> Tensor:
        moved = center + matrix @ change
        return moved[1:] / moved[0]

    yield _beside(quotient(form[1:], form[:1]), ratio, torch.zeros(3).double())


def _encoded(draws: Draws, index: int) -> tuple[HypformerEncoder, HypformerBlock, Tensor, Scaled]:
    """An encoder, its first block, features, and where the first moves, its point after the position."""
    model, x, _ = random_model(draws, 3 if index % 2 else 0)
    encoder = cast("HypformerEncoder", model.encoder)
    block = cast("HypformerBlock", encoder.blocks[0])
    moved, radius = affine_of(encoder.embedding)[0][:, 1:] * _SMALL, x.new_tensor([_SMALL])
    space, scaling, floor = exponential(
        encoder.embedding, _ball(_FEATURES), x[:1], moved[None], x[:1] * _SMALL, radius
    )  # fmt: skip
    point = lifted(refined(encoder.refine, space), scaling, floor, block.manifold_in)
    return encoder, block, x, positioned(block.position, point)


@CLAIMS.add("certified.points", "L6", "lower", rounds=20)
def _points(draws: Draws, index: int) -> Iterable[Trial]:
    """Points with a scale beside them enclose exponential, refinement, position; attained by small balls."""
    # A point from features to after the position, held with its scale.
    encoder, block, x, point = _encoded(draws, index)

    def place(change: Tensor) -> Tensor:
        return block.position(encoder.points(x[:1] + change))[0, 1:]

    yield _beside(settled(point, block.manifold_in).space, place, torch.zeros(_FEATURES).double())


@CLAIMS.add("certified.attention", "L7", "lower", rounds=40)
def _attention(draws: Draws, index: int) -> Iterable[Trial]:
    """Linear attention where one token moves lies in v = A + w (v_a - A); attained by small balls."""
    encoder, block, x, point = _encoded(draws, index)
    layer, others = cast("HypLinearAttention", block.attention), torch.arange(_NODES) > 0

    def asked(change: Tensor) -> Tensor:
        moved = torch.where(others[:, None], x, x + change)
        return layer(block.position(encoder.points(moved)))[0, 1:]

    with torch.no_grad():
        crowd = crowd_of(layer, block.position(encoder.points(x)), torch.tensor([0]))
        found = attended(layer, point, point, crowd)
        found = quotient(found, point.scale, point.floor)
    yield _beside(found, asked, torch.zeros(_FEATURES).double())


@CLAIMS.add("certified.features", "L7", "lower", rounds=100)
def _features(draws: Draws, index: int) -> Iterable[Trial]:
    """phi(e) = |e| e^p / |e^p| turns e no farther than some vector of a one and k - 1 smaller, equal entries."""
    power, e = draws.uniform(1.1, 4.0), random_numbers(draws, draws.integer(1, 6)).abs()
    if index % 2:
        power, e = 2.0, torch.cat([torch.ones(1), torch.full((8,), _FARTHEST_ROUND)]).double()
    angle = largest_angle(torch.tensor([len(e)]).double(), power)
    yield Trial((power_features(e, power) - angle.cos() * e).norm().item(), (angle.sin() * e.norm()).item())


def _graph_encoder(draws: Draws, index: int) -> Propagation | GCN:
    """One of both kinds, with random weights."""
    encoder = Propagation(_FEATURES, 5, 4, steps=2) if index % 2 else GCN(_FEATURES, 5, 4, layers=3, residual=True)
    encoder = encoder.double()
    with torch.no_grad():
        for each in encoder.parameters():
            each.copy_(random_numbers(draws, *each.shape))
    return encoder


def _graphs(draws: Draws, index: int, *, together: bool) -> Iterable[Trial]:
    """L8, L13: graph encoders of a ring where the features of one node move, or of all."""
    edges = ring(_NODES)
    encoder = _graph_encoder(draws, index)
    x, victim = random_numbers(draws, _NODES, _FEATURES), torch.tensor([index // 2 % 2])
    noise, basis = _ball(_FEATURES), torch.eye(_FEATURES).double()
    moves = torch.ones(_NODES, 1).double() if together else torch.eye(_NODES, 1).double()

    def output(change: Tensor) -> Tensor:
        return encoder(x + moves * change, edges)[victim[0]]

    with torch.no_grad():
        branch = graph_branch(encoder, x, edges)
        if together:
            noise.tokens = victim
            found = enclose_all(branch, noise, int(victim), basis, _SMALL, "frobenius")
        else:
            found = branch.enclose(noise, torch.tensor([0]), victim, basis[None], x.new_tensor([_SMALL]))
    yield _beside(found, output, torch.zeros_like(x))


for name, lemma, moves in (("graph_together", "L13", "all nodes move"), ("graph", "L8", "one node moves")):
    CLAIMS.add(
        f"certified.{name}",
        lemma,
        "lower",
        statement=f"GCN and Propagation are enclosed where {moves}; attained by small balls",
        together=name == "graph_together",
        rounds=20,
    )(_graphs)


@CLAIMS.add("certified.ellipsoids", "L10", "lower", rounds=60)
def _ellipsoids(draws: Draws, index: int) -> Iterable[Trial]:
    """Sums of images of many balls, or of one that they share, lie in the ball of L10; attained by similar images."""
    # Supports of sums of images of balls, beside those of one ball; sharp where all images are similar.
    images, weights = random_numbers(draws, 1, 4, 3, 2), random_numbers(draws, 1, 4).abs()
    if index % 2:
        images = random_numbers(draws, 1, 4, 1, 1) * images[:, :1]
    direction = random_numbers(draws, 1, 3)
    each = weights * torch.einsum("de,ntef->ntf", direction, images).norm(dim=-1)
    zero = constant(_ball(2), torch.zeros(1, 3).double())
    together = with_bounded(zero, weights, images, "frobenius").columns[..., 2:]
    for ball, support in ((weighted(weights, images), each.sum()), (together, each.norm())):
        yield Trial(support.item(), (direction @ ball[0]).norm().item())


@CLAIMS.add("certified.softmax", "L11", rounds=60)
def _softmax(draws: Draws, index: int) -> Iterable[Trial]:
    """sum_j p_j exp(u_j) >= 1 and the Lorentz norm is 1/sqrt(c) at least, where the mean is taken off the logits."""
    # One, beside the sum of the weights and the Lorentz norm after changes of the logits, less their mean.
    shares, change = random_numbers(draws, 5).softmax(0), random_numbers(draws, 5)
    space = random_numbers(draws, 5, 3)
    if index % 2:
        change, space = torch.full_like(change, draws.uniform(-2.0, 2.0)), space[:1].expand(5, -1)
    weights = shares * (change - (shares * change).sum()).exp()
    time = (1 + space.square().sum(-1)).sqrt()
    total, mean = weights @ space, (weights * time).sum()
    yield Trial(1.0, weights.sum().item())
    yield Trial(1.0, (mean.square() - total.square().sum()).sqrt().item())


@CLAIMS.add("certified.averages", "L12", "equal", rounds=60)
def _averages(draws: Draws, _: int) -> Iterable[Trial]:
    """An average with weights q.k is its centre, a part that is linear in what moves, and two products."""
    q, k, v = random_numbers(draws, 3).abs(), random_numbers(draws, 5, 3).abs(), random_numbers(draws, 5, 2)
    q = q / (k @ q).sum()
    dq, dk, dv = 0.1 * random_numbers(draws, 3) * q, 0.1 * random_numbers(draws, 5, 3), random_numbers(draws, 5, 2)
    before, after = k @ q, (k + dk) @ (q + dq)
    middle = before @ v
    offset = v - middle
    linear_part = (k @ (q + dq)) @ offset + (dk @ q) @ offset + before @ dv
    rest = (dk @ dq) @ offset + (after - before) @ dv
    truth = after @ (v + dv) / after.sum()
    found = middle + (linear_part + rest) / after.sum()
    size = truth.norm() + (before.abs() @ (v.norm(dim=-1) + dv.norm(dim=-1))) / after.sum().abs()
    yield Trial((truth - found).norm().item(), 2.0**12 * torch.finfo(torch.float64).eps * size.item())


@CLAIMS.add("certified.quadratics", "L14", "lower", rounds=60)
def _quadratics(draws: Draws, index: int) -> Iterable[Trial]:
    """For |d| <= 1, min g.d + d'Hd >= -mu - sum_i gamma_i^2 / (4 (mu + lambda_i)); attained by the best mu."""
    # A quadratic function at random points and at the one that is about its least, beside the bound.
    size = draws.integer(1, 5)
    gradient, matrix = random_numbers(draws, size), random_numbers(draws, size, size)
    matrix = (matrix + matrix.T) * (0.0 if index % 5 == 0 else draws.logarithmic(_SMALL, 4.0))
    bound, point = least(gradient, matrix)
    points = torch.nn.functional.normalize(random_numbers(draws, 20, size), dim=-1)
    points = torch.cat([points, point[None] / point.norm().clamp(min=1.0)])
    found = points @ gradient + torch.einsum("pi,ij,pj->p", points, matrix, points)
    yield Trial(-found.amin().item(), -bound.item(), floor=_TOLERANCE)


@CLAIMS.add("certified.parabolas", "L15", "lower", rounds=60)
def _parabolas(draws: Draws, index: int) -> Iterable[Trial]:
    """ReLU(c + x + w) is below and above s z + q x^2 + m for |x| <= gamma, |w| <= rho; attained."""
    # How far a ReLU is above or below a parabola at most, on a grid of both unknowns, beside m.
    grid = torch.linspace(-1, 1, 257).double()
    gamma, rho = draws.uniform(0.5, 2.0), draws.uniform(0.0, 0.5) * (index % 3)
    c = draws.uniform(-0.2, 0.2) * gamma
    parts = torch.tensor([[c], [gamma], [rho]], dtype=torch.float64)
    x, rest = gamma * grid[:, None], rho * grid[::16]
    z = c + x + rest
    ends = (parts[0] - parts[1] - parts[2], parts.sum(0))
    for sign, (s, q, m) in ((1, above(parts[0], parts[1], parts[2], ends)), (-1, below(*parts))):
        for number in range(len(s)):
            off = sign * (torch.relu(z) - s[number] * z - q[number] * x.square())
            yield Trial(off.amax().item(), sign * m[number].item(), floor=_TOLERANCE)


@CLAIMS.add("certified.squares", "L16", "lower", rounds=40)
def _squares(draws: Draws, _: int) -> Iterable[Trial]:
    """(g.d)(h.d) is d'Hd, in [min(lambda_1, 0), max(lambda_n, 0)] for |d| <= 1; attained."""
    # L16.1 and L16.2: a quadratic form on the sphere beside its interval, a product beside its columns.
    one, other = random_numbers(draws, 3), random_numbers(draws, 3)
    noise = Noise.of(1, 3, one, squares=True)
    columns = torch.nn.functional.pad(products(one, other), (3, 0))[None, None]
    shift, rest = rest_of(Form(noise, torch.zeros(1, 1).double(), columns, torch.zeros(1, 1).double()))
    # The largest and the least value of a product are on the two diagonals of its vectors.
    ends = torch.nn.functional.normalize(torch.stack([one, other]), dim=-1)
    for sign in (1, -1):
        point = torch.nn.functional.normalize(ends[0] + sign * ends[1], dim=0)
        value = (one @ point) * (other @ point)
        yield Trial(sign * value.item(), (sign * shift + rest).item(), floor=_TOLERANCE)
        matrix = symmetric(products(one, other), 3)
        yield Trial(abs(value.item()), abs((point @ matrix @ point).item()), floor=_TOLERANCE)


@CLAIMS.add("certified.bent", "L16", "lower", rounds=60)
def _bent(draws: Draws, index: int) -> Iterable[Trial]:
    """f(c + x + w) is within h of s y + q x^2 + m for |x| <= gamma, |w| <= rho; attained by ReLU."""
    grid = torch.linspace(-1, 1, 257).double()
    gamma, rho = draws.uniform(0.5, 1.0), 0.0
    c, power = draws.uniform(-0.2, 0.2) * gamma, 1.0
    if index % 2:
        rho, c, power = gamma * draws.uniform(2.0, 4.0), 8.0, 2.0

    def function(t: Tensor, power: float = power) -> Tensor:
        return torch.relu(t).pow(power)

    def slope(t: Tensor, power: float = power) -> Tensor:
        return power * torch.relu(t).pow(power - 1) * (t > 0)

    ends = torch.linspace(c - gamma - rho, c + gamma + rho, 17, dtype=torch.float64)
    if power == 1.0:
        ends = torch.tensor([c - gamma, 0.0, c + gamma], dtype=torch.float64)
    parts = torch.tensor([[c], [gamma], [rho]], dtype=torch.float64)
    s, q, m, h = parabola(ends[None], parts[0], (parts[1], parts[2]), function, slope)
    x, y = gamma * grid[:, None], c + gamma * grid[:, None] + rho * grid[::16]
    left = function(y) - s * y - q * x.square() - m
    yield Trial(left.amax().item(), h.item(), floor=_TOLERANCE)
    yield Trial(-left.amin().item(), h.item(), floor=_TOLERANCE)


@CLAIMS.add("certified.stretch", "L17", "lower", rounds=60)
def _stretch(draws: Draws, index: int) -> Iterable[Trial]:
    """Lines are below and above x/arsinh(x) on an interval; attained at its ends or in its middle."""
    # L17.2 on intervals where the function is convex, where it is concave, and on long ones across both.
    low = (0.9, 2.4, 0.0)[index % 3] + draws.uniform(0.0, 0.7)
    ends = torch.tensor([[low], [low + draws.uniform(0.1, 0.7) + 8 * (index % 3 == 2)]], dtype=torch.float64)
    below, above = lines_of_stretch(*ends)
    x = torch.lerp(ends[0], ends[1], torch.linspace(0, 1, 257, dtype=torch.float64))
    yield Trial(((below[0] * x + below[1]) / stretch(x)).amax().item(), 1.0, floor=_TOLERANCE)
    yield Trial((stretch(x) / (above[0] * x + above[1])).amax().item(), 1.0, floor=_TOLERANCE)


@CLAIMS.add("certified.backward", "L15", "lower")
def _backward(draws: Draws) -> Iterable[Trial]:
    """Rows times GCN and Propagation have the lower bounds of L15; attained by small balls."""
    # Rows times what graph encoders give a node, where it goes down steepest, beside its bound from below.
    edges = ring(_NODES)
    numbers = (2 * index + kind for index in draws.rounds(10) for kind in range(2))
    for index in numbers:
        encoder = _graph_encoder(draws, index)
        x, row, node = random_numbers(draws, _NODES, _FEATURES), random_numbers(draws, 1, 4), torch.tensor([0])
        basis, size = torch.eye(_FEATURES).double(), draws.logarithmic(_SMALL, 1.0) if index % 3 else _SMALL

        def output(change: Tensor, encoder: Any = encoder, x: Tensor = x, row: Tensor = row) -> Tensor:
            return row[0] @ encoder(x.index_add(0, torch.tensor([0]), change[None]), edges)[0]

        zero = torch.zeros(_FEATURES).double()
        slope = torch.autograd.functional.jacobian(output, zero)
        with torch.no_grad():
            branch = graph_branch(encoder, x, edges)
            branch.enclose(_ball(_FEATURES), node, node, basis[None], x.new_tensor([size]))
            nowhere = zero[None, None][:, :0]
            bound = improved(
                lambda bad, branch=branch, row=row: branch.below(0, row, bad), lambda found: found, nowhere
            ).least()[0]
            start = output(zero)
            lower = start - output(-size * torch.nn.functional.normalize(slope, dim=0))
        yield Trial(lower.item(), (start - bound[0]).item(), floor=_TOLERANCE * size)


@CLAIMS.add("certified.sharpened", "L15", "lower", rounds=30)
def _sharpened(draws: Draws, _: int) -> Iterable[Trial]:
    """Values before a GCN's second ReLU, with their first order or not, are within L15.3; attained with one unit."""
    # A node alone with one unit a layer, of which both first ReLUs switch, on a grid of all perturbations.
    alone, node, grid = torch.empty(2, 0, dtype=torch.int64), torch.tensor([0]), torch.linspace(-1, 1, 257).double()
    encoder, x = GCN(1, 1, 1, layers=3).double(), random_numbers(draws, 1, 1)
    with torch.no_grad():
        weights = [cast("nn.Linear", each).weight for each in encoder.convolutions]
        for each in weights:
            each.fill_(draws.uniform(0.5, 2.0) * (1 if draws.uniform(0.0, 1.0) < 0.5 else -1))
        first, second = weights[0].item(), weights[1].item()
        encoder.biases[0].fill_(draws.uniform(-0.3, 0.3) * abs(first) - first * x.item())
        encoder.biases[1].fill_(-draws.uniform(0.2, 0.6) * second * abs(first))
        branch = cast("Convolved", graph_branch(encoder, x, alone))
        branch.enclose(_ball(1), node, node, torch.ones(1, 1, 1).double(), x.new_ones(1))
        branch.sharpen(0)
        moved = cast("Convolved", graph_branch(encoder, x + grid[:, None], alone)).layers[1].before.squeeze(1)
        switch = branch.last[0].switches[1]
        off = (moved - grid * switch.gradient.squeeze() - switch.center).abs().amax()
        low, high = switch.between
    yield Trial(off.item(), switch.rest.item(), floor=_TOLERANCE)
    yield Trial((moved.amax() - low).item(), (high - low).item(), floor=_TOLERANCE)
    yield Trial((high - moved.amin()).item(), (high - low).item(), floor=_TOLERANCE)


class _Mixed(nn.Module):
    """Nodes mixed by products and sums, ReLU, and a number for each entry."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.mix, self.weight, self.bias = (
            random_numbers(draws, *size) for size in ((_NODES, _NODES), (_FEATURES, 4), (4,))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        before = torch.addmm(self.bias, self.mix @ x, self.weight)
        sums = torch.zeros_like(before).index_add_(0, edge_index[1], before[edge_index[0]] / 3)
        return torch.relu(before - sums) @ torch.diag(self.bias)


@CLAIMS.add("certified.traced", "L18", "lower", rounds=20)
def _traced(draws: Draws, _: int) -> Iterable[Trial]:
    """An encoder of linear maps and ReLU lies in what its operations are followed to; attained on a segment."""
    # A perturbation of one number, and the entry that is farthest from its linear part on a grid and at kinks.
    edges, node, grid = ring(_NODES), torch.tensor([0]), torch.linspace(-1, 1, 65).double()
    encoder, x = _Mixed(draws), random_numbers(draws, _NODES, _FEATURES)
    size = draws.logarithmic(0.1, 10.0)
    turn = torch.nn.functional.normalize(random_numbers(draws, _FEATURES, 1), dim=0)
    with torch.no_grad():
        found = TracedBranch(encoder, x, edges).enclose(_ball(1), node, node, turn[None], x.new_tensor([size]))
        # A ReLU turns where its enclosure, from the middle, has gone down by the box.
        kinks = (-(found.center - found.box * encoder.bias.sign()) / found.columns.squeeze(-1)).nan_to_num(0.0)
        places = torch.cat([grid, kinks.clamp(-1, 1).flatten()])
        truth = torch.stack([encoder(x.index_add(0, node, place * size * turn.T), edges)[0] for place in places])
        off = (truth - found.center - places[:, None] * found.columns[0].T).abs().amax(0)
        at = int((off / (found.box[0] + _TOLERANCE)).argmax())
    yield Trial(off[at].item(), found.box[0, at].item(), floor=_TOLERANCE)
