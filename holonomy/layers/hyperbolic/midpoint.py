r"""The Lorentzian midpoint of two points: the residual connection, and the position of a token (Hypformer eq. 20).

.. math:: m = \frac{x + \epsilon y}{\sqrt{|\kappa|\,|\langle x + \epsilon y, x + \epsilon y\rangle|}}

The norm under the root is never taken as the difference of two large squares, see :mod:`holonomy.ops.lorentz.midpoint`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import may_bypass
from holonomy._shapes import Float
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.norms import HypLayerNorm, affine_of, may_bypass_norm
from holonomy.layers.hyperbolic.refinement import HRC, rescale_space, resolve
from holonomy.manifolds import Lorentz
from holonomy.manifolds.lorentz import require_lorentz
from holonomy.ops.lorentz.midpoint import midpoint
from holonomy.ops.lorentz.residual_norm import residual_norm


def lifted_midpoint(
    x: Float[Tensor, "*batch ambient"],
    y: Float[Tensor, "*batch ambient_or_dim"],
    epsilon: float,
    curvature: Float[Tensor, "*one"],
) -> Float[Tensor, "*batch ambient"]:
    """The midpoint of ``x`` and ``epsilon * y``, two points of one manifold; of y the space part is enough."""
    dim = x.shape[-1] - 1
    # A slice's gradient is a table of zeros that is written into, that of a split one concatenation.
    spaces = (z if z.shape[-1] == dim else z.split([1, dim], -1)[1] for z in (x, y))
    left, right = torch.broadcast_tensors(*spaces)
    found = midpoint(left.reshape(-1, dim), right.reshape(-1, dim), curvature, epsilon)
    return found.view(*left.shape[:-1], dim + 1)


def add_and_norm(
    residual: HypResidual, norm: HRC, x: Float[Tensor, "*batch ambient"], branch: Float[Tensor, "*batch ambient"]
) -> Float[Tensor, "*batch ambient"]:
    """``norm(residual(x, branch))``, on one manifold by the formula that needs no midpoint."""
    if not (may_bypass(residual, HypResidual) and may_bypass_norm(norm)):
        return norm(residual(x, branch))
    manifolds = (residual.manifold_in, residual.manifold_branch, norm.manifold_in)
    one = all(manifold is residual.manifold_out for manifold in manifolds)
    if not (one and x.shape == branch.shape and x.shape[-1] == norm.features + 1):
        return norm(residual(x, branch))
    gain, shift, here, last, eps = affine_of(norm, x)
    # A larger eps would show the rounding of what it is multiplied with.
    if eps * norm.features > 1:
        return norm(residual(x, branch))
    centered = isinstance(norm, HypLayerNorm)
    return residual_norm(x, branch, here, gain, shift, last, weight=residual.epsilon, eps=eps, centered=centered)


class HypResidual(nn.Module):
    r"""The residual connection: the Lorentzian midpoint of x and :math:`\epsilon\, F(x)`.

    Both points are first moved to ``manifold_out``, by multiplication with :math:`\sqrt{\kappa/\kappa'}`. With
    :math:`\epsilon = 1` the Lipschitz constant is at most the mean of those of x and F(x).

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
        _, self.manifold_branch = resolve(self.manifold_out, manifold_branch, "manifold_branch")
        self.epsilon = checks.positive("epsilon", epsilon)

    def forward(
        self, x: Float[Tensor, "*batch dim_plus_1"], branch: Float[Tensor, "*batch dim_plus_1"]
    ) -> Float[Tensor, "*batch dim_plus_1"]:
        """Points ``(*batch, d + 1)`` of ``manifold_out``.

        ``x`` are points ``(*batch, d + 1)`` of ``manifold_in``, ``branch`` of ``manifold_branch``.
        """
        checks.vectors(x=x)
        checks.last_axis("branch", branch, x.shape[-1], "features + 1")
        if any(a != b and 1 not in (a, b) for a, b in zip(reversed(x.shape), reversed(branch.shape), strict=False)):
            raise ValueError(f"branch must broadcast with x, {tuple(x.shape)}, got {tuple(branch.shape)}.")
        out = self.manifold_out
        # Only space parts are read: those of another manifold may come with its times.
        x, branch = rescale_space(x, self.manifold_in, out), rescale_space(branch, self.manifold_branch, out)
        return lifted_midpoint(x, branch, self.epsilon, out.curvature)

    def extra_repr(self) -> str:
        """The weight, for ``repr``."""
        return f"epsilon={self.epsilon}"


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
