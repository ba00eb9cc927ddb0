r"""Normalisations of the space part of points: HRC (Hypformer eqs. 13, 21) with those of torch.

Rows too long for their squares are scaled down first. Points are ambient, ``(..., d + 1)``, time first.
"""

from __future__ import annotations

import math
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import _parts, checks, numerics
from holonomy._autograd import may_bypass
from holonomy._parts import Group, Parts
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.refinement import HRC, change_curvature, curvatures
from holonomy.manifolds import Lorentz
from holonomy.manifolds.curvature import root_ratio

_HALF = (torch.float16, torch.bfloat16)


class _RowNorm(HRC):
    """A normalisation of the space part, row by row."""

    _torchs: type[nn.LayerNorm | nn.RMSNorm]

    def __init__(
        self,
        features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        eps: float = numerics.LAYER_NORM_EPS,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        checks.positive_int("features", features)
        checks.in_range("eps", eps, 0.0, math.inf)
        checks.flags(elementwise_affine=elementwise_affine)
        norm = self._torchs(features, eps=eps, elementwise_affine=elementwise_affine, device=device, dtype=dtype)
        super().__init__(_Bounded(norm), manifold_in, manifold_out)
        self.features = features

    def forward(self, x: Float[Tensor, "*batch dim_plus_1"]) -> Float[Tensor, "*batch dim_plus_1"]:
        """Map points ``(*batch, d + 1)`` to points ``(*batch, d + 1)`` of ``manifold_out``."""
        checks.last_axis("x", x, self.features + 1, "features + 1", getattr(self.function, "norm", None))
        return super().forward(x)


class HypLayerNorm(_RowNorm):
    r"""Layer normalisation of the space part: HRC (eq. 21) with :class:`torch.nn.LayerNorm`.

    Rows whose squares would overflow are scaled down first, so that the result is accurate up to the largest
    representable radius. Without the affine map, on one manifold and for :math:`\epsilon \le 1` the Lipschitz constant
    is :math:`1/\sqrt{\epsilon}` (theorem H4 on the page *Certificates*); for larger :math:`\epsilon` it may be larger
    than that. One feature alone becomes zero.

    Args:
        features: d.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.
        eps: added to the variance.
        elementwise_affine: learn a scale and a shift per coordinate.
        device: of the parameters.
        dtype: of the parameters.

    >>> m = Lorentz()
    >>> HypLayerNorm(2, m)(m.lift(torch.tensor([1.0, 3.0])))[1:]
    tensor([-1.0000,  1.0000], grad_fn=...)
    """

    _torchs = nn.LayerNorm


class HypRMSNorm(_RowNorm):
    r"""Division of the space part by its root mean square: HRC (eq. 13) with :class:`torch.nn.RMSNorm`.

    .. math:: x_s \mapsto \gamma \odot x_s \Big/ \sqrt{\tfrac{1}{d} |x_s|^2 + \epsilon}

    The normalisation of HELM (He et al., NeurIPS 2025). Unlike :class:`HypLayerNorm` it keeps the direction of the
    space part: without ``elementwise_affine`` it commutes with rotations, and points move along geodesics through the
    origin. Rows whose squares would overflow are treated as there. At the origin the gradient of the space part is
    :math:`\gamma/\sqrt\epsilon`.

    Args:
        features: d.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.
        eps: added to the mean square.
        elementwise_affine: learn a scale per coordinate.
        device: of the parameters.
        dtype: of the parameters.

    >>> m = Lorentz()
    >>> HypRMSNorm(2, m)(m.lift(torch.tensor([1.0, 7.0])))[1:]
    tensor([0.2000, 1.4000], grad_fn=...)
    """

    _torchs = nn.RMSNorm


def may_bypass_norm(norm: HRC) -> TypeGuard[HypLayerNorm | HypRMSNorm]:
    """Whether this is a normalisation of rows whose parameters may be read in place of calling it."""
    for kind, torchs in ((HypLayerNorm, nn.LayerNorm), (HypRMSNorm, nn.RMSNorm)):
        if may_bypass(norm, kind) and isinstance(norm.function, _Bounded):
            return may_bypass(norm.function, _Bounded) and may_bypass(norm.function.norm, torchs)
    return False


def affine_of(
    norm: HypLayerNorm | HypRMSNorm, like: Float[Tensor, "*batch dim_plus_1"]
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """What follows the normalisation, with the change of curvature: gain, shift, both curvatures; and its eps."""
    inner = cast("nn.LayerNorm", cast("_Bounded", norm.function).norm)
    gain = inner.weight if inner.elementwise_affine else like.new_ones(norm.features)
    shift = getattr(inner, "bias", None)
    shift = torch.zeros_like(gain) if shift is None else shift
    here, last = curvatures(norm.manifold_in, norm.manifold_out)
    if last is not here:
        ratio = root_ratio(here, last).to(gain.dtype)
        gain, shift = gain * ratio, shift * ratio
    return gain, shift, here, last, inner.eps


class HypBatchNorm(HRC):
    r"""Batch normalisation of the space part: HRC (eq. 21) with :class:`torch.nn.BatchNorm1d`.

    Statistics run over all leading axes, in float32 at least. They are computed from differences to the first point:
    far from the origin torch's lose the digits of a small variance. In training at least two points are needed, as in
    torch. A running variance beyond the range of its dtype is set to the largest number, so that evaluation divides by
    too little: in float16 if a coordinate deviates by more than 255.

    Args:
        features: d.
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.
        eps: added to the variance.
        momentum: of the running statistics.
        affine: learn a scale and a shift per coordinate.
        track_running_stats: keep running statistics for evaluation.
        device: of the parameters.
        dtype: of the parameters.

    >>> m = Lorentz()
    >>> HypBatchNorm(1, m)(m.lift(torch.tensor([[1.0], [3.0]])))[:, 1].tolist()
    [-0.99999..., 0.99999...]
    """

    def __init__(
        self,
        features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        eps: float = numerics.BATCH_NORM_EPS,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        checks.positive_int("features", features)
        checks.positive("eps", eps)
        checks.in_range("momentum", momentum, 0.0, 1.0)
        norm = _BatchNorm(features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        super().__init__(_Rows(norm), manifold_in, manifold_out)
        self.features = features
        checks.flags(affine=affine, track_running_stats=track_running_stats)

    def forward(
        self, x: Float[Tensor, "*batch dim_plus_1"], *, group: Group | None = None
    ) -> Float[Tensor, "*batch dim_plus_1"]:
        """Map points ``(*batch, d + 1)`` to points ``(*batch, d + 1)`` of ``manifold_out``.

        A ``group`` of processes shares the points, of which ``x`` are those of this one: statistics of a batch are
        those of all, two sums of d + 1 and 2 d numbers; of less than two points the running ones stay as they are.
        Another object is a TypeError; a stream is a ValueError where running statistics were to be drawn towards its
        own, as its chunks are computed more than once.
        """
        rows = cast("_Rows", self.function)
        checks.last_axis("x", x, self.features + 1, "features + 1", getattr(rows, "norm", None))
        if group is None or not (rows.norm.training or rows.norm.running_mean is None):  # statistics that are known
            return super().forward(x)
        space = rows.over(self.manifold_in.space(x), group)
        return change_curvature(space, self.manifold_in, self.manifold_out)


class _Bounded(nn.Module):
    """A scale-invariant row function whose squares must not overflow."""

    def __init__(self, function: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__()
        self.norm = function

    def refinements(self) -> tuple[nn.Module]:
        return (self.norm,)

    def forward(self, space: Tensor) -> Tensor:
        # The variance of so long a row is far from overflow, and any eps far below its last digit.
        bounded = numerics.within(space, torch.finfo(space.dtype).max ** 0.25)
        weight: Tensor | None = getattr(self.norm, "weight", None)
        # Of two dtypes, as under autocast, torch has no fused RMS norm, and warns.
        return self.norm(bounded if weight is None else bounded.to(weight.dtype)).to(space.dtype)


class _BatchNorm(nn.BatchNorm1d):
    """Torch's, with statistics of a batch computed of differences to its first row: those of rows far out cancel."""

    def forward(self, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the name
        if not (self.training or self.running_mean is None):
            return super().forward(rows)
        first = rows[:1].detach()  # neither the result nor its gradient depends on it
        mean, variance, share = None, None, 0.0
        if _tracks(self):
            cast("Tensor", self.num_batches_tracked).add_(1)
            # A copy, as torch keeps it for the backward pass.
            mean, variance, share = cast("Tensor", self.running_mean).clone(), self.running_var, float(_share(self))
        about = rows - first
        out = functional.batch_norm(
            about, mean, variance, self.weight, self.bias, training=True, momentum=share, eps=self.eps
        )
        if mean is not None:
            with torch.no_grad():
                cast("Tensor", self.running_mean).copy_(mean + first.sum(0) * share)
        return out


def _tracks(norm: nn.BatchNorm1d) -> bool:
    """Whether running statistics are drawn towards those of the batch."""
    return norm.training and norm.track_running_stats and norm.running_mean is not None


def _share(norm: nn.BatchNorm1d) -> float | Tensor:
    """Of this batch in the running statistics; without a momentum, as update_bn sets it, all batches count the same."""
    return cast("Tensor", norm.num_batches_tracked).reciprocal() if norm.momentum is None else norm.momentum


class _Rows(nn.Module):
    """A function of a table of rows, applied to all leading axes at once."""

    def __init__(self, function: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = function

    def refinements(self) -> tuple[nn.Module]:
        return (self.norm,)

    def forward(self, space: Tensor) -> Tensor:
        norm = self._in_float32 if space.dtype in _HALF else self.norm
        return numerics.saturating_cast(norm(self._table(space)), space.dtype).reshape(space.shape)

    @staticmethod
    def _table(space: Tensor) -> Float[Tensor, "rows dim"]:
        """In float32 at least, no row so long that squares, summed over the table, leave the dtype."""
        rows = space.reshape(-1, space.shape[-1])
        rows = rows.float() if rows.dtype in _HALF else rows
        return numerics.within(rows, torch.finfo(rows.dtype).max ** 0.5 / 2**16)

    def over(self, space: Tensor, group: Group) -> Tensor:
        """With the statistics of the rows of all parts: the mean first, then squares and what it was rounded by."""
        rows = self._table(space)
        total, count = _parts.total(functional.pad(rows.sum(0), (0, 1), value=len(rows)), group).tensor_split([-1])
        mean = total / count.clamp(min=1)
        centred = rows - mean
        sums = _parts.total(torch.cat([centred.sum(0), centred.square().sum(0)]), group)
        rounded, square = (sums / count.clamp(min=1)).chunk(2)
        centred, variance = centred - rounded, (square - rounded.square()).clamp(min=0)
        if _tracks(self.norm):
            self._draw(mean + rounded, variance, count, group)
        # The root and not its inverse, in whose gradient the cube of a number that is small already would be zero.
        result = centred / (variance + self.norm.eps).sqrt()
        if self.norm.affine:
            result = result * self.norm.weight + self.norm.bias
        return numerics.narrow(result, space.dtype).reshape(space.shape)

    @torch.no_grad()
    def _draw(self, mean: Tensor, variance: Tensor, count: Tensor, group: Group) -> None:
        """Running statistics towards those of the batch, as torch does it."""
        if isinstance(group, Parts):
            raise ValueError(  # noqa: TRY004 - without running statistics a stream is right
                "group must be processes where running statistics are kept, got chunks of a stream, which are computed "
                "more than once; leave them out with track_running_stats=False."
            )
        unbiased = variance * (count / (count - 1).clamp(min=1))
        if self.norm.num_batches_tracked is not None:
            self.norm.num_batches_tracked.add_(1)
        share = (count > 1).to(variance.dtype) * _share(self.norm)  # less than two rows tell nothing
        for held, found in ((self.norm.running_mean, mean), (self.norm.running_var, unbiased)):
            if held is not None:
                held.lerp_(numerics.narrow(found, held.dtype), share.to(held.dtype))

    def _in_float32(self, rows: Tensor) -> Tensor:
        # Torch rounds the mean to the dtype of the rows before it is subtracted.
        held = {**dict(self.norm.named_parameters()), **dict(self.norm.named_buffers())}
        wide = {name: x.float() for name, x in held.items() if x.is_floating_point()}
        result = torch.func.functional_call(self.norm, wide, (rows,))
        with torch.no_grad():
            for name in wide.keys() & {"running_mean", "running_var"}:
                held[name].copy_(numerics.narrow(wide[name], held[name].dtype))
        return result
