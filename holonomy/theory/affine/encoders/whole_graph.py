r"""The graph branch when the features of all nodes move: L13.

**Propagation** gives node i :math:`\sum_j \pi_{ij} \mathrm{MLP}(x_j)`, so that each node's change is enclosed by itself
(L1) and the changes are summed (L10).

**GCN**, backwards from node i (as CROWN does): the output is linear in the last hidden values, these lie in
:math:`s z + m + [-h, h]` of their pre-activations z (L1), which are linear in the hidden values before, and so on down
to the features. What is left is exact for the units whose sign is known, and one symbol for each other unit.

The range of each pre-activation that matters is found in the same way, layer by layer from the first on, backwards
from its own node: it depends on nodes within as many edges as there are layers below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float, Int
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, merged, weighted, with_first
from holonomy.theory.affine.arithmetic.entrywise import positive_power, relu_lines
from holonomy.theory.affine.arithmetic.forms import ROUNDING, UNIT, Form, Noise, constant
from holonomy.theory.affine.encoders.graph import Convolved, GraphBranch, Propagated, weight_of
from holonomy.theory.affine.points import bias_of

# Relative; more than rounding takes from sums over all rows.
_SLACK = 2.0**-40
# Nodes whose ranges are looked for side by side.
_TOGETHER = 16


@singledispatch
def enclose_all(
    branch: GraphBranch, noise: Noise, victim: int, basis: Float[Tensor, "dim first"], radius: float, threat: Threat
) -> Form:
    """The output of the victim; what is read of each perturbation is ``basis`` times its group and the radius."""
    del noise, victim, basis, radius, threat
    raise NotImplementedError(type(branch))


@enclose_all.register
def _(branch: Propagated, noise: Noise, victim: int, basis: Tensor, radius: float, threat: Threat) -> Form:
    first, second = branch.encoder.first, branch.encoder.second
    weight, bias = weight_of(first), bias_of(first)
    count = len(branch.x)
    everyone = torch.arange(count)
    share = branch.share(everyone, torch.full_like(everyone, victim))
    columns = (weight * radius).expand(count, -1, -1)
    loss = ROUNDING * (branch.x.abs() @ weight.abs().T + bias.abs())
    center = branch.x @ weight.T + bias
    hidden = positive_power(Form(Noise.of(count, weight.shape[1], branch.x), center, columns, loss), 1.0)
    found = merged(hidden.linear(weight_of(second), bias_of(second)))
    middle = branch.result[victim] + (share * (found.center - branch.start)).sum(0)
    images = share[..., None] * (found.first @ basis)
    form = with_first(constant(noise, middle[None]), images[None], threat)
    form = form.with_ball(weighted(share.T.abs(), found.rest[None]))
    return form.with_box(_SLACK * (branch.result.abs().amax() + form.spread()))


@dataclass(frozen=True)
class _Units:
    """What a layer's ReLU does on the ball, as a change: slope, middle, half, for each row and unit."""

    slope: Tensor
    middle: Tensor
    half: Tensor


@dataclass(frozen=True)
class _Asked:
    """How values of some nodes depend on changes of others: one row for each pair; sums of absolute terms beside it."""

    owner: Int[Tensor, " pair"]
    node: Int[Tensor, " pair"]
    values: Float[Tensor, "pair value entry"]
    mass: Float[Tensor, "pair value entry"]

    def total(self, part: Float[Tensor, "pair value"], owners: int) -> Float[Tensor, "owner value"]:
        """Sums over the pairs of each owner."""
        return part.new_zeros(owners, part.shape[1]).index_add(0, self.owner, part)


@enclose_all.register
def _(branch: Convolved, noise: Noise, victim: int, basis: Tensor, radius: float, threat: Threat) -> Form:
    output, rows = branch.layers[-1].before[victim], torch.tensor([victim])
    units = _units(branch, rows, radius, threat)
    asked, middle, parts = _backwards(branch, len(branch.layers) - 1, rows, units)
    images = output.new_zeros(len(branch.x), *asked.values.shape[1:]).index_copy(0, asked.node, asked.values)
    form = with_first(constant(noise, output[None] + middle), (images @ basis * radius)[None], threat)
    symbols = [part.values.transpose(1, 2)[part.values.abs().amax(1) > 0].T for part in parts]
    extra = torch.cat([output.new_zeros(len(output), 0), *symbols], -1)
    form = form.with_group(extra[None], ball=False)
    return form.with_box(output.abs() * _unit(branch) + _rounding(branch, asked, parts, radius))


def _backwards(
    branch: Convolved, number: int, rows: Int[Tensor, " owner"], units: list[_Units]
) -> tuple[_Asked, Float[Tensor, "owner value"], list[_Asked]]:
    """The values of some rows before a layer's ReLU: what they ask of features, a number, and of each unit's half."""
    eye, parts = torch.eye(branch.layers[number].before.shape[1]).double(), list[_Asked]()
    asked = _Asked(torch.arange(len(rows)), rows, eye.expand(len(rows), -1, -1), eye.expand(len(rows), -1, -1))
    middle = eye.new_zeros(len(rows), len(eye))
    for below in reversed(range(number + 1)):
        asked = _before(branch, below, asked)
        if below:
            slope, center, half = (part[asked.node][:, None] for part in vars(units[below - 1]).values())
            middle = middle + asked.total((asked.values * center).sum(-1), len(rows))
            parts.append(replace(asked, values=asked.values * half, mass=asked.mass * (center.abs() + half)))
            asked = replace(asked, values=asked.values * slope, mass=asked.mass * slope)
    return asked, middle, parts


def _before(branch: Convolved, number: int, asked: _Asked) -> _Asked:
    """Through a convolution, from its output to its input."""
    layer, (start, source, weight) = branch.layers[number], branch.into
    count = start[asked.node + 1] - start[asked.node]
    pair = torch.arange(len(count)).repeat_interleave(count)
    edge = torch.arange(len(pair)) + (start[asked.node] - count.cumsum(0) + count).repeat_interleave(count)
    owner, node, share = asked.owner[pair], source[edge], weight[edge][:, None, None]
    if layer.skip is not None:
        owner, node = torch.cat([owner, asked.owner]), torch.cat([node, asked.node])
    places, place = torch.unique(owner * len(branch.x) + node, return_inverse=True)

    def back(part: Tensor, share: Tensor, weight: Tensor, skip: Tensor | None) -> Tensor:
        found = part.new_zeros(len(places), part.shape[1], weight.shape[1])
        found = found.index_add(0, place[: len(pair)], share * (part @ weight)[pair])
        return found if skip is None else found.index_add(0, place[len(pair) :], part @ skip)

    skip = None if layer.skip is None else layer.skip.abs()
    mass = back(asked.mass, share.abs(), layer.weight.abs(), skip)
    values = back(asked.values, share, layer.weight, layer.skip)
    return _Asked(places // len(branch.x), places % len(branch.x), values, mass)


def _units(branch: Convolved, rows: Tensor, radius: float, threat: Threat) -> list[_Units]:
    """Those of all rows that the given ones depend on."""
    start, source, _ = branch.into
    target = torch.arange(len(branch.x)).repeat_interleave(start.diff())
    live = torch.zeros(len(branch.x), dtype=torch.bool).index_fill(0, rows, value=True)
    needed = list[Tensor]()
    for _ in branch.layers[1:]:
        live = live.index_fill(0, source[live[target]], value=True)
        needed.append(live.nonzero().squeeze(1))
    found = list[_Units]()
    for number, some in enumerate(reversed(needed)):
        before = branch.layers[number].before
        ranges = [_range(branch, number, each, found, radius, threat) for each in some.split(_TOGETHER)]
        middle, reach = (
            torch.zeros_like(before).index_copy(0, some, torch.cat(part)) for part in zip(*ranges, strict=True)
        )
        found.append(_relaxed(before, before + middle, reach))
    return found


def _range(
    branch: Convolved, number: int, rows: Tensor, units: list[_Units], radius: float, threat: Threat
) -> tuple[Float[Tensor, "owner value"], Float[Tensor, "owner value"]]:
    """Middle and reach of the changes of some rows before a layer's ReLU."""
    asked, middle, parts = _backwards(branch, number, rows, units)
    sizes = asked.values.norm(dim=-1)
    if threat == "frobenius":
        moved = numerics.root(asked.total(sizes.square(), len(rows)))
    else:
        moved = asked.total(sizes, len(rows))
    moved = moved * (radius * (1 + _unit(branch))) + _rounding(branch, asked, parts, radius, len(rows))
    return middle, sum((part.total(part.values.abs().sum(-1), len(rows)) for part in parts), moved)


def _rounding(
    branch: Convolved, asked: _Asked, parts: list[_Asked], radius: float, owners: int = 1
) -> Float[Tensor, "owner value"]:
    """What sums over all pairs may lose."""
    size = asked.total(asked.mass.sum(-1), owners) * radius
    return _unit(branch) * sum((part.total(part.mass.sum(-1), owners) for part in parts), size)


def _unit(branch: Convolved) -> float:
    """The rounding of a backward bound and of a sum over all nodes, relative to the absolute terms."""
    degree = int(branch.into[0].diff().max())
    terms = sum(sum(layer.weight.shape) + degree + 16 for layer in branch.layers)
    return 2 * UNIT * (terms + len(branch.x))


def _relaxed(nominal: Tensor, center: Tensor, radius: Tensor) -> _Units:
    """L1 for ReLU, as a change of its nominal value."""
    slope, half, crossing = relu_lines(center, radius)
    middle = slope * nominal + half - torch.relu(nominal)
    return _Units(slope, middle, half + torch.where(crossing, ROUNDING * (center.abs() + radius), 0.0))
