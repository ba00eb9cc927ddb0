r"""The graph branch on a ball of features of one node: L8.

**Propagation** of an MLP is linear in its start: the output of node i is :math:`\kappa\, \mathrm{MLP}(x_a)` plus a
constant,
:math:`\kappa` the entry (i, a) of the propagation matrix. A node apart from the moving one has a constant.

**GCN.** Where node a moves and node v is asked, layer l changes only within distance l of a and matters only within
distance L - l of v. Over these rows the change of the hidden state is an affine form: columns for the perturbation, and
one symbol for each ReLU that may switch (L1; others are linear on the ball). Rows share the symbols, as a convolution
mixes them. Symbols of different problems have nothing to do with each other, so they share numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from holonomy._shapes import Float, Int
from holonomy.layers import GCN, Propagation
from holonomy.ops.propagation import edge_list, normalised_edges, propagation
from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.backward import Switch, switched
from holonomy.theory.affine.arithmetic.entrywise import positive_power, relu_lines
from holonomy.theory.affine.arithmetic.forms import ROUNDING, UNIT, Form, Noise, constant
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.points import bias_of
from holonomy.theory.attention.projections import as_stated

# The most ReLUs of a layer that are bounded backwards, one by one.
_MOST_SHARPENED = 256
# How often they are: first with the same lines for all, then with lines for where each is least.
_SHARPENED = 2


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a linear map in float64."""
    as_stated(layer, nn.Linear)
    return cast("nn.Linear", layer).weight.double()


class GraphBranch(ABC):
    """A graph encoder at one input: what it gives all nodes, and one when another moves.

    ``reads`` are the weights that are multiplied with features: what is across them moves nothing.
    """

    result: Float[Tensor, "node entry"]
    reads: list[Float[Tensor, "row dim"]]

    @abstractmethod
    def enclose(
        self,
        noise: Noise,
        moving: Int[Tensor, " problem"],
        victim: Int[Tensor, " problem"],
        basis: Float[Tensor, "problem dim first"],
        radius: Float[Tensor, " problem"],
    ) -> Form:
        """The output of the victim; the perturbation is ``basis`` times the first group times the radius."""

    @abstractmethod
    def below(
        self, problem: int, rows: Float[Tensor, "class entry"], bad: Float[Tensor, "class point first"]
    ) -> Quadratic:
        """Rows times the output of a problem of the last enclosure, from below (L15), chosen for some points d."""

    def sharpen(self, problem: int) -> None:
        """Enclose the ReLUs of a problem of the last enclosure better, where that is possible."""
        del problem


class Absent(GraphBranch):
    """No graph encoder: zero, whatever moves."""

    def __init__(self, victim: Int[Tensor, " problem"], entries: int) -> None:
        self.result, self.reads = torch.zeros(int(victim.max()) + 1, entries).double(), list[Tensor]()

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """Zero."""
        del moving, basis, radius
        return constant(noise, self.result[victim])

    def below(self, problem: int, rows: Tensor, bad: Tensor) -> Quadratic:
        """Zero."""
        del problem
        zero = rows.new_zeros(len(rows), bad.shape[-1])
        return Quadratic.linear(zero.sum(-1), zero, zero.sum(-1))


class Propagated(GraphBranch):
    """A propagated MLP at one input: what enters its one layer of ReLUs is linear, and cannot be sharper."""

    def __init__(self, encoder: Propagation, x: Tensor, edge_index: Tensor | Graph) -> None:
        as_stated(encoder, Propagation)
        self.encoder, self.x, self.reads = encoder, x, [weight_of(encoder.first)]
        self.propagate = propagation(edge_index, len(x), x.dtype)
        self.start = self.mlp(x)
        self.result = self._propagated(self.start)

    def share(self, moving: Tensor, victim: Tensor) -> Tensor:
        """Entries of the propagation matrix, ``(problem, 1)``."""
        number = torch.arange(len(moving))
        one = torch.zeros(len(self.x), len(moving), dtype=self.x.dtype)
        one[moving, number] = 1
        return self._propagated(one)[victim, number][:, None]

    def mlp(self, x: Tensor) -> Tensor:
        """What is propagated."""
        first, second = self.encoder.first, self.encoder.second
        hidden = torch.relu(x @ weight_of(first).T + bias_of(first))
        return hidden @ weight_of(second).T + bias_of(second)

    def _propagated(self, start: Tensor) -> Tensor:
        result = start
        for _ in range(self.encoder.steps):
            result = torch.lerp(self.propagate(result), start, self.encoder.teleport)
        return result

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """MLP of one node, times a number."""
        first, second = self.encoder.first, self.encoder.second
        share = self.share(moving, victim)
        center = self.x[moving] @ weight_of(first).T + bias_of(first)
        columns = (weight_of(first) @ basis) * radius[:, None, None]
        loss = ROUNDING * (self.x[moving].abs() @ weight_of(first).abs().T + bias_of(first).abs())
        loss = loss + ROUNDING * columns.abs().sum(-1)
        self.last = share, center, columns, loss, self.result[victim]
        hidden = positive_power(Form(noise, center, columns, loss), 1.0)
        rest = self.result[victim] - share * self.start[moving]
        return hidden.linear(weight_of(second), bias_of(second)) * share + constant(noise, rest)

    def below(self, problem: int, rows: Tensor, bad: Tensor) -> Quadratic:
        """One layer of ReLUs of the node that moves."""
        share, center, columns, loss, result = (part[problem] for part in self.last)
        weight = weight_of(self.encoder.second)
        switch = Switch.of(center[None], center[None], columns[None], loss[None])
        found, asked = switched(switch, ((rows @ weight) * share)[:, None], bad)
        size = rows.abs() @ (result.abs() + weight.abs() @ (switch.sizes[0] + columns.abs().sum(-1)) * share.abs())
        loss = 2 * UNIT * (sum(weight.shape) + 16) * size
        return found.plus(Quadratic.linear(rows @ result, asked[:, 0] @ columns, loss))


@dataclass(frozen=True)
class _Layer:
    """A convolution: its maps, and what it gives all nodes before the ReLU."""

    weight: Tensor
    skip: Tensor | None
    before: Tensor


@dataclass(frozen=True)
class _Step:
    """A layer between the rows that matter: their numbers, and shares of the rows before."""

    # ``stays`` are those that mattered before, too, and ``places`` where they were.

    rows: Tensor
    shares: Tensor
    stays: Tensor
    places: Tensor


@dataclass(frozen=True)
class _Last:
    """One problem of an enclosure: its victim, perturbation and rows, and its values before each ReLU."""

    # ``sizes`` are those of the numbers that a backward bound adds up, for each unit that is asked of a convolution's
    # change, ``unit`` their rounding; ``sharp`` says that L15.3 was used.

    victim: int
    basis: Tensor
    steps: list[_Step]
    switches: list[Switch]
    sizes: list[Tensor]
    unit: float
    sharp: bool = False


class Convolved(GraphBranch):
    """A GCN at one input: the values before each ReLU, and the rows that matter of each pair of nodes asked for."""

    def __init__(self, encoder: GCN, x: Tensor, edge_index: Tensor | Graph) -> None:
        as_stated(encoder, GCN)
        self.x = x
        self.edges = source, target, weight = normalised_edges(edge_list(edge_index), len(x), x.dtype)
        order = target.argsort(stable=True)
        start = torch.nn.functional.pad(target.bincount(minlength=len(x)).cumsum(0), (1, 0))
        # The edges into each node, one node after the other.
        self.into = start, source[order], weight[order]
        propagate = propagation(edge_index, len(x), x.dtype)
        self.layers: list[_Layer] = []
        hidden, last = x, len(encoder.convolutions) - 1
        for i, (convolution, bias) in enumerate(zip(encoder.convolutions, encoder.biases, strict=True)):
            weight, skip = weight_of(convolution), None
            before = propagate(convolution(hidden)) + bias.double()
            if encoder.residual:
                layer = encoder.skips[i]
                skip = torch.eye(len(weight)).double() if isinstance(layer, nn.Identity) else weight_of(layer)
                before = before + layer(hidden)
            self.layers.append(_Layer(weight, skip, before))
            hidden = before if i == last else torch.relu(before)
        self.result, first = hidden, self.layers[0]
        self.reads = [first.weight] if first.skip is None else [first.weight, first.skip]
        self.known: dict[tuple[int, int], list[_Step] | None] = {}

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """Problem by problem, as each has rows of its own."""
        output = self.result[victim]
        self.last: list[_Last] = []
        found = [
            self._one(a, v, basis[i] * radius[i], output.shape[1])
            for i, (a, v) in enumerate(zip(moving.tolist(), victim.tolist(), strict=True))
        ]
        first = basis.shape[-1]
        start = noise.new(max(columns.shape[-1] for _, columns, _ in found) - first, ball=False)
        columns = output.new_zeros(len(found), output.shape[1], noise.size)
        for i, (_, each, _) in enumerate(found):
            columns[i, :, :first] = each[:, :first]
            columns[i, :, start : start + each.shape[1] - first] = each[:, first:]
        shift, box = torch.stack([shift for shift, _, _ in found]), torch.stack([box for _, _, box in found])
        return Form(noise, output + shift, columns, box)

    def _one(self, moving: int, victim: int, basis: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        steps = self.steps(moving, victim)
        first = basis.shape[1]
        terms = sum(sum(layer.weight.shape) + 16 for layer in self.layers)
        terms = terms + sum(sum(step.shares.shape) for step in steps or [])
        last = _Last(victim, basis, steps or [], [], [], 2 * UNIT * terms)
        self.last.append(last)
        if steps is None:
            zero = basis.new_zeros(entries)
            return zero, basis.new_zeros(entries, first), zero
        # Changes of the rows that matter: shift (row, entry), columns (row, entry, column).
        shift, columns = basis.new_zeros(1, len(basis)), basis[None]
        box, size = torch.zeros_like(shift), basis.abs().sum(-1)[None]
        for i, (layer, step) in enumerate(zip(self.layers, steps, strict=True)):
            shift, columns, box = _convolve(layer, step, shift, columns, box)
            last.sizes.append(_sized(layer, step, size))
            if i < len(self.layers) - 1:
                rest = columns[..., first:].abs().sum(-1) + box
                before = layer.before[step.rows]
                switch = Switch.of(before, before + shift, columns[..., :first], rest)
                last.switches.append(switch)
                size = last.sizes[-1] + switch.sizes
                shift, columns, box = _switch(before, shift, columns, box, first)
        return shift[0], columns[0], box[0]

    def below(self, problem: int, rows: Tensor, bad: Tensor) -> Quadratic:
        """Layer by layer backwards over the rows that matter."""
        last = self.last[problem]
        result = self.result[last.victim]
        zero = rows.new_zeros(len(rows), last.basis.shape[1])
        found = Quadratic.linear(rows @ result, zero, last.unit * (rows.abs() @ result.abs()))
        return found.plus(self._backwards(last, len(self.layers) - 1, rows[:, None], bad)) if last.steps else found

    def _backwards(self, last: _Last, layer: int, asked: Tensor, bad: Tensor) -> Quadratic:
        """What is asked of the change of a layer's values before its ReLU, from below."""
        found: Quadratic | None = None
        loss = last.unit * (asked.abs().flatten(1) @ last.sizes[layer].flatten())
        for i in reversed(range(layer + 1)):
            asked = _asked(self.layers[i], last.steps[i], asked)
            if i:
                part, asked = switched(last.switches[i - 1], asked, bad)
                found = part if found is None else found.plus(part)
        start = Quadratic.linear(0 * loss, asked[:, 0] @ last.basis, loss)
        return start if found is None else found.plus(start)

    def sharpen(self, problem: int) -> None:
        """From the second layer on each ReLU that may switch is bounded backwards, too (L15.3), if none was yet."""
        last = self.last[problem]
        units = [len(switch.entries) for switch in last.switches[1:]]
        if last.sharp or not 0 < max(units, default=0) <= _MOST_SHARPENED:
            return
        switches = last.switches[:1]
        for number, switch in enumerate(last.switches[1:], 1):
            known, sharper = replace(last, switches=switches), switch
            where = switch.gradient.new_zeros(1, 0, last.basis.shape[1])
            for _ in range(_SHARPENED):
                if len(sharper.entries):
                    sharper, where = self._sharpened(known, number, sharper, where)
            switches.append(sharper)
        self.last[problem] = replace(last, switches=switches, sharp=True)

    def _sharpened(self, last: _Last, layer: int, switch: Switch, bad: Tensor) -> tuple[Switch, Tensor]:
        """The values before a layer's ReLU and their negatives from below; and where those that may switch are least.

        Lines are chosen for some points d of each; without any, for all of them alike.
        """
        count, before = len(switch.entries), switch.before.flatten()
        signs = before.new_tensor((1.0, -1.0)).repeat_interleave(count)
        rows = before.new_zeros(2 * count, len(before))
        rows[torch.arange(2 * count), switch.entries.repeat(2)] = signs
        rows = rows.unflatten(1, switch.before.shape)
        gradient, nominal = switch.gradient.repeat(2, 1) * signs[:, None], before[switch.entries].repeat(2) * signs
        loss = last.unit * (nominal.abs() + switch.reached.repeat(2))
        found = self._backwards(last, layer, rows, bad)
        value, where = found.plus(Quadratic.linear(nominal, 0 * gradient, loss)).least()
        rest, _ = found.plus(Quadratic.linear(nominal, -gradient, loss)).least()
        sharper = switch.within(rest.view(2, count), value.view(2, count))
        some = torch.isin(switch.entries, sharper.entries)
        return sharper, where[some.repeat(2), None]

    def steps(self, moving: int, victim: int) -> list[_Step] | None:
        """The rows that matter layer by layer; None where the victim is too far away."""
        if (moving, victim) not in self.known:
            self.known[moving, victim] = self._planned(moving, victim)
        return self.known[moving, victim]

    def _planned(self, moving: int, victim: int) -> list[_Step] | None:
        source, target, weight = self.edges
        depth = len(self.layers)
        changed = [torch.arange(len(self.x)) == moving]
        wanted = [torch.arange(len(self.x)) == victim]
        for _ in range(depth):
            ahead = changed[-1].clone()
            ahead[target[changed[-1][source]]] = True
            changed.append(ahead)
            behind = wanted[-1].clone()
            behind[source[wanted[-1][target]]] = True
            wanted.append(behind)
        if not bool(changed[depth][victim]):
            return None
        rows = [(changed[i] & wanted[depth - i]).nonzero().squeeze(1) for i in range(depth + 1)]
        place = torch.full((len(self.x),), -1)
        steps = []
        for before, after in pairwise(rows):
            place.fill_(-1)
            place[before] = torch.arange(len(before))
            into = torch.full_like(place, -1)
            into[after] = torch.arange(len(after))
            some = (place[source] >= 0) & (into[target] >= 0)
            shares = weight.new_zeros(len(after), len(before))
            shares.index_put_((into[target[some]], place[source[some]]), weight[some], accumulate=True)
            stays = (place[after] >= 0).nonzero().squeeze(1)
            steps.append(_Step(after, shares, stays, place[after][stays]))
        return steps


def _convolve(layer: _Layer, step: _Step, shift: Tensor, columns: Tensor, box: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A convolution of changes; the bias and the rows that stay drop out."""
    mass = shift.abs() + columns.abs().sum(-1) + box
    new_shift, new_columns = _mixed(step, shift) @ layer.weight.T, layer.weight @ _mixed(step, columns)
    if layer.skip is not None:
        new_shift = new_shift.index_add(0, step.stays, shift[step.places] @ layer.skip.T)
        new_columns = new_columns.index_add(0, step.stays, layer.skip @ columns[step.places])
    new_box, moved = (_sized(layer, step, part) for part in (box, mass))
    return new_shift, new_columns, new_box * (1 + ROUNDING) + ROUNDING * (1 + len(layer.weight)) * moved


def _mixed(step: _Step, part: Tensor) -> Tensor:
    return (step.shares @ part.reshape(len(part), -1)).reshape(-1, *part.shape[1:])


def _sized(layer: _Layer, step: _Step, size: Tensor) -> Tensor:
    """A convolution of numbers that are not negative, with absolute weights."""
    found = (step.shares.abs() @ size) @ layer.weight.abs().T
    return found if layer.skip is None else found.index_add(0, step.stays, size[step.places] @ layer.skip.abs().T)


def _asked(layer: _Layer, step: _Step, asked: Tensor) -> Tensor:
    """What is asked of the changes before a convolution."""
    found = step.shares.T @ (asked @ layer.weight)
    return found if layer.skip is None else found.index_add(1, step.places, asked[:, step.stays] @ layer.skip)


def _switch(before: Tensor, shift: Tensor, columns: Tensor, box: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """ReLU (L1) of a nominal value plus a change, as a change of the nominal result; one symbol where it may switch."""
    radius = (columns[..., :first].norm(dim=-1) + columns[..., first:].abs().sum(-1)) * (1 + ROUNDING) + box
    center = before + shift
    slope, half, crossing = relu_lines(center, radius)
    new = slope * center + half - torch.relu(before)
    half = half + torch.where(crossing, ROUNDING * (center.abs() + radius), 0.0)
    which = crossing.flatten().nonzero().squeeze(1)
    symbols = columns.new_zeros(crossing.numel(), len(which))
    symbols[which, torch.arange(len(which))] = half.flatten()[which]
    columns = torch.cat([columns * slope[..., None], symbols.reshape(*crossing.shape, -1)], dim=-1)
    return new, columns, box * slope + ROUNDING * (center.abs() + radius)
