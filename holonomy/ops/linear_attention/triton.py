r"""Linear attention as Triton kernels: two passes forward and two back, for very many tokens.

The same as :func:`~holonomy.ops.linear_attention.reference.linear_attention`, and, if asked, of
:func:`~holonomy.ops.linear_attention.reference.power_features` of its queries and keys. One pass reads keys and values
and leaves :math:`K^\top V` and the sum of keys; the other reads queries and writes averages. Back, a pass over queries
leaves the gradients of these two, and one over keys and values uses them. At most 64 channels leave the sums in
registers. What it buys: each number is read once in a pass, and of what is computed nothing but results is written;
neither features nor numerators are.

A program takes a chunk of rows and adds in one order; the chunks are added by torch. There are no atomics: two runs
give the same bits. Sums are of float32, or float64, as in :mod:`~holonomy.ops.simplicial_attention.triton`.
"""

# Triton's language has no types: pointers and sizes are what the launchers below pass.
# ruff: noqa: ANN001, ANN202, ARG001, FBT003, N803, N806
# pyright: basic, reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.cuda import device_of

from holonomy import _autograd, numerics
from holonomy.ops.triton_support import language

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["KERNELS", "triton_linear_attention"]

tl, jit = language()


@jit
def _load(base, rows, count, columns, width, WIDE: tl.constexpr):
    there = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=there, other=0.0).to(WIDE)


@jit
def _store(base, x, rows, count, columns, width):
    there = (rows < count)[:, None] & (columns < width)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * width + columns[None, :], x, mask=there)


@jit
def _times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@jit
def _matrix(base, rows, height, columns, width):
    return tl.load(
        base + rows[:, None] * width + columns[None, :],
        mask=(rows < height)[:, None] & (columns < width)[None, :],
        other=0.0,
    )


@jit
def _length(x):
    """Norms of nonnegative rows, by their largest entries, which come second."""
    largest = tl.max(x, 1)
    scaled = x / tl.where(largest > 0, largest, 1.0)[:, None]
    return largest * tl.sqrt(tl.sum(scaled * scaled, 1)), scaled


@jit
def _features(x, power, MOST: tl.constexpr, UNIT: tl.constexpr):
    """The feature map of Hypformer eq. 19, its length left out if UNIT."""
    length, scaled = _length(tl.maximum(x, 0.0))
    live = scaled > 0
    powered = tl.where(live, tl.exp2(power * tl.log2(tl.where(live, scaled, 1.0))), 0.0)
    norm = tl.sqrt(tl.sum(powered * powered, 1))
    if UNIT:
        factor = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    else:
        factor = tl.where(norm > 0, tl.minimum(length, MOST) / tl.where(norm > 0, norm, 1.0), 0.0)
    return powered * factor[:, None]


@jit
def _through_features(grad, x, features, power, MOST: tl.constexpr, UNIT: tl.constexpr):
    """The gradient through :func:`_features`, from its argument and result."""
    positive = tl.maximum(x, 0.0)
    slope = features / tl.where(x > 0, positive, 1.0)
    if UNIT:
        radial = tl.sum(grad * features, 1)
        found = power * (grad - radial[:, None] * features) * slope
    else:
        length, _ = _length(positive)
        inverse = tl.minimum(1.0 / tl.where(length > 0, length, 1.0), MOST)[:, None]
        direction = features * inverse
        radial = tl.sum(grad * direction, 1)[:, None]
        found = radial * (positive * inverse) + power * (grad - radial * direction) * slope
    return found


@jit
def _keys(
    base,
    there,
    entry,
    rows,
    count,
    columns,
    width,
    power,
    MOST: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Keys as they are, their features, and which of them count."""
    raw = _load(base + entry * count * width, rows, count, columns, width, WIDE)
    counts = rows < count
    if MASKED:
        counts = counts & (tl.load(there + entry * count + rows, mask=counts, other=0) != 0)
        raw = tl.where(counts[:, None], raw, 0.0)
    features = raw
    if MAPPED:
        features = _features(raw, power, MOST, False)
    return raw, features, counts


@jit
def _sum_keys(
    key,
    value,
    there,
    products,
    sums,
    tops,
    sizes,
    power,
    share,
    MOST: tl.constexpr,
    ROOT: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk: K^T V and the sum of keys, in units of its largest entry, and that entry."""
    count, width, channels, chunks, rows_each = sizes
    entry, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    WIDE: tl.constexpr = products.dtype.element_ty
    d, c = tl.arange(0, D), tl.arange(0, V)
    product, total = tl.zeros((D, V), WIDE), tl.zeros((D,), WIDE)
    top = tl.max(total, 0)
    for first in range(chunk * rows_each, tl.minimum((chunk + 1) * rows_each, count), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        _, k, counts = _keys(key, there, entry, rows, count, d, width, power, MOST, MAPPED, MASKED, WIDE)
        v = tl.where(counts[:, None], _load(value + entry * count * channels, rows, count, c, channels, WIDE), 0.0)
        highest = tl.maximum(top, tl.max(tl.max(tl.abs(k), 1), 0))
        unit = tl.where(highest > 0, highest, 1.0)
        kept, k = top / unit, k / unit * share
        product = product * kept + _times(tl.trans(k), v, PRECISION)
        total = total * kept + tl.sum(k, 0)
        top = highest
    at = entry * chunks + chunk
    _store(products + at * width * channels, product, d, width, c, channels)
    tl.store(sums + at * width + d, total, d < width)
    tl.store(tops + at, top)


@jit
def _average(
    query,
    product,
    total,
    out,
    sizes,
    power,
    share,
    MOST: tl.constexpr,
    ROOT: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk of queries: the averages."""
    count, width, channels, chunks, rows_each = sizes
    entry, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    WIDE: tl.constexpr = product.dtype.element_ty
    d, c = tl.arange(0, D), tl.arange(0, V)
    kv = _matrix(product + entry * width * channels, d, width, c, channels)
    ones = tl.load(total + entry * width + d, mask=d < width, other=0.0)
    for first in range(chunk * rows_each, tl.minimum((chunk + 1) * rows_each, count), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        q = _load(query + entry * count * width, rows, count, d, width, WIDE)
        if MAPPED:
            q = _features(q, power, MOST, True)
        inverse = _inverse(q, ones, MOST, ROOT)
        mixed = _times(q, kv, PRECISION) * inverse[:, None]
        _store(out + entry * count * channels, mixed, rows, count, c, channels)


@jit
def _inverse(q, ones, MOST: tl.constexpr, ROOT: tl.constexpr):
    """One over the denominators, zero where these count as zero."""
    denominator = tl.sum(q * ones[None, :], 1)
    live = denominator > tl.max(q, 1) * ROOT
    return tl.where(live, tl.minimum(1.0 / tl.where(live, denominator, 1.0), MOST), 0.0)


@jit
def _pull_queries(
    query,
    product,
    total,
    out,
    grad,
    g_query,
    g_products,
    g_sums,
    sizes,
    power,
    share,
    MOST: tl.constexpr,
    ROOT: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk of queries: their gradient, and their part of the gradients of K^T V and of the sum of keys."""
    count, width, channels, chunks, rows_each = sizes
    entry, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    WIDE: tl.constexpr = product.dtype.element_ty
    d, c = tl.arange(0, D), tl.arange(0, V)
    kv = _matrix(product + entry * width * channels, d, width, c, channels)
    ones = tl.load(total + entry * width + d, mask=d < width, other=0.0)
    g_kv, g_ones = tl.zeros((D, V), WIDE), tl.zeros((D,), WIDE)
    for first in range(chunk * rows_each, tl.minimum((chunk + 1) * rows_each, count), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        raw = _load(query + entry * count * width, rows, count, d, width, WIDE)
        q = raw
        if MAPPED:
            q = _features(raw, power, MOST, True)
        inverse = _inverse(q, ones, MOST, ROOT)
        g = _load(grad + entry * count * channels, rows, count, c, channels, WIDE)
        mixed = _load(out + entry * count * channels, rows, count, c, channels, WIDE)
        above, below = g * inverse[:, None], -tl.sum(g * mixed, 1) * inverse
        pulled = _times(above, tl.trans(kv), PRECISION) + below[:, None] * ones[None, :]
        if MAPPED:
            pulled = _through_features(pulled, raw, q, power, MOST, True)
        _store(g_query + entry * count * width, pulled, rows, count, d, width)
        g_kv += _times(tl.trans(q), above, PRECISION)
        g_ones += tl.sum(q * below[:, None], 0)
    at = entry * chunks + chunk
    _store(g_products + at * width * channels, g_kv, d, width, c, channels)
    tl.store(g_sums + at * width + d, g_ones, d < width)


@jit
def _pull_keys(
    key,
    value,
    there,
    unit,
    g_product,
    g_total,
    g_key,
    g_value,
    sizes,
    power,
    share,
    MOST: tl.constexpr,
    ROOT: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk of keys and values: their gradients."""
    count, width, channels, chunks, rows_each = sizes
    entry, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    WIDE: tl.constexpr = g_product.dtype.element_ty
    d, c = tl.arange(0, D), tl.arange(0, V)
    g_kv = _matrix(g_product + entry * width * channels, d, width, c, channels)
    g_ones = tl.load(g_total + entry * width + d, mask=d < width, other=0.0)
    factor = tl.load(unit + entry)
    for first in range(chunk * rows_each, tl.minimum((chunk + 1) * rows_each, count), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        raw, k, counts = _keys(key, there, entry, rows, count, d, width, power, MOST, MAPPED, MASKED, WIDE)
        v = tl.where(counts[:, None], _load(value + entry * count * channels, rows, count, c, channels, WIDE), 0.0)
        of_value = tl.where(counts[:, None], _times(k * factor, g_kv, PRECISION), 0.0)
        _store(g_value + entry * count * channels, of_value, rows, count, c, channels)
        pulled = (_times(v, tl.trans(g_kv), PRECISION) + g_ones[None, :]) * factor
        if MAPPED:
            pulled = _through_features(pulled, raw, k, power, MOST, False)
        _store(g_key + entry * count * width, tl.where(counts[:, None], pulled, 0.0), rows, count, d, width)


KERNELS = (_sum_keys, _average, _pull_queries, _pull_keys)
"""Forward the first two, back the others."""


def triton_linear_attention(
    query: Float[Tensor, "*batch query channels"],
    key: Float[Tensor, "*batch key channels"],
    value: Float[Tensor, "*batch key values"],
    mask: Bool[Tensor, "*#batch key"] | None = None,
    *,
    power: float | None = None,
) -> Float[Tensor, "*batch query values"]:
    r""":math:`Z = Q (K^\top V) / (Q (K^\top 1))`, Hypformer eq. 16, without a second derivative.

    Args:
        query: nonnegative features ``(*batch, query, channels)``.
        key: nonnegative features ``(*batch, key, channels)``.
        value: values ``(*batch, key, values)``.
        mask: ``(*batch, key)``, ``True`` at keys to ignore, whatever they hold.
        power: take ``query`` and ``key`` for vectors whose features of this power (eq. 19) are to be made first, those
            of queries without their length.

    Returns:
        Averages ``(*batch, query, values)``; zero for a query that meets no key.

    >>> triton_linear_attention(torch.ones(0, 1), torch.ones(2, 1), torch.ones(2, 3)).shape
    torch.Size([0, 3])
    """
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    if 0 in (*batch, *query.shape[-2:], key.shape[-2], value.shape[-1]):
        return value.new_zeros(*batch, query.shape[-2], value.shape[-1])
    flat = [x.expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]).contiguous() for x in (query, key, value)]
    there = torch.empty(0, dtype=torch.uint8, device=key.device)
    if mask is not None:
        there = (~mask).expand(*batch, -1).reshape(-1, key.shape[-2]).to(torch.uint8).contiguous()
    mixed, *_ = _autograd.apply_function(_LinearAttention, *flat, there, power)
    return mixed.reshape(*batch, *mixed.shape[-2:])


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, there: Tensor, power: float | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _attend(query, key, value, there, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.power = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = _autograd.apply_function(_Gradient, *ctx.saved_tensors, grad_outputs[0].contiguous(), ctx.power)
        return *grads, None, None


class _Gradient(torch.autograd.Function):
    """The gradient of :class:`_LinearAttention`, an operation of its own: asking for its derivative is refused."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        there: Tensor,
        mixed: Tensor,
        product: Tensor,
        total: Tensor,
        unit: Tensor,
        grad: Tensor,
        power: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _pull(query, key, value, there, mixed, product, total, unit, grad, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        del ctx, grad_outputs
        raise RuntimeError("Linear attention in Triton has no second derivative: take the form in plain torch.")


# Operations of torch, so that a compiler takes them as they are.


@torch.library.custom_op(
    "holonomy::linear_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor there, float? power) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend(
    query: Tensor, key: Tensor, value: Tensor, there: Tensor, power: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixed, product, total, unit = _results(query, key, value, there, power)
    entries, count, width = key.shape
    chunks = _chunks(key, value)
    products = product.new_empty(entries, chunks, *product.shape[1:])
    sums, tops = product.new_empty(entries, chunks, width), product.new_empty(entries, chunks)
    # Of a power of two, so that it costs no digit; with it no sum over keys exceeds the largest value.
    share = 2.0 ** -math.ceil(math.log2(count * width))
    _launch(_sum_keys, [key, value, there, products, sums, tops], key, value, there, power, share)
    largest = tops.amax(1, keepdim=True)
    kept = numerics.safe_div(tops, largest)
    product, total = (products * kept[..., None, None]).sum(1), (sums * kept[..., None]).sum(1)
    unit = numerics.finite(numerics.safe_div(torch.full_like(largest[:, 0], share), largest[:, 0]))
    _launch(_average, [query, product, total, mixed], query, value, there, power)
    return mixed, product, total, unit


@_attend.register_fake
def _results(
    query: Tensor, key: Tensor, value: Tensor, there: Tensor, power: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del there, power
    wide = torch.promote_types(value.dtype, torch.float32)
    entries, width, channels = len(key), key.shape[-1], value.shape[-1]
    return (
        value.new_empty(*query.shape[:2], channels),
        value.new_empty(entries, width, channels, dtype=wide),
        value.new_empty(entries, width, dtype=wide),
        value.new_empty(entries, dtype=wide),
    )


@torch.library.custom_op(
    "holonomy::linear_attention_gradient",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor there, Tensor mixed, Tensor product, Tensor total,"
    " Tensor unit, Tensor grad, float? power) -> (Tensor, Tensor, Tensor)",
)
def _pull(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    there: Tensor,
    mixed: Tensor,
    product: Tensor,
    total: Tensor,
    unit: Tensor,
    grad: Tensor,
    power: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    g_query, g_key, g_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    chunks = _chunks(query, value)
    g_products = product.new_empty(len(product), chunks, *product.shape[1:])
    g_sums = product.new_empty(len(product), chunks, product.shape[1])
    inputs = [query, product, total, mixed, grad, g_query, g_products, g_sums]
    _launch(_pull_queries, inputs, query, value, there, power)
    inputs = [key, value, there, unit, g_products.sum(1), g_sums.sum(1), g_key, g_value]
    _launch(_pull_keys, inputs, key, value, there, power)
    return g_query, g_key, g_value


@_pull.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _block(rows: Tensor, value: Tensor) -> int:
    """Rows at a time; few on a CPU, where the interpreter runs for tests."""
    return 16 if rows.device.type == "cpu" else 64 if max(rows.shape[-1], value.shape[-1]) <= 16 else 32


def _chunks(rows: Tensor, value: Tensor) -> int:
    """How many programs share the rows of an entry: as many as keep a GPU busy, and few enough to be added up."""
    programs = 2 if rows.device.type == "cpu" else 1024
    return min(-(-programs // len(rows)), -(-rows.shape[1] // _block(rows, value)))


def _launch(
    kernel: Any,
    tensors: list[Tensor],
    rows: Tensor,
    value: Tensor,
    there: Tensor,
    power: float | None,
    share: float = 1.0,
) -> None:
    entries, count, width = rows.shape
    block, chunks = _block(rows, value), _chunks(rows, value)
    limits = torch.finfo(torch.promote_types(value.dtype, torch.float32))
    with device_of(rows):
        kernel[(entries * chunks,)](
            *tensors,
            (count, width, value.shape[-1], chunks, block * -(-count // (block * chunks))),
            1.0 if power is None else float(power),
            share,
            MOST=limits.max,
            ROOT=math.sqrt(limits.tiny),
            MAPPED=power is not None,
            MASKED=there.numel() > 0,
            D=max(16, 1 << (width - 1).bit_length()),
            V=max(16, 1 << (value.shape[-1] - 1).bit_length()),
            BLOCK=block,
            num_warps=4 if max(width, value.shape[-1]) <= 32 else 8,
            PRECISION="tf32" if value.dtype in (torch.bfloat16, torch.float16) else "ieee",
        )
