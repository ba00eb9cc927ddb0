r"""The Frechet mean, with its derivative by the implicit function theorem, in float64.

Space parts ``(..., n, d)`` and weights ``(..., n)``; ``scale`` is :math:`s = \sqrt{-\kappa}`, D distances in curvature
radii, N unit directions from the mean, in frame components as in :mod:`holonomy.manifolds.hyperboloid.frames`.

The mean m minimises :math:`\frac12 \sum w_i\, d(m, x_i)^2`, which is strongly convex in hyperbolic space: with weights
that sum to one its gradient is :math:`-F`, :math:`F = \sum w_i \log_m x_i`, and its Hessian

.. math:: H = \sum w_i \big(N_i N_i^\top + D_i \coth D_i\, (1 - N_i N_i^\top)\big) \ge 1 .

**A step that never fails.** :math:`\operatorname{arcosh}^2 u` is concave, so replacing it by its tangent at the present
distances gives a larger function that is linear in ambient coordinates (Lou et al. 2020). Its minimum lies along F, at
:math:`\operatorname{artanh}(|F| / L)` curvature radii, :math:`L = \sum w_i D_i \coth D_i`: every such step lowers the
sum, and from every start they end in the mean, at the rate :math:`1 - 1/L` at worst. **Newton's step**
:math:`H^{-1} F` squares the error near the end. It is taken where it leaves at most half of the least :math:`|F|` so
far, which happens only finitely often, and the other one elsewhere: so the whole converges for every input.

**Derivative.** :math:`F(m, x, w, s) = 0` gives :math:`\partial m = H^{-1}\, \partial F` with m held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holonomy import _autograd, numerics
from holonomy.manifolds.hyperboloid.frames import frame_exponential, frame_logarithm_gradients, frame_view
from holonomy.manifolds.hyperboloid.views import differentiable, dot, from_frame, off_ray, ray_of

# Points up to rapidity 5 take six, points up to 86 some sixty.
_STEPS = 200
# Newton's last step, in roundings of what it is a sum of.
_ROUNDINGS = 64


def frechet_mean(x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """Frechet means of weighted points, the origin where all weights are zero."""
    return _autograd.apply_function(_FrechetMean, x, weights, scale)


class _FrechetMean(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
        return _minimum(x, _shares(weights)[0], scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return differentiable(_gradients, ctx.saved_tensors, grad_outputs[0], _beside)


def _gradients(x: Tensor, weights: Tensor, scale: Tensor, mean: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    shares, mass = _shares(weights)
    distance, direction = frame_view(mean.unsqueeze(-2), x, scale)
    cotangent = from_frame(ray_of(mean, scale), grad)
    pulled = torch.linalg.solve(_hessian(distance, direction, shares), cotangent.unsqueeze(-1)).mT
    there = mean.unsqueeze(-2).expand_as(x)
    _, on_x, on_scale = frame_logarithm_gradients(there, x, scale, shares.unsqueeze(-1) * pulled)
    on_weights = numerics.safe_div(dot(direction * (distance / scale), pulled).squeeze(-1), mass)
    return on_x, numerics.finite(on_weights), on_scale


def _beside(x: Tensor, weights: Tensor, scale: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    mean, x, _ = off_ray(mean.unsqueeze(-2), x, scale)
    return x, weights, scale, mean.squeeze(-2)


def _shares(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that sum to one, or to zero, and their sum."""
    if weights.shape[-1] == 0:
        return weights, weights.new_zeros((*weights.shape[:-1], 1))
    # Divided by the largest first, for the sum to stay in the range.
    largest = weights.amax(-1, keepdim=True)
    rescaled = numerics.safe_div(weights, largest)
    total = rescaled.sum(-1, keepdim=True)
    return numerics.safe_div(rescaled, total), numerics.finite(total * largest)


def _hessian(distance: Tensor, direction: Tensor, shares: Tensor) -> Tensor:
    """H; the unit matrix where there are no weights."""
    bend = numerics.cothc(distance)
    along = (direction * (shares.unsqueeze(-1) * (1 - bend))).mT @ direction
    across = (shares.unsqueeze(-1) * bend).sum(-2, keepdim=True)
    unit = torch.eye(direction.shape[-1], dtype=direction.dtype, device=direction.device)
    return along + unit * torch.where(across > 0, across, 1.0)


def _minimum(x: Tensor, shares: Tensor, scale: Tensor) -> Tensor:
    reach = numerics.widest_rapidity(x.dtype)
    reads = not (_autograd.transformed() or x.is_meta)
    # From the origin, where no digit is lost, however far out the points lie.
    mean = x.new_zeros((*x.shape[:-2], x.shape[-1]))
    pull, safe, newton = _steps(mean, x, shares, scale)
    least = pull
    for _ in range(1 if x.is_meta else _STEPS):
        moving = _matters(newton, mean, x, shares, scale)
        if reads and not bool(moving.any()):
            break
        tried = frame_exponential(mean, newton, scale, reach)
        pull, safe_next, newton_next = _steps(tried, x, shares, scale)
        taken = pull <= least / 2
        if not reads or not bool((taken | ~moving).all()):
            held = frame_exponential(mean, safe, scale, reach)
            pull_held, safe_held, newton_held = _steps(held, x, shares, scale)
            tried = torch.where(taken, tried, held)
            pull, safe_next = torch.where(taken, pull, pull_held), torch.where(taken, safe_next, safe_held)
            newton_next = torch.where(taken, newton_next, newton_held)
        mean, safe, newton = (
            torch.where(moving, new, old) for new, old in ((tried, mean), (safe_next, safe), (newton_next, newton))
        )
        least = torch.minimum(least, pull)
    return torch.where(newton.isnan(), newton, mean)  # where a point is nan, no step was taken


def _steps(mean: Tensor, x: Tensor, shares: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|F|, the step that never fails, and Newton's, in frame components."""
    distance, direction = frame_view(mean.unsqueeze(-2), x, scale)
    pull = (shares.unsqueeze(-1) * direction * distance).sum(-2)
    size = numerics.norm(pull, keepdim=True)
    bend = (shares.unsqueeze(-1) * numerics.cothc(distance)).sum(-2)
    share = numerics.safe_div(size, bend).clamp(max=1 - torch.finfo(x.dtype).eps)
    safe = pull * numerics.safe_div(torch.atanh(share), size)
    newton = torch.linalg.solve(_hessian(distance, direction, shares), pull.unsqueeze(-1)).squeeze(-1)
    return size, safe / scale, newton / scale


def _matters(newton: Tensor, mean: Tensor, x: Tensor, shares: Tensor, scale: Tensor) -> Tensor:
    """Whether a step is longer than the rounding of the distances of points and of the place of the mean."""
    time = ray_of(mean, scale).time
    reach = (shares.unsqueeze(-1) * torch.asinh(ray_of(x, scale).length)).sum(-2)
    spacing = _ROUNDINGS * torch.finfo(newton.dtype).eps * (time + reach)
    return numerics.norm(newton, keepdim=True) * scale > spacing
