r"""The position of a token, learned from the token: Hypformer eq. 20.

:math:`\tilde x = (x + \epsilon p) / \sqrt{|\kappa|\,|\langle x + \epsilon p, x + \epsilon p\rangle|}` with
:math:`p = \mathrm{HTC}(x)`: the residual connection of :mod:`holonomy.layers.hyperbolic.midpoint` around HTC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.midpoint import lifted_midpoint
from holonomy.manifolds import Lorentz
from holonomy.manifolds.lorentz import require_lorentz

if TYPE_CHECKING:
    from jaxtyping import Float


class HypPositionalEncoding(nn.Module):
    r"""The Lorentzian midpoint of x and :math:`\epsilon\,\mathrm{HTC}(x)`, Hypformer eq. 20.

    The position is computed from x itself, on the manifold of x.

    Args:
        features: d.
        manifold: where input, position and output lie.
        epsilon: the weight of the position.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz
    >>> m = Lorentz()
    >>> layer = HypPositionalEncoding(1, m)
    >>> _ = layer.position.weight.data.copy_(torch.tensor([[0.0, -1.0]]))
    >>> _ = layer.position.bias.data.zero_()
    >>> layer(m.lift(torch.tensor([2.0]))).detach()  # the midpoint of x and -x
    tensor([1., 0.])
    """

    def __init__(
        self,
        features: int,
        manifold: Lorentz,
        *,
        epsilon: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.positive_int("features", features)
        require_lorentz("manifold", manifold)
        self.position = HTC(features, features, manifold, device=device, dtype=dtype)
        self.manifold = self.position.manifold_in
        self.epsilon = checks.positive("epsilon", epsilon)

    def forward(self, x: Float[Tensor, "*batch dim_plus_1"]) -> Float[Tensor, "*batch dim_plus_1"]:
        """Points ``(*batch, d + 1)``, each moved towards its position."""
        checks.vectors(x=x)
        return lifted_midpoint(x, space_of(self.position, x), self.epsilon, self.manifold.curvature)

    def extra_repr(self) -> str:
        """The weight, for ``repr``."""
        return f"epsilon={self.epsilon}"
