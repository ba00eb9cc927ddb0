r"""The tiles of N-simplicial attention as Triton kernels, for N >= 2 and both forms of the logit.

The same as :func:`~holonomy.ops.simplicial_attention.tiled.tiled_attention`, from the same factors: the logits of
queries and a head are a product with the tails, a running softmax goes over tails and heads, and the way back makes the
logits again. Causality, windows and padding come as the interval of queries that see a head or a tail. What it buys:
logits never leave the multiprocessor, and a tile is no launch of a dozen operations.

The gradient is three kernels, of queries, of heads and of tails, each with its own sums. They make the logits three
times instead of once, and add in one order, without atomics: two runs give the same bits.

All is kept and added in float32, or float64. Products of float32 are IEEE's; where inputs had 16 bits, the factors of
matrix products are rounded to the 11 digits of TF32, into which bfloat16 and float16 numbers fit.
"""

# Triton's language has no types: pointers and sizes are what the launchers below pass.
# ruff: noqa: ANN001, ANN202, ARG001, N803, PLR0915, RUF059
# pyright: basic, reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.cuda import device_of

from holonomy import _autograd
from holonomy.ops.simplicial_attention.simplexes import Simplexes, steps_of
from holonomy.ops.simplicial_attention.tiled import Factors
from holonomy.ops.triton_support import language

__all__ = ["seen_by", "triton_attention"]

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
def _interval(at, index, count, queries):
    """The queries that see a tail: none beyond the last."""
    there = index < count
    return tl.load(at + index, mask=there, other=queries), tl.load(at + count + index, mask=there, other=0)


@jit
def _within(first, last, count, back, ahead):
    """Nodes that a block of queries may see."""
    return tl.maximum(first - back, 0), tl.minimum(last + ahead, count)


@jit
def _stretch(first, last, queries, tails, back, ahead, POWER: tl.constexpr):
    """Tails that a block of queries may see, as :func:`simplexes.reach` has it; all where POWER is zero."""
    low, high = _within(first, last, queries, back, ahead)
    start, stop = low * 0, high * 0 + tails
    if POWER > 0:
        start, stop = low, high
    for _ in tl.static_range(1, POWER):
        start, stop = start * low, stop * high
    return start, stop


@jit
def _times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@jit
def _slopes(a, tail, tail_value, seen, grad, value, base, average, PRECISION: tl.constexpr):
    """Weights of a tile, what is pulled through the head's values, and the slopes of the logits."""
    weights = tl.where(seen, tl.exp(_times(a, tl.trans(tail), PRECISION) - base[:, None]), 0.0)
    pulled = grad * value[None, :]
    slopes = weights * (_times(pulled, tl.trans(tail_value), PRECISION) - average[:, None])
    return weights, pulled, slopes


@jit
def _forward(
    left,
    right,
    tail,
    value,
    tail_value,
    heads_at,
    tails_at,
    mixed,
    mass,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of queries of one entry of the batch: their averages and the logarithms of their masses."""
    entries, queries, heads, tails, features, channels, heads_step, tails_step = sizes
    back, ahead, tails_back, tails_ahead = reach
    blocks = tl.num_programs(0) // entries
    entry, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    second_left, second_right = (entry * 0 + entries) * queries * features, (entry * 0 + entries) * heads * features
    f, c = tl.arange(0, F), tl.arange(0, C)
    left += entry * queries * features
    right += entry * heads * features
    tail += entry * tails * features
    value += entry * heads * channels
    tail_value += entry * tails * channels
    heads_at += entry * heads_step
    tails_at += entry * tails_step
    rows = first + tl.arange(0, BLOCK)
    left0 = _load(left, rows, queries, f, features)
    if TERMS == 2:
        left1 = _load(left + second_left, rows, queries, f, features)
    peak = tl.full((BLOCK,), float("-inf"), left0.dtype)
    total, average = tl.zeros((BLOCK,), left0.dtype), tl.zeros((BLOCK, C), left0.dtype)
    first_head, last_head = _within(first, first + BLOCK, heads, back, ahead)
    first_tail, last_tail = _stretch(first, first + BLOCK, queries, tails, tails_back, tails_ahead, POWER)
    for start in range(first_tail, last_tail, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some, some_values = _load(tail, at, tails, f, features), _load(tail_value, at, tails, c, channels)
        opens, closes = _interval(tails_at, at, tails, queries)
        sees = (opens[None, :] <= rows[:, None]) & (rows[:, None] < closes[None, :])
        for head in range(first_head, last_head):
            one = _row(value, head, c, channels)
            right0 = _row(right, head, f, features)
            from_, to = tl.load(heads_at + head), tl.load(heads_at + heads + head)
            a = left0 * right0[None, :]
            if TERMS == 2:
                right1 = _row(right + second_right, head, f, features)
                a += left1 * right1[None, :]
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            logits = tl.where(seen, _times(a, tl.trans(some), PRECISION), float("-inf"))
            highest = tl.maximum(peak, tl.max(logits, 1))
            # Where nothing is allowed so far every logit is -inf, and any finite number serves.
            level = tl.where(highest == float("-inf"), 0.0, highest)
            weights, kept = tl.exp(logits - level[:, None]), tl.exp(peak - level)
            total = total * kept + tl.sum(weights, 1)
            average = average * kept[:, None] + _times(weights, some_values, PRECISION) * one[None, :]
            peak = highest
    average = average / tl.where(total == 0.0, 1.0, total)[:, None]
    _store(mixed + entry * queries * channels, average, rows, queries, c, channels)
    logarithm = tl.where(total == 0.0, float("-inf"), peak + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(mass + entry * queries + rows, logarithm, rows < queries)


@jit
def _of_queries(
    left,
    right,
    tail,
    value,
    tail_value,
    heads_at,
    tails_at,
    grad,
    base,
    average,
    g_left,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a block of queries."""
    entries, queries, heads, tails, features, channels, heads_step, tails_step = sizes
    back, ahead, tails_back, tails_ahead = reach
    blocks = tl.num_programs(0) // entries
    entry, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    second_left, second_right = (entry * 0 + entries) * queries * features, (entry * 0 + entries) * heads * features
    f, c = tl.arange(0, F), tl.arange(0, C)
    left += entry * queries * features
    right += entry * heads * features
    tail += entry * tails * features
    value += entry * heads * channels
    tail_value += entry * tails * channels
    heads_at += entry * heads_step
    tails_at += entry * tails_step
    grad += entry * queries * channels
    base += entry * queries
    average += entry * queries
    rows = first + tl.arange(0, BLOCK)
    left0 = _load(left, rows, queries, f, features)
    if TERMS == 2:
        left1 = _load(left + second_left, rows, queries, f, features)
    slope = _load(grad, rows, queries, c, channels)
    low, mean = tl.load(base + rows, rows < queries, 0.0), tl.load(average + rows, rows < queries, 0.0)
    g0 = tl.zeros((BLOCK, F), left0.dtype)
    if TERMS == 2:
        g1 = tl.zeros((BLOCK, F), left0.dtype)
    first_head, last_head = _within(first, first + BLOCK, heads, back, ahead)
    first_tail, last_tail = _stretch(first, first + BLOCK, queries, tails, tails_back, tails_ahead, POWER)
    for start in range(first_tail, last_tail, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some, some_values = _load(tail, at, tails, f, features), _load(tail_value, at, tails, c, channels)
        opens, closes = _interval(tails_at, at, tails, queries)
        sees = (opens[None, :] <= rows[:, None]) & (rows[:, None] < closes[None, :])
        for head in range(first_head, last_head):
            one = _row(value, head, c, channels)
            right0 = _row(right, head, f, features)
            from_, to = tl.load(heads_at + head), tl.load(heads_at + heads + head)
            a = left0 * right0[None, :]
            if TERMS == 2:
                right1 = _row(right + second_right, head, f, features)
                a += left1 * right1[None, :]
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            _, _, slopes = _slopes(a, some, some_values, seen, slope, one, low, mean, PRECISION)
            pulled = _times(slopes, some, PRECISION)
            g0 += pulled * right0[None, :]
            if TERMS == 2:
                g1 += pulled * right1[None, :]
    g_left += entry * queries * features
    _store(g_left, g0, rows, queries, f, features)
    if TERMS == 2:
        _store(g_left + second_left, g1, rows, queries, f, features)


@jit
def _of_heads(
    left,
    right,
    tail,
    value,
    tail_value,
    heads_at,
    tails_at,
    grad,
    base,
    average,
    g_right,
    g_value,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of one head."""
    entries, queries, heads, tails, features, channels, heads_step, tails_step = sizes
    back, ahead, tails_back, tails_ahead = reach
    blocks = tl.num_programs(0) // entries
    entry, head = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    second_left, second_right = (entry * 0 + entries) * queries * features, (entry * 0 + entries) * heads * features
    f, c = tl.arange(0, F), tl.arange(0, C)
    left += entry * queries * features
    right += entry * heads * features
    tail += entry * tails * features
    value += entry * heads * channels
    tail_value += entry * tails * channels
    heads_at += entry * heads_step
    tails_at += entry * tails_step
    grad += entry * queries * channels
    base += entry * queries
    average += entry * queries
    one = _row(value, head, c, channels)
    right0 = _row(right, head, f, features)
    from_, to = tl.load(heads_at + head), tl.load(heads_at + heads + head)
    g0, g_one = tl.zeros((F,), right0.dtype), tl.zeros((C,), right0.dtype)
    if TERMS == 2:
        right1 = _row(right + second_right, head, f, features)
        g1 = tl.zeros((F,), right0.dtype)
    for first in range(tl.maximum(from_, 0), tl.minimum(to, queries), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        left0 = _load(left, rows, queries, f, features)
        if TERMS == 2:
            left1 = _load(left + second_left, rows, queries, f, features)
        slope = _load(grad, rows, queries, c, channels)
        low, mean = tl.load(base + rows, rows < queries, 0.0), tl.load(average + rows, rows < queries, 0.0)
        a = left0 * right0[None, :]
        if TERMS == 2:
            a += left1 * right1[None, :]
        pulled, inner = tl.zeros((BLOCK, F), right0.dtype), tl.zeros((BLOCK, C), right0.dtype)
        first_tail, last_tail = _stretch(first, first + BLOCK, queries, tails, tails_back, tails_ahead, POWER)
        for start in range(first_tail, last_tail, BLOCK):
            at = start + tl.arange(0, BLOCK)
            some, some_values = _load(tail, at, tails, f, features), _load(tail_value, at, tails, c, channels)
            opens, closes = _interval(tails_at, at, tails, queries)
            sees = (opens[None, :] <= rows[:, None]) & (rows[:, None] < closes[None, :])
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            weights, _, slopes = _slopes(a, some, some_values, seen, slope, one, low, mean, PRECISION)
            pulled += _times(slopes, some, PRECISION)
            inner += _times(weights, some_values, PRECISION)
        g_one += tl.sum(inner * slope, 0)
        g0 += tl.sum(pulled * left0, 0)
        if TERMS == 2:
            g1 += tl.sum(pulled * left1, 0)
    g_right += entry * heads * features + head * features
    tl.store(g_right + f, g0, f < features)
    if TERMS == 2:
        tl.store(g_right + second_right + f, g1, f < features)
    tl.store(g_value + entry * heads * channels + head * channels + c, g_one, c < channels)


@jit
def _of_tails(
    left,
    right,
    tail,
    value,
    tail_value,
    heads_at,
    tails_at,
    grad,
    base,
    average,
    g_tail,
    g_tail_value,
    sizes,
    reach,
    TERMS: tl.constexpr,
    POWER: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a block of tails."""
    entries, queries, heads, tails, features, channels, heads_step, tails_step = sizes
    back, ahead, tails_back, tails_ahead = reach
    blocks = tl.num_programs(0) // entries
    entry, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    second_left, second_right = (entry * 0 + entries) * queries * features, (entry * 0 + entries) * heads * features
    f, c = tl.arange(0, F), tl.arange(0, C)
    left += entry * queries * features
    right += entry * heads * features
    tail += entry * tails * features
    value += entry * heads * channels
    tail_value += entry * tails * channels
    heads_at += entry * heads_step
    tails_at += entry * tails_step
    grad += entry * queries * channels
    base += entry * queries
    average += entry * queries
    at = start + tl.arange(0, BLOCK)
    some, some_values = _load(tail, at, tails, f, features), _load(tail_value, at, tails, c, channels)
    opens, closes = _interval(tails_at, at, tails, queries)
    g_some, g_some_values = tl.zeros((BLOCK, F), some.dtype), tl.zeros((BLOCK, C), some.dtype)
    for first in range(tl.maximum(tl.min(opens, 0), 0), tl.minimum(tl.max(closes, 0), queries), BLOCK):
        rows = first + tl.arange(0, BLOCK)
        left0 = _load(left, rows, queries, f, features)
        if TERMS == 2:
            left1 = _load(left + second_left, rows, queries, f, features)
        slope = _load(grad, rows, queries, c, channels)
        low, mean = tl.load(base + rows, rows < queries, 0.0), tl.load(average + rows, rows < queries, 0.0)
        sees = (opens[None, :] <= rows[:, None]) & (rows[:, None] < closes[None, :])
        first_head, last_head = _within(first, first + BLOCK, heads, back, ahead)
        for head in range(first_head, last_head):
            one = _row(value, head, c, channels)
            right0 = _row(right, head, f, features)
            from_, to = tl.load(heads_at + head), tl.load(heads_at + heads + head)
            a = left0 * right0[None, :]
            if TERMS == 2:
                right1 = _row(right + second_right, head, f, features)
                a += left1 * right1[None, :]
            seen = sees & ((from_ <= rows) & (rows < to))[:, None]
            weights, pulled, slopes = _slopes(a, some, some_values, seen, slope, one, low, mean, PRECISION)
            g_some += _times(tl.trans(slopes), a, PRECISION)
            g_some_values += _times(tl.trans(weights), pulled, PRECISION)
    _store(g_tail + entry * tails * features, g_some, at, tails, f, features)
    _store(g_tail_value + entry * tails * channels, g_some_values, at, tails, c, channels)


KERNELS = (_forward, _of_queries, _of_heads, _of_tails)


def seen_by(simplexes: Simplexes, device: torch.device) -> tuple[Tensor, Tensor]:
    """The interval of queries that see each head and each tail; what is padding for all queries is seen by none."""
    all_queries = torch.tensor([[0], [simplexes.sizes[0]]], device=device)
    of_heads, of_tails = (
        all_queries.expand(2, count) if interval is None else torch.stack([interval.opens, interval.closes])
        for interval, count in ((simplexes.of_heads, simplexes.heads), (simplexes.of_tails, simplexes.tails))
    )
    heads, tails = of_heads[None], of_tails[None]
    if simplexes.pair_mask is not None:
        there = torch.atleast_2d(simplexes.pair_mask)[..., 0, :]
        there = there.expand(*simplexes.batch, -1).flatten(0, -2) if there.dim() > 1 else there[None]
        there = there.expand(-1, simplexes.heads)
        whole = there
        for _ in range(simplexes.order - 2):
            whole = (whole[:, :, None] & there[:, None]).flatten(1)
        if simplexes.order_of_tails is not None:
            whole = whole[:, simplexes.order_of_tails]
        nobody = all_queries.flip(0)
        heads, tails = torch.where(there[:, None], heads, nobody), torch.where(whole[:, None], tails, nobody)
    return heads.to(torch.int32).contiguous(), tails.to(torch.int32).contiguous()


def triton_attention(factors: Factors, simplexes: Simplexes, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of any number of tokens, without a second derivative."""
    at = seen_by(simplexes, factors.left.device)
    steps = [steps_of(simplexes, m) for m in range(1, simplexes.order + 1)]
    if simplexes.of_tails is None:
        far = max(simplexes.sizes)
        reach = [far, far, far, far, 0]
    else:
        reach = [*steps[0], min(back for back, _ in steps[1:]), max(ahead for _, ahead in steps[1:]), len(steps) - 1]
    inputs = [factor.contiguous() for factor in factors]
    return _autograd.apply_function(_Attention, *inputs, *at, reach, "tf32" if rounded else "ieee")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        left: Tensor,
        right: Tensor,
        tail: Tensor,
        value: Tensor,
        tail_value: Tensor,
        heads_at: Tensor,
        tails_at: Tensor,
        reach: list[int],
        precision: str,
    ) -> tuple[Tensor, Tensor]:
        return _attend(left, right, tail, value, tail_value, heads_at, tails_at, reach, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.reach, ctx.precision = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mixed, mass = ctx.saved_tensors
        grad, grad_mass = grad_outputs
        base = mass.masked_fill(mass.isneginf(), 0.0)
        # The softmax's own derivative takes from each logit's slope the average slope of its row.
        average = (mixed * grad).sum(-1) - grad_mass
        grads = _autograd.apply_function(
            _Gradient, *tensors, grad.contiguous(), base, average, ctx.reach, ctx.precision
        )
        return *grads, None, None, None, None


class _Gradient(torch.autograd.Function):
    """The gradient of :class:`_Attention`, an operation of its own so that asking for its derivative is refused."""

    @staticmethod
    def forward(
        left: Tensor,
        right: Tensor,
        tail: Tensor,
        value: Tensor,
        tail_value: Tensor,
        heads_at: Tensor,
        tails_at: Tensor,
        grad: Tensor,
        base: Tensor,
        average: Tensor,
        reach: list[int],
        precision: str,
    ) -> tuple[Tensor, ...]:
        return _pull(left, right, tail, value, tail_value, heads_at, tails_at, grad, base, average, reach, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        del ctx, grad_outputs
        raise RuntimeError(
            "Simplicial attention in Triton has no second derivative: give a tile that holds all logits."
        )


# Operations of torch, so that a compiler takes them as they are.

_FACTORS = "Tensor left, Tensor right, Tensor tail, Tensor value, Tensor tail_value, Tensor heads_at, Tensor tails_at"


@torch.library.custom_op(
    "holonomy::simplicial", mutates_args=(), schema=f"({_FACTORS}, int[] reach, str precision) -> (Tensor, Tensor)"
)
def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    *tensors, reach, precision = inputs
    left, value = tensors[0], tensors[3]
    mixed, mass = left.new_empty(*left.shape[1:3], value.shape[-1]), left.new_empty(left.shape[1:3])
    _launch(_forward, tensors, [mixed, mass], reach, precision)
    return mixed, mass


@_attend.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    left, value = inputs[0], inputs[3]
    return left.new_empty(*left.shape[1:3], value.shape[-1]), left.new_empty(left.shape[1:3])


@torch.library.custom_op(
    "holonomy::simplicial_gradient",
    mutates_args=(),
    schema=f"({_FACTORS}, Tensor grad, Tensor base, Tensor average, int[] reach, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _pull(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, reach, precision = inputs
    left, right, tail, value, tail_value = grads = tuple(torch.empty_like(tensor) for tensor in tensors[:5])
    _launch(_of_queries, tensors, [left], reach, precision)
    _launch(_of_heads, tensors, [right, value], reach, precision)
    _launch(_of_tails, tensors, [tail, tail_value], reach, precision)
    return grads


@_pull.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in inputs[:5])


def _launch(kernel: Any, tensors: list[Tensor], results: list[Tensor], reach: list[int], precision: str) -> None:
    left, right, tail, value, _, heads_at, tails_at, *_ = tensors
    terms, entries, queries, features = left.shape
    heads, tails, channels = right.shape[2], tail.shape[1], value.shape[-1]
    *steps, power = reach
    between = (0 if len(at) == 1 else 2 * at.shape[-1] for at in (heads_at, tails_at))
    wide = max(features, channels)
    # The largest that leave their sums in registers. On a CPU the interpreter runs, for tests: with several blocks.
    block = 16 if left.device.type == "cpu" else 64 if precision == "tf32" and wide <= 32 else 32
    programs = {_of_heads: heads, _of_tails: -(-tails // block)}.get(kernel, -(-queries // block))
    with device_of(left):
        kernel[(programs * entries,)](
            *tensors,
            *results,
            (entries, queries, heads, tails, features, channels, *between),
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
    """The power of two that a product of matrices takes."""
    return max(16, 1 << (width - 1).bit_length())
