r"""A linear map whose coordinates are distances to hyperplanes: Geoopt's ``LorentzPLFC``.

Points are ambient, ``(..., d + 1)``, time first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.classifier import HypMLR
from holonomy.layers.hyperbolic.refinement import change_curvature, resolve, translated
from holonomy.manifolds import Lorentz

# Room for the change of curvature and the translation behind the largest coordinates, as a rapidity.
_ROOM = 4.0


class LorentzPLFC(nn.Module):
    r"""Point-to-hyperplane fully connected layer: each coordinate is the signed distance to a hyperplane.

    With :math:`\ell_k` the logits of :class:`HypMLR` (weights :math:`z_k`, offsets :math:`a_k`) and
    :math:`c = |\kappa_1|`,

    .. math::
        f_k(x) = \tfrac{1}{\sqrt c} \sinh\big(\sqrt c\, \ell_k(x)\big), \qquad
        y = \big(\sqrt{(\kappa_1/\kappa_2)\,|f|^2 - 1/\kappa_2},\; \sqrt{\kappa_1/\kappa_2}\, f\big)
            \oplus \exp_o^{\kappa_2}(b),

    :math:`y \oplus \exp_o(b) = \exp_y(P_{o \to y}\, b)` being the translation. (Shimizu et al. 2021 on the ball; on the
    hyperboloid, ILNN and Geoopt's ``LorentzPLFC``, which has one curvature.) A row with :math:`|z_k| = 1` is a row of
    :class:`HTC` whose weight is a unit spacelike covector. The rows of Z, or its columns where there are fewer, are
    orthonormal at first, a and b zero: so the layer starts as such an HTC, which keeps the distance from the origin.
    (Geoopt draws Z with deviation 0.02, by which points are at 0.01 behind four layers.) Where :math:`z_k = 0` the
    coordinate is zero, with zero gradients.

    **What it is good for.** Along a coordinate axis, :math:`\ell_k` grows as fast as its weights do, and gradient
    descent reaches a target far out in steps that grow with the logarithm of its distance; :class:`HTC` needs
    :math:`e^2` times as many for each unit. In any other direction several coordinates have to grow together, their
    derivatives :math:`\cosh \ell_k` differ, and plain gradient descent at a rate of 0.05 does not arrive from rapidity
    4 on; Adam does.

    **It is not Lipschitz** in the hyperbolic metric unless it has one output or all :math:`|z_k|` are equal and at most
    one: with orthogonal z of length :math:`\lambda > 1` its stretch grows as :math:`e^{(\lambda - 1) \rho}`. No
    certificate covers it; :class:`TangentLinear` reaches as far, has a constant, and takes a seventh of the time.

    Coordinates are held where the dtype ends, at rapidity 82 in float32 and 703 in float64, less
    :math:`\log 1/\sqrt c` where that is positive. Digits are those of :class:`HypMLR`, times :math:`\sqrt c\,\ell_k`.
    Gradients of weights and curvatures may leave the range where inputs or results are beyond rapidity 78 in float32,
    and 690 in float64.

    Args:
        in_features: dimension of the points that come in.
        out_features: dimension of the points that go out.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        bias: learn b.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if an argument is of another type than it says.
        ValueError: if a size is not positive.

    >>> m = Lorentz(-1.0)
    >>> layer = LorentzPLFC(1, 1, m)
    >>> _ = layer.hyperplanes.weight.data.fill_(2.0), layer.hyperplanes.offset.data.fill_(0.5)
    >>> x = m.expmap0(torch.tensor([0.0, 1.5]))  # at distance 1 from the hyperplane, through 0.5
    >>> round(m.dist0(layer(x)).item(), 4)
    2.0
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
        self.out_features = checks.positive_int("out_features", out_features)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        self.hyperplanes = HypMLR(in_features, out_features, manifold_in, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        nn.init.orthogonal_(self.hyperplanes.weight)
        nn.init.zeros_(self.hyperplanes.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch dim_in_plus_1"]) -> Float[Tensor, "*batch dim_out_plus_1"]:
        """Map points ``(*batch, in_features + 1)`` to points ``(*batch, out_features + 1)`` of ``manifold_out``."""
        checks.last_axis("x", x, self.in_features + 1, "in_features + 1", self)
        # The space part whose coordinates have these signed distances from the coordinate hyperplanes.
        distance = self.hyperplanes(x)
        root = self.manifold_in.curvature.neg().sqrt().to(distance.dtype)
        most = numerics.widest_rapidity(distance.dtype) - _ROOM + root.detach().log().clamp(max=0.0)
        space = (distance * root).clamp(-most, most).sinh() / root
        points = change_curvature(space, self.manifold_in, self.manifold_out)
        return points if self.bias is None else translated(points, self.bias, self.manifold_out)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
