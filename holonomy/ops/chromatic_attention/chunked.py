r"""Chromatic attention over chunks of pairs, recomputed in the backward pass.

A chunk is some whole graphs, or some rows of one graph. All chunks are written into the same buffers, which thereby
stay in the cache. With :math:`U_{ij} = V_j + E^{val}_{ij}` the messages, :math:`A_{ij} = e^{\ell_{ij}}` the filters
before the division by their sum :math:`S_i = \sum_j A_{ij}`, :math:`k_{ij}` the factors ``keep`` (one without), and
G the gradient of the result, all by channel:

.. math::

    O_i &= \textstyle\sum_j k_{ij} A_{ij} U_{ij} / S_i &\quad (1) \\
    B_{ij} &= A_{ij} G_i / S_i &\quad (2) \\
    \partial U_{ij} &= k_{ij} B_{ij} &\quad (3) \\
    \partial \ell_{ij} &= B_{ij} (k_{ij} U_{ij} - O_i) &\quad (4)

Equation 4 is the gradient of softmax: :math:`\sum_j B_{ij} k_{ij} U_{ij} = G_i O_i`. Where logits have one number for
each head, a product with the 0-1 matrix of heads and channels repeats it over the channels, and a product with its
transpose sums the gradient over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy.ops.chromatic_attention.reference import chromatic_attention_reference
from holonomy.ops.heads import merge_heads, split_heads


class Options(NamedTuple):
    """The arguments that are no tensors."""

    heads: int  # number of heads
    activation: Callable[[Tensor], Tensor] | None  # of the additive form
    chunk: int  # entries of a buffer
    one_tensor: bool  # whether biases and edge values are maps of the same tensor


class _Chunk(NamedTuple):
    """Whole graphs, or some rows of one graph."""

    graphs: slice
    rows: slice


class _Workspace:
    """The tensors of a call, and the buffers that its chunks share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias_edges: Tensor,
        value_edges: Tensor | None,
        bias_map: Tensor | None,
        value_map: Tensor | None,
        mask: Tensor | None,
        keep: Tensor | None,
        options: Options,
    ) -> None:
        self.dtype = query.dtype
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.bias_edges, self.value_edges, self.mask, self.keep = bias_edges, value_edges, mask, keep
        self.options = options
        self.maps = tuple(None if m is None else m.to(self.dtype) for m in (bias_map, value_map))
        self.shape = query.shape
        self.query, self.key, self.value = (x.to(self.wide) for x in (query, key, value))
        self.hidden = None if mask is None else ~mask & mask.any(-1, keepdim=True)
        biases = bias_edges.shape[-1] if bias_map is None else bias_map.shape[0]
        self.channelwise = biases == query.shape[-1]
        width = query.shape[-1] // options.heads
        self.scale = 1 / math.sqrt(width)
        # (heads, channels) of 0 and 1: repeats a head's number over its channels; transposed, it sums over them.
        self.spread = torch.eye(options.heads, dtype=self.wide, device=query.device).repeat_interleave(width, 1)
        self.buffers: dict[str, Tensor] = {}

    def chunks(self) -> Iterator[_Chunk]:
        """Chunks of at most ``options.chunk`` entries, or of one row where a row has more."""
        graphs, nodes, channels = self.shape
        row, entries = nodes * channels, self.options.chunk
        together = max(1, entries // (row * nodes))
        rows = nodes if entries >= row * nodes else max(1, entries // row)
        for graph in range(0, graphs, together):
            for start in range(0, nodes, rows):
                yield _Chunk(slice(graph, min(graph + together, graphs)), slice(start, min(start + rows, nodes)))

    def buffer(self, name: str, like: Tensor, width: int) -> Tensor:
        """A buffer with a row for each row of ``like``; it is allocated for the first chunk, which is the largest."""
        pairs = like.shape[0]
        if name not in self.buffers:
            self.buffers[name] = torch.empty(pairs, width, dtype=self.wide, device=like.device)
        return self.buffers[name][:pairs]

    def pairs(self, edges: Tensor, chunk: _Chunk) -> Tensor:
        """Features of the pairs of a chunk (pairs, features), zero at padding."""
        features = edges[chunk.graphs, chunk.rows]
        if self.mask is not None:
            nodes = self.mask[chunk.graphs]
            features = features.masked_fill(~(nodes[:, chunk.rows, None] & nodes[:, None, :])[..., None], 0.0)
        return features.flatten(0, 2)

    def mapped(self, name: str, rows: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows, or their products with a map, and the buffer for the next result; products already lie in it."""
        out = self.buffer(name, rows, rows.shape[1] if weight is None else weight.shape[0])
        if weight is None:
            return rows.to(self.wide), out
        if rows.dtype == self.dtype == self.wide:
            return torch.mm(rows, weight.t(), out=out), out
        return out.copy_(rows.to(self.dtype) @ weight.t()), out

    def logits(
        self, rows: Tensor, chunk: _Chunk, *, record: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Logits (pairs, channels or heads); additive, also argument and result of the activation, copied."""
        graphs, nodes, channels = chunk.graphs, self.shape[1], self.shape[2]
        biases, out = self.mapped("bias", rows, self.maps[0])
        query, key = self.query[graphs, chunk.rows], self.key[graphs]
        hidden = None if self.hidden is None else self.hidden[graphs]
        if self.options.activation is None:
            q, k = (split_heads(x, self.options.heads) for x in (query, key))
            products = (q * self.scale) @ k.mT
            if hidden is not None:
                # Finite: the product with zeros of ``spread`` would make nan of -inf.
                products = products.masked_fill(hidden[:, None, None, :], torch.finfo(self.wide).min / 2)
            products = products.permute(0, 2, 3, 1).reshape(-1, self.options.heads)
            if self.channelwise:  # CSA eq. 5: one bias for each channel
                return torch.addmm(biases, products, self.spread, out=out), None
            return torch.add(biases, products, out=out), None  # eq. 4: one for each head
        # The additive form, Q_i + K_j + E_ij.
        shape = (*query.shape[:2], nodes, channels)
        summed = torch.add(biases.view(shape), query[:, :, None], out=out.view(shape)).add_(key[:, None]).view_as(out)
        recorded = None
        if record:
            with torch.enable_grad():
                argument = summed.detach().requires_grad_()
                recorded = argument, self.options.activation(argument.clone())
            logits = recorded[1].detach().clone()
        else:
            logits = self.options.activation(summed)
        if hidden is not None:
            logits = logits.view(shape).masked_fill(hidden[:, None, :, None], -math.inf).view_as(logits)
        return logits, recorded

    def messages(self, rows: Tensor, chunk: _Chunk) -> Tensor:
        """Messages U_ij = V_j + E^val_ij of a chunk (pairs, channels)."""
        value = self.value[chunk.graphs].flatten(1)[:, None]  # (graphs, 1, keys * channels), of every query
        by_query = (value.shape[0], -1, value.shape[2])
        if self.value_edges is None and not self.options.one_tensor:
            out = self.buffer("message", rows, self.shape[2])
            out.view(by_query).copy_(value)
        else:
            rows = rows if self.value_edges is None else self.pairs(self.value_edges, chunk)
            edges, out = self.mapped("message", rows, self.maps[1])
            torch.add(edges.view(by_query), value, out=out.view(by_query))
        return out

    def by_row(self, x: Tensor) -> Tensor:
        """View (pairs, c) as (queries, keys, c)."""
        return x.view(-1, self.shape[1], x.shape[-1])

    def by_channel(self, filters: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Filters (queries, keys, channels) and their sums; what is one number for each head is repeated."""
        if self.channelwise:
            return self.by_row(filters), row_sum
        repeated = torch.mm(filters, self.spread, out=self.buffer("spread", filters, self.shape[2]))
        return self.by_row(repeated), row_sum @ self.spread

    def kept(self, chunk: _Chunk) -> Tensor | None:
        """The factors k_ij of a chunk (queries, keys, 1)."""
        if self.keep is None:
            return None
        keep = self.keep[chunk.graphs]
        keep = keep[:, chunk.rows] if keep.shape[1] > 1 else keep
        rows = chunk.rows.stop - chunk.rows.start
        return keep.to(self.wide).expand(keep.shape[0], rows, -1).reshape(-1, self.shape[1], 1)


def _attend(work: _Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 1, and the largest logit and the sum S_i of each row: (graphs, nodes, channels or heads)."""
    biases = work.shape[-1] if work.channelwise else work.options.heads
    out = work.query.new_empty(work.shape, dtype=work.dtype)
    largest, total = (work.query.new_empty(*work.shape[:2], biases) for _ in range(2))
    for chunk in work.chunks():
        rows = work.pairs(work.bias_edges, chunk)
        logits, _ = work.logits(rows, chunk)
        filters = work.by_row(logits)
        # Hidden keys have half of the lowest number, forbidden pairs -inf: at a quarter of it, a row of them has A = 0.
        top = filters.amax(1).clamp_(min=torch.finfo(work.wide).min / 4)
        torch.exp(filters.sub_(top[:, None]), out=filters)  # over the logits
        row_sum = filters.sum(1)
        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
        where = (chunk.graphs, chunk.rows)
        largest[where], total[where] = top.view_as(largest[where]), row_sum.view_as(total[where])
        filters, row_sum = work.by_channel(logits, row_sum)
        messages, keep = work.by_row(work.messages(rows, chunk)), work.kept(chunk)
        if keep is not None:
            messages = messages.mul_(keep)
        out[where] = (messages.mul_(filters).sum(1) / row_sum).view_as(out[where])
    return out, largest, total


class _Gradients:
    """The gradients of a call, summed over chunks; None where they are not asked for."""

    def __init__(self, work: _Workspace, wanted: tuple[bool, ...]) -> None:
        self.query, self.key, self.value = (torch.zeros_like(work.query) for _ in range(3))
        self.bias_edges = torch.empty_like(work.bias_edges) if wanted[3] else None
        self.value_edges = None if work.value_edges is None or not wanted[4] else torch.empty_like(work.value_edges)
        self.bias_map, self.value_map = (
            torch.zeros(m.shape, dtype=work.wide, device=m.device) if m is not None and asked else None
            for m, asked in zip(work.maps, wanted[5:7], strict=True)
        )

    @staticmethod
    def edges(
        gradient: Tensor,
        rows: Tensor,
        into: Tensor | None,
        chunk: _Chunk,
        grad_map: Tensor | None,
        weight: Tensor | None,
        *,
        add: bool,
    ) -> None:
        """Backward of ``mapped``: add to the map's gradient, and add to the rows' gradient or write it."""
        if grad_map is not None:
            grad_map += gradient.t() @ rows.to(gradient.dtype)
        if into is None:
            return
        into = into[chunk.graphs, chunk.rows].view(rows.shape)
        if weight is None:
            into.add_(gradient) if add else into.copy_(gradient)
        elif into.dtype == weight.dtype == gradient.dtype:
            torch.addmm(into, gradient, weight, beta=int(add), out=into)
        else:
            grad_rows = gradient.to(weight.dtype) @ weight
            into.add_(grad_rows) if add else into.copy_(grad_rows)


def _backward(
    work: _Workspace, grad: Tensor, out: Tensor, largest: Tensor, total: Tensor, wanted: tuple[bool, ...]
) -> _Gradients:
    """Equations 2 to 4, with the logits and messages of each chunk computed again."""
    grads = _Gradients(work, wanted)
    for chunk in work.chunks():
        where = (chunk.graphs, chunk.rows)
        rows = work.pairs(work.bias_edges, chunk)
        logits, recorded = work.logits(rows, chunk, record=True)
        filters = work.by_row(logits)
        torch.exp(filters.sub_(largest[where].flatten(0, 1)[:, None]), out=filters)  # over the logits
        filters, row_sum = work.by_channel(logits, total[where].flatten(0, 1))
        # Equation 2: B = A * G / S.
        scaled_grad = grad[where].flatten(0, 1).to(work.wide) / row_sum
        base = filters.mul_(scaled_grad[:, None])
        messages, keep = work.by_row(work.messages(rows, chunk)), work.kept(chunk)
        if keep is not None:
            messages = messages.mul_(keep)
        # Equation 4, then equation 3, which may overwrite B.
        grad_logits = messages.sub_(out[where].flatten(0, 1)[:, None]).mul_(base).flatten(0, 1)
        grad_messages = base if keep is None else base.mul_(keep)
        _backward_messages(work, grads, chunk, rows, grad_messages)
        _backward_logits(work, grads, chunk, rows, grad_logits, recorded)
    return grads


def _backward_messages(work: _Workspace, grads: _Gradients, chunk: _Chunk, rows: Tensor, gradient: Tensor) -> None:
    """From the messages U_ij = V_j + E^val_ij to values and edge values."""
    graphs = chunk.graphs.stop - chunk.graphs.start
    # V_j is a term of U_ij for all i.
    grads.value[chunk.graphs] += gradient.view(graphs, -1, *work.shape[1:]).sum(1)
    into = grads.bias_edges if work.options.one_tensor else grads.value_edges
    if work.value_edges is not None:
        rows = work.pairs(work.value_edges, chunk)
    elif not work.options.one_tensor:
        return
    grads.edges(gradient.flatten(0, 1), rows, into, chunk, grads.value_map, work.maps[1], add=False)


def _backward_logits(
    work: _Workspace,
    grads: _Gradients,
    chunk: _Chunk,
    rows: Tensor,
    gradient: Tensor,
    recorded: tuple[Tensor, Tensor] | None,
) -> None:
    """From the logits to queries, keys and biases."""
    graphs, nodes, channels = chunk.graphs, work.shape[1], work.shape[2]
    heads = work.options.heads
    if recorded is not None:
        argument, activated = recorded
        (gradient,) = torch.autograd.grad(activated, argument, gradient)
        # Q_i is a term for all j, K_j for all i.
        by_pair = gradient.view(graphs.stop - graphs.start, -1, nodes, channels)
        grads.query[graphs, chunk.rows] += by_pair.sum(2)
        grads.key[graphs] += by_pair.sum(1)
    else:
        # CSA eq. 5: all channels of a head share Q_i . K_j / sqrt(d_h), so their gradients are summed.
        by_head = gradient @ work.spread.t()
        grad_products = by_head.view(graphs.stop - graphs.start, -1, nodes, heads).permute(0, 3, 1, 2) * work.scale
        q, k = (split_heads(x, heads) for x in (work.query[graphs, chunk.rows], work.key[graphs]))
        grads.query[graphs, chunk.rows] += merge_heads(grad_products @ k)
        grads.key[graphs] += merge_heads(grad_products.mT @ q)
        gradient = gradient if work.channelwise else by_head
    # Where one tensor gives biases and edge values, equation 3 has been written into its gradient: add to it.
    grads.edges(gradient, rows, grads.bias_edges, chunk, grads.bias_map, work.maps[0], add=work.options.one_tensor)


class ChunkedAttention(torch.autograd.Function):
    """The chunked form of :func:`~holonomy.ops.chromatic_attention.chromatic_attention`."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Attend."""
        with torch.autocast(_autograd.autocast_device(inputs[0]), enabled=False):
            return _attend(_Workspace(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Save the inputs, the result, and two numbers for each row and channel."""
        ctx.options = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:-1], *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by chunks, or by the reference where the gradient is differentiated again."""
        *inputs, out, largest, total = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if _autograd.through_reference(grad_outputs[0]):
            return _backward_of_reference(tuple(inputs), ctx.options, grad_outputs[0], wanted)
        with torch.autocast(_autograd.autocast_device(out), enabled=False):
            work = _Workspace(*inputs, options=ctx.options)
            grads = _backward(work, grad_outputs[0], out, largest, total, wanted)
        every = (
            grads.query, grads.key, grads.value, grads.bias_edges, grads.value_edges, grads.bias_map, grads.value_map,
        )  # fmt: skip
        cast = (None if g is None or x is None else g.to(x.dtype) for g, x in zip(every, inputs, strict=False))
        return *cast, None, None, None


def _backward_of_reference(
    inputs: tuple[Tensor | None, ...], options: Options, grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    def reference(
        query: Tensor, key: Tensor, value: Tensor, bias_edges: Tensor, value_edges: Tensor | None, *rest: Tensor | None
    ) -> Tensor:
        bias_map, value_map, mask, keep = rest
        if options.one_tensor:
            value_edges = bias_edges
        return chromatic_attention_reference(
            query, key, value, bias_edges, value_edges, mask, heads=options.heads,
            bias_map=bias_map, value_map=value_map, activation=options.activation, keep=keep,
        )  # fmt: skip

    grads = _autograd.reference_gradients(reference, inputs, grad, wanted[: len(inputs)])
    return *grads, *(None for _ in wanted[len(inputs) :])
