r"""Linear attention some rows at a time, with what the way back needs computed again but for |P| of keys and values.

A part is some rows of one graph. Channels come first, ``(heads, channels, rows)``: sums over channels run along
contiguous rows. With e a row of a projection after ReLU, m its largest entry, :math:`s = e/m`, :math:`P = s^p`,

.. math:: \phi(e) = m \frac{|s|}{|P|} P, \qquad
    \frac{\partial}{\partial e}(g \cdot \phi) = \frac{g \cdot P}{|P|} \frac{s}{|s|}
        + p \frac{|s|}{|P|} s^{p-1} \odot \Bigl(g - \frac{g \cdot P}{|P|^2} P\Bigr).

Forward, the first pass over parts gathers :math:`S = \sum_j K_j (V_j, 1)` and writes the residual of the values, the
second adds the averages :math:`Q S_v / Q S_1`, for which P itself will do as Q. A common factor of the keys cancels, so
that they are divided by their largest entry so far, and S with them when it grows. Backward, with G the gradient of
the space part, the first pass turns :math:`B = S_v G^\top` into the gradients of the queries and of S, the second
takes the latter to keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds import hyperboloid
from holonomy.ops.linear_attention.reference import SHARE
from holonomy.ops.lorentz.lifted import curvature_gradient, space_gradient


class Options(NamedTuple):
    """The arguments that are no tensors."""

    heads: int  # number of heads
    power: float  # the exponent of the feature map
    rows: int  # how many are computed at once
    reference: Callable[..., Tensor]  # what is differentiated where gradients of gradients are wanted


class _Maps(NamedTuple):
    weight: Tensor
    bias: Tensor
    residual_weight: Tensor
    residual_bias: Tensor
    curvature: Tensor | None


class _Features:
    """The feature map of projections ``(heads, channels, rows)``, which are overwritten."""

    def __init__(self, projected: Tensor, power: float) -> None:
        self.power = power
        positive = projected.clamp_(min=0)
        # In rows without a positive entry all is zero, whatever they are divided by.
        self.largest = numerics.positive(positive.amax(1, keepdim=True))
        self.scaled = positive.div_(self.largest)
        self.powered = self.scaled.square() if power == 2 else self.scaled.pow(power)

    def measure(self, sharpened: Tensor, *, known: bool) -> None:
        """Lengths of s and P, at least one where a row is not zero; the latter are written, or known."""
        squares = self.powered if self.power == 2 else self.scaled.square()
        self.length = squares.sum(1, keepdim=True).sqrt_().clamp_(min=0.5)
        if not known:
            torch.sum(self.powered.square(), 1, keepdim=True, out=sharpened).sqrt_().clamp_(min=0.5)
        self.sharpened = sharpened
        self.factor = numerics.finite(self.largest * self.length) / self.sharpened

    def slope(self) -> Tensor:
        """s^(p-1)."""
        if self.power == 2:
            return self.scaled
        return self.scaled.sign() if self.power == 1 else self.scaled.pow(self.power - 1)

    def direction_gradient(self, grad: Tensor) -> Tensor:
        """Of e, from a gradient of P that is orthogonal to P but for rounding, which small rows would magnify."""
        radial = (grad * self.powered).sum(1, keepdim=True) / self.powered.square().sum(1, keepdim=True).clamp_(min=0.5)
        across = grad.addcmul_(self.powered, radial, value=-1)
        return _held(across.mul_(self.slope()).mul_(numerics.finite(self.power / self.largest)))

    def gradient(self, grad: Tensor) -> Tensor:
        """Of e, from the gradient of the features."""
        radial = (grad * self.powered).sum(1, keepdim=True) / self.sharpened
        across = self.power * self.length / self.sharpened
        inside = grad.mul_(across).addcmul_(self.powered, radial * across / self.sharpened, value=-1)
        if self.power == 2:
            return inside.add_(radial / self.length).mul_(self.scaled)
        return inside.mul_(self.slope()).addcmul_(self.scaled, radial / self.length)


def _held(grad: Tensor) -> Tensor:
    """A gradient, in place, where sums over channels stay in the range: those of short rows are long."""
    limit = SHARE * torch.finfo(grad.dtype).max
    return grad.clamp_(-limit, limit)


class _Graph:
    """One graph ``(nodes, inputs)`` of a call, the maps, and its sums over keys."""

    def __init__(
        self, x: Tensor, mask: Tensor | None, maps: _Maps, options: Options, sharpened: Tensor, *, known: bool
    ) -> None:
        self.sharpened, self.known = sharpened, known
        self.x, self.mask, self.options = x, mask, options
        self.weight, self.bias, self.residual_weight, self.residual_bias, self.curvature = maps
        self.dim = self.residual_bias.shape[0]
        self.channels = self.dim // options.heads
        self.context = x.new_zeros(options.heads, self.channels, self.channels)
        self.mass = x.new_zeros(options.heads, self.channels, 1)
        self.largest = x.new_full((options.heads, 1, 1), torch.finfo(x.dtype).tiny)
        self.share = 1 / (x.shape[0] * self.channels)

    def parts(self) -> Iterator[slice]:
        for start in range(0, self.x.shape[0], self.options.rows):
            yield slice(start, start + self.options.rows)

    def keep(self, part: slice) -> Tensor | None:
        return None if self.mask is None else (~self.mask[part]).to(self.x.dtype)

    def features(self, part: slice, which: slice) -> _Features:
        projected = torch.addmm(self.bias[which, None], self.weight[which], self.x[part].t())
        return _Features(projected.view(-1, self.channels, projected.shape[1]), self.options.power)

    def queries(self, part: slice) -> tuple[_Features, Tensor]:
        """Features of queries up to their lengths, and one over the sum of the weights of each."""
        query = self.features(part, slice(self.dim))
        weights = self.mass.mT @ query.powered
        # The gradient has the square of the inverse, which must not overflow.
        alive = weights > math.sqrt(torch.finfo(weights.dtype).tiny)
        return query, alive / weights.masked_fill_(~alive, 1.0)

    def keys_and_values(self, part: slice) -> tuple[_Features, Tensor]:
        """Features of both, and the factors of the keys' that are left of their common scale: see ``measure``."""
        both = self.features(part, slice(self.dim, None))
        both.measure(self.sharpened[..., part], known=self.known)
        factor, keep = both.factor[: self.options.heads], self.keep(part)
        return both, factor if keep is None else factor * keep

    def scale(self) -> Tensor:
        """What keys are multiplied with: no sum over them exceeds one."""
        return self.share / self.largest

    def gather(self, key: Tensor, factor: Tensor, value: Tensor) -> None:
        """Add keys and values to the sums."""
        before = self.largest
        self.largest = torch.maximum(before, factor.amax(-1, keepdim=True))
        shrunk = before / self.largest
        key = key * (factor * self.scale())
        self.context.mul_(shrunk).baddbmm_(key, value.mT)
        self.mass.mul_(shrunk).add_(key.sum(-1, keepdim=True))


def _attend(graph: _Graph, out: Tensor) -> None:
    """Write the result ``(nodes, outputs)``."""
    heads, channels = graph.options.heads, graph.channels
    space = out[:, out.shape[1] - graph.dim :]
    for part in graph.parts():
        both, factor = graph.keys_and_values(part)
        value = both.powered[heads:] * both.factor[heads:]
        graph.gather(both.powered[:heads], factor, value)
        rows = value.view(graph.dim, -1).t()
        torch.addmm(graph.residual_bias, rows, graph.residual_weight.t(), out=space[part])
    for part in graph.parts():
        query, inverse = graph.queries(part)
        weights = query.powered.mul_(inverse)
        for head in range(heads):
            rows = space[part, head * channels : (head + 1) * channels]
            torch.addmm(rows, weights[head].t(), graph.context[head], out=rows)
        keep = graph.keep(part)
        if keep is not None:
            space[part].mul_(keep[:, None])
        if graph.curvature is not None:
            out[part, :1] = hyperboloid.time(space[part], graph.curvature)


class _Gradients:
    """Where the gradients of a call are gathered."""

    def __init__(self, x: Tensor, maps: _Maps) -> None:
        self.x = torch.empty_like(x)
        self.weight, self.bias, self.residual_weight, self.residual_bias = (torch.zeros_like(m) for m in maps[:4])
        self.curvature = x.new_zeros(())

    def through(self, graph: _Graph, x: Tensor, part: slice, which: slice, grad: Tensor, *, add: bool) -> None:
        """From projections ``(heads, channels, rows)`` to maps, and to rows of ``x``, where it is added or written."""
        grad = grad.flatten(0, 1)
        self.weight[which].addmm_(grad, graph.x[part])
        self.bias[which].add_(grad.sum(-1))
        torch.addmm(x[part], grad.t(), graph.weight[which], beta=int(add), out=x[part])


def _of_space(graph: _Graph, out: Tensor, grad: Tensor, part: slice) -> Tensor:
    """The gradient of the space part alone, from the one of time and space: eq. 18's root has the slope s / t."""
    rows = grad[part]
    if graph.curvature is not None:
        rows = space_gradient(rows, out[part])
    keep = graph.keep(part)
    return rows.contiguous() if keep is None else rows * keep[:, None]


def _return(graph: _Graph, out: Tensor, grad: Tensor, x: Tensor, found: _Gradients) -> None:
    """Write the gradient ``x`` of one graph, and add those of the maps."""
    heads, dim = graph.options.heads, graph.dim
    of_context, of_mass = torch.zeros_like(graph.context), torch.zeros_like(graph.mass)
    for part in graph.parts():
        by_head = _of_space(graph, out, grad, part).unflatten(-1, (heads, -1)).transpose(0, 1)
        query, inverse = graph.queries(part)
        pulled = graph.context @ by_head.mT
        weights = query.powered * inverse
        level = (weights * pulled).sum(1, keepdim=True)
        of_context.baddbmm_(weights, by_head)
        of_mass.baddbmm_(weights, level.mT, alpha=-1)
        pulled.addcmul_(graph.mass, level, value=-1).mul_(inverse)
        found.through(graph, x, part, slice(dim), query.direction_gradient(pulled), add=False)
    for part in graph.parts():
        rows = _of_space(graph, out, grad, part)
        both, factor = graph.keys_and_values(part)
        value = both.powered[heads:] * both.factor[heads:]
        flat = value.view(dim, -1)
        found.residual_weight.addmm_(rows.t(), flat.t())
        found.residual_bias.add_(rows.sum(0))
        of_features = torch.empty_like(both.powered)
        torch.mm(graph.residual_weight.t(), rows.t(), out=of_features[heads:].view_as(flat))
        of_features[heads:].baddbmm_(of_context.mT, both.powered[:heads] * (factor * graph.scale()))
        keep = graph.keep(part)
        common = graph.scale() if keep is None else graph.scale() * keep
        _held(torch.baddbmm(of_mass, of_context, value, out=of_features[:heads]).mul_(common))
        found.through(graph, x, part, slice(dim, None), both.gradient(of_features), add=True)
    if graph.curvature is not None:
        found.curvature += curvature_gradient(grad, out, graph.curvature).reshape(())


class RecomputedAttention(torch.autograd.Function):
    """The fast form of :func:`~holonomy.ops.linear_attention.linear_attention_block`."""

    @staticmethod
    def forward(x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        """Attend."""
        *tensors, options = inputs
        sharpened = x.new_empty(x.shape[0], 2 * options.heads, 1, x.shape[1])
        graphs = _graphs(x, tensors, options, sharpened, known=False)
        lifted = tensors[-1] is not None
        out = x.new_empty(*x.shape[:-1], graphs[0].dim + lifted)
        for graph, rows in zip(graphs, out, strict=True):
            _attend(graph, rows)
        context, mass, largest = zip(*((g.context, g.mass, g.largest) for g in graphs), strict=True)
        return out, torch.stack(context), torch.stack(mass), torch.stack(largest), sharpened

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the inputs, the result, and the sums over keys."""
        ctx.options = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:-1], *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by chunks, or by the reference where the gradient itself will be differentiated."""
        # The forward pass ran outside of autocast; this one may be asked for inside.
        with torch.autocast(_autograd.autocast_device(grad_outputs[0]), enabled=False):
            return _backward(ctx, grad_outputs[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs."""
    *inputs, out, context, mass, largest, sharpened = ctx.saved_tensors
    options: Options = ctx.options
    if _autograd.through_reference(grad):

        def reference(x: Tensor, mask: Tensor | None, *maps: Any) -> Tensor:
            return options.reference(x, *maps, mask, heads=options.heads, power=options.power)

        wanted = ctx.needs_input_grad[:-1]
        return *_autograd.reference_gradients(reference, tuple(inputs), grad, wanted), None
    x, *tensors = inputs
    found = _Gradients(x, _Maps(*tensors[1:]))
    for place, graph in enumerate(_graphs(x, tensors, options, sharpened, known=True)):
        graph.context, graph.mass, graph.largest = context[place], mass[place], largest[place]
        _return(graph, out[place], grad[place], found.x[place], found)
    of_curvature = None if tensors[-1] is None else found.curvature.view_as(tensors[-1])
    maps = (found.weight, found.bias, found.residual_weight, found.residual_bias)
    return found.x, None, *maps, of_curvature, None


def _graphs(x: Tensor, tensors: list[Any], options: Options, sharpened: Tensor, *, known: bool) -> list[_Graph]:
    mask, *maps = tensors
    masks = [None] * len(x) if mask is None else mask
    return [
        _Graph(one, hidden, _Maps(*maps), options, lengths, known=known)
        for one, hidden, lengths in zip(x, masks, sharpened, strict=True)
    ]
