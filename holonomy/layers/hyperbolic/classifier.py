r"""Classifiers on the hyperboloid: distances to hyperplanes (HypMLR), distances to learned points (HypPrototypes).

Points are ambient, ``(..., d + 1)``, time first; logits are ``(..., classes)``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Float
from holonomy.manifolds import Lorentz, LorentzPoints
from holonomy.manifolds.lorentz import require_lorentz
from holonomy.ops.lorentz.hyperplanes import hyperplane_distances

# The farthest hyperplanes, in curvature radii: cosh of it times any float32 point can be squared in float64.
_FARTHEST = 300.0


class HypMLR(nn.Module):
    r"""Hyperbolic multinomial logistic regression, in Lorentz form.

    The hyperplane of class k is orthogonal to the geodesic :math:`\exp_o(s\, z_k/|z_k|)` at :math:`s = a_k`. With
    :math:`c = |\kappa|` it is

    .. math:: H_k = \{x : \alpha_k(x) = 0\}, \qquad
        \alpha_k(x) = \cosh(\sqrt c\, a_k) \langle z_k, x_s\rangle - \sinh(\sqrt c\, a_k)\, |z_k|\, x_t ,

    and the logit is the signed distance to it, times :math:`|z_k|`:

    .. math:: \ell_k(x) = \frac{|z_k|}{\sqrt c} \operatorname{arsinh}\Big(\frac{\sqrt c\, \alpha_k(x)}{|z_k|}\Big) .

    As :math:`\kappa \to 0` it becomes :math:`\langle z_k, x_s\rangle - a_k |z_k|`, logistic regression.
    (Ganea et al. 2018 on the ball; this parametrisation: Shimizu et al. 2021, in Lorentz form Bdeir et al. 2024.)
    Where :math:`z_k = 0` the logit is zero, with zero gradients.

    Computed in float64 from space parts: for float32 points the error is below their rounding (1e-4 at rapidity 12,
    where neighbouring points lie 0.01 apart), and finite at any radius. For float64 points at rapidity :math:`\rho` it
    is about 1e-16 :math:`e^{2\rho}` curvature radii (1e-9 at 8). Offsets are clamped to rapidity 300.

    Args:
        features: d.
        classes: number of classes.
        manifold: where the input lies.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz
    >>> m = Lorentz(-1.0)
    >>> layer = HypMLR(1, 1, m)
    >>> _ = layer.weight.data.fill_(2.0), layer.offset.data.fill_(0.5)
    >>> x = m.expmap0(torch.tensor([0.0, 1.5]))  # at distance 1 from the hyperplane, through 0.5
    >>> round(layer(x).item(), 4)
    2.0
    """

    def __init__(
        self,
        features: int,
        classes: int,
        manifold: Lorentz,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.classes = checks.positive_int("classes", classes)
        self.manifold = require_lorentz("manifold", manifold)
        self.weight = nn.Parameter(torch.empty(classes, features, device=device, dtype=dtype))
        self.offset = nn.Parameter(torch.empty(classes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew: normals as the rows of a linear layer, hyperplanes through the origin."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.zeros_(self.offset)

    def forward(self, x: Float[Tensor, "*batch dim_plus_1"]) -> Float[Tensor, "*batch classes"]:
        """Signed distances times lengths ``(*batch, classes)``, of points ``(*batch, d + 1)``."""
        checks.last_axis("x", x, self.features + 1, "features + 1")
        checks.on_device(self.weight.device, x=x)
        kappa = numerics.widen(self.manifold.curvature)
        root = kappa.neg().sqrt()
        weight = numerics.widen(self.weight)
        length = numerics.norm(weight, keepdim=True)
        normal = numerics.safe_div(weight, length)
        shift = (root * numerics.widen(self.offset)).clamp(-_FARTHEST, _FARTHEST)
        # Near a hyperplane far out two numbers of size cosh(shift) x_t cancel; over cosh(shift) they are one product.
        plane = torch.cat([-shift.tanh()[:, None], normal], -1)
        signed = hyperplane_distances(x[..., 1:], plane, root * shift.cosh(), kappa)
        logits = signed * (length.squeeze(-1) / root)
        return numerics.narrow(logits, torch.promote_types(x.dtype, self.weight.dtype))

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.features}, {self.classes}"


class HypPrototypes(nn.Module):
    r"""Classification by learned points: the logit is minus the scaled squared distance to the class's prototype.

    .. math:: \ell_k(x) = -s\, d(x, p_k)^2, \qquad s = \exp(\text{log\_scale}) > 0 .

    The prototypes are :class:`holonomy.manifolds.LorentzPoints`: a Riemannian optimizer moves them on the manifold, and
    they follow a learning curvature. The gradient is zero where a point equals its prototype.

    Args:
        features: d.
        classes: number of classes.
        manifold: where the input and the prototypes lie.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz
    >>> m = Lorentz(-1.0)
    >>> layer = HypPrototypes(2, 3, m)
    >>> layer(layer.prototypes()).argmax(-1).tolist()
    [0, 1, 2]
    """

    def __init__(
        self,
        features: int,
        classes: int,
        manifold: Lorentz,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        checks.positive_int("classes", classes)
        self.manifold = require_lorentz("manifold", manifold)
        self.prototypes = LorentzPoints(classes, features, manifold, device=device, dtype=dtype)
        self.log_scale = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch dim_plus_1"]) -> Float[Tensor, "*batch classes"]:
        """Minus scaled squared distances ``(*batch, classes)``, of points ``(*batch, d + 1)``."""
        checks.last_axis("x", x, self.features + 1, "features + 1")
        checks.on_device(self.log_scale.device, x=x)
        distance = self.manifold.cdist(x.reshape(-1, x.shape[-1]), self.prototypes())
        logits = -numerics.exp(self.log_scale) * distance.square()
        return logits.unflatten(0, x.shape[:-1]) if x.ndim > 1 else logits.squeeze(0)


def decoder_of(
    kind: Literal["linear", "mlr", "prototypes"],
    features: int,
    out_features: int,
    manifold: Lorentz,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear | HypMLR | HypPrototypes:
    """Make the decoder of a hyperbolic model."""
    checks.one_of("decoder", kind, ("linear", "mlr", "prototypes"))
    if kind == "linear":
        return nn.Linear(features, out_features, device=device, dtype=dtype)
    classifier = HypMLR if kind == "mlr" else HypPrototypes
    return classifier(features, out_features, manifold, device=device, dtype=dtype)
