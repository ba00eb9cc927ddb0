r"""Triton kernels of N-simplicial attention, for N >= 2 and both forms of the logit.

They compute the same as :func:`~holonomy.ops.simplicial_attention.tiled.tiled_attention` from the same factors, and its
equations 1 to 9 are those that comments here name: the logits of queries and a first key are a product with the others,
a running softmax goes over others and first keys, and the backward pass recomputes the logits. Causality, windows and
padding enter as the interval of queries that see a first key or a tuple of others. Logits never leave the
multiprocessor, and a tile is one launch instead of a dozen.

The gradient is three kernels, for queries, first keys and others, each with its own sums. They compute the logits three
times instead of once, and add in a fixed order, without atomics: two runs give the same bits.

Sums are in float32, or float64. Products of float32 are IEEE products; where inputs have 16 bits, the factors of matrix
products are rounded to the 11 digits of TF32, which hold bfloat16 and float16 exactly.
"""

# Triton's language has no types: pointers and sizes are what the launchers below pass.
# ruff: noqa: ANN001, ANN202, N803, RUF059
# pyright: basic, reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.cuda import device_of

from holonomy.ops.simplicial_attention.reference import Factors
from holonomy.ops.simplicial_attention.simplexes import Simplexes, steps_of
from holonomy.ops.simplicial_attention.tiled import refuse_second_derivative
from holonomy.ops.triton_support import language

tl, jit = language()


@jit
def _load(base, rows, count, columns, width):
    """Rows of a matrix, zero beyond its edges."""
    there = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows[:, None] * width + columns[None, :], mask=there, other=0.0)


@jit
def _store(base, x, rows, count, columns, width):
    there = (rows < count)[:, None] & (columns < width)[None, :]
    tl.store(base + rows[:, None] * width + columns[None, :], x, mask=there)


@jit
def _row(base, row, columns, width):
    return tl.load(base + row * width + columns, mask=columns < width, other=0.0)


@jit
def _slices(first, sizes, reach, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """First keys and others that a block of queries may see, as in :func:`simplexes.reach`; POWER 0 is all others."""
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    back, ahead, others_back, others_ahead = reach
    last = first + BLOCK
    low, high = tl.maximum(first - others_back, 0), tl.minimum(last + others_ahead, queries)
    start, stop = low * 0, high * 0 + others
    if POWER > 0:
        start, stop = low, high
    for _ in tl.static_range(1, POWER):
        start, stop = start * low, stop * high
    return tl.maximum(first - back, 0), tl.minimum(last + ahead, first_keys), start, stop


@jit
def _at_entry(tables, sizes, BLOCK: tl.constexpr):
    """An entry of the batch, where in it this program's block begins, and its tables of queries, first keys, others."""
    left, right, other, value, other_value, first_keys_at, others_at = tables
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    blocks = tl.num_programs(0) // entries
    entry, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    entries = entry * 0 + entries  # int64, as the number of an entry is: tables may have more than 2^31 numbers
    # The distances are those of second terms from the first.
    of_queries = (left + entry * queries * features, entries * queries * features)
    of_first_keys = (
        right + entry * first_keys * features,
        entries * first_keys * features,
        value + entry * first_keys * channels,
        first_keys_at + entry * first_keys_step,
    )
    of_others = (
        other + entry * others * features,
        other_value + entry * others * channels,
        others_at + entry * others_step,
    )
    return entry, first, of_queries, of_first_keys, of_others


@jit
def _queries(of_queries, rows, count, columns, width, TERMS: tl.constexpr):
    """Both terms of a block of queries; where there is one, it stands for the other, too."""
    left, second = of_queries
    left0 = _load(left, rows, count, columns, width)
    left1 = left0
    if TERMS == 2:
        left1 = _load(left + second, rows, count, columns, width)
    return left0, left1


@jit
def _first_key(of_first_keys, first_key, sizes, f, c, TERMS: tl.constexpr):
    """Both terms of a first key, its value, and the queries that see it."""
    right, second, value, at = of_first_keys
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    right0 = _row(right, first_key, f, features)
    right1 = right0
    if TERMS == 2:
        right1 = _row(right + second, first_key, f, features)
    first_value = _row(value, first_key, c, channels)
    return right0, right1, first_value, tl.load(at + first_key), tl.load(at + first_keys + first_key)


@jit
def _others(of_others, at, sizes, f, c):
    """A block of others, their values, and the queries that see each tuple: none beyond the last tuple."""
    other, value, seen_at = of_others
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    block, values = _load(other, at, others, f, features), _load(value, at, others, c, channels)
    there = at < others
    opens = tl.load(seen_at + at, mask=there, other=queries)
    return block, values, opens, tl.load(seen_at + others + at, mask=there, other=0)


@jit
def _incoming(incoming, entry, rows, count, columns, width):
    """What comes in at a block of queries: gradients, largest logits, and c_q of equation 4."""
    grad, largest, average = incoming
    return (
        _load(grad + entry * count * width, rows, count, columns, width),
        tl.load(largest + entry * count + rows, rows < count, 0.0),
        tl.load(average + entry * count + rows, rows < count, 0.0),
    )


@jit
def _between(rows, opens, closes):
    """Which of a block of queries see which tuples of others."""
    return (opens[None, :] <= rows[:, None]) & (rows[:, None] < closes[None, :])


@jit
def _products(left0, left1, right0, right1, TERMS: tl.constexpr):
    """What queries and a first key multiply the others with: f of equation 1."""
    a = left0 * right0[None, :]
    if TERMS == 2:
        a += left1 * right1[None, :]
    return a


@jit
def _matmul(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@jit
def _grad_logits(a, other, other_value, seen, came, value, PRECISION: tl.constexpr):
    """The weights A of a tile, G_q * u_h, and equation 4."""
    grad, largest, average = came
    weights = tl.where(seen, tl.exp(_matmul(a, tl.trans(other), PRECISION) - largest[:, None]), 0.0)
    pulled = grad * value[None, :]
    grad_logits = weights * (_matmul(pulled, tl.trans(other_value), PRECISION) - average[:, None])
    return weights, pulled, grad_logits


@jit
def _forward(
    tables,
    mixed,
    largest,
    sums,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of queries of one entry of the batch: their averages, largest logits and sums over those."""
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    entry, first, of_queries, of_first_keys, of_others = _at_entry(tables, sizes, BLOCK)
    f, c = tl.arange(0, F), tl.arange(0, C)
    rows = first + tl.arange(0, BLOCK)
    left0, left1 = _queries(of_queries, rows, queries, f, features, TERMS)
    peak = tl.full((BLOCK,), float("-inf"), left0.dtype)
    total, average = tl.zeros((BLOCK,), left0.dtype), tl.zeros((BLOCK, C), left0.dtype)
    first_key_start, first_key_stop, other_start, other_stop = _slices(first, sizes, reach, POWER, BLOCK)
    for start in range(other_start, other_stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block, block_values, opens, closes = _others(of_others, at, sizes, f, c)
        sees = _between(rows, opens, closes)
        for first_key in range(first_key_start, first_key_stop):
            right0, right1, first_value, from_, to = _first_key(of_first_keys, first_key, sizes, f, c, TERMS)
            a = _products(left0, left1, right0, right1, TERMS)
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            logits = tl.where(seen, _matmul(a, tl.trans(block), PRECISION), float("-inf"))
            highest = tl.maximum(peak, tl.max(logits, 1))
            # While all logits so far are -inf, their maximum is replaced by zero: -inf minus itself is nan.
            level = tl.where(highest == float("-inf"), 0.0, highest)
            # Sums so far are rescaled to the new maximum.
            weights, kept = tl.exp(logits - level[:, None]), tl.exp(peak - level)
            total = total * kept + tl.sum(weights, 1)
            average = average * kept[:, None] + _matmul(weights, block_values, PRECISION) * first_value[None, :]
            peak = highest
    average = average / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(mixed + entry * queries * channels, average, rows, queries, c, channels)
    tl.store(largest + entry * queries + rows, peak, rows < queries)
    tl.store(sums + entry * queries + rows, total, rows < queries)


@jit
def _of_queries(
    tables,
    incoming,
    grad_left,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a block of queries: equations 4, 8 and 9."""
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    entry, first, of_queries, of_first_keys, of_others = _at_entry(tables, sizes, BLOCK)
    f, c = tl.arange(0, F), tl.arange(0, C)
    rows = first + tl.arange(0, BLOCK)
    left0, left1 = _queries(of_queries, rows, queries, f, features, TERMS)
    came = _incoming(incoming, entry, rows, queries, c, channels)
    g0 = tl.zeros((BLOCK, F), left0.dtype)
    if TERMS == 2:
        g1 = tl.zeros((BLOCK, F), left0.dtype)
    first_key_start, first_key_stop, other_start, other_stop = _slices(first, sizes, reach, POWER, BLOCK)
    for start in range(other_start, other_stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block, block_values, opens, closes = _others(of_others, at, sizes, f, c)
        sees = _between(rows, opens, closes)
        for first_key in range(first_key_start, first_key_stop):
            right0, right1, first_value, from_, to = _first_key(of_first_keys, first_key, sizes, f, c, TERMS)
            a = _products(left0, left1, right0, right1, TERMS)
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            _, _, grad_logits = _grad_logits(a, block, block_values, seen, came, first_value, PRECISION)
            # Equation 8, then 9 for the query.
            pulled = _matmul(grad_logits, block, PRECISION)
            g0 += pulled * right0[None, :]
            if TERMS == 2:
                g1 += pulled * right1[None, :]
    grad_left += entry * queries * features
    _store(grad_left, g0, rows, queries, f, features)
    if TERMS == 2:
        _store(grad_left + of_queries[1], g1, rows, queries, f, features)


@jit
def _of_first_keys(
    tables,
    incoming,
    grad_right,
    grad_value,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of one first key: equations 5, 8 and 9."""
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    entry, first_key, of_queries, of_first_keys, of_others = _at_entry(tables, sizes, 1)
    f, c = tl.arange(0, F), tl.arange(0, C)
    right0, right1, first_value, from_, to = _first_key(of_first_keys, first_key, sizes, f, c, TERMS)
    g0, grad_first_value = tl.zeros((F,), right0.dtype), tl.zeros((C,), right0.dtype)
    if TERMS == 2:
        g1 = tl.zeros((F,), right0.dtype)
    for first in range(tl.maximum(from_, 0), tl.minimum(to, queries), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        left0, left1 = _queries(of_queries, rows, queries, f, features, TERMS)
        came = _incoming(incoming, entry, rows, queries, c, channels)
        a = _products(left0, left1, right0, right1, TERMS)
        pulled, inner = tl.zeros((BLOCK, F), right0.dtype), tl.zeros((BLOCK, C), right0.dtype)
        first_key_start, first_key_stop, other_start, other_stop = _slices(first, sizes, reach, POWER, BLOCK)
        for start in range(other_start, other_stop, BLOCK):
            at = start + tl.arange(0, BLOCK)
            block, block_values, opens, closes = _others(of_others, at, sizes, f, c)
            sees = _between(rows, opens, closes)
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            weights, _, grad_logits = _grad_logits(a, block, block_values, seen, came, first_value, PRECISION)
            # Equation 8, and the inner sum of equation 5.
            pulled += _matmul(grad_logits, block, PRECISION)
            inner += _matmul(weights, block_values, PRECISION)
        # Equation 5, then 9 for the first key.
        grad_first_value += tl.sum(inner * came[0], 0)
        g0 += tl.sum(pulled * left0, 0)
        if TERMS == 2:
            g1 += tl.sum(pulled * left1, 0)
    grad_right += entry * first_keys * features + first_key * features
    tl.store(grad_right + f, g0, f < features)
    if TERMS == 2:
        tl.store(grad_right + of_first_keys[1] + f, g1, f < features)
    tl.store(grad_value + entry * first_keys * channels + first_key * channels + c, grad_first_value, c < channels)


@jit
def _of_others(
    tables,
    incoming,
    grad_other,
    grad_other_value,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a block of others: equations 4, 6 and 7."""
    entries, queries, first_keys, others, features, channels, first_keys_step, others_step = sizes
    entry, start, of_queries, of_first_keys, of_others = _at_entry(tables, sizes, BLOCK)
    f, c = tl.arange(0, F), tl.arange(0, C)
    at = start + tl.arange(0, BLOCK)
    block, block_values, opens, closes = _others(of_others, at, sizes, f, c)
    grad_block, grad_block_values = tl.zeros((BLOCK, F), block.dtype), tl.zeros((BLOCK, C), block.dtype)
    for first in range(tl.maximum(tl.min(opens, 0), 0), tl.minimum(tl.max(closes, 0), queries), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        left0, left1 = _queries(of_queries, rows, queries, f, features, TERMS)
        came = _incoming(incoming, entry, rows, queries, c, channels)
        sees = _between(rows, opens, closes)
        first_key_start, first_key_stop, other_start, other_stop = _slices(first, sizes, reach, POWER, BLOCK)
        for first_key in range(first_key_start, first_key_stop):
            right0, right1, first_value, from_, to = _first_key(of_first_keys, first_key, sizes, f, c, TERMS)
            a = _products(left0, left1, right0, right1, TERMS)
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            weights, pulled, grad_logits = _grad_logits(a, block, block_values, seen, came, first_value, PRECISION)
            # Equations 7 and 6.
            grad_block += _matmul(tl.trans(grad_logits), a, PRECISION)
            grad_block_values += _matmul(tl.trans(weights), pulled, PRECISION)
    _store(grad_other + entry * others * features, grad_block, at, others, f, features)
    _store(grad_other_value + entry * others * channels, grad_block_values, at, others, c, channels)


KERNELS = (_forward, _of_queries, _of_first_keys, _of_others)


def seen_by(simplexes: Simplexes, device: torch.device) -> tuple[Tensor, Tensor]:
    """The interval of queries that see each first key and each tuple of others; it is empty at padding."""
    all_queries = torch.tensor([[0], [simplexes.sizes[0]]], device=device)
    of_first_keys, of_others = (
        all_queries.expand(2, count) if interval is None else torch.stack([interval.opens, interval.closes])
        for interval, count in (
            (simplexes.of_first_keys, simplexes.first_keys),
            (simplexes.of_others, simplexes.others),
        )
    )
    first_keys, others = of_first_keys[None], of_others[None]
    if simplexes.pair_mask is not None:
        there = torch.atleast_2d(simplexes.pair_mask)[..., 0, :]
        there = there.expand(*simplexes.batch, -1).flatten(0, -2) if there.dim() > 1 else there[None]
        there = there.expand(-1, simplexes.first_keys)
        whole = there
        for _ in range(simplexes.order - 2):
            whole = (whole[:, :, None] & there[:, None]).flatten(1)
        if simplexes.order_of_others is not None:
            whole = whole[:, simplexes.order_of_others]
        no_queries = all_queries.flip(0)
        first_keys, others = (
            torch.where(there[:, None], first_keys, no_queries),
            torch.where(whole[:, None], others, no_queries),
        )
    return first_keys.to(torch.int32).contiguous(), others.to(torch.int32).contiguous()


def triton_attention(factors: Factors, simplexes: Simplexes, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """Equations 2 and 3. Asking for a second derivative raises an error."""
    at = seen_by(simplexes, factors.left.device)
    steps = [steps_of(simplexes, m) for m in range(1, simplexes.order + 1)]
    # The slices of keys that a kernel skips are those of as many queries; intervals are right for fewer, too.
    if simplexes.of_others is None or simplexes.sizes[0] < simplexes.sizes[1]:
        far = max(simplexes.sizes)
        reach = [far, far, far, far, 0]
    else:
        reach = [*steps[0], min(back for back, _ in steps[1:]), max(ahead for _, ahead in steps[1:]), len(steps) - 1]
    inputs = [factor.contiguous() for factor in factors]
    mixed, mass, _, _ = _attend(*inputs, *at, reach, "tf32" if rounded else "ieee")
    return mixed, mass


# Registered with torch, so that torch.compile calls them without tracing.

_FACTORS = (
    "Tensor left, Tensor right, Tensor other, Tensor value, Tensor other_value, Tensor first_keys_at, Tensor others_at"
)


@torch.library.custom_op(
    "holonomy::simplicial",
    mutates_args=(),
    schema=f"({_FACTORS}, int[] reach, str precision) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, reach, precision = inputs
    left, value = tensors[0], tensors[3]
    mixed = left.new_empty(*left.shape[1:3], value.shape[-1])
    largest, sums = (left.new_empty(left.shape[1:3]) for _ in range(2))
    _launch(_forward, tensors, [mixed, largest, sums], reach, precision)
    return mixed, largest + sums.log(), largest, sums


@_attend.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    left, value = inputs[0], inputs[3]
    return left.new_empty(*left.shape[1:3], value.shape[-1]), *(left.new_empty(left.shape[1:3]) for _ in range(3))


@torch.library.custom_op(
    "holonomy::simplicial_gradient",
    mutates_args=(),
    schema=f"({_FACTORS}, Tensor grad, Tensor largest, Tensor average, int[] reach, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pull(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, reach, precision = inputs
    left, right, other, value, other_value = grads = tuple(torch.empty_like(tensor) for tensor in tensors[:5])
    _launch(_of_queries, tensors, [left], reach, precision)
    _launch(_of_first_keys, tensors, [right, value], reach, precision)
    _launch(_of_others, tensors, [other, other_value], reach, precision)
    return grads


@_pull.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in inputs[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reach, ctx.precision = inputs
    mixed, _, largest, sums = output
    ctx.save_for_backward(*tensors, mixed, largest, sums)


def _backward(ctx: Any, grad: Tensor, grad_mass: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, mixed, largest, sums = ctx.saved_tensors
    empty = sums == 0
    largest, sums = largest.masked_fill(empty, 0.0), sums.masked_fill(empty, 1.0)
    # Divided by S, so that weights need not be; c_q of equation 4.
    grad = (grad / sums[..., None]).contiguous()
    average = (mixed * grad).sum(-1) - grad_mass / sums
    return *_pull(*tensors, grad, largest, average, ctx.reach, ctx.precision), None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
_pull.register_autograd(refuse_second_derivative)


def _launch(kernel: Any, tensors: list[Tensor], results: list[Tensor], reach: list[int], precision: str) -> None:
    left, right, other, value, _, first_keys_at, others_at, *_ = tensors
    terms, entries, queries, features = left.shape
    first_keys, others, channels = right.shape[2], other.shape[1], value.shape[-1]
    *steps, power = reach
    between = (0 if len(at) == 1 else 2 * at.shape[-1] for at in (first_keys_at, others_at))
    wide = max(features, channels)
    # The largest blocks whose sums fit in registers. On a CPU, where tests run the interpreter, several small blocks.
    block = 16 if left.device.type == "cpu" else 64 if precision == "tf32" and wide <= 32 else 32
    inputs = [tuple(some) for some in (tensors[:7], tensors[7:]) if some]  # forward nothing comes in
    programs = {_of_first_keys: first_keys, _of_others: -(-others // block)}.get(kernel, -(-queries // block))
    with device_of(left):
        kernel[(programs * entries,)](
            *inputs,
            *results,
            (entries, queries, first_keys, others, features, channels, *between),
            tuple(steps),
            TERMS=terms,
            POWER=power,
            F=_padded(features),
            C=_padded(channels),
            BLOCK=block,
            PRECISION=precision,
            num_warps=4 if wide <= 64 else 8,
        )


def _padded(width: int) -> int:
    """The next power of two that a Triton matrix product supports."""
    return max(16, 1 << (width - 1).bit_length())
