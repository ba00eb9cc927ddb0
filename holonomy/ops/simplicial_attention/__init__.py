r"""N-simplicial attention: one softmax over all N-tuples of keys (Simplicial section 2.2, algorithm 2).

.. math:: z_i = \sum_{k_1 .. k_N} A_{i k_1 .. k_N} \; v^1_{k_1} * \cdots * v^N_{k_N}, \qquad
    A_{i \cdot} = \mathrm{softmax}_{k_1 .. k_N} \bigl( s \, \langle x^0_i, x^1_{k_1}, \dots, x^N_{k_N} \rangle \bigr)

Axes are ``(*batch, nodes, channels)``, heads among the batch axes. Masks are boolean and ``True`` where a simplex takes
part, as in :func:`torch.nn.functional.scaled_dot_product_attention`.

Both forms of the logit are inner products of features of the first two vectors with features of the other N - 1
(:mod:`~holonomy.ops.simplicial_attention.logits`). For any N there is thus a first key :math:`k_1` and a tuple of other
keys :math:`(k_2, \dots, k_N)`, one of :math:`n^{N-1}`, and the logits of a query and a first key are a row of one
matrix product. Up to :data:`STORED` logits are stored
(:mod:`~holonomy.ops.simplicial_attention.reference`). More are computed tile by tile with a running softmax, and
recomputed in the backward pass (:mod:`~holonomy.ops.simplicial_attention.tiled`): memory of order :math:`n^{N-1}`
instead of :math:`n^{N+1}`. On CUDA devices Triton kernels compute the tiles
(:mod:`~holonomy.ops.simplicial_attention.triton`), where Triton is installed, N is at least 2, no ``mask`` and no
``tile`` is given, the pair mask is one row for all queries, and there are at most 128 channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from holonomy import _autograd, checks, numerics
from holonomy._shapes import Bool, Float
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.simplicial_attention.logits import FORMS, Form, rescale_to_safe_range
from holonomy.ops.simplicial_attention.reference import (
    Factors,
    factors_of,
    factors_within,
    simplex_weights,
    simplicial_attention_reference,
)
from holonomy.ops.simplicial_attention.simplexes import Simplexes, Tile, allowed, list_simplexes, tiles
from holonomy.ops.simplicial_attention.tiled import tiled_attention
from holonomy.ops.triton_support import supports_triton

TILE = 2**17
"""Logits of a tile, which stays in a CPU core's cache. On other devices 64 times as many."""

STORED = 2**19
"""Up to so many logits are stored, as one tile. On other devices 64 times as many."""


def simplicial_attention(
    keys: Sequence[Float[Tensor, "..."]],
    values: Sequence[Float[Tensor, "..."]],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    pair_mask: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    window: int | tuple[int, ...] | None = None,
    form: Form = "product",
    scale: float | None = None,
    lower_orders: bool = False,
    tile: int | None = None,
) -> Float[Tensor, "..."]:
    r"""Attend to all tuples of N keys, exactly; N is the number of values.

    ``lower_orders`` puts all tuples of the first m keys, m = 1 .. N, into one softmax (appendix F.1, where the keys and
    values beyond m are ones). That is the mixture :math:`\sum_m Z_m z^{(m)} / \sum_m Z_m` of the attentions of each
    order with their softmax masses :math:`Z_m`, and is computed in this way; it is defined for determinants as well.

    Where N = 1 the product form is scaled dot-product attention. Determinants at N = 1 are antisymmetric; at any N
    equal arguments have logit 0, and :math:`\lfloor d/(N+1) \rfloor` chunks of N + 1 channels count (section 2.4 prints
    :math:`\lfloor d/N \rfloor`, which are more than fit).

    Args:
        keys: N + 1 tensors, the query first: ``(*batch, n_m, d)``.
        values: N tensors ``(*batch, n_m, values)``, m = 1 .. N.
        mask: which simplexes there are, broadcasting to ``(*batch, n_0, n_1, .., n_N)``.
        pair_mask: ``(*batch, n_0, n_1)``, broadcasting: a simplex is there if its query may attend to each of its keys.
            A row for keys that are no padding is ``(*batch, 1, n)``.
        causal: leave out keys later than the query. Fewer queries than keys are the last of them.
        window: leave out keys w or more places from the query; N numbers give each key its own window. With ``causal``
            the w tokens up to the query remain. Time is then of order :math:`n w^N`. Fewer queries than keys are the
            last of them.
        form: of the logits, ``"product"`` or ``"determinant"``.
        scale: s, finite; :math:`1/\sqrt{d}` if left out.
        lower_orders: all orders up to N in one softmax.
        tile: logits of a tile; if left out, all of them up to :data:`STORED`, else :data:`TILE`. One tile of all logits
            is stored for the backward pass, which is faster for short sequences; smaller ones are recomputed there.
            The tiled form has no second derivative and raises an error if asked for one; forward mode and
            ``torch.func`` take one tile of all logits.

    Returns:
        ``(*batch, n_0, values)``; zero for a query that is in no simplex.

    Raises:
        TypeError: if keys and values are no floating-point tensors, or some but not all of them float64.
        ValueError: if the numbers or shapes of keys and values do not fit, masks cannot be combined, or a window or
            ``tile`` is not positive.

    >>> x = [torch.zeros(3, 2) for _ in range(3)]
    >>> values = [torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 1)]
    >>> simplicial_attention(x, values, causal=True).flatten()
    tensor([1.0000, 1.5000, 2.0000])
    >>> simplicial_attention(x, values, causal=True, window=(2, 3)).flatten()
    tensor([1.0000, 1.5000, 2.5000])
    """
    checks.one_of("form", form, FORMS)
    checks.flags(causal=causal, lower_orders=lower_orders)
    order = check_simplex(keys, values)
    if tile is not None:
        checks.positive_int("tile", tile)
    windows = check_window(window, order)
    if lower_orders and mask is not None:
        raise ValueError("mask must be None with lower_orders, whose simplexes differ in order; pair_mask is allowed.")
    batch = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in (*keys, *values)))
    sizes = _check_masks(keys, batch, mask, pair_mask, by_place=causal or windows is not None)
    orders = range(1, order + 1) if lower_orders else (order,)
    orders = [m for m in orders if 0 not in (*batch, *sizes[: m + 1])]  # those of which there is a tuple
    if not orders:
        return numerics.zeros_of((*batch, sizes[0], values[0].shape[-1]), *values, *keys)
    scale = 1 / math.sqrt(keys[0].shape[-1]) if scale is None else checks.finite_number("scale", scale)
    if order == 1 and form == "product" and not lower_orders:
        whole = [tensor.expand(*batch, -1, -1) for tensor in (*keys, values[0])]
        return _pairwise(whole[:2], whole[2], mask, pair_mask, causal=causal, window=windows, scale=scale)
    dtype, rounded = values[0].dtype, _any_rounded(*keys, *values)
    if rounded:  # sums over n^N terms, and differences of logits
        keys, values = [key.float() for key in keys], [value.float() for value in values]
    each: list[tuple[Tensor, Tensor]] = []
    with torch.autocast(_autograd.autocast_device(values[0]), enabled=False):
        for m in orders:
            near = None if windows is None else windows[:m]
            masks = {"mask": mask, "pair_mask": pair_mask}
            simplexes = list_simplexes(
                tuple(sizes[: m + 1]), batch, keys[0].device, **masks, causal=causal, window=near
            )
            each.append(
                _attend(keys[: m + 1], values[:m], simplexes, form=form, scale=scale, tile=tile, rounded=rounded)
            )
        return _mixture(each).to(dtype)


def refuse_lower_orders(*, lower_orders: bool) -> None:
    """Refuse to give the weights of all orders as one tensor."""
    if lower_orders:
        raise ValueError("lower_orders must be False for weights, got True: its tuples have several sizes.")


def simplicial_weights(
    keys: Sequence[Float[Tensor, "..."]],
    *,
    pair_mask: Bool[Tensor, "..."] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    window: tuple[int, ...] | None = None,
    form: Form = "product",
) -> Float[Tensor, "..."]:
    """The weights of :func:`simplicial_attention`, ``(*batch, n_0, n_1, .., n_N)``: all of them are stored."""
    batch = torch.broadcast_shapes(*(key.shape[:-2] for key in keys))
    sizes = _check_masks(keys, batch, mask, pair_mask, by_place=causal or window is not None)
    dtype = keys[0].dtype
    if 0 in (*batch, *sizes):
        return numerics.zeros_of((*batch, *sizes), *keys)
    if _any_rounded(*keys):  # as in the attention
        keys = [key.float() for key in keys]
    with torch.autocast(_autograd.autocast_device(keys[0]), enabled=False):
        masks = {"mask": mask, "pair_mask": pair_mask}
        simplexes = list_simplexes(tuple(sizes), batch, keys[0].device, **masks, causal=causal, window=window)
        safe = rescale_to_safe_range(keys, keys[0].shape[-1] * math.factorial(len(keys)))
        # Weights do not depend on values.
        factors = factors_of(safe, safe[1:], simplexes, form=form, scale=1 / math.sqrt(keys[0].shape[-1]))
        axes = math.prod(batch), sizes[0], simplexes.first_keys, simplexes.others
        weights, _ = simplex_weights(factors, allowed(simplexes, Tile(*(slice(0, size) for size in axes))))
    if simplexes.order_of_others is not None:
        weights = weights[..., simplexes.order_of_others.argsort()]
    return weights.reshape(*batch, *sizes).to(dtype)


def _any_rounded(*tensors: Tensor) -> bool:
    """Whether one has 16 bits: of a state made outside of autocast, keys have more than queries."""
    return any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)


def _check_masks(
    keys: Sequence[Tensor], batch: torch.Size, mask: Tensor | None, pair_mask: Tensor | None, *, by_place: bool
) -> list[int]:
    """The numbers of nodes, where masks fit them."""
    sizes = [key.shape[-2] for key in keys]
    if (by_place or pair_mask is not None) and any(size != sizes[1] for size in sizes[2:]):
        raise ValueError(f"keys must have equally many nodes with causal, window or pair_mask, got {sizes}.")
    if by_place and sizes[0] > sizes[1]:
        raise ValueError(f"keys must have at most as many queries as keys with causal or window, got {sizes}.")
    for name, given, nodes in (("mask", mask, sizes), ("pair_mask", pair_mask, sizes[:2])):
        if given is not None:
            checks.broadcasting_mask(name, given, (*batch, *nodes), 0, "(*batch, nodes, ..)")
    return sizes


def check_simplex(keys: Sequence[Tensor], values: Sequence[Tensor]) -> int:
    """Check that keys and values are those of one simplicial attention."""
    for name, tensors in (("keys", keys), ("values", values)):
        for entry in checks.sequence(name, tensors, "tensors", Tensor):
            checks.floating(name, entry)
            if entry.ndim < 2:
                raise ValueError(f"{name} must have shapes (*batch, nodes, channels), got {tuple(entry.shape)}.")
    order = len(values)
    if order < 1 or len(keys) != order + 1:
        raise ValueError(f"keys must be one more than values, and values at least one, got {len(keys)} and {order}.")
    for m in range(1, order + 1):
        if keys[m].shape[-1] != keys[0].shape[-1]:
            raise ValueError(f"keys must have equal channels, got {keys[0].shape[-1]} and {keys[m].shape[-1]}.")
        if values[m - 1].shape[-2] != keys[m].shape[-2] or values[m - 1].shape[-1] != values[0].shape[-1]:
            raise ValueError(
                f"values must have shape (..., {keys[m].shape[-2]}, {values[0].shape[-1]}) like key {m},"
                f" got {tuple(values[m - 1].shape)}."
            )
    for x, y in itertools.combinations((*keys, *values), 2):
        batch, other = x.shape[:-2], y.shape[:-2]
        if any(m not in (n, 1) and n != 1 for m, n in zip(reversed(batch), reversed(other), strict=False)):
            came = f"{tuple(batch)} and {tuple(other)}"
            raise ValueError(f"keys and values must have batch axes that broadcast, got {came}.")
        if x.dtype != y.dtype and torch.float64 in (x.dtype, y.dtype):
            raise TypeError(f"keys and values must have one dtype, got {x.dtype} and {y.dtype}.")
    return order


def check_window(window: int | tuple[int, ...] | None, order: int) -> tuple[int, ...] | None:
    """Check a window, and give one to each key."""
    if window is None:
        return None
    windows = window if isinstance(window, tuple) else (window,) * order
    if len(windows) != order:
        raise ValueError(f"window must be one number or N = {order}, got {window}.")
    return tuple(checks.positive_int("window", each) for each in windows)


def _pairwise(
    keys: Sequence[Tensor],
    value: Tensor,
    mask: Tensor | None,
    pair_mask: Tensor | None,
    *,
    causal: bool,
    window: tuple[int, ...] | None,
    scale: float,
) -> Tensor:
    # Products of float16 are summed in float32, which holds them.
    half = keys[0].dtype == torch.float16
    query, key = keys if half else rescale_to_safe_range(keys, keys[0].shape[-1])
    given = [item for item in (mask, pair_mask) if item is not None]
    if causal or window is not None:
        queries, places = query.shape[-2], key.shape[-2]
        pairs = torch.ones(queries, places, dtype=torch.bool, device=query.device)
        near = places if window is None else window[0] - 1
        given.append(pairs.tril(places - queries + (0 if causal else near)).triu(places - queries - near))
    return dot_product_attention(query, key, value, reduce(torch.logical_and, given) if given else None, scale=scale)


def _mixture(each: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Averages with the exponentials of the log masses as weights."""
    if len(each) == 1:
        return each[0][0]
    logits = torch.stack([mass for _, mass in each])
    empty = logits.isneginf().all(0)
    weights = logits.masked_fill(empty, 0.0).softmax(0)
    return torch.stack([weight[..., None] * mixed for weight, (mixed, _) in zip(weights, each, strict=True)]).sum(0)


def _attend(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    simplexes: Simplexes,
    *,
    form: Form,
    scale: float,
    tile: int | None,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """The averages ``(*batch, n_0, channels)`` and the logarithms of the softmax masses ``(*batch, n_0)``."""
    keys = rescale_to_safe_range(keys, keys[0].shape[-1] * math.factorial(len(keys)))
    factors = factors_of(keys, rescale_to_safe_range(values, 1), simplexes, form=form, scale=scale)
    use_triton = tile is None and _supports_triton(factors, simplexes)
    total = math.prod((*simplexes.batch, *simplexes.sizes))
    if _autograd.transformed() and not _autograd.traced():
        tile = total
    elif tile is None:
        larger = 1 if keys[0].device.type == "cpu" else 64
        tile = total if total <= larger * STORED else larger * TILE
    blocks = list(itertools.islice(tiles(simplexes, tile), 2))
    if len(blocks) == len(blocks[0]) == 1:
        whole = blocks[0][0]
        mixed, mass = simplicial_attention_reference(factors_within(factors, whole), allowed(simplexes, whole))
    elif use_triton:
        from holonomy.ops.simplicial_attention.triton import triton_attention  # noqa: PLC0415 - Triton is imported where it is used

        mixed, mass = triton_attention(factors, simplexes, rounded=rounded)
    else:
        mixed, mass = tiled_attention(factors, simplexes, tile)
    return mixed.unflatten(0, simplexes.batch) if simplexes.batch else mixed[0], mass.reshape(*simplexes.batch, -1)


def _supports_triton(f: Factors, simplexes: Simplexes) -> bool:
    """Whether the kernels support these inputs: they know padding, causality and windows, and no other masks."""
    pairs = simplexes.pair_mask
    supported = (
        simplexes.order > 1 and simplexes.mask is None and (pairs is None or pairs.dim() < 2 or pairs.shape[-2] == 1)
    )
    return supported and max(f.left.shape[-1], f.value.shape[-1]) <= 128 and supports_triton(*f)
