r"""Linear maps between hyperboloids: HTC (Hypformer eq. 9) and its two ancestors (eqs. 6, 7).

Points are ambient, ``(..., d + 1)``, time first. Weights are laid out as torch's, ``(out, in)``, where
``in`` counts the time coordinate, first, wherever the whole point goes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks, numerics
from holonomy._autograd import may_bypass
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.refinement import change_curvature, from_tangent, resolve
from holonomy.manifolds import Lorentz, hyperboloid
from holonomy.ops.lorentz.exponential_linear import exponential_linear
from holonomy.ops.lorentz.tangent_map import tangent_map


class HTC(nn.Module):
    r"""Hyperbolic transformation with curvatures, Hypformer eq. 9.

    .. math::
        y = \big(\sqrt{(\kappa_1/\kappa_2) |f|^2 - 1/\kappa_2},\; \sqrt{\kappa_1/\kappa_2}\, f\big),
        \qquad f = W x + b,

    where x is the whole point, time included. The time column of ``weight`` is initialised with zero and the rest as in
    :class:`torch.nn.Linear`, so that at first f is an ordinary linear layer of the space part for any curvature (a
    random time column would add :math:`|\kappa_1|^{-1/2}` times itself to the bias).

    With ``init="orthogonal"`` the rows of W_s (or its columns, if they are fewer) are orthonormal and b is zero: at
    first, layers that do not reduce the dimension preserve distances from the origin. With ``"uniform"`` points move
    towards the origin: rapidity 3 becomes 1.0 after four layers of width 64.

    Gradient descent needs :math:`(\sinh 2R + 2R) / (4 \eta\, (|x|^2 + 1))` steps to move its output to rapidity R,
    :math:`e^2` times as many for each unit. If points must lie far from the origin and no normalisation follows, use
    :class:`TangentLinear` (the page *Linear maps far from the origin*).

    Points beyond rapidity 80 in float32 (whose time exceeds 1/4096 of the largest number of the dtype) are moved to
    that distance first, and results that the dtype cannot represent are moved towards the origin.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        bias: learn b.
        init: ``"uniform"``, the weights of :class:`torch.nn.Linear`, or ``"orthogonal"``.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m = Lorentz(-1.0)
    >>> layer = HTC(2, 2, m, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    >>> x = m.lift(torch.tensor([3.0, 4.0]))
    >>> torch.equal(layer(x), x)
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        bias: bool = True,
        init: Literal["uniform", "orthogonal"] = "uniform",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        checks.floating_dtype(dtype)
        self.init = checks.one_of("init", init, ("uniform", "orthogonal"))
        self.in_features = checks.positive_int("in_features", in_features)
        self.out_features = checks.positive_int("out_features", out_features)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        self.weight = nn.Parameter(torch.empty(out_features, in_features + 1, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        with torch.no_grad():
            self.weight[:, 0].zero_()
            bound = 0.0 if self.init == "orthogonal" else 1 / math.sqrt(self.in_features)
            if self.init == "orthogonal":
                self.weight[:, 1:] = nn.init.orthogonal_(torch.empty_like(self.weight[:, 1:]))
            else:
                self.weight[:, 1:].uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def space(
        self, x: Float[Tensor, "*batch dim_in_plus_1"], factor: Float[Tensor, " 1"] | None = None
    ) -> Float[Tensor, "*batch dim_out"]:
        """The space parts ``(*batch, out_features)`` of the output, times ``factor``, a tensor of one number.

        For callers that do not need the time. ``x`` is that of :meth:`forward`.
        """
        checks.last_axis("x", x, self.in_features + 1, "in_features + 1", self)
        weight, bias = self.affine(factor)
        return functional.linear(hyperboloid.held(x, weight=weight), weight, bias)

    def affine(
        self, factor: Float[Tensor, " 1"] | None = None, ratio: Float[Tensor, " 1"] | None = None
    ) -> tuple[Float[Tensor, "dim_out dim_in_plus_1"], Float[Tensor, " dim_out"] | None]:
        """Weight and bias from points of ``manifold_in`` to space parts on ``manifold_out``.

        They include the change of curvature, and are multiplied by ``factor``, a tensor of one number, if there is one;
        ``ratio`` is the factor of the change of curvature, where it is known already.
        """
        # Numbers are multiplied into the weight, which is small where x is long.
        if self.manifold_in is not self.manifold_out:
            ratio = self.manifold_in.ratio(self.manifold_out) if ratio is None else ratio
            ratio = ratio.to(self.weight.dtype)
            factor = ratio if factor is None else ratio * factor
        if factor is None:
            return self.weight, self.bias
        return self.weight * factor, None if self.bias is None else self.bias * factor

    def forward(self, x: Float[Tensor, "*batch dim_in_plus_1"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Map points ``(*batch, in_features + 1)`` to points ``(*batch, out_features + 1)`` of ``manifold_out``."""
        return change_curvature(self.space(x), self.manifold_out, self.manifold_out)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def space_of(
    htc: HTC, x: Float[Tensor, "*batch dim_in_plus_1"], factor: Float[Tensor, " 1"] | None = None
) -> Float[Tensor, "*batch dim_out"]:
    """The space part of ``htc(x)``, times a factor; the time is computed only where hooks or a subclass may see it."""
    if may_bypass(htc, ExpMapHTC if isinstance(htc, ExpMapHTC) else HTC):
        return htc.space(x, factor)
    space = htc(x)[..., 1:]
    return space if factor is None else space * factor


class ExpMapHTC(HTC):
    r"""The exponential map at the origin, then HTC: the first layer of a model (section 4.6).

    Raw features :math:`u \in R^d` become the point
    :math:`(\cosh r / \sqrt c,\; (\sinh r / r)\, u)`, :math:`c = |\kappa_1|`, :math:`r = \sqrt c\, |u|`, to which
    eq. 9 is applied. As its space part is u times one number per row, the product with the weight is taken on u
    itself, so that **sparse features are multiplied sparsely** (bag of words are 99% zeros) and the result is
    the same to rounding. Sparse features, CSR or COO, get no gradient.

    Accurate up to r = 82 in float32 and 340 in float64, less :math:`\log 1/\sqrt c` where that is positive: cosh is
    then an 800th of the largest float32, or the largest number whose square is still a float64. Where the absolute
    weights of some row sum to s > 16, it is :math:`\log(s/16)` less. Larger r are clamped to this value, without
    gradient, and the result stays finite.

    Args:
        in_features: number of raw features.
        out_features: dimension of the points that go out.
        manifold_in: whose exponential map is taken, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        bias: learn b.
        init: as in :class:`HTC`.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> layer, u = ExpMapHTC(3, 2, Lorentz(-1.0), Lorentz(-0.5)), torch.tensor([[0.0, 2.0, 0.0]])
    >>> torch.allclose(layer(u), layer(u.to_sparse()))
    True
    """

    def forward(self, x: Float[Tensor, "*batch dim_in"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Points ``(*batch, out_features + 1)`` of ``manifold_out``, from raw features.

        These are dense, ``(*batch, in_features)``, or sparse, ``(rows, in_features)``.
        """
        return change_curvature(self.space(x), self.manifold_out, self.manifold_out)

    def space(
        self, x: Float[Tensor, "*batch dim_in"], factor: Float[Tensor, " 1"] | None = None
    ) -> Float[Tensor, "*batch dim_out"]:
        """As :meth:`HTC.space`, from raw features."""
        checks.last_axis("x", x, self.in_features, "in_features", self, sparse=True)
        weight, bias = self.affine(factor)
        return exponential_linear(x, weight, bias, self.manifold_in.curvature)


class TangentLinear(nn.Module):
    r"""A linear map of the tangent space at the origin, Hypformer eq. 6.

    .. math:: y = \exp_o^{\kappa_2}(W \log_o^{\kappa_1}(x) + b)

    The ancestor of HTC that goes through the tangent space (Ganea et al. 2018, Chami et al. 2019).
    The logarithm at the origin is the zero vector there, with the right gradient.

    With Adam its output reaches rapidity R in steps that grow as R. Without bias its Lipschitz constant is
    :math:`\sqrt{\kappa_1/\kappa_2}` times that of :math:`A = \sqrt{\kappa_2/\kappa_1}\, W`: the norm of A where that is
    at most one, else :math:`\sinh(|A| \rho) / \sinh \rho` on the ball of rapidity :math:`\rho` (theorem H14 on the page
    *Certificates*). Float32 rows up to rapidity 14 are computed in one formula, as fast as HTC; others by the
    exponential and the logarithm. There gradients by the tangent vectors :math:`W \log_o x + b` are held at the root of
    the largest number of the dtype, 1.8e19 in float32. Of a loss of order one in the coordinates of y they are as long
    as :math:`\cosh` of its rapidity, and are held from 44 on; gradients of distances are not.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        bias: learn b.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m, to = Lorentz(-1.0), Lorentz(-0.25)
    >>> layer = TangentLinear(1, 1, m, to, bias=False)
    >>> _ = layer.linear.weight.data.fill_(3.0)
    >>> x = m.lift(torch.tensor([1.0]))
    >>> torch.allclose(to.dist0(layer(x)), 3 * m.dist0(x))
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        checks.floating_dtype(dtype)
        self.in_features = checks.positive_int("in_features", in_features)
        checks.positive_int("out_features", out_features)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch dim_in_plus_1"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Map points ``(*batch, in_features + 1)`` to points ``(*batch, out_features + 1)`` of ``manifold_out``."""
        checks.last_axis("x", x, self.in_features + 1, "in_features + 1", self.linear)
        if may_bypass(self.linear, nn.Linear):
            ends = self.manifold_in.curvature, self.manifold_out.curvature
            return tangent_map(x, self.linear.weight, self.linear.bias, *ends)
        return from_tangent(self.linear(self.manifold_in.logmap0(x)[..., 1:]), self.manifold_out)


class FullyLorentzLinear(nn.Module):
    r"""The fully Lorentz linear layer of Chen et al. (2022), as printed in Hypformer eq. 7.

    .. math::
        y_s = \lambda\, \sigma(v \cdot x + b') \frac{W h(x) + b}{|W h(x) + b|},
        \qquad y_t = \sqrt{|y_s|^2 - 1/\kappa},

    with :math:`\sigma` the sigmoid. The whole point goes in; the direction comes from W, the length, below
    :math:`\lambda`, from v. Where :math:`W h(x) + b = 0` the result is the origin, with zero gradients. With
    another ``manifold_out`` the space part is multiplied by :math:`\sqrt{\kappa_1/\kappa_2}` as in eq. 9, which the
    paper's form, of one curvature, does not have.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        activation: h, applied to the whole point; the identity if ``None``.
        scale: the initial :math:`\lambda > 0`; it is learned as ``log_scale``, and so stays positive.
        bias: learn b (b' is learned in any case).
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m = Lorentz()
    >>> y = FullyLorentzLinear(3, 2, m, scale=10.0)(m.lift(torch.randn(5, 3)))
    >>> bool((y[:, 1:].norm(dim=-1) < 10).all())
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        activation: Callable[[Tensor], Tensor] | None = None,
        scale: float = 10.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        checks.floating_dtype(dtype)
        self.in_features = checks.positive_int("in_features", in_features)
        checks.positive_int("out_features", out_features)
        checks.positive("scale", scale)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        if activation is not None:
            checks.function("activation", activation)
        self.activation = activation
        self.direction = nn.Linear(in_features + 1, out_features, bias=bias, device=device, dtype=dtype)
        self.length = nn.Linear(in_features + 1, 1, device=device, dtype=dtype)
        self.log_scale = nn.Parameter(torch.full((1,), math.log(scale), device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch dim_in_plus_1"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Map points ``(*batch, in_features + 1)`` to points ``(*batch, out_features + 1)`` of ``manifold_out``."""
        checks.last_axis("x", x, self.in_features + 1, "in_features + 1", self.direction)
        # Weights of any usual size cannot bring that share beyond the range.
        both = self.direction, self.length
        readable = [part.weight for part in both if isinstance(part, nn.Linear)]  # pyright: ignore[reportUnnecessaryIsInstance]
        x = hyperboloid.held(x, 2.0**-24, torch.cat(readable) if readable else None)
        affine = self.direction(x if self.activation is None else self.activation(x))
        length = numerics.exp(self.log_scale) * torch.sigmoid(self.length(x))
        unit = numerics.unit_vector(affine)
        return change_curvature(length * unit, self.manifold_in, self.manifold_out)
