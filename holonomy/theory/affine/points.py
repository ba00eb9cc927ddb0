r"""Enclosures of points of the hyperboloid and of the layers of Hypformer that take one point at a time.

**Scaled points (L6).** Every layer of a block is positively homogeneous once the scale of a point is
carried beside it: a point is held as (time, space)/scale with three forms, so that

* the exponential map at the origin gives :math:`T\,(1, k \tanh(\rho)/\rho\; u)`, :math:`\rho = k |u|`, with
  scale :math:`1/T = k/\cosh \rho`: nothing of the size of :math:`e^\rho` occurs;
* :math:`\mathrm{HTC}` reads W (time, space) + b scale;
* the Lorentzian midpoint is the sum, with scale :math:`\sqrt c\, L`, L the Lorentz norm of the sum: no division;
* LayerNorm divides by :math:`(\mathrm{var} + \epsilon\, \mathrm{scale}^2)^{1/2}`, which becomes the scale of the
  feed-forward's points; where the decoder is linear, there is no division at all but that of attention (L17).

**Midpoints.** For points X = (t, x) and P = (s, p) of one scale :math:`\sigma`, the Lorentz norm L of
:math:`X + \epsilon P` has

.. math:: L^2 = (1 + \epsilon)^2 \sigma^2/c + \epsilon\, (|x - p|^2 - (t - s)^2) .

*Proof.* :math:`\langle X, X\rangle = \langle P, P\rangle = -\sigma^2/c`, so that :math:`2 \langle X, P\rangle =
-2\sigma^2/c - \langle X - P, X - P\rangle`, in :math:`-L^2 = \langle X, X\rangle + 2 \epsilon \langle X, P\rangle +
\epsilon^2 \langle P, P\rangle`. QED
So L is the norm (L4) of a vector with the time :math:`|(\sqrt\epsilon\,(x - p), (1 + \epsilon)\, \sigma/\sqrt c)|`
(L3) and the one space entry :math:`\sqrt\epsilon\,(t - s)`: differences of two points are shorter than sums, and less
cancels. The brackets are not negative (reversed Cauchy-Schwarz), so that the midpoint's scale :math:`\sqrt c\, L` is at
least :math:`1 + \epsilon` times theirs; a lower bound of the scale, ``floor``, is known all along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from holonomy._shapes import Float
from holonomy.layers import HRC, HTC, ExpMapHTC, HypBatchNorm, HypDropout, HypLayerNorm, HypRMSNorm
from holonomy.manifolds import Lorentz
from holonomy.theory.affine.arithmetic.entrywise import positive_power, sech_of_square, tanhc_of_square
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Noise, constant, join, select
from holonomy.theory.affine.arithmetic.lengths import length, lorentz_norm
from holonomy.theory.affine.arithmetic.products import quotient, scale
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.arithmetic.squares import bounds, products, with_squares
from holonomy.theory.attention.projections import NotCoveredError, as_stated
from holonomy.theory.certificates.refinements import gain_and_shift, parts

# The largest rapidity.
_FARTHEST = 300.0
_LESS = 1 - ROUNDING
# Normalisations of one row, see centered.
RowNorm = HypLayerNorm | HypRMSNorm


@dataclass(frozen=True)
class Scaled:
    """Points (time, space) / scale; each scale is at least ``floor``."""

    space: Form
    time: Form
    scale: Form
    floor: Float[Tensor, "problem 1"]


def root(manifold: Lorentz) -> Float[Tensor, ""]:
    """The root of minus the curvature."""
    return manifold.curvature.double().neg().sqrt().squeeze()


def lifted(space: Form, scaling: Form, floor: Tensor, manifold: Lorentz) -> Scaled:
    """The point above a space part: its time is a length (L3)."""
    return Scaled(space, length(join(space, scaling * (1 / root(manifold)))), scaling, floor)


def unscaled(space: Form, manifold: Lorentz) -> Scaled:
    """A point whose scale is one."""
    one = torch.ones_like(space.center[:, :1])
    return lifted(space, constant(space.noise, one), one, manifold)


def above(space: Form, manifold: Lorentz) -> Form:
    """The point above a space part, its time (L3) first."""
    radius = constant(space.noise, torch.ones_like(space.center[:, :1]) / root(manifold))
    return join(length(join(space, radius)), space)


def settled(point: Scaled, manifold: Lorentz) -> Scaled:
    """The same point with scale one."""
    return unscaled(quotient(point.space, point.scale, point.floor), manifold)


def affine_of(layer: HTC) -> tuple[Tensor, Tensor]:
    """Weight and bias of an HTC, with its change of curvature, in float64."""
    as_stated(layer, ExpMapHTC if isinstance(layer, ExpMapHTC) else HTC)
    ratio = root(layer.manifold_in) / root(layer.manifold_out)
    weight = layer.weight.double() * ratio
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.double() * ratio
    return weight, bias


def bias_of(layer: nn.Linear) -> Tensor:
    """The bias of a linear map in float64, zeros if it has none."""
    bias = cast("Tensor | None", layer.bias)
    return torch.zeros(layer.out_features).double() if bias is None else bias.double()


def transformed(layer: HTC, point: Scaled) -> Form:
    """The space part of HTC (eq. 9), times the scale."""
    weight, bias = affine_of(layer)
    return join(point.time, point.space, point.scale).linear(torch.cat([weight, bias[:, None]], dim=1))


def exponential(
    layer: ExpMapHTC,
    noise: Noise,
    features: Float[Tensor, "problem dim"],
    moved: Float[Tensor, "problem entry first"],
    along: Float[Tensor, "problem first"],
    radius: Float[Tensor, " problem"],
) -> tuple[Form, Form, Tensor]:
    """The first layer on features that move by at most ``radius``: its space part over T, 1/T, and the least 1/T.

    ``moved`` is W applied to the perturbation, ``along`` the inner product with the features, per unit ball. Where
    there are squares, the first group is all of the perturbation, not only what is read of it.
    """
    weight, bias = affine_of(layer)
    k = root(layer.manifold_in)
    square = features.square().sum(-1, keepdim=True)
    # Farther out the scale is no number of float64 any more.
    beyond = k * (square.squeeze(1).sqrt() + radius) > _FARTHEST
    noise.fail(beyond)
    stay = (~beyond).to(radius.dtype)
    radius, moved, along = radius * stay, moved * stay[:, None, None], along * stay[:, None]
    half = radius[:, None].square() / 2
    # v = k^2 |u + delta|^2, whose last term lies between 0 and r^2.
    v = Form(noise, square, 2 * along[:, None], ROUNDING * square)
    if noise.squares:
        eye = torch.eye(along.shape[-1]).double()
        v = with_squares(v, 2 * half[..., None] * products(eye, eye).sum(0), 2 * len(eye) * half)
    else:
        v = v.apart(half, half)
    v = v * (k * k)
    farthest = (k * (square.sqrt() + radius[:, None])).clamp(max=_FARTHEST)
    inner = Form(noise, features @ weight[:, 1:].T, moved, torch.zeros_like(moved[..., 0]))
    inner = inner.with_box(ROUNDING * (features.abs() @ weight[:, 1:].abs().T))
    scaling = sech_of_square(v) * k
    space = scale(tanhc_of_square(v) * k, inner).plus(
        scaling.linear(bias[:, None]), constant(noise, weight[:, 0].expand(len(features), -1))
    )
    return space, scaling, k / farthest.cosh() * _LESS


def midpoint(one: Scaled, other: Scaled, weight: float, manifold: Lorentz) -> Scaled:
    """The Lorentzian midpoint of a point and ``weight`` times another, which has the same scale; its norm is L4."""
    k, share = root(manifold), math.sqrt(weight)
    space, time = (a + b * weight for a, b in ((one.space, other.space), (one.time, other.time)))
    x, t = ((a - b) * share for a, b in ((one.space, other.space), (one.time, other.time)))
    floor = torch.maximum(one.floor, bounds(one.scale)[0] * _LESS) * (1 + weight)
    norm = lorentz_norm(length(join(x, one.scale * ((1 + weight) / k))), t, floor / k)
    return Scaled(space, time, norm * k, floor)


def normalised(layer: nn.Module, point: Scaled) -> Ratio:
    """Layer, RMS or batch normalisation of the space part (eq. 21), with the change of curvature."""
    if isinstance(layer, RowNorm):
        inner, size = _row_norm(layer), layer.features
        gain, shift = gain_of(layer)
        space = point.space.linear(centered(layer, torch.eye(size).double()))
        extra = math.sqrt(size * inner.eps)
        divisor, floor = length(join(space, point.scale * extra)), point.floor * (extra * _LESS)
        return Ratio(space * (gain * math.sqrt(size)) + divisor.linear(shift[:, None]), divisor, floor)
    if isinstance(layer, HypBatchNorm):
        gain, shift = gain_and_shift(cast("nn.BatchNorm1d", _within(layer, nn.BatchNorm1d)))
        gain, shift = (part.double() * (root(layer.manifold_in) / root(layer.manifold_out)) for part in (gain, shift))
        return Ratio(point.space * gain + point.scale.linear(shift[:, None]), point.scale, point.floor)
    raise NotCoveredError(
        f"model must normalise by HypLayerNorm, HypRMSNorm or HypBatchNorm, got {type(layer).__name__}."
    )


def _within(layer: HRC, kind: type[nn.Module]) -> nn.Module:
    """The one function of torch that a layer applies to space parts."""
    as_stated(layer, HRC)
    functions = parts(layer.function)
    if len(functions) != 1:
        raise NotCoveredError(f"layer must be made of one {kind.__name__}, got {len(functions)} functions.")
    as_stated(functions[0], kind)
    return cast("nn.Module", functions[0])


def _row_norm(layer: RowNorm) -> Any:
    inner = cast("Any", _within(layer, nn.LayerNorm if isinstance(layer, HypLayerNorm) else nn.RMSNorm))
    if inner.normalized_shape != (layer.features,) or inner.eps is None:
        raise NotCoveredError(f"layer must normalise {layer.features} entries with a number eps, got {inner}.")
    return inner


def gain_of(layer: RowNorm) -> tuple[Tensor, Tensor]:
    """Gain and shift of a normalisation of rows, with its change of curvature, in float64."""
    inner, ratio = _row_norm(layer), root(layer.manifold_in) / root(layer.manifold_out)
    one, bias = torch.ones(layer.features, dtype=torch.float64), getattr(inner, "bias", None)
    gain = one if inner.weight is None else inner.weight.double()
    shift = torch.zeros_like(one) if bias is None else bias.double()
    return gain * ratio, shift * ratio


def centered(layer: RowNorm, rows: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    """What is divided by its length: a LayerNorm subtracts the mean of each row, an RMS norm nothing."""
    return rows - rows.mean(-1, keepdim=True) if isinstance(layer, HypLayerNorm) else rows


def within_sphere(layer: nn.Module, form: Form) -> Form:
    """What a normalisation of rows gives whatever comes in, where the form has failed or reaches farther than that."""
    if not isinstance(layer, RowNorm):
        return form
    gain, shift = gain_of(layer)
    matrix = (
        gain[:, None]
        * centered(layer, torch.eye(layer.features).double())
        * (math.sqrt(layer.features) * (1 + ROUNDING))
    )
    far = form.noise.failed | ~(form.reach() <= torch.linalg.matrix_norm(matrix, 2))
    if not bool(far.any()):
        return form
    sphere = constant(form.noise, shift.expand_as(form.center)).with_ball(matrix.expand(len(far), -1, -1))
    form.noise.failed = torch.zeros_like(far)
    return select(far, sphere, form)


def refined(layer: HRC, form: Form) -> Form:
    """A refinement (eq. 13) of ReLU, dropout that is off, or both; the scale stays."""
    as_stated(layer, HRC)
    ratio = root(layer.manifold_in) / root(layer.manifold_out)
    for step in parts(layer.function):
        if isinstance(step, nn.Dropout | nn.Identity):
            continue
        if not (step in (torch.relu, nn.functional.relu) or isinstance(step, nn.ReLU)):
            name = getattr(step, "__name__", type(step).__name__)
            raise NotCoveredError(f"model must have ReLU as its activation, got {name}.")
        form = positive_power(form, 1.0)
    return form if ratio == 1 else form * ratio


def dropped(layer: nn.Module, form: Form) -> Form:
    """Dropout that is off: at most a change of curvature."""
    if not isinstance(layer, HypDropout):
        raise NotCoveredError(f"model must have HypDropout here, got {type(layer).__name__}.")
    return refined(layer, form)
