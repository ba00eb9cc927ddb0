r"""The Busemann function: how far a point lies from one at infinity.

.. math::
    B_\xi(x) = \lim_{t \to \infty} d(x, \exp_o(t \xi)) - t
             = \frac{1}{\sqrt{-\kappa}} \log\big(\sqrt{-\kappa}\,(x_t - \langle x_s, \xi\rangle)\big)

for a unit vector :math:`\xi`. With r the rapidity of x and :math:`\phi` the angle between its ray and :math:`\xi`, the
difference is :math:`e^{-r} + \sinh r\, (1 - \cos\phi)`, in which nothing cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holonomy import checks, numerics
from holonomy._shapes import Ambient, Float
from holonomy.manifolds import hyperboloid
from holonomy.manifolds.hyperboloid.rays import polar
from holonomy.manifolds.hyperboloid.views import part_across
from holonomy.manifolds.lorentz import Lorentz, require_lorentz


def busemann(x: Ambient, direction: Float[Tensor, "... dim"], manifold: Lorentz) -> Float[Tensor, "..."]:
    r"""The Busemann function of an ideal point: signed distances from the horosphere about it through the origin.

    Zero at the origin, **negative towards the ideal point** and positive away from it: :math:`-t` at distance t along
    ``direction``. Its level sets are the horospheres about the ideal point, its gradient has length one everywhere.

    Accurate for float32 points up to rapidity 86, also exactly on the ray of the ideal point. For float64 points the
    angle to that ray is rounded as they are: near it results are off by up to 1e-7 at rapidity 30, and by 1 at 60.

    Args:
        x: points ``(..., d + 1)``.
        direction: where the ideal point lies, seen from the origin, ``(..., d)``: vectors of any length but zero, of
            which only the direction counts. Where it cannot be read, a zero vector gives an undefined result.
        manifold: where the points lie.

    Returns:
        ``(...)``, in units of length.

    Raises:
        ValueError: if a direction is zero, where it can be read, or if shapes do not fit.

    >>> m = Lorentz(-0.5)
    >>> x = m.expmap0(torch.tensor([[0.0, 3.0, 0.0], [0.0, -2.0, 0.0]]))
    >>> torch.allclose(busemann(x, torch.tensor([1.0, 0.0]), m), torch.tensor([-3.0, 2.0]))
    True
    """
    require_lorentz("manifold", manifold)
    checks.vectors(x=x)
    checks.vectors(x=hyperboloid.space(x), direction=direction)
    checks.nonzero("direction", direction)
    # Of a short direction the gradient is long, and a sum of several may leave the range.
    space, direction = torch.broadcast_tensors(hyperboloid.space(x), numerics.sums_saturate(direction))
    direction = numerics.gradient_within(direction, torch.finfo(direction.dtype).max * numerics.ROOM)
    result = hyperboloid.saturating(_busemann, manifold.curvature, space, direction)
    return numerics.narrow(result, torch.promote_types(x.dtype, direction.dtype)).squeeze(-1)


def _busemann(x: Tensor, direction: Tensor, scale: Tensor) -> Tensor:
    # Lengths and angles are of vectors as they came: the curvature then moves the rapidity only.
    reach, norm = numerics.norm(direction, keepdim=True), numerics.norm(x, keepdim=True)
    length = numerics.finite(norm * scale)
    unit = numerics.safe_div(x, norm)
    cosine = (unit * numerics.safe_div(direction, reach)).sum(-1, keepdim=True)
    sine = numerics.safe_div(numerics.norm(part_across(x, unit, direction), keepdim=True), reach)
    towards = cosine > 0
    gap = torch.where(towards, sine.square() / (1 + cosine.clamp(min=0)), 1 - cosine)  # 1 - cos
    near = length <= 1
    held = torch.where(near, 1.0, length)
    far = torch.log(1 / (held + numerics.hypot(held, torch.ones_like(held))) + held * gap)
    # Near the origin, where a point has no direction, it is smooth in coordinates.
    small = torch.where(near, x, 0.0) * scale
    time = polar(small)[1]
    inside = (small * small).sum(-1, keepdim=True) / (1 + time)
    inside = inside - (small * numerics.safe_div(direction, reach)).sum(-1, keepdim=True)
    return torch.where(near, torch.log1p(inside), far) / scale
