"""Chromatic attention a few graphs at a time, with what the way back needs computed again (see ``kernels.chromatic``).

A part is some whole graphs, or some rows of one. Its buffers are made once and serve every part: what is written
stays in the cache. With A the filter before its division by its sum, U the messages :math:`V_j + E^{val}_{ij}`, G the
gradient of the result, the way back is

    B = A * G / sum,   dE^val = B,   dE = B * (U - out)

and head-wise terms are a product with the 0-1 matrix of channels and heads. With factors ``keep`` of the filters,
dE^val = B * keep and dE = B * (keep * U - out).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd

__all__ = ["Options", "RecomputedAttention"]


class Options(NamedTuple):
    """What is no tensor.

    Attributes:
        heads: number of heads.
        activation: of the additive form.
        chunk: entries of a buffer.
        definition: what is differentiated where gradients of gradients are wanted.
        one_tensor: whether edge values are made of the tensor that biases are made of.
    """

    heads: int
    activation: Callable[[Tensor], Tensor] | None
    chunk: int
    definition: Callable[..., Tensor]
    one_tensor: bool


class _Part(NamedTuple):
    graphs: slice
    rows: slice


def _parts(graphs: int, nodes: int, channels: int, chunk: int) -> Iterator[_Part]:
    row = nodes * channels
    together = max(1, chunk // (row * nodes))
    rows = nodes if together > 1 or chunk >= row * nodes else max(1, chunk // row)
    for graph in range(0, graphs, together):
        for start in range(0, nodes, rows):
            yield _Part(slice(graph, min(graph + together, graphs)), slice(start, min(start + rows, nodes)))


class _Workspace:
    """The tensors of a call, and the buffers that parts share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor,
        second: Tensor | None,
        bias_map: Tensor | None,
        value_map: Tensor | None,
        mask: Tensor | None,
        keep: Tensor | None,
        options: Options,
    ) -> None:
        self.dtype = query.dtype
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.first, self.second, self.mask, self.keep, self.options = first, second, mask, keep, options
        self.maps = tuple(None if m is None else m.to(self.dtype) for m in (bias_map, value_map))
        self.shape = query.shape
        self.scale = 1 / math.sqrt(query.shape[-1] // options.heads)
        self.query, self.key, self.value = (x.to(self.wide) for x in (query, key, value))
        self.hidden = None if mask is None else ~mask & mask.any(-1, keepdim=True)
        biases = first.shape[-1] if bias_map is None else bias_map.shape[0]
        self.filters = biases == query.shape[-1]
        width = query.shape[-1] // options.heads
        # Channels of a head: a product with it spreads a head's number, a product with its transpose sums channels.
        self.spread = torch.eye(options.heads, dtype=self.wide, device=query.device).repeat_interleave(width, 1)
        self.buffers: dict[str, Tensor] = {}

    def parts(self) -> Iterator[_Part]:
        graphs, nodes, channels = self.shape
        return _parts(graphs, nodes, channels, self.options.chunk)

    def buffer(self, name: str, like: Tensor, width: int) -> Tensor:
        """Rows of pairs, the first of which are ``like``'s; the first part is the largest."""
        pairs = like.shape[0]
        if name not in self.buffers:
            self.buffers[name] = torch.empty(pairs, width, dtype=self.wide, device=like.device)
        return self.buffers[name][:pairs]

    def pairs(self, edges: Tensor, part: _Part) -> Tensor:
        """Rows (pairs, features) of a part, with zeros where there is padding."""
        piece = edges[part.graphs, part.rows]
        if self.mask is not None:
            nodes = self.mask[part.graphs]
            piece = piece.masked_fill(~(nodes[:, part.rows, None] & nodes[:, None, :])[..., None], 0.0)
        return piece.flatten(0, 2)

    def source(self, name: str, rows: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows, or their products with a map, and a buffer to go on in: the same one where there is a map."""
        out = self.buffer(name, rows, rows.shape[1] if weight is None else weight.shape[0])
        if weight is None:
            return rows.to(self.wide), out
        if rows.dtype == self.dtype == self.wide:
            return torch.mm(rows, weight.t(), out=out), out
        return out.copy_(rows.to(self.dtype) @ weight.t()), out

    def logits(self, rows: Tensor, part: _Part) -> tuple[Tensor, Tensor | None]:
        """Logits of a part (pairs, channels or heads), and for the additive form what the activation was applied to."""
        graphs, nodes, channels = part.graphs, self.shape[1], self.shape[2]
        biases, out = self.source("bias", rows, self.maps[0])
        query, key = self.query[graphs, part.rows], self.key[graphs]
        hidden = None if self.hidden is None else self.hidden[graphs]
        if self.options.activation is None:
            q, k = (x.unflatten(-1, (self.options.heads, -1)).transpose(1, 2) for x in (query, key))
            products = (q * self.scale) @ k.mT
            if hidden is not None:
                # A finite number: in the product with zeros below, infinity would become nan.
                products = products.masked_fill(hidden[:, None, None, :], torch.finfo(self.wide).min / 2)
            products = products.permute(0, 2, 3, 1).reshape(-1, self.options.heads)
            if self.filters:
                return torch.addmm(biases, products, self.spread, out=out), None
            return torch.add(biases, products, out=out), None
        shape = (*query.shape[:2], nodes, channels)
        summed = torch.add(biases.view(shape), query[:, :, None], out=out.view(shape)).add_(key[:, None]).view_as(out)
        logits = self.options.activation(summed)
        if hidden is not None:
            logits = logits.view(shape).masked_fill(hidden[:, None, :, None], -math.inf).view_as(logits)
        return logits, summed

    def messages(self, rows: Tensor, part: _Part) -> Tensor:
        """V_j + E^val_ij of a part (pairs, channels)."""
        value = self.value[part.graphs]
        value = value.reshape(value.shape[0], 1, -1)
        if self.second is None and not self.options.one_tensor:
            out = self.buffer("message", rows, self.shape[2])
            by_query = out.view(value.shape[0], -1, value.shape[2])
            by_query.copy_(value.expand_as(by_query))
            return out
        edges, out = self.source(
            "message", rows if self.second is None else self.pairs(self.second, part), self.maps[1]
        )
        by_query = (value.shape[0], -1, value.shape[2])
        torch.add(edges.view(by_query), value, out=out.view(by_query))
        return out

    def by_row(self, x: Tensor) -> Tensor:
        """(pairs, c) as (queries, keys, c)."""
        return x.view(-1, self.shape[1], x.shape[-1])

    def kept(self, part: _Part) -> Tensor | None:
        """The factors of a part (queries, keys, 1)."""
        if self.keep is None:
            return None
        keep = self.keep[part.graphs]
        keep = keep[:, part.rows] if keep.shape[1] > 1 else keep
        rows = part.rows.stop - part.rows.start
        return keep.to(self.wide).expand(keep.shape[0], rows, -1).reshape(-1, self.shape[1], 1)


def _attend(work: _Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the largest logit and the sum of exponentials of each row: (graphs, nodes, channels or heads)."""
    biases = work.shape[-1] if work.filters else work.options.heads
    out = work.query.new_empty(work.shape, dtype=work.dtype)
    largest, total = (work.query.new_empty(*work.shape[:2], biases) for _ in range(2))
    for part in work.parts():
        rows = work.pairs(work.first, part)
        logits, _ = work.logits(rows, part)
        filters = work.by_row(logits)
        # Hidden keys stand at half of the least number, biases of -inf below: a row of such has weights of zero.
        top = filters.amax(1).clamp_(min=torch.finfo(work.wide).min / 4)
        filters = torch.exp(filters.sub_(top[:, None]), out=filters)
        weight = filters.sum(1)
        weight = weight.masked_fill(weight == 0, 1.0)
        where = (part.graphs, part.rows)
        largest[where], total[where] = top.view_as(largest[where]), weight.view_as(total[where])
        messages = work.by_row(work.messages(rows, part))
        keep = work.kept(part)
        if not work.filters:
            filters = work.by_row(torch.mm(logits, work.spread, out=work.buffer("spread", rows, work.shape[2])))
            weight = weight @ work.spread
        if keep is not None:
            messages = messages.mul_(keep)
        out[where] = (messages.mul_(filters).sum(1) / weight).view_as(out[where])
    return out, largest, total


class _Gradients:
    """Where the gradients of a call are gathered; None where nobody asks."""

    def __init__(self, work: _Workspace, wanted: tuple[bool, ...]) -> None:
        nodes = [torch.zeros_like(work.query) for _ in range(3)]
        self.query, self.key, self.value = nodes
        self.first = torch.empty_like(work.first) if wanted[3] else None
        self.second = None if work.second is None or not wanted[4] else torch.empty_like(work.second)
        self.bias_map, self.value_map = (
            torch.zeros(m.shape, dtype=work.wide, device=m.device) if m is not None and asked else None
            for m, asked in zip(work.maps, wanted[5:7], strict=True)
        )

    @staticmethod
    def edges(
        gradient: Tensor, rows: Tensor, into: Tensor | None, of_map: Tensor | None, weight: Tensor | None, *, add: bool
    ) -> None:
        """Through ``mapped``: to the map, and to the rows, where it is added or written."""
        if of_map is not None:
            of_map += gradient.t() @ rows.to(gradient.dtype)
        if into is None:
            return
        into = into.view(rows.shape)
        if weight is None:
            into.add_(gradient) if add else into.copy_(gradient)
        elif into.dtype == weight.dtype == gradient.dtype:
            torch.addmm(into, gradient, weight, beta=int(add), out=into)
        else:
            back = gradient.to(weight.dtype) @ weight
            into.add_(back) if add else into.copy_(back)


def _return(
    work: _Workspace, grad: Tensor, out: Tensor, largest: Tensor, total: Tensor, wanted: tuple[bool, ...]
) -> _Gradients:
    found = _Gradients(work, wanted)
    for part in work.parts():
        where = (part.graphs, part.rows)
        rows = work.pairs(work.first, part)
        logits, summed = work.logits(rows, part)
        filters = work.by_row(logits)
        filters = torch.exp(filters.sub_(largest[where].flatten(0, 1)[:, None]), out=filters)
        weight = total[where].flatten(0, 1)
        if not work.filters:
            filters = work.by_row(torch.mm(logits, work.spread, out=work.buffer("spread", rows, work.shape[2])))
            weight = weight @ work.spread
        from_above = grad[where].flatten(0, 1).to(work.wide) / weight
        base = filters.mul_(from_above[:, None])
        messages, keep = work.by_row(work.messages(rows, part)), work.kept(part)
        if keep is not None:
            messages = messages.mul_(keep)
        of_bias = messages.sub_(out[where].flatten(0, 1)[:, None]).mul_(base).flatten(0, 1)
        of_message = base if keep is None else base.mul_(keep)
        _return_messages(work, found, part, rows, of_message)
        _return_logits(work, found, part, rows, of_bias, summed)
    return found


def _return_messages(work: _Workspace, found: _Gradients, part: _Part, rows: Tensor, gradient: Tensor) -> None:
    graphs = part.graphs.stop - part.graphs.start
    found.value[part.graphs] += gradient.view(graphs, -1, *work.shape[1:]).sum(1)
    weight = work.maps[1]
    if work.options.one_tensor:
        into = None if found.first is None else found.first[part.graphs, part.rows]
        found.edges(gradient.flatten(0, 1), rows, into, found.value_map, weight, add=False)
    elif work.second is not None:
        into = None if found.second is None else found.second[part.graphs, part.rows]
        rows = work.pairs(work.second, part)
        found.edges(gradient.flatten(0, 1), rows, into, found.value_map, weight, add=False)


def _return_logits(
    work: _Workspace, found: _Gradients, part: _Part, rows: Tensor, gradient: Tensor, summed: Tensor | None
) -> None:
    graphs, nodes, channels = part.graphs, work.shape[1], work.shape[2]
    activation, heads = work.options.activation, work.options.heads
    if activation is not None and summed is not None:
        with torch.enable_grad():
            summed = summed.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(activation(summed), summed, gradient)
        by_pair = gradient.view(graphs.stop - graphs.start, -1, nodes, channels)
        found.query[graphs, part.rows] += by_pair.sum(2)
        found.key[graphs] += by_pair.sum(1)
    else:
        by_head = gradient @ work.spread.t()
        of_products = by_head.view(graphs.stop - graphs.start, -1, nodes, heads).permute(0, 3, 1, 2) * work.scale
        q, k = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (work.query[graphs, part.rows], work.key[graphs]))
        found.query[graphs, part.rows] += (of_products @ k).transpose(1, 2).flatten(-2)
        found.key[graphs] += (of_products.mT @ q).transpose(1, 2).flatten(-2)
        gradient = gradient if work.filters else by_head
    into = None if found.first is None else found.first[graphs, part.rows]
    found.edges(gradient, rows, into, found.bias_map, work.maps[0], add=work.options.one_tensor)


class RecomputedAttention(torch.autograd.Function):
    """The fast form of :func:`~holonomy.ops.chromatic_attention.chromatic_attention`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Attend."""
        with torch.autocast(_autograd.autocast_device(inputs[0]), enabled=False):
            return _attend(_Workspace(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the inputs, the result, and two numbers a row and channel."""
        ctx.options = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:-1], *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate: in parts, or by the definition where the gradient itself will be differentiated."""
        *inputs, out, largest, total = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _by_definition(tuple(inputs), ctx.options, grad_outputs[0], wanted)
        with torch.autocast(_autograd.autocast_device(out), enabled=False):
            work = _Workspace(*inputs, options=ctx.options)
            found = _return(work, grad_outputs[0], out, largest, total, wanted)
        every = (
            found.query, found.key, found.value, found.first, found.second, found.bias_map, found.value_map,
        )  # fmt: skip
        cast = (None if g is None or x is None else g.to(x.dtype) for g, x in zip(every, inputs, strict=False))
        return *cast, None, None, None


def _by_definition(
    inputs: tuple[Tensor | None, ...], options: Options, grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    def plain(*inputs: Tensor | None) -> Tensor:
        query, key, value, first, second, bias_map, value_map, mask, keep = inputs
        return options.definition(
            query, key, value, first, first if options.one_tensor else second, mask, heads=options.heads,
            bias_map=bias_map, value_map=value_map, activation=options.activation, keep=keep,
        )  # fmt: skip

    found = _autograd.by_definition(plain, inputs, grad, wanted[: len(inputs)])
    return *found, *(None for _ in wanted[len(inputs) :])
