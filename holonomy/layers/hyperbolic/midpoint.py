r"""The Lorentzian midpoint of two points: the residual connection, and eq. 20's sum (Hypformer).

.. math:: m = \frac{x + \epsilon y}{\sqrt{|\kappa|\,|\langle x + \epsilon y, x + \epsilon y\rangle|}}

The norm under the root is never taken as the difference of two large squares: with
:math:`q = |\kappa| \langle x - y, x - y\rangle = 4 \sinh^2(\sqrt{|\kappa|}\, d(x,y)/2)`,

.. math:: |\kappa|\,|\langle x + \epsilon y, x + \epsilon y\rangle| = (1 + \epsilon)^2 + \epsilon\, q .
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holonomy import autograd, checks, numerics
from holonomy.layers.hyperbolic.refinement import HypLayerNorm, normalised, rescale_space, resolve
from holonomy.layers.kernels.lifted import pays
from holonomy.layers.kernels.lifted_rows import LiftedMidpoint, LiftedMidpointNorm
from holonomy.manifolds import Lorentz, hyperboloid

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["HypResidual", "lifted_midpoint", "midpoint", "normalised_residual", "positive_weight", "squared_chord"]


def midpoint(
    x: Float[Tensor, "*batch dim"],
    y: Float[Tensor, "*batch dim"],
    epsilon: float,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch dim"]:
    r"""Space part of the Lorentzian midpoint of ``x`` and ``epsilon * y``, two points of one manifold.

    Args:
        x: space parts ``(*batch, d)``.
        y: space parts ``(*batch, d)``.
        epsilon: the positive weight of ``y``.
        curvature: one negative number.

    Returns:
        Space parts ``(*batch, d)``.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> torch.allclose(midpoint(x, x, 1.0, torch.tensor([-1.0])), x)
    True
    >>> midpoint(x, -x, 1.0, torch.tensor([-1.0])).tolist()
    [[0.0, 0.0]]
    """
    chord = squared_chord(x, y, curvature)
    norm = torch.sqrt((1 + epsilon) ** 2 + epsilon * chord)
    # Divided before the sum, which might not fit the dtype where the midpoint does.
    return x * (1 / norm).to(x.dtype) + y * (epsilon / norm).to(x.dtype)


def lifted_midpoint(
    x: Float[Tensor, "*batch ambient"],
    y: Float[Tensor, "*batch ambient_or_dim"],
    epsilon: float,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch ambient"]:
    r"""The midpoint of points, lifted.

    On the CPU, where rows are many, :class:`~holonomy.layers.kernels.lifted_rows.LiftedMidpoint` makes it in parts.

    Args:
        x: points ``(*batch, d + 1)``; only their space parts are read.
        y: the same, or space parts ``(*batch, d)``.
        epsilon: the positive weight of ``y``.
        curvature: one negative number.

    Returns:
        Points ``(*batch, d + 1)``.

    >>> x = torch.tensor([[5.0, 3.0, 4.0]])
    >>> lifted_midpoint(x, -x[:, 1:], 1.0, torch.tensor([-1.0])).tolist()
    [[1.0, 0.0, 0.0]]
    """
    if not _in_parts(x, y):
        return _lifted_midpoint(x, y, curvature, epsilon)
    rows = (z.reshape(-1, z.shape[-1]) for z in (x, y))
    found: tuple[Tensor, ...] = autograd.apply_function(LiftedMidpoint, *rows, curvature, epsilon, _lifted_midpoint)
    return found[0].view_as(x)


def _lifted_midpoint(x: Tensor, y: Tensor, curvature: Tensor, epsilon: float) -> Tensor:
    dim = x.shape[-1] - 1
    return hyperboloid.lift(midpoint(x[..., 1:], y[..., y.shape[-1] - dim :], epsilon, curvature), curvature)


def normalised_residual(
    residual: HypResidual,
    norm: HypLayerNorm,
    x: Float[Tensor, "*batch ambient"],
    branch: Float[Tensor, "*batch ambient"],
) -> Float[Tensor, "*batch ambient"]:
    """``norm(residual(x, branch))``, in parts and without the midpoint in between where rows are many, on the CPU.

    A block of Hypformer spends its time on tables that are read and written: forward and backward the two in one take
    0.7 of the time of one after the other.

    Args:
        residual: the residual connection.
        norm: what follows it.
        x: points ``(*batch, d + 1)``.
        branch: points ``(*batch, d + 1)``.

    Returns:
        Points ``(*batch, d + 1)``.

    >>> from holonomy.layers import HypLayerNorm
    >>> m = Lorentz(-1.0)
    >>> x = m.lift(torch.tensor([[1.0, 3.0]]))
    >>> normalised_residual(HypResidual(m), HypLayerNorm(2, m), x, x)[:, 1:]
    tensor([[-1.0000,  1.0000]], grad_fn=...)
    """
    manifolds = (residual.manifold_in, residual.manifold_branch, norm.manifold_in)
    if not _in_parts(x, branch) or any(manifold is not residual.manifold_out for manifold in manifolds):
        return norm(residual(x, branch))
    rows = (z.reshape(-1, z.shape[-1]) for z in (x, branch))
    gain, shift, last, eps = norm.affine(x)
    here = last if norm.manifold_out is norm.manifold_in else norm.manifold_in.curvature
    tensors, numbers = (*rows, here, gain, shift, last), (residual.epsilon, eps)
    found: tuple[Tensor, ...] = autograd.apply_function(LiftedMidpointNorm, *tensors, *numbers, _normalised_midpoint)
    return found[0].view_as(x)


def _normalised_midpoint(
    x: Tensor, y: Tensor, curvature: Tensor, gain: Tensor, shift: Tensor, last: Tensor, epsilon: float, eps: float
) -> Tensor:
    return normalised(_lifted_midpoint(x, y, curvature, epsilon), gain, shift, last, eps)


def _in_parts(x: Tensor, y: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and pays(x, x.numel() // x.shape[-1])
        and x.shape[:-1] == y.shape[:-1]
        and x.dtype == y.dtype
    )


def squared_chord(
    x: Float[Tensor, "*batch dim"],
    y: Float[Tensor, "*batch dim"],
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch 1"]:
    r""":math:`|\kappa| \langle x - y, x - y\rangle` of two points given by their space parts, in float64.

    From radii a, b and the chord of the two directions, a sum of positive terms that lose no digits:
    :math:`4 \sinh^2((a-b)/2) + \sinh a \sinh b\, |\hat x - \hat y|^2`. The gradient is the smooth
    :math:`2 |\kappa| (y_t / x_t\, x_s - y_s)`, right at the origin and at coincident points (zero there).

    Args:
        x: space parts ``(*batch, d)``.
        y: space parts ``(*batch, d)``.
        curvature: one negative number.

    Returns:
        Squares ``(*batch, 1)``, float64.

    >>> x = torch.tensor([[0.0, 0.0]])
    >>> round(squared_chord(x, torch.tensor([[0.0, 1.1752012]]), torch.tensor([-1.0])).item(), 5)
    1.08616
    """
    x, y = torch.broadcast_tensors(x, y)
    function = _TracedSquaredChord if torch.compiler.is_compiling() else _SquaredChord
    return autograd.apply_function(function, x, y, numerics.widen(curvature.reshape(()).neg()))


class _SquaredChord(torch.autograd.Function):
    r"""Vectors are in the caller's dtype, numbers per row in float64.

    With the unit vectors u, v of x, y the gradient is
    :math:`y_t/x_t\, x_s - y_s = \sinh(a-b)/(\sqrt{|\kappa|}\, x_t)\, u + |y_s| (u - v)`: nothing cancels.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        return _chord(x, y, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return _chord_gradients(ctx, grad_outputs[0])


class _TracedSquaredChord(torch.autograd.Function):
    """The same in the form that dynamo traces into whatever decorates the functions it calls; without vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, c)
        return _chord(x, y, c)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return _chord_gradients(ctx, grad_outputs[0])


def _chord(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    x_norm, x_time, y_norm, y_time = _polar(x, y, c)
    half = _half(_sinh_difference(x_norm, x_time, y_norm, y_time, c))
    turn = numerics.widen(numerics.norm(_unit(x, x_norm) - _unit(y, y_norm), keepdim=True))
    return numerics.finite(half.square() + (c.sqrt() * x_norm.sqrt() * turn * y_norm.sqrt()).square())


def _chord_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, y, c = ctx.saved_tensors
    # Made again, so that a second derivative sees them depend on x and y.
    x_norm, x_time, y_norm, y_time = _polar(x, y, c)
    radial = _sinh_difference(x_norm, x_time, y_norm, y_time, c)
    x_unit, y_unit = _unit(x, x_norm), _unit(y, y_norm)
    turn = x_unit - y_unit
    factor = 2 * c * grad
    rise = factor * radial / c.sqrt()
    grad_x = numerics.narrow(rise / x_time, x.dtype) * x_unit + numerics.narrow(factor * y_norm, x.dtype) * turn
    grad_y = numerics.narrow(-rise / y_time, y.dtype) * y_unit - numerics.narrow(factor * x_norm, y.dtype) * turn
    if not ctx.needs_input_grad[2]:
        return grad_x, grad_y, None
    turned = x_norm.sqrt() * numerics.widen(numerics.norm(turn, keepdim=True)) * y_norm.sqrt()
    slope = radial / x_time * (radial / y_time) / c + turned.square()
    return grad_x, grad_y, (grad * slope).sum()


def _polar(x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lengths, and times in units of the radius of curvature."""
    x_norm, y_norm = (numerics.widen(numerics.norm(z, keepdim=True)) for z in (x, y))
    one, root = torch.ones_like(x_norm), c.sqrt()
    return x_norm, numerics.hypot(root * x_norm, one), y_norm, numerics.hypot(root * y_norm, one)


def _sinh_difference(x_norm: Tensor, x_time: Tensor, y_norm: Tensor, y_time: Tensor, c: Tensor) -> Tensor:
    """The hyperbolic sine of the difference of the radii, no product of two large numbers on the way."""
    slope = x_norm / x_time + y_norm / y_time
    sum_of_radii = x_norm / x_time / y_time + y_norm / y_time / x_time
    return c.sqrt() * numerics.safe_div((x_norm - y_norm) * sum_of_radii, slope)


def _half(sinh: Tensor) -> Tensor:
    """2 sinh(a/2) from sinh(a)."""
    return sinh / ((1 + numerics.hypot(sinh, torch.ones_like(sinh))) / 2).sqrt()


def _unit(x: Tensor, length: Tensor) -> Tensor:
    """The direction of x in its dtype; the zero vector has none."""
    return x * numerics.narrow(numerics.safe_div(torch.ones_like(length), length), x.dtype)


def positive_weight(name: str, value: float) -> float:
    """``value``, if it is positive and finite.

    Args:
        name: the argument's name, for the sentence.
        value: what came.

    Returns:
        The value.

    Raises:
        ValueError: if it is not.

    >>> positive_weight("epsilon", 1.0)
    1.0
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    return value


class HypResidual(nn.Module):
    r"""The residual connection: the Lorentzian midpoint of x and :math:`\epsilon\, F(x)`.

    A block maps ``manifold_in`` to ``manifold_out``, and points of two manifolds have no midpoint. So
    both are first brought to ``manifold_out``, by multiplication with :math:`\sqrt{\kappa/\kappa'}`. Contracting:
    with :math:`\epsilon = 1` the Lipschitz constant is the mean of those of x and F(x).

    Args:
        manifold_in: where x lies.
        manifold_out: where the midpoint lies; ``manifold_in`` if ``None``.
        manifold_branch: where F(x) lies; ``manifold_out`` if ``None``.
        epsilon: the weight of F(x).

    >>> from holonomy.manifolds import Lorentz
    >>> m, to = Lorentz(-1.0), Lorentz(-0.25)
    >>> x = m.lift(torch.tensor([1.0, 2.0]))
    >>> torch.allclose(HypResidual(m, to)(x, m.rescale(x, to)), m.rescale(x, to))
    True
    """

    def __init__(
        self,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_branch: Lorentz | None = None,
        epsilon: float = 1.0,
    ) -> None:
        super().__init__()
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_branch = resolve(self.manifold_out, manifold_branch)
        self.epsilon = positive_weight("epsilon", epsilon)

    def forward(
        self, x: Float[Tensor, "*batch dim_plus_1"], branch: Float[Tensor, "*batch dim_plus_1"]
    ) -> Float[Tensor, "*batch dim_plus_1"]:
        """Add the branch.

        Args:
            x: points ``(*batch, d + 1)`` on ``manifold_in``.
            branch: points ``(*batch, d + 1)`` on ``manifold_branch``.

        Returns:
            Points ``(*batch, d + 1)`` on ``manifold_out``.
        """
        checks.last_axis("branch", branch, x.shape[-1], "features + 1")
        out = self.manifold_out
        # Only space parts are read: those of another manifold may come with its times.
        return lifted_midpoint(
            rescale_space(x, self.manifold_in, out),
            rescale_space(branch, self.manifold_branch, out),
            self.epsilon,
            out.curvature,
        )

    def extra_repr(self) -> str:
        """The weight, for ``repr``.

        Returns:
            The line that ``repr`` shows.
        """
        return f"epsilon={self.epsilon}"
