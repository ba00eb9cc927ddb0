r"""The graph branch when the features of all nodes move: L13.

**Propagation** gives node i :math:`\sum_j \pi_{ij} \mathrm{MLP}(x_j)`, so that each node's change is enclosed by itself
(L1) and the changes are summed (L10).

**GCN**, backwards from node i (as CROWN does): the output is linear in the last hidden values, these lie in
:math:`s z + m + [-h, h]` of their pre-activations z (L1), which are linear in the hidden values before, and so on down
to the features. What is left is exact for the units whose sign is known, and one symbol for each other unit.

The range of a pre-activation comes from norms: if row u of layer l moves by at most :math:`\sum_j N^l_{uj} |\delta_j|`,
row u of the next by at most :math:`\sum_j (|W|\, |\hat A| N^l + |V| N^l)_{uj} |\delta_j|`, V the skip, as ReLU is
1-Lipschitz, and unit k before its ReLU by the same with the k-th rows of W and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomy.theory.affine.arithmetic.ellipsoids import Threat, merged, weighted, with_first
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Noise, constant, linear, spread, with_ball, with_box
from holonomy.theory.affine.graph import Convolved, GraphBranch, Propagated, weight_of
from holonomy.theory.affine.points import bias_of

if TYPE_CHECKING:
    from jaxtyping import Float

# Relative; more than rounding takes from sums over all rows.
_SLACK = 2.0**-40


@singledispatch
def enclose_all(
    branch: GraphBranch, noise: Noise, victim: int, basis: Float[Tensor, "dim first"], radius: float, threat: Threat
) -> Form:
    """The output of the victim; what is read of each perturbation is ``basis`` times its group and the radius."""
    raise NotImplementedError


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
    found = merged(linear(hidden, weight_of(second), bias_of(second)))
    middle = branch.result[victim] + (share * (found.center - branch.start)).sum(0)
    images = share[..., None] * (found.first @ basis)
    form = with_first(constant(noise, middle[None]), images[None], threat)
    form = with_ball(form, weighted(share.T.abs(), found.rest[None]))
    return with_box(form, _SLACK * (branch.result.abs().amax() + spread(form)))


@dataclass(frozen=True)
class _Units:
    """What a layer's ReLU does on the ball, as a change: slope, middle, half, for each row and unit."""

    slope: Tensor
    middle: Tensor
    half: Tensor


@enclose_all.register
def _(branch: Convolved, noise: Noise, victim: int, basis: Tensor, radius: float, threat: Threat) -> Form:
    units = _units(branch, radius, threat)
    output = branch.layers[-1].before[victim]
    # How the victim's output depends on the values of each row, (row, output, unit).
    back = output.new_zeros(len(branch.x), len(output), len(output))
    back[victim] = torch.eye(len(output)).double()
    middle, symbols = output.clone(), [output.new_zeros(len(output), 0)]
    for number in reversed(range(len(branch.layers))):
        back = _before(branch, number, back)
        if number:
            unit = units[number - 1]
            middle = middle + torch.einsum("nou,nu->o", back, unit.middle)
            some = (unit.half > 0) & (back.abs().amax(1) > 0)
            symbols.append((back.transpose(1, 2)[some] * unit.half[some][:, None]).T)
            back = back * unit.slope[:, None]
    form = with_first(constant(noise, middle[None]), (back @ basis * radius)[None], threat)
    extra = torch.cat(symbols, -1)
    start = noise.new(extra.shape[1], ball=False)
    wide = torch.nn.functional.pad(form.columns, (0, start - form.columns.shape[-1]))
    form = Form(noise, form.center, torch.cat([wide, extra[None]], -1), form.box)
    return with_box(form, _SLACK * (output.abs() + spread(form)))


def _before(branch: Convolved, number: int, back: Tensor) -> Tensor:
    """Through a convolution, from its output to its input."""
    layer, (source, target, weight) = branch.layers[number], branch.edges
    live = back.abs().amax((1, 2)) > 0
    some = live[target]
    through = back @ layer.weight
    found = torch.zeros_like(through).index_add(0, source[some], weight[some][:, None, None] * through[target[some]])
    return found if layer.skip is None else found + back @ layer.skip


def _units(branch: Convolved, radius: float, threat: Threat) -> list[_Units]:
    source, target, weight = branch.edges
    count = len(branch.x)
    adjacency = torch.zeros(count, count).double().index_put((target, source), weight.abs(), accumulate=True)
    norms, found = torch.eye(count).double(), []
    for layer in branch.layers[:-1]:
        mixed = adjacency @ norms
        size = layer.weight.norm(dim=1) * _pooled(mixed, threat)
        if layer.skip is not None:
            size = size + layer.skip.norm(dim=1) * _pooled(norms, threat)
        found.append(_relaxed(layer.before, size * (radius * (1 + ROUNDING))))
        norms = mixed * torch.linalg.matrix_norm(layer.weight, 2) + (
            0.0 if layer.skip is None else norms * torch.linalg.matrix_norm(layer.skip, 2)
        )
    return found


def _pooled(norms: Tensor, threat: Threat) -> Tensor:
    """The largest sum of norms times changes of rows, for changes of length one in all or one each."""
    return (norms.norm(dim=1) if threat == "frobenius" else norms.sum(1))[:, None] * (1 + _SLACK)


def _relaxed(center: Tensor, radius: Tensor) -> _Units:
    """L1 for ReLU, as a change of its value at the centre."""
    lower, upper = center - radius, center + radius
    crossing = (lower < 0) & (upper > 0)
    slope = torch.where(crossing, upper / torch.where(crossing, upper - lower, 1.0), (upper > 0).double()).clamp(0, 1)
    half = torch.where(crossing, torch.maximum(-slope * lower, (1 - slope) * upper) / 2, 0.0)
    middle = slope * center + half - torch.relu(center)
    loss = torch.where(crossing, ROUNDING * (center.abs() + radius), 0.0)
    return _Units(slope, torch.where(crossing, middle, 0.0), half + loss)
