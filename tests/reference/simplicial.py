"""Simplicial attention again, from the equations of Simplicial section 2 and appendix F.1, as loops over all tuples.

``reference(module, *inputs)`` reads the module's parameters by name and its options. Each logit is written out: the sum
of products, or determinants by expansion along the first column; each simplex is asked whether it takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from holonomy import layers, models
from tests.reference.hyperbolic import change, htc
from tests.reference.tokens import affine, entries_dropped, layer_norm, mlp, stacked

Takes = Callable[[int, tuple[int, ...]], bool]


def determinant(columns: Sequence[Tensor]) -> Tensor:
    """Expansion along the first column."""
    if len(columns) == 1:
        return columns[0][0]
    size, total = len(columns), columns[0].new_zeros(())
    for row in range(size):
        rest = [torch.cat([column[:row], column[row + 1 :]]) for column in columns[1:]]
        total = total + (-1) ** row * columns[0][row] * determinant(rest)
    return total


def logit(vectors: Sequence[Tensor], form: str) -> Tensor:
    """The N + 1 vectors of a simplex: section 2.2 or 2.4, without the scale."""
    if form == "product":
        total = torch.ones_like(vectors[0])
        for vector in vectors:
            total = total * vector
        return total.sum()
    size = len(vectors)
    chunks = [
        determinant([vector[size * c : size * (c + 1)] for vector in vectors]) for c in range(len(vectors[0]) // size)
    ]
    return torch.stack(chunks).sum()


def near(window: int | tuple[int, ...] | None, i: int, simplex: tuple[int, ...]) -> bool:
    """Whether each key is less than its window away from the query."""
    if window is None:
        return True
    each = (window,) * len(simplex) if isinstance(window, int) else window
    return all(abs(i - k) < w for k, w in zip(simplex, each, strict=False))


def attention(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    takes: Takes = lambda i, simplex: True,
    *,
    form: str = "product",
    lower_orders: bool = False,
    bias: Callable[[int, tuple[int, ...]], Tensor | float] = lambda i, simplex: 0.0,
    scale: float | None = None,
) -> Tensor:
    """One head, axes (n, d); ``takes(i, (k_1, .., k_N))`` says whether a simplex takes part."""
    order = len(values)
    scale = 1 / math.sqrt(keys[0].shape[1]) if scale is None else scale
    rows = []
    for i in range(len(keys[0])):
        logits, mixed = [], []
        for m in range(1, order + 1) if lower_orders else (order,):
            for simplex in product(*(range(len(key)) for key in keys[1 : m + 1])):
                if takes(i, simplex):
                    vectors = [keys[0][i]] + [keys[slot + 1][k] for slot, k in enumerate(simplex)]
                    logits.append(scale * logit(vectors, form) + bias(i, simplex))
                    entry = torch.ones_like(values[0][0])
                    for slot, k in enumerate(simplex):
                        entry = entry * values[slot][k]
                    mixed.append(entry)
        if not logits:
            rows.append(torch.zeros_like(values[0][0]))
            continue
        weights = torch.stack(logits).softmax(0)
        rows.append(sum(weight * entry for weight, entry in zip(weights, mixed, strict=True)))
    return torch.stack(rows)


def rotated(x: Tensor, size: int, base: float = 10000.0) -> Tensor:
    """Token p's chunks times the p-th power of one rotation of SO(size) each, as matrices."""
    number, planes = x.shape[1] // size, size // 2
    rows = []
    for p, row in enumerate(x):
        out = list(row.unbind())
        for c in range(number):
            rotation = torch.eye(size, dtype=torch.float64)
            for plane in range(planes):
                angle = base ** (-(c * planes + plane) / (number * planes))
                a, b = 2 * plane, 2 * plane + 1
                rotation[a, a] = rotation[b, b] = math.cos(angle)
                rotation[a, b], rotation[b, a] = -math.sin(angle), math.sin(angle)
            power = torch.linalg.matrix_power(rotation, p).to(x)
            out[c * size : (c + 1) * size] = (power @ row[c * size : (c + 1) * size]).unbind()
        rows.append(torch.stack(out))
    return torch.stack(rows)


def marked(steps: Tensor, i: int, simplex: tuple[int, ...]) -> bool:
    """Whether each step of the path is among those of the token that it leaves."""
    path = (i, *simplex)
    return all(after in steps[before].tolist() for before, after in pairwise(path))


def best_steps(query: Tensor, key: Tensor, gate: Tensor, k: int, *, causal: bool, hidden: Tensor) -> list[list[int]]:
    """Section 2.3: the k largest s_ij = sum_h w_ih ReLU(q_ih . k_jh), ties to the lowest index; axes (heads, n, d)."""
    nodes, chosen = query.shape[1], []
    for i in range(nodes):
        scores = {}
        for j in range(nodes):
            if hidden[j] or (causal and j > i):
                continue
            value = sum(gate[i, h] * (query[h, i] @ key[h, j]).relu() for h in range(len(query)))
            scores[j] = value.item()
        ranked = sorted(scores, key=lambda j: (-scores[j], j))[:k]
        chosen.append(sorted(ranked))
    return chosen


def again(x: Tensor, hidden: Tensor) -> Tensor:
    """Which tokens are there and equal to one that is there before."""
    return torch.tensor(
        [
            any(bool(torch.isclose(row, x[i]).all()) for i in range(j) if not hidden[i]) and not bool(hidden[j])
            for j, row in enumerate(x)
        ]
    )


def by_heads(table: Tensor, slots: int, heads: int) -> list[list[Tensor]]:
    """(n, slots * heads * d) to [slot][head] of (n, d)."""
    width = table.shape[1] // (slots * heads)
    return [
        [table[:, (m * heads + h) * width : (m * heads + h + 1) * width] for h in range(heads)] for m in range(slots)
    ]


def projections(module: layers.SimplicialAttention, x: Tensor) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    keys = stacked([affine(module.key, row.unbind()) for row in x])
    values = stacked([affine(module.value, row.unbind()) for row in x])
    by_slot = by_heads(keys, module.order + 1, module.heads)
    if module.rope:
        by_slot = [[rotated(head, module.order + 1) for head in slot] for slot in by_slot]
    return by_slot, by_heads(values, module.order, module.heads)


def simplicial(
    module: layers.SimplicialAttention,
    x: Tensor,
    padding: Tensor | None = None,
    takes: Takes = lambda i, simplex: True,
    bias: Callable[[int, tuple[int, ...]], Tensor | float] = lambda i, simplex: 0.0,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """``attn_mask`` ``(tokens, keys)`` is True where a query must not attend; keys and values are of ``memory`` if it
    is there. Padding comes out as a token that attends to none."""
    if x.ndim == 3:
        paddings, memories = ([None] * len(x) if given is None else given for given in (padding, memory))
        how, graphs = {"is_causal": is_causal, "attn_mask": attn_mask}, zip(x, paddings, memories, strict=True)
        return torch.stack([simplicial(module, graph, one, memory=other, **how) for graph, one, other in graphs])
    others = x if memory is None else memory
    hidden = torch.zeros(len(others), dtype=torch.bool) if padding is None else padding
    others = torch.where(hidden[:, None], 0.0, others)
    (_, *keys), values = projections(module, others)
    query = projections(module, others if memory is None else x)[0][0]

    def there(i: int, simplex: tuple[int, ...]) -> bool:
        late, lost = module.causal or is_causal, attn_mask is not None and any(attn_mask[i, k] for k in simplex)
        seen = not lost and all(not hidden[k] and (k <= i or not late) for k in simplex)
        return seen and near(module.window, i, simplex) and takes(i, simplex)

    heads = [
        attention(
            [slot[h] for slot in (query, *keys)],
            [slot[h] for slot in values],
            there,
            form=module.form,
            lower_orders=module.lower_orders,
            bias=bias,
        )
        for h in range(module.heads)
    ]
    mixed = torch.cat(heads, 1)
    if memory is None:
        mixed = torch.where(hidden[:, None], 0.0, mixed)
    return stacked([affine(module.out, row.unbind()) for row in mixed])


def along_paths(
    attention_module: layers.SimplicialAttention,
    router: layers.PathRouter,
    x: Tensor,
    query: Tensor,
    key: Tensor,
    padding: Tensor | None = None,
) -> Tensor:
    """The simplexes whose steps are marked; query and key (heads, n, d) of the layer before. The value of a score is
    nothing, its gradient that of a bias of its step."""
    hidden = torch.zeros(len(x), dtype=torch.bool) if padding is None else padding
    if router.distinct:
        hidden = hidden | again(x, hidden)
    # Only the gate's own weights learn from the scores.
    query, key = query.detach(), key.detach()
    gate = stacked([affine(router.gate, row.unbind()) for row in x.detach()])
    steps = best_steps(query, key, gate, router.k, causal=router.causal, hidden=hidden)

    def score(i: int, j: int) -> Tensor:
        value = sum(gate[i, h] * (query[h, i] @ key[h, j]).relu() for h in range(len(query)))
        return value - value.detach()

    def takes(i: int, simplex: tuple[int, ...]) -> bool:
        path = (i, *simplex)
        return all(after in steps[before] for before, after in pairwise(path))

    def bias(i: int, simplex: tuple[int, ...]) -> Tensor:
        path = (i, *simplex)
        return sum(score(before, after) for before, after in pairwise(path))

    return simplicial(attention_module, x, padding, takes, bias)


def on_paths(outer: nn.Module, x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The registered pair: an attention whose paths are chosen by its own first two projections."""
    if x.ndim == 3:
        paddings = [None] * len(x) if padding is None else padding
        return torch.stack([on_paths(outer, graph, one) for graph, one in zip(x, paddings, strict=True)])
    if padding is not None:
        x = torch.where(padding[:, None], 0.0, x)
    keys, _ = projections(outer.attention, x)
    return along_paths(outer.attention, outer.router, x, torch.stack(keys[0]), torch.stack(keys[1]), padding)


def expert_choice(module: layers.ExpertChoice, x: Tensor, padding: Tensor | None = None) -> Tensor:
    if x.ndim == 3:
        paddings = [None] * len(x) if padding is None else padding
        return torch.stack([expert_choice(module, graph, one) for graph, one in zip(x, paddings, strict=True)])
    if padding is not None:
        x = torch.where(padding[:, None], 0.0, x)
    return x + chosen_only(module, x, padding)


def chosen_only(module: layers.ExpertChoice, x: Tensor, padding: Tensor | None) -> Tensor:
    """s_i f(X_S)_i for the k best, zero for the others: section 2.3."""
    scores = [affine(module.router, row.unbind())[0] for row in x]
    there = [i for i in range(len(x)) if padding is None or not padding[i]]
    best = sorted(sorted(there, key=lambda i: (-scores[i].item(), i))[: module.capacity])
    out = [torch.zeros_like(row) for row in x]
    if best:
        inner = simplicial(module.inner, x[best])
        for place, i in enumerate(best):
            out[i] = scores[i] * inner[place]
    return torch.stack(out)


def encoder_layer(
    module: layers.SimplicialEncoderLayer,
    x: Tensor,
    padding: Tensor | None,
    before: Tensor | None,
    pairs: Tensor | None,
    dropout: float,
    memory: Tensor | None = None,
    *,
    is_causal: bool = False,
):
    """One graph; ``before`` are the normed tokens of the layer before, with its attention."""
    if padding is not None and memory is None:
        x = torch.where(padding[:, None], 0.0, x)
    normed = stacked([layer_norm(module.norm_attention, row.unbind()) for row in x])
    if isinstance(module.attention, layers.ExpertChoice):
        attended = chosen_only(module.attention, normed, padding)
    elif module.router is not None:
        query, key = before
        attended = along_paths(module.attention, module.router, normed, query, key, padding)
    else:
        how = {"attn_mask": pairs, "is_causal": is_causal, "memory": memory}
        attended = simplicial(module.attention, normed, padding, **how)
    handed = None
    if not isinstance(module.attention, layers.ExpertChoice):
        keys, _ = projections(module.attention, normed)
        handed = torch.stack(keys[0]), torch.stack(keys[1])
    middle = x + entries_dropped(attended, dropout, module)
    return middle + mlp(module, middle, dropout), handed


def one_layer(
    module: layers.SimplicialEncoderLayer,
    x: Tensor,
    padding: Tensor | None = None,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    memory: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    if x.ndim == 2:
        return encoder_layer(module, x, padding, None, attn_mask, dropout, memory, is_causal=is_causal)[0]
    paddings, memories = ([None] * len(x) if given is None else given for given in (padding, memory))
    how = {"is_causal": is_causal, "attn_mask": attn_mask, "dropout": dropout}
    graphs = zip(x, paddings, memories, strict=True)
    return torch.stack([one_layer(module, graph, one, memory=other, **how) for graph, one, other in graphs])


def transformer(
    module: models.SimplicialTransformer,
    x: Tensor,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """``mask`` is True where a token must not attend to another."""
    if x.ndim == 3:
        masks = [None] * len(x) if mask is None else mask
        paddings = [None] * len(x) if padding is None else padding
        graphs = zip(x, masks, paddings, strict=True)
        return torch.stack([transformer(module, *graph, dropout=dropout) for graph in graphs])
    handed = None
    for layer in module.layers:
        x, handed = encoder_layer(layer, x, padding, handed, mask, dropout)
    return stacked([layer_norm(module.norm, row.unbind()) for row in x])


def hyperbolic(
    module: layers.HypSimplicialAttention,
    x: Tensor,
    padding: Tensor | None = None,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """HTC (Hypformer eq. 14), the Euclidean attention of the space parts, and eq. 18.

    ``attn_mask`` ``(nodes, keys)`` is True where a query must not attend; keys and values are of ``memory`` if it is
    there.
    """
    if x.ndim == 3:
        paddings, memories = ([None] * len(x) if given is None else given for given in (padding, memory))
        graphs = zip(x, paddings, memories, strict=True)
        how = {"is_causal": is_causal, "attn_mask": attn_mask}
        return torch.stack([hyperbolic(module, graph, one, memory=other, **how) for graph, one, other in graphs])
    others = x if memory is None else memory
    hidden = torch.zeros(len(others), dtype=torch.bool) if padding is None else padding
    others = torch.where(hidden[:, None], 0.0, others)
    x = others if memory is None else x
    maps = zip(module.keys, [x] + [others] * module.order, strict=True)
    keys = [by_heads(htc(linear, points)[:, 1:], 1, module.heads)[0] for linear, points in maps]
    values = [by_heads(htc(linear, others)[:, 1:], 1, module.heads)[0] for linear in module.values]

    def there(i: int, simplex: tuple[int, ...]) -> bool:
        late = module.causal or is_causal
        kept = attn_mask is None or not any(attn_mask[i, k] for k in simplex)
        return kept and all(not hidden[k] and (k <= i or not late) for k in simplex)

    heads = [
        attention(
            [slot[h] for slot in keys],
            [slot[h] for slot in values],
            there,
            form=module.form,
            lower_orders=module.lower_orders,
        )
        for h in range(module.heads)
    ]
    space = torch.cat(heads, 1)
    if memory is None:
        space = torch.where(hidden[:, None], 0.0, space)
    return torch.stack([torch.stack(change(row.unbind(), module, "manifold_hidden")) for row in space])


REFERENCES: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.SimplicialAttention: simplicial,
    layers.PathRouter: on_paths,
    layers.ExpertChoice: expert_choice,
    layers.SimplicialEncoderLayer: one_layer,
    layers.HypSimplicialAttention: hyperbolic,
    models.SimplicialTransformer: transformer,
}
