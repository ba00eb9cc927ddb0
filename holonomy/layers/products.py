r"""Layers on products of hyperbolic, flat and spherical factors: a linear map and attention by joint distances.

After Cho et al. 2023 (*Curve Your Attention*, FPS-T) and Skopek et al. 2020, who compute in tangent spaces and
stereographic charts; here, as in Hypformer, maps act on whole points, and results lie on their factors by construction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holonomy import checks, numerics
from holonomy._shapes import Bool, Float
from holonomy.layers.attention import KeyValueAttention, Masks
from holonomy.manifolds import Lorentz, Product
from holonomy.manifolds.product import require_product
from holonomy.ops.heads import head_count, merge_heads, of_all_heads, split_heads, without_padding
from holonomy.ops.masks import masked_softmax, pair_masks


class ProductLinear(nn.Module):
    r"""A linear map of whole points, whose result is read as the coordinates of points of another product.

    .. math:: y = \mathrm{lift}(W u + b), \qquad u_f = \sqrt{|\kappa_f|}\, x_f

    u are the ambient coordinates of x in units of the radii (those of flat factors as they are), and lift sets each
    share of the result on its factor: under a time on the hyperboloid, in its direction on the sphere. Every factor of
    y depends on all factors of x. The columns of W that belong to times start at zero, the rest as in
    :class:`torch.nn.Linear`. Between two hyperbolic factors this is HTC (Hypformer eq. 9), with b in units of
    :math:`1/\sqrt{|\kappa|}`.

    Args:
        manifold_in: where the input lies.
        manifold_out: where the output lies; ``manifold_in`` if ``None``.
        bias: learn b.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a manifold is no :class:`~holonomy.manifolds.Product`.

    >>> from holonomy.manifolds import Lorentz, Sphere
    >>> m = Product((Lorentz(-1.0, learnable=True), 5), (Sphere(1.0, learnable=True), 4))
    >>> ProductLinear(m)(m.lift(torch.randn(10, 8))).shape
    torch.Size([10, 9])
    """

    def __init__(
        self,
        manifold_in: Product,
        manifold_out: Product | None = None,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(bias=bias)
        checks.floating_dtype(dtype)
        self.manifold_in = require_product("manifold_in", manifold_in)
        self.manifold_out = manifold_in if manifold_out is None else require_product("manifold_out", manifold_out)
        shape = sum(self.manifold_out.sizes), self.manifold_in.n_elements
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        bound = 1 / math.sqrt(sum(self.manifold_in.sizes))
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            for (factor, _), part in zip(self.manifold_in.factors, self.manifold_in.slices, strict=True):
                if isinstance(factor, Lorentz):
                    self.weight[:, part.start].zero_()
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, x: Float[Tensor, "*batch ambient_in"]) -> Float[Tensor, "*batch ambient_out"]:
        """Points of ``manifold_out``, from points of ``manifold_in``."""
        checks.last_axis("x", x, self.manifold_in.n_elements, "ambient", self)
        # Products of gradients with coordinates as long as the dtype allows leave the range.
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return self.manifold_out.lift(numerics.bounded(nn.functional.linear, self.manifold_in.unit(x), *parameters))


class ProductAttention(KeyValueAttention[ProductLinear]):
    r"""Softmax attention on a product: the weights come from all factors together, the values are averaged in each.

    .. math::
        a_{ij} = \mathrm{softmax}_j\Bigl(-\frac{1}{\sqrt{d'}} \sum_f w_f\, d_f(q_i, k_j)^2\Bigr)

    Queries, keys and values are :class:`ProductLinear` of x; each head has its share of the coordinates of each factor,
    d' in all, and learns positive weights w of the factors, one at first. Values are averaged by the Lorentzian
    midpoint, the mean, or the mean in space set on the sphere. With one head and one hyperbolic factor this is
    :class:`~holonomy.layers.HypSoftmaxAttention` with the squared geodesic distance.

    Memory and time grow with the product of queries, keys and coordinates where a factor is flat or spherical.

    Args:
        manifold: where input and output lie. The coordinates of each factor (``manifold.sizes``) are a multiple of
            ``heads``, on a sphere two for each head at least.
        heads: number of heads.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if ``manifold`` is no :class:`~holonomy.manifolds.Product`.
        ValueError: if the coordinates of a factor cannot be shared by the heads.

    >>> from holonomy.manifolds import Lorentz, Sphere
    >>> m = Product((Lorentz(-1.0, learnable=True), 5), (Sphere(1.0, learnable=True), 4))
    >>> ProductAttention(m, heads=2)(m.lift(torch.randn(3, 10, 8))).shape
    torch.Size([3, 10, 9])
    """

    def __init__(
        self,
        manifold: Product,
        heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.manifold = require_product("manifold", manifold)
        shares = [size // head_count(size, heads, "manifold.sizes") for size in manifold.sizes]
        self.heads = heads
        each = zip((factor for factor, _ in manifold.factors), shares, strict=True)
        self.manifold_head = Product(*((factor, share + isinstance(factor, Lorentz)) for factor, share in each))
        self.query, self.key, self.value = (ProductLinear(manifold, device=device, dtype=dtype) for _ in range(3))
        self.log_weight = nn.Parameter(torch.zeros(heads, len(shares), device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weights of the factors to one; the linear maps draw their own parameters."""
        nn.init.zeros_(self.log_weight)

    def forward(
        self,
        x: Float[Tensor, "*batch nodes ambient"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys ambient"] | None = None,
    ) -> Float[Tensor, "*batch nodes ambient"]:
        """Points ``(*batch, nodes, ambient)``; the origin where x is padding, and of a head that may attend to none.

        ``x`` and ``memory`` are points ``(*batch, nodes, ambient)`` and ``(*batch, keys, ambient)``; masks,
        ``is_causal`` and errors are those of :meth:`holonomy.layers.HypSoftmaxAttention.forward`.
        """
        query, key, value = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        attended = self._average(query, key, value, Masks(key_padding_mask, attn_mask, is_causal))
        return self._result(attended, None if memory is not None else key_padding_mask)

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        return self.manifold.n_elements, "ambient", self.query

    def _split(self, project: ProductLinear, x: Tensor) -> Float[Tensor, "*batch heads nodes ambient"]:
        """Of each factor its share of the coordinates, as points of a head."""
        parts = self.manifold.coordinates(project(x)).split(self.manifold.sizes, -1)
        return self.manifold_head.lift(torch.cat([split_heads(part, self.heads) for part in parts], -1))

    def _weights(self, query: Tensor, key: Tensor, masks: Masks) -> Float[Tensor, "*batch heads nodes keys"]:
        padding, attn_mask, is_causal = masks
        hidden = pair_masks(query, key.shape[-2], of_all_heads(padding), attn_mask, is_causal=is_causal)
        return masked_softmax(self._logits(query, key), *hidden)

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        return self.manifold_head.centroid(value, self._weights(query, key, masks))

    def _result(self, attended: Tensor, padding: Tensor | None) -> Tensor:
        parts = self.manifold_head.coordinates(attended).split(self.manifold_head.sizes, -1)
        return self.manifold.lift(without_padding(torch.cat([merge_heads(part) for part in parts], -1), padding))

    def _logits(self, query: Tensor, key: Tensor) -> Float[Tensor, "*batch heads nodes keys"]:
        weight = numerics.exp(self.log_weight)[:, None, None, :] / math.sqrt(sum(self.manifold_head.sizes))
        distances = self.manifold_head.factor_cdist(query, key)
        wide = torch.promote_types(distances.dtype, torch.float32)  # float16 squares end at 65504
        return -numerics.bounded(_joint_squares, weight.to(wide), distances.to(wide))

    def extra_repr(self) -> str:
        """The number of heads, for ``repr``."""
        return f"heads={self.heads}"


def _joint_squares(weight: Tensor, distances: Tensor) -> Tensor:
    """The weighted sum of squares; of weights whose sum is held at the largest number the gradient is zero."""
    return (weight * numerics.finite(distances.square())).sum(-1)
