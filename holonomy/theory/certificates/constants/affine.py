r"""Lipschitz constants, in the hyperbolic metric, of affine functions of a point: HRC (H1) and HTC (H2).

Everything is in unit coordinates :math:`y = \sqrt c\, x`, where the curvature is -1, the bias is
:math:`\sqrt c\, b`, and the change of curvature of Hypformer eqs. 9 and 13 is the identity. In them
:math:`\eta = \mathrm{diag}(-1, 1, \ldots, 1)`. Proofs: the page *Certificates*.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Float

_BISECTIONS = 60
_GOLDEN = (math.sqrt(5) - 1) / 2
# Beyond this rapidity the squares of sinh leave float64; the global constant takes over.
_WIDE = 300.0
# Steps of H2' for a unit of the angle's greatest slope, and how many are worth their time: a solution that needs more
# has left for infinity, but for tiny balls.
_FINE, _LONG = 40, 100_000


def affine_stretch(
    weight: Float[Tensor, "out dim"], bias: Float[Tensor, " out"] | None = None, radius: float = math.inf
) -> float:
    r"""The Lipschitz constant of :math:`x_s \mapsto A x_s + b` between hyperboloids, exactly: H1.

    .. math:: \mathrm{Lip} = \Big|\begin{pmatrix} A & b \\ 0 & 1 \end{pmatrix}\Big|_2, \qquad
        \mathrm{Lip}_{B_\rho}^2 = \min_{\mu \ge 0} \lambda_{\max}(M + \mu Q),

    .. math:: M = \begin{pmatrix} AA^\top + bb^\top & -b \\ -b^\top & 1 \end{pmatrix}, \qquad
        Q = \begin{pmatrix} \sinh^2(\rho) AA^\top - bb^\top & b \\ b^\top & -1 \end{pmatrix}.

    Without bias it is :math:`\max(1, |A|_2)`, on a ball :math:`|A|_2` where that is at least 1, and else
    :math:`|A|_2 \cosh\rho / \sqrt{1 + |A|_2^2 \sinh^2 \rho}`. A constant map has 0.
    """
    weight = numerics.widen(weight.detach())
    norm = torch.linalg.matrix_norm(weight, 2).item()
    if norm == 0:
        return 0.0
    if bias is None or not bias.any():
        return linear_stretch(norm, radius)
    b = numerics.widen(bias.detach())[:, None]
    square = _bordered(weight @ weight.mT, torch.zeros_like(b), 0.0)
    moved = _bordered(b @ b.mT, -b, 1.0)
    if radius > _WIDE:
        return _root(_top(square + moved)[0])
    return _root(_dual(square, math.sinh(radius) ** 2 * square, moved))


def linear_stretch(norm: float, radius: float = math.inf) -> float:
    """The constant of a 1-homogeneous function of this Euclidean Lipschitz constant; exact for linear maps."""
    if norm >= 1 or norm == 0:
        return norm
    if radius > _WIDE:
        return 1.0
    return norm * math.cosh(radius) / math.hypot(1.0, norm * math.sinh(radius))


def transformation_stretch(
    weight: Float[Tensor, "out ambient"], bias: Float[Tensor, " out"] | None = None, radius: float = math.inf
) -> float:
    r"""The Lipschitz constant of HTC's :math:`x \mapsto W x + b`, the whole point going in: H2.

    With :math:`S = W \eta W^\top = W_s W_s^\top - w_t w_t^\top`,

    .. math:: \mathrm{Lip}^2 \le \lambda_{\max} \begin{pmatrix} S + bb^\top & -b \\ -b^\top & 1 \end{pmatrix},
        \qquad \mathrm{Lip}_{B_\rho}^2 \le \min_{\mu, \theta > 0} \lambda_{\max}(M + \mu Q_\theta),

    M the matrix on the left and

    .. math:: Q_\theta = \begin{pmatrix} (1 + \theta) \cosh^2(\rho)\, w_t w_t^\top
        + (1 + 1/\theta) \sinh^2(\rho)\, W_s W_s^\top - bb^\top & b \\ b^\top & -1 \end{pmatrix}.

    On all of space and without bias it is exact, :math:`\sqrt{\max(1, \lambda_{\max} S)}`: however far out, it stays
    bounded, and the time column only helps. With ``w_t = 0`` it is :func:`affine_stretch`, exact.
    """
    weight = numerics.widen(weight.detach())
    time, space = weight[:, :1], weight[:, 1:]
    if not time.any():
        return affine_stretch(space, bias, radius)
    b = torch.zeros_like(time) if bias is None else numerics.widen(bias.detach())[:, None]
    square, column = (_bordered(z @ z.mT, torch.zeros_like(b), 0.0) for z in (space, time))
    moved = _bordered(b @ b.mT, -b, 1.0)
    if radius > _WIDE:
        return _root(_top(square - column + moved)[0])
    sinh, cosh = math.sinh(radius) ** 2, math.cosh(radius) ** 2

    def at(log_theta: float) -> float:
        theta = math.exp(log_theta)
        return _dual(square - column, (1 + theta) * cosh * column + (1 + 1 / theta) * sinh * square, moved)

    # Along rays mu : mu theta a jointly convex function is quasiconvex; any theta gives a bound.
    return _root(_golden(at, -12.0, 12.0))


def reach(
    weight: Float[Tensor, "out ambient"], bias: Float[Tensor, " out"] | None, radius: float, constant: float
) -> float:
    r"""How far from the origin HTC sends a ball, in unit coordinates.

    .. math:: \min\big( \operatorname{arsinh}(\max_{x_t \in \{1, \cosh\rho\}} |w_t x_t + b| + |W_s|_2 \sinh\rho),\;
        \operatorname{arsinh}|w_t + b| + \mathrm{Lip}\,\rho \big)
    """
    weight = numerics.widen(weight.detach())
    time = weight[:, 0]
    b = torch.zeros_like(time) if bias is None else numerics.widen(bias.detach())
    # A constant map stays where the origin goes, however large the ball.
    center = math.asinh((time + b).norm().item()) + (constant * radius if constant else 0.0)
    if radius > _WIDE:
        return center
    shift = max((time * t + b).norm().item() for t in (1.0, math.cosh(radius)))
    return min(center, math.asinh(shift + torch.linalg.matrix_norm(weight[:, 1:], 2).item() * math.sinh(radius)))


def ball_stretch(stretch: float, bias: float, radius: float) -> float:
    r"""A bound of the stretch of HTC over the ball about any point, from that at the point: H2'.

    Along a geodesic of unit speed :math:`|\lambda'| \le \sqrt{(\lambda^2 - 1)^2 + |b|^2}`; the equation is integrated
    in :math:`\varphi = \arctan \lambda`, twice, and their difference is added. Without bias and from below 1 it is
    :math:`\tanh(\operatorname{artanh}\lambda + r)`, the form of the Schwarz-Pick lemma.
    """
    if radius == 0:
        return stretch
    if bias == 0 and stretch < 1:
        return math.tanh(math.atanh(stretch) + radius)
    if bias == 0:
        left = math.inf if stretch == 1 else math.atanh(1 / stretch)
        return 1 / math.tanh(left - radius) if left > radius else math.inf

    steps = max(100, math.ceil(_FINE * radius * (2 + bias))) if math.isfinite(radius * bias) else _LONG
    if steps >= _LONG:
        return math.inf
    rough, fine = (_follow_angle(math.atan(stretch), bias, radius, n) for n in (steps, 2 * steps))
    # The finer of the two is off by a fifteenth of their difference.
    angle = fine + abs(fine - rough)
    return math.tan(angle) if angle < math.pi / 2 else math.inf


def _follow_angle(angle: float, bias: float, radius: float, steps: int) -> float:
    """Runge and Kutta's fourth order for the angle of H2'; what passes the right angle stays there."""

    def speed(angle: float) -> float:
        # phi' = lambda' / (1 + lambda^2) at lambda = tan(phi).
        c, s = math.cos(angle) ** 2, math.sin(angle) ** 2
        return math.hypot(s - c, bias * c)

    step = radius / steps
    for _ in range(steps):
        first = speed(angle)
        second = speed(angle + step * first / 2)
        third = speed(angle + step * second / 2)
        angle += step * (first + 2 * second + 2 * third + speed(angle + step * third)) / 6
        if angle >= math.pi / 2:
            return math.pi / 2
    return angle


def _bordered(block: Tensor, edge: Tensor, corner: float) -> Tensor:
    return torch.cat([torch.cat([block, edge], 1), torch.cat([edge.mT, block.new_full((1, 1), corner)], 1)])


def _top(matrix: Tensor) -> tuple[float, Tensor]:
    """The top eigenvalue, with what rounding can have taken from it, and its vector; infinite of what is not finite."""
    if not matrix.isfinite().all():
        return math.inf, torch.zeros_like(matrix[0])
    values, vectors = torch.linalg.eigh(matrix)
    rounding = 4 * len(values) * torch.finfo(matrix.dtype).eps * values.abs().amax()
    return (values[-1] + rounding).item(), vectors[:, -1]


def _dual(still: Tensor, far: Tensor, moved: Tensor) -> float:
    """The least over mu >= 0 of the top eigenvalue of M + mu Q, by bisection on a subgradient: a bound at every mu."""
    # M is ``still + moved`` and Q is ``far - moved``: a long bias is large in both and cancels at mu = 1.

    def at(mu: float) -> tuple[float, bool]:
        # M + mu Q. With v its top eigenvector, v^T Q v is a subgradient in mu.
        value, vector = _top(still + mu * far + (1 - mu) * moved)
        return value, bool(vector @ far @ vector >= vector @ moved @ vector)

    best, rising = at(0.0)
    if rising:
        return best
    # The eigenvalue is convex in mu: double mu until it rises, then bisect.
    low, high = 0.0, 1.0
    while not rising and high < 2.0**60:
        value, rising = at(high)
        best = min(best, value)
        low, high = (low, high) if rising else (high, 2 * high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        value, rising = at(middle)
        best = min(best, value)
        low, high = (low, middle) if rising else (middle, high)
    return best


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value that golden sections of an interval find."""
    # Each step keeps one of the two inner points: one evaluation a step.
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    best = min(at_left, at_right, function(low), function(high))
    for _ in range(30):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
        best = min(best, at_left, at_right)
    return best


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))
