"""Zero, infinity and the limits of floating-point types: the only file of the library that treats them.

Everything else writes plain formulas and calls these functions where a formula would meet ``0/0``, a square that
overflows, or a number that the caller's dtype cannot hold. Two habits run through the file:

* **Widen, compute, narrow.** Geometry of float32 points is computed in float64 (:func:`widen`) and handed back in the
  caller's dtype (:func:`narrow`), saturated at the largest finite number instead of overflowing to infinity.
* **Double where.** A branch that would divide by zero gets a harmless input first, so that its gradient is zero and
  never ``nan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holonomy import _autograd
from holonomy._shapes import Bool, Float

ADAM_EPS = 1e-8
"""Default ``eps`` of :class:`holonomy.optim.RiemannianAdam`, as in torch and Geoopt."""

LAYER_NORM_EPS = 1e-5
"""Default ``eps`` added to the variance by layer normalisation, as in torch."""

BATCH_NORM_EPS = 1e-5
"""Default ``eps`` added to the variance by batch normalisation, as in torch."""

CHECK_TOLERANCE = 1e-5
"""Default ``atol`` and ``rtol`` of the question whether a point lies on a manifold, as in Geoopt."""

PRODUCT_NEAR = 1e-8
"""The least sum of products of float64 numbers up to one that still has float32's digits."""

PRODUCT_APART = 5e-3
"""The least sum of products of float32 numbers up to one whose square root still has float32's digits."""

PRODUCT_WIDEST = 1e18
"""The largest number whose square fits float32."""

PRODUCT_SHORTEST = 1e-11
"""The least length of whose square a part of ``PRODUCT_NEAR`` is still a normal number of float32."""

ROW_WIDEST = 1e6
"""Lengths whose float32 digits survive a product with half of float64's."""

ROOM = 2.0**-32
"""The factor by which numbers are scaled before they are summed over an axis, so that no partial sum overflows."""

ROW_STEEPEST = 1e4
"""The largest ratio of terms to their sum whose square, by which gradients cancel, leaves float64 float32's digits."""

LONG = 2.0**20
"""The length of a row beyond which neither its cube nor the reciprocal of that fits float32."""

# From here on arsinh x is log 2x to the last digit of float64.
_LOGARITHMIC = 1e9
# Entries of a row that the compiler's loops take at once.
_LANES = 16


class Tolerance(NamedTuple):
    """Relative and absolute agreement that a dtype allows between two ways to compute one thing."""

    rtol: float
    atol: float


_TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-10),
    torch.float32: Tolerance(1e-4, 1e-5),
    torch.bfloat16: Tolerance(5e-2, 5e-2),
    torch.float16: Tolerance(1e-2, 1e-2),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Agreement to expect of two evaluations in ``dtype``: the one table that tests and guards read."""
    return _TOLERANCES[dtype]


class _SaturatingCast(torch.autograd.Function):
    """A change of dtype that saturates, both forward and on the way back, where a plain cast would overflow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return saturated(x, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        del output
        ctx.source, ctx.target = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return saturating_cast(grad_outputs[0], ctx.source), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        tangent = tangents[0]
        return None if tangent is None else saturating_cast(tangent, ctx.target)


def saturated(x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Cast to ``dtype``, saturating at its largest finite value, with torch's own gradient."""
    limits = torch.finfo(dtype)
    if limits.max < torch.finfo(x.dtype).max:
        x = x.clamp(limits.min, limits.max)
    return x.to(dtype)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to ``dtype``, saturating at its largest finite value; gradients are cast back the same way."""
    if x.dtype == dtype:
        return x
    # dynamo refuses autograd Functions that define jvp; the compiled graph keeps the forward saturation.
    if torch.compiler.is_compiling():
        return saturated(x, dtype)
    return _autograd.apply_function(_SaturatingCast, x, dtype)


def widen(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The float64 working copy of ``x``; gradients come back saturated, not infinite."""
    return sums_saturate(x) if x.dtype == torch.float64 else saturating_cast(x, torch.float64)


def narrow(x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Back from the float64 working copy to the caller's ``dtype``, saturated at its largest finite value."""
    return saturating_cast(finite(x), dtype)


def finite(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``x`` with infinities replaced by the largest finite number of its dtype; the gradient there is zero."""
    limits = torch.finfo(x.dtype)
    return x.clamp(limits.min, limits.max)


def finite_(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """:func:`finite`, in place."""
    limits = torch.finfo(x.dtype)
    return x.clamp_(limits.min, limits.max)


def nan_if_infinite(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``x`` with nan in place of infinities: of an input, which saturation would turn into an ordinary result."""
    return torch.where(x.isinf(), math.nan, x)


def bounded(function: Callable[..., Tensor], *inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A function with infinite results saturated, and gradients without entries that overflowed.

    A product may leave the range in the gradient only: entries that are not finite are zero, unless ``nan`` came in.
    Compiled, and in transformations of ``torch.func``, gradients are those of the function.
    """
    if not _autograd.supports_custom_backward(*inputs):
        return finite(function(*inputs))
    return _autograd.apply_function(_Bounded, function, *inputs)


def sums_saturate(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``x``, whose gradient is finite where it is a sum of finite gradients from several places."""
    return gradient_within(x, torch.finfo(x.dtype).max)


def gradient_within(x: Float[Tensor, "..."], limit: float) -> Float[Tensor, "..."]:
    """``x``, the entries of whose gradient are held at a limit."""
    recorded = torch.is_grad_enabled() and x.requires_grad
    if not recorded or not _autograd.supports_custom_backward(x):
        return x
    x = x.view_as(x)
    x.register_hook(partial(_held, limit=limit))  # pyright: ignore[reportUnknownMemberType]
    return x


def _held(gradient: Tensor | None, limit: float) -> Tensor | None:
    return None if gradient is None else gradient.clamp(-limit, limit)


def shared(x: Float[Tensor, ""], shape: tuple[int, ...]) -> Float[Tensor, "..."]:
    """One number as a tensor of a shape; its gradient is the sum of all, saturated."""
    return _autograd.apply_function(_Shared, x, shape) if _autograd.supports_custom_backward(x) else x.expand(shape)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        del ctx
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        del ctx
        return total(grad_outputs[0]), None


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return finite(function(*inputs))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, grad = ctx.saved_tensors, grad_outputs[0]
        gradients = _autograd.reference_gradients(ctx.function, inputs, grad, tuple(ctx.needs_input_grad[1:]))
        # A finite sum has finite terms: one pass over most gradients, on a CPU, where reading it waits for nothing.
        readable = grad.device.type == "cpu" and not _autograd.batched(grad)
        if readable and all(x is None or bool(x.sum().isfinite()) for x in gradients):
            return None, *gradients
        spoiled = torch.stack([x.isnan().any() for x in (*inputs, grad)]).any()
        return None, *(x if x is None else where_finite(x, spoiled) for x in gradients)


def where_finite(gradient: Float[Tensor, "..."], spoiled: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A gradient with zero in place of the entries that overflowed, so that they do not spoil sums with others."""
    return torch.where(gradient.isfinite() | spoiled, gradient, 0.0)


def total(x: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """The sum of all entries, saturated at the largest finite number, where partial sums would overflow."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # times ROOM float16 numbers would be zero
    return saturated(_sum(wide), x.dtype)


def dot(x: Float[Tensor, "... dim"], y: Float[Tensor, "... dim"]) -> Float[Tensor, "... 1"]:
    """The dot product over the last axis, saturated at the largest finite number as its products are."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = (saturating_cast(z, torch.promote_types(dtype, torch.float32)) for z in (x, y))
    return saturating_cast(_sum(finite(x * y), -1, keepdim=True), dtype)


def _sum(x: Tensor, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
    # Literals, here and wherever gradients written by hand may be the first to read a number: dynamo, told that sizes
    # change, makes symbols of named numbers, and fails where one that it met in such a gradient comes up again.
    return finite((x * 2.0**-32).sum(dim, keepdim) / 2.0**-32)


def exp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The exponential of a logarithm that is learned, held where its square and its inverse are in the range."""
    widest = widest_rapidity(x.dtype) / 2
    return x.clamp(-widest, widest).exp()


def power_of_two(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The largest power of two up to ``|x|``, with the sign of ``x``: dividing by it is exact."""
    x = x.detach()
    return x / (2 * torch.frexp(x).mantissa.abs())


def norm(x: Float[Tensor, "... dim"], *, keepdim: bool = False) -> Float[Tensor, "..."]:
    """Euclidean norm over the last axis, without overflow or underflow in its squares; zero gradient at zero."""
    # As for saturating_cast, dynamo takes the plain operations, whose gradient is the same.
    length = _norm(x) if torch.compiler.is_compiling() else _autograd.apply_function(_Norm, x)
    return length if keepdim else length.squeeze(-1)


class _Norm(torch.autograd.Function):
    """The norm with its gradient in the caller's dtype, keeping no float64 copy for the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _norm(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        x, length = ctx.saved_tensors
        return x * finite(safe_div(torch.ones_like(length), length)) * grad_outputs[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        x, length = ctx.saved_tensors
        return (x * finite(safe_div(torch.ones_like(length), length)) * tangents[0]).sum(-1, keepdim=True)


def _norm(x: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        # Squares of any float32 or bfloat16 number fit float64: no scaling. (Cast first: the norm's own dtype
        # argument takes a slower kernel.)
        wide = x.to(torch.float64)
        if torch.compiler.is_compiling():
            return saturating_cast(root(row_sum(wide.square())), x.dtype)
        return saturating_cast(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), x.dtype)
    if x.shape[-1] == 0:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # The scale is constant for autograd: it cancels exactly in the value and in the gradient.
    largest = x.detach().abs().amax(-1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return finite(torch.linalg.vector_norm(x / scale, dim=-1, keepdim=True) * scale)


def row_sum(x: Float[Tensor, "... dim"]) -> Float[Tensor, "... 1"]:
    """The sum of each row of float64 numbers, by a product where the compiler's loops take four times as long."""
    if torch.compiler.is_compiling() and x.device.type == "cpu" and x.shape[-1] and x.shape[-1] % _LANES == 0:
        return x.unflatten(-1, (-1, _LANES)).sum(-2) @ x.new_ones(_LANES, 1)
    return x.sum(-1, keepdim=True)


def unit_vector(x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    """``x / |x|``, and the zero vector, with zero gradient, where x is zero."""
    return safe_div(x, norm(x, keepdim=True))


def root(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\sqrt x`, with a zero gradient at zero; nan below it, and of nan."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def safe_div(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``a / b``, and 0 with zero gradients where ``b == 0``."""
    zero = b == 0
    return torch.where(zero, 0.0, a / torch.where(zero, 1.0, b))


def zeros_of(size: Sequence[int], *tensors: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Zeros in the dtype of the first tensor that depend on all of them: gradients are zero, where else were none."""
    # Sums of nothing: a product with zero is nan where a number is infinite.
    depends = [x[..., :0].sum() for x in tensors]
    return tensors[0].new_zeros(size) + torch.stack([x.to(tensors[0]) for x in depends]).sum()


def hypot(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\sqrt{a^2 + b^2}` without overflow of the squares, saturated at the largest finite number."""
    return finite(torch.hypot(a, b))


def sinhc(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\sinh(x)/x`, 1 at zero; a series below 0.1, so that the gradient keeps its digits.

    Arguments beyond :func:`widest_rapidity` are held there (zero gradient): the result stays finite.
    """
    small = x < 0.1
    s = torch.where(small, x, 0.0).square()
    series = 1 + s / 6 * (1 + s / 20 * (1 + s / 42 * (1 + s / 72)))
    large = torch.where(small, 1.0, x).clamp(max=widest_rapidity(x.dtype))
    return torch.where(small, series, torch.sinh(large) / large)


def cos_sinc(square: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    r""":math:`\cos a` and :math:`\sin(a)/a` of the square of an angle, by series below 0.01: smooth at zero."""
    small = square < 0.01
    s = torch.where(small, square, 0.0)
    cos = 1 - s / 2 * (1 - s / 12 * (1 - s / 30 * (1 - s / 56 * (1 - s / 90))))
    sinc = 1 - s / 6 * (1 - s / 20 * (1 - s / 42 * (1 - s / 72)))
    angle = torch.where(small, 1.0, square).sqrt()
    return torch.where(small, cos, angle.cos()), torch.where(small, sinc, angle.sin() / angle)


def sinhc_slope(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`(\cosh x - \sinh(x)/x) / x^2`, twice the derivative of :func:`sinhc` by :math:`x^2`; 1/3 at zero."""
    small = x < 0.1
    s = torch.where(small, x, 0.0).square()
    series = (1 + s / 10 * (1 + s / 28 * (1 + s / 54 * (1 + s / 88)))) / 3
    large = torch.where(small, 1.0, x)
    return torch.where(small, series, (torch.cosh(large) - torch.sinh(large) / large) / large.square())


def above_noise(length: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Float64 lengths held above 1e-4, where ``(cosh r - sinh(r) / r) / r**2`` has float32's digits of its limit."""
    return length.clamp(min=1e-4)


def log_sinhc(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\log(\sinh(x)/x)` for :math:`x \ge 0`, finite far out; a series below 0.2, where it would cancel."""
    small = x < 0.2
    s = torch.where(small, x, 0.0).square()
    series = s * _alternating((1 / 6, 1 / 180, 1 / 2835, 1 / 37800, 1 / 467775, 691 / 3831077250), s)
    large = torch.where(small, 1.0, x)
    return torch.where(small, series, large - torch.log(2 * large) + torch.log1p(-torch.exp(-2 * large)))


def asinh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\operatorname{arsinh} x`, with a gradient where squares leave the range, too: there torch's is zero."""
    far = x.abs() > _LOGARITHMIC
    large = torch.where(far, x, 1.0)
    return torch.where(far, large.sign() * (large.abs().log() + math.log(2)), torch.where(far, 1.0, x).asinh())


def asinhc(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`\operatorname{arsinh}(x)/x`, 1 at zero; a series below 0.02, so that the gradient keeps its digits."""
    small = x < 0.02
    s = torch.where(small, x, 0.0).square()
    series = 1 - s * (1 / 6 - s * (3 / 40 - s * (15 / 336 - s * (105 / 3456))))
    large = torch.where(small, 1.0, x)
    return torch.where(small, series, torch.asinh(large) / large)


def cothc(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`x \coth x`, 1 at zero; a series below 0.2, so that the gradient keeps its digits."""
    small = x < 0.2
    s = torch.where(small, x, 0.0).square()
    series = 1 + s * (1 / 3 - s * (1 / 45 - s * (2 / 945 - s * (1 / 4725 - s * (2 / 93555 - s * 1382 / 638512875)))))
    large = torch.where(small, 1.0, x)
    return torch.where(small, series, large / torch.tanh(large))


def minus_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    r""":math:`x - \tanh x`; a series below 0.2, where the difference cancels."""
    small = x < 0.2
    s = torch.where(small, x, 0.0).square()
    coefficients = (
        1 / 3,
        2 / 15,
        17 / 315,
        62 / 2835,
        1382 / 155925,
        21844 / 6081075,
        929569 / 638512875,
        6404582 / 10854718875,
        443861162 / 1856156927625,
    )
    return torch.where(small, x * s * _alternating(coefficients, s), x - torch.tanh(x))


def _alternating(coefficients: tuple[float, ...], s: Tensor) -> Tensor:
    """The series ``c_0 - c_1 s + c_2 s**2 - ..``, summed from its last term."""
    series = torch.zeros_like(s)
    for coefficient in reversed(coefficients):
        series = coefficient - s * series
    return series


def widest_rapidity(dtype: torch.dtype) -> float:
    """The largest ``r`` for which ``sinh(r)`` and its neighbours are surely finite in ``dtype``."""
    return math.log(torch.finfo(dtype).max) - 2.0


def shrink(space: Float[Tensor, "... dim"], dtype: torch.dtype) -> Float[Tensor, "... dim"]:
    """Points beyond what ``dtype`` can hold drawn back along their rays, to a quarter of it: room for the time."""
    shrunk = partial(_shrunk, limit=torch.finfo(dtype).max / 4)
    # Gradients of a wider working dtype have room.
    return bounded(shrunk, finite(space)) if space.dtype == dtype else shrunk(finite(space))


def _shrunk(space: Tensor, limit: float) -> Tensor:
    # Times this share even the length of 2^16 of the largest numbers fits, and float16 holds the limit.
    share = 2.0**-8
    radius, limit = norm(space * share, keepdim=True), limit * share
    beyond = radius > limit
    return torch.where(beyond, space / torch.where(beyond, radius, 1.0) * limit, space)


def at_least_spacing(room: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """``room``, a distance from one, held above a quarter of the spacing of ``dtype`` there (zero gradient below)."""
    return room.clamp(min=torch.finfo(dtype).eps / 4)


def is_ordinary(
    stretch: Float[Tensor, "..."], angle: Float[Tensor, "..."], square: Float[Tensor, "..."], stored: torch.dtype
) -> Bool[Tensor, "..."]:
    """Where a step on the hyperboloid may be computed in its inputs' own dtype and then stored in another.

    ``stretch <= 1/sqrt(eps)`` leaves half of the digits, ``square <= sqrt(max)`` finite sums. False for ``nan``.
    """
    eps, widest = torch.finfo(stretch.dtype).eps, torch.finfo(stored).max
    return (stretch <= eps**-0.5) & (angle <= 1) & (square <= widest**0.5)


def positive(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``x`` with zeros replaced by the smallest normal number: a denominator without gradients in mind."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def squarable(length: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Powers of two that bring rows of these lengths, above a million, to squares that fit; one for the others."""
    length = length.detach()
    return torch.where(length > 2.0**20, torch.exp2(-length.log2().floor()), 1.0)


def within(x: Float[Tensor, "*batch dim"], limit: float) -> Float[Tensor, "*batch dim"]:
    """Rows longer than ``limit`` scaled down to that length, by a factor that is constant for autograd."""
    # Lengths of float32 fit float64; those of float64 rows are taken of a small share of them.
    if x.dtype == torch.float64:
        length = norm(x.detach() * ROOM, keepdim=True) / (limit * ROOM)
    else:
        length = torch.linalg.vector_norm(x.detach().to(torch.float64), dim=-1, keepdim=True) / limit
    return x * torch.where(length > 1, 1 / length, 1.0).to(x.dtype)
