r"""Simplicial path sparse attention: the simplexes along all paths of marked steps (Simplicial section 2.3).

Each token marks its k best others, by a score of pairs. The simplex :math:`(k_0, .., k_N)` is kept if every step
:math:`k_m \to k_{m+1}` is marked: :math:`n k^N` simplexes, gathered, in time and memory linear in n.

Neighbours are ``(*batch, nodes, k)`` indices. An entry of -1 is no neighbour; of equal entries in a row only the first
counts; a token may mark itself. Axes are ``(*batch, nodes, channels)``, heads among the batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Bool, Float, Int
from holonomy.ops.masks import masked_softmax
from holonomy.ops.simplicial_attention import TILE, check_simplex
from holonomy.ops.simplicial_attention.logits import (
    FORMS,
    Form,
    first_key_terms,
    other_keys_features,
    rescale_to_safe_range,
)
from holonomy.ops.simplicial_attention.path_groups import grouped_paths
from holonomy.ops.simplicial_attention.reference import factors_of, simplicial_attention_reference
from holonomy.ops.simplicial_attention.simplexes import list_simplexes

GATHERED = 2**21
"""Numbers that are gathered in one chunk."""


def simplicial_path_attention(
    keys: Sequence[Float[Tensor, "..."]],
    values: Sequence[Float[Tensor, "..."]],
    neighbours: Int[Tensor, "*#batch nodes k"],
    *,
    form: Form = "product",
    scale: float | None = None,
    scores: Float[Tensor, "*#batch nodes k"] | None = None,
    tile: int = GATHERED,
) -> Float[Tensor, "..."]:
    r"""Attend along paths of neighbours.

    The same as :func:`~holonomy.ops.simplicial_attention.simplicial_attention` with the mask :func:`path_mask`, without
    building the mask.

    Args:
        keys: N + 1 tensors ``(*batch, nodes, d)``, the query first.
        values: N tensors ``(*batch, nodes, values)``.
        neighbours: ``(*batch, nodes, k)``, broadcasting: the steps from each node.
        form: of the logits.
        scale: of the logits, finite; :math:`1/\sqrt{d}` if left out.
        scores: added to the logits along a path, one for each step, broadcasting like the neighbours; nothing if left
            out.
        tile: numbers that are gathered in one chunk; chunks are gathered again in the backward pass. Nothing is
            gathered where a token has at most four simplexes a path. On the CPU, where all paths take more than a tile
            (or more than a k-th of one, for paths of two steps and more), those of the same last step are taken
            together (:func:`~holonomy.ops.simplicial_attention.path_groups.grouped_paths`), by the rule of
            :func:`holonomy._autograd.supports_custom_backward`: in 0.3 to 0.6 of the time where there are several
            tiles, and with a half to a third of the memory in one.

    Returns:
        ``(*batch, nodes, values)``; zero at nodes from which no path starts.

    Raises:
        ValueError: if the numbers or shapes of keys and values do not fit, or a neighbour is not in ``[-1, nodes)``.

    >>> x, v = torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [3.0]])
    >>> simplicial_path_attention([x, x, x], [v, v], torch.tensor([[1], [2], [-1]])).flatten()
    tensor([6., 0., 0.])
    """
    checks.one_of("form", form, FORMS)
    checks.positive_int("tile", tile)
    checks.integers("neighbours", neighbours)
    if neighbours.ndim < 2:
        raise ValueError(f"neighbours must have shape (*batch, nodes, k), got {tuple(neighbours.shape)}.")
    order, nodes = check_simplex(keys, values), keys[0].shape[-2]
    if any(key.shape[-2] != nodes for key in keys) or neighbours.shape[-2] != nodes:
        sizes = [key.shape[-2] for key in keys]
        raise ValueError(f"keys must all have the {neighbours.shape[-2]} nodes of neighbours, got {sizes}.")
    checks.codes("neighbours", neighbours, nodes, "nodes", least=-1)
    neighbours = neighbours.long()
    dtype = values[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        keys, values = [key.float() for key in keys], [value.float() for value in values]
    batch = torch.broadcast_shapes(neighbours.shape[:-2], *(tensor.shape[:-2] for tensor in (*keys, *values)))
    if scores is not None:
        checks.floating("scores", scores)
        checks.broadcasting("scores", scores, (*batch, *neighbours.shape[-2:]), 2, "(*batch, nodes, k)")
    if 0 in (*batch, nodes, neighbours.shape[-1]):
        given = (*values, *keys) if scores is None else (*values, *keys, scores)
        return numerics.zeros_of((*batch, nodes, values[0].shape[-1]), *given).to(dtype)
    keys = rescale_to_safe_range(keys, keys[0].shape[-1] * math.factorial(len(keys)))
    values = rescale_to_safe_range(values, 1)
    keys[0] = keys[0] * (1 / math.sqrt(keys[0].shape[-1]) if scale is None else checks.finite_number("scale", scale))
    valid = _valid(neighbours)
    bias = keys[0].new_zeros(()) if scores is None else scores.to(keys[0].dtype)
    bias = torch.where(valid, bias, -torch.inf)
    paths = neighbours.shape[-1] ** order
    gathered = paths * (keys[0].shape[-1] + values[0].shape[-1])  # by a token
    saved = neighbours.shape[-1] if order > 1 else 1  # how many times fewer groups gather
    with torch.autocast(_autograd.autocast_device(values[0]), enabled=False):
        if nodes**order <= 4 * paths:  # from four logits a path on, gathering is faster
            steps = neighbours.masked_fill(~valid, nodes)
            mixed = _masked(*_flat(batch, keys, values, [steps, bias]), form)
        elif (
            keys[0].device.type == "cpu"
            and _autograd.supports_custom_backward(*keys, *values)
            # Of fewer, the calls that make groups take up to as long again as all the rest.
            and batch.numel() * nodes * gathered * saved > min(tile, GATHERED)
        ):
            return _grouped(keys, values, neighbours.clamp(min=0), bias, batch, form, tile).to(dtype)
        else:
            mixed = _blocks(*_flat(batch, keys, values, [neighbours.clamp(min=0), bias]), form, tile // gathered)
    return mixed.reshape(*batch, nodes, -1).to(dtype)


def _flat(batch: torch.Size, *parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Keys, values, steps and biases with one batch axis."""
    keys, values, (steps, bias) = (
        [x.expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in tensors] for tensors in parts
    )
    return keys, values, steps, bias


def _grouped(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    steps: Tensor,
    bias: Tensor,
    batch: torch.Size,
    form: Form,
    tile: int,
) -> Tensor:
    """Group paths by their last step. Batch axes with the same steps, as attention heads have, share the groups."""
    nodes, own = steps.shape[-2], torch.broadcast_shapes(steps.shape, bias.shape)
    own = (1,) * (len(batch) + 2 - len(own)) + tuple(own)
    alike = [axis for axis in range(len(batch)) if own[axis] == 1]
    first = list(range(len(alike)))
    bias = bias.expand(own).reshape(-1, own[-1])
    graphs = torch.arange(len(bias) // nodes, device=steps.device)[:, None, None] * nodes
    steps = (steps.expand(own).reshape(-1, *own[-2:]) + graphs).flatten(0, 1)

    def rows(x: Tensor) -> tuple[Tensor, ...]:
        x = x.expand(*batch, -1, -1).movedim(alike, first)
        return x.reshape(-1, len(bias), x.shape[-1]).unbind()

    entries = zip(zip(*map(rows, keys), strict=True), zip(*map(rows, values), strict=True), strict=True)
    found = torch.stack([grouped_paths(*entry, steps, bias, form=form, chunk=tile) for entry in entries])
    apart = (size for axis, size in enumerate(batch) if axis not in alike)
    return found.reshape(*(batch[axis] for axis in alike), *apart, nodes, found.shape[-1]).movedim(first, alike)


def _blocks(keys: list[Tensor], values: list[Tensor], steps: Tensor, bias: Tensor, form: Form, rows: int) -> Tensor:
    """Path by path, for chunks of queries, gathered again in the backward pass."""
    nodes, rows = steps.shape[-2], max(1, rows // len(steps))
    if rows >= nodes:
        return _paths(keys, values, steps, bias, 0, nodes, form)
    block = partial(checkpoint, _paths, keys, values, steps, bias, use_reentrant=False, preserve_rng_state=False)
    blocks = [block(start, min(start + rows, nodes), form) for start in range(0, nodes, rows)]
    return torch.cat(cast("list[Tensor]", blocks), -2)


def _masked(keys: Sequence[Tensor], values: Sequence[Tensor], steps: Tensor, scores: Tensor, form: Form) -> Tensor:
    """All simplexes, with the scores of their steps as biases, -inf where a step is not marked."""
    order, (entries, nodes, _) = len(values), steps.shape
    # Column n takes the steps that do not count.
    table = scores.new_full((entries, nodes, nodes + 1), -torch.inf).scatter(-1, steps, scores)[..., :nodes]
    bias = table
    for _ in range(order - 1):
        bias = bias[..., None] + table.reshape(entries, *(1,) * (bias.dim() - 2), nodes, nodes)
    bias = bias[:, :, None] if order == 1 else bias.flatten(3)
    simplexes = list_simplexes((nodes,) * (order + 1), torch.Size([entries]), steps.device)
    return simplicial_attention_reference(factors_of(keys, values, simplexes, form=form, scale=1.0), bias=bias)[0]


def _paths(
    keys: Sequence[Tensor], values: Sequence[Tensor], steps: Tensor, scores: Tensor, start: int, stop: int, form: Form
) -> Tensor:
    """The averages of a block of queries, over axes ``(batch, queries, k, .., k)``."""
    order = len(values)
    entry = torch.arange(steps.shape[0], device=steps.device)
    at = torch.arange(start, stop, device=steps.device).expand(steps.shape[0], -1)
    ends, logits = [at], torch.zeros((), dtype=keys[0].dtype, device=steps.device)
    for depth in range(order):
        here = entry.reshape(-1, *(1,) * (depth + 1))
        logits = logits[..., None] + scores[here, ends[-1]]
        ends.append(steps[here, ends[-1]])
    # The m-th node of a path has m axes of choices; it broadcasts over those of later steps.
    spread = [end.reshape(*end.shape, *(1,) * (order - m)) for m, end in enumerate(ends)]
    entry = entry.reshape(-1, *(1,) * (order + 1))
    gathered = [key[entry, end] for key, end in zip(keys, spread, strict=True)]
    terms = first_key_terms(gathered[0], gathered[1], order=order, form=form)
    features = reduce(torch.add, (left * right for left, right in terms))
    if order > 1:
        features = features * other_keys_features(gathered[2:], order=order, form=form)
    logits = (logits + features.sum(-1)).flatten(2)
    weights = masked_softmax(logits, logits.isneginf().all(-1, keepdim=True), None)
    mixed = reduce(torch.mul, (value[entry, end] for value, end in zip(values, spread[1:], strict=True)))
    return (weights[..., None, :] @ mixed.flatten(2, -2)).squeeze(-2)


def _valid(neighbours: Tensor) -> Tensor:
    """Which entries count: those that are not negative and do not repeat an earlier one."""
    k = neighbours.shape[-1]
    earlier = torch.ones(k, k, dtype=torch.bool, device=neighbours.device).tril(-1)
    repeated = ((neighbours[..., :, None] == neighbours[..., None, :]) & earlier).any(-1)
    return (neighbours >= 0) & ~repeated


def path_mask(neighbours: Int[Tensor, "*batch nodes k"], order: int) -> Bool[Tensor, "..."]:
    """The simplexes along paths, written out: n^(N+1) entries, for small n."""
    nodes = neighbours.shape[-2]
    every = torch.arange(nodes, device=neighbours.device)
    marked = (neighbours[..., None] == every).any(-2)
    mask = marked
    for _ in range(order - 1):
        step = marked.reshape(*marked.shape[:-2], *(1,) * (mask.dim() - marked.dim() + 1), nodes, nodes)
        mask = mask[..., None] & step
    return mask


def step_scores(
    query: Float[Tensor, "*batch heads nodes dim"],
    key: Float[Tensor, "*batch heads nodes dim"],
    gate: Float[Tensor, "*batch nodes heads"],
    neighbours: Int[Tensor, "*batch nodes k"],
) -> Float[Tensor, "*batch nodes k"]:
    r"""Scores :math:`s_{ij} = \sum_h w_{ih} \mathrm{ReLU}(q_{ih} \cdot k_{jh})` of given steps i -> j."""
    heads, k = query.shape[-3], neighbours.shape[-1]
    index = neighbours.clamp(min=0).flatten(-2)[..., None, :, None]
    index = index.expand(*neighbours.shape[:-2], heads, -1, key.shape[-1])
    gathered = key.gather(-2, index).unflatten(-2, (-1, k))
    products = (gathered @ query[..., None]).squeeze(-1).relu()
    return (products * gate.mT[..., None]).sum(-3)


def best_neighbours(
    query: Float[Tensor, "*batch heads nodes dim"],
    key: Float[Tensor, "*batch heads nodes dim"],
    gate: Float[Tensor, "*batch nodes heads"],
    k: int,
    *,
    causal: bool = False,
    key_padding_mask: Bool[Tensor, "*batch nodes"] | None = None,
) -> Int[Tensor, "*batch nodes k"]:
    """The k best steps from each node by :func:`step_scores`, the lowest indices among equal scores."""
    nodes = query.shape[-2]
    kept = min(checks.positive_int("k", k), nodes)
    rows = max(1, TILE // max(1, math.prod(query.shape[:-1])))
    if nodes == 0:
        return torch.full((*gate.shape[:-1], k), -1, device=gate.device)
    found: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, nodes, rows):
            chunk = slice(start, min(start + rows, nodes))
            products = (query[..., chunk, :] @ key.mT).relu()
            scores = (products * gate[..., chunk, :].mT[..., None]).sum(-3)
            if key_padding_mask is not None:
                scores = scores.masked_fill(key_padding_mask[..., None, :], -torch.inf)
            if causal:
                at = torch.arange(nodes, device=scores.device)
                scores = scores.masked_fill(at > at[chunk, None], -torch.inf)
            found.append(_best(scores, kept))
    return torch.nn.functional.pad(torch.cat(found, -2), (0, k - kept), value=-1)


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest finite entries of each row, ascending; ties go to the lowest index."""
    least = scores.topk(k, -1).values[..., -1:]
    # topk leaves open which of equal scores it returns: take all above the k-th, then fill up by index.
    above, level = scores > least, (scores == least) & (scores > -torch.inf)
    chosen = above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    nodes = scores.shape[-1]
    place = torch.arange(nodes, device=scores.device).masked_fill(~chosen, nodes)
    best = place.topk(k, -1, largest=False).values
    return best.masked_fill(best == nodes, -1)


def find_duplicates(
    x: Float[Tensor, "*batch tokens features"], key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None
) -> Bool[Tensor, "*batch tokens"]:
    """Tell which tokens are equal to an earlier one, up to 16 units in the last place of the largest entry."""
    x, tokens = x.detach(), x.shape[-2]
    if tokens < 2:
        return x.new_zeros(x.shape[:-1], dtype=torch.bool)
    # No two entries of the direction are equal, so that tokens with the same entries in another order lie apart.
    direction = torch.arange(1, x.shape[-1] + 1, device=x.device).to(torch.float32).cos().to(x.dtype)
    place = (x * direction).sum(-1)
    if key_padding_mask is not None:
        place = place.masked_fill(key_padding_mask, torch.inf)
    order = place.argsort(dim=-1, stable=True)
    row = x.gather(-2, order[..., None].expand(x.shape))
    apart = (row[..., 1:, :] - row[..., :-1, :]).abs().amax(-1)
    same = apart <= 16 * torch.finfo(x.dtype).eps * row[..., 1:, :].abs().amax(-1)
    if key_padding_mask is not None:
        same = same & ~key_padding_mask.gather(-1, order)[..., 1:]
    # Runs of equal tokens, and the first token of each run.
    run = torch.nn.functional.pad(~same, (1, 0)).cumsum(-1)
    first = torch.full_like(order, tokens).scatter_reduce(-1, run, order, "amin")
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, order != first.gather(-1, run))
