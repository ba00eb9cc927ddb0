r"""N-simplicial attention in hyperbolic space: the kernel of Simplicial section 2.2 on Hypformer's space parts.

In neither paper: queries, keys and values are HTC of the input (Hypformer eq. 14), their space parts go through the
Euclidean kernel, and the time coordinate of the result is the one that its space part asks for (eq. 18).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers.attention import KeyValueAttention, Masks
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.refinement import change_curvature, resolve
from holonomy.manifolds import Lorentz
from holonomy.ops.heads import head_count, merge_heads, split_heads, without_padding, without_queries
from holonomy.ops.masks import allowed_pairs
from holonomy.ops.simplicial_attention import refuse_lower_orders, simplicial_attention, simplicial_weights
from holonomy.ops.simplicial_attention.logits import FORMS, Form, chunks


class HypSimplicialAttention(KeyValueAttention[nn.Module]):
    r"""Multi-head N-simplicial attention between points of hyperbolic space.

    .. math::
        K^m &= \mathrm{HTC}(X; W^m_K, \kappa_1, \kappa_2), \quad V^m = \mathrm{HTC}(X; W^m_V, \kappa_1, \kappa_2), \\
        Z_s &= \mathrm{SimplicialAttention}(K^0_s, \dots, K^N_s;\; V^1_s, \dots, V^N_s), \\
        Z &= \Big(\sqrt{(\kappa_2/\kappa_3) |Z_s|^2 - 1/\kappa_3},\; \sqrt{\kappa_2/\kappa_3}\, Z_s\Big)

    It commutes with permutations of the nodes unless it is causal. Logits and results are products of N + 1 and N
    coordinates, so that they are finite for points of radius R if :math:`R^{N+1}` is in the range of the dtype.

    Args:
        features: d, a multiple of ``heads``.
        heads: number of heads.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_3`; ``manifold_in`` if ``None``.
        manifold_hidden: where queries, keys and values lie, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        order: N.
        form: of the logits: ``"product"`` or ``"determinant"``, see
            :class:`~holonomy.layers.simplicial.attention.SimplicialAttention`.
        lower_orders: all orders 1 .. N in one softmax.
        causal: keys later than the query take no part.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if sizes do not fit.

    >>> from holonomy.manifolds import Lorentz
    >>> m, to = Lorentz(-1.0), Lorentz(-0.5)
    >>> z = HypSimplicialAttention(8, 2, m, to)(m.lift(torch.randn(6, 8)))
    >>> torch.allclose(z[:, :1], to.time(z))
    True
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_hidden: Lorentz | None = None,
        order: int = 2,
        form: Form = "product",
        lower_orders: bool = False,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(lower_orders=lower_orders, causal=causal)
        checks.floating_dtype(dtype)
        self.features, self.heads = features, head_count(features, heads)
        self.order = checks.positive_int("order", order)
        checks.one_of("form", form, FORMS)
        self.form: Form = form
        self.lower_orders, self.causal = lower_orders, causal
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_hidden = resolve(self.manifold_in, manifold_hidden, "manifold_hidden")
        width = features // heads
        if form == "determinant":
            width = chunks(width, order) * (order + 1)

        def htc(size: int, *, bias: bool = True) -> HTC:
            return HTC(features, size, manifold_in, self.manifold_hidden, bias=bias, device=device, dtype=dtype)

        # At N = 1 a bias of the keys is the same for all of them, and softmax does not see it.
        self.keys = nn.ModuleList(htc(heads * width, bias=m == 0 or order > 1) for m in range(order + 1))
        self.values = nn.ModuleList(htc(features) for _ in range(order))

    def forward(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #nodes keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys dim_plus_1"] | None = None,
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Points ``(*batch, nodes, d + 1)``; the origin where x is padding, and at nodes in no simplex.

        ``x`` and ``memory`` are points ``(*batch, nodes, d + 1)`` and ``(*batch, keys, d + 1)`` on ``manifold_in``;
        masks, ``is_causal`` and errors are those of :meth:`holonomy.layers.SimplicialAttention.forward`.
        """
        query, key, value = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        pairs = allowed_pairs(query, key.shape[-2], key_padding_mask, pair_mask, attn_mask)
        attended = self._mixed(query, key, value, pairs, causal=self.causal or is_causal)
        return self._result(attended, None if memory is not None else key_padding_mask)

    def weights(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        pair_mask: Bool[Tensor, "*#batch #nodes keys"] | None = None,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys dim_plus_1"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The weights of all tuples of N keys, see :meth:`holonomy.layers.SimplicialAttention.weights`."""
        refuse_lower_orders(lower_orders=self.lower_orders)
        query, key, _ = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        pairs = allowed_pairs(query, key.shape[-2], key_padding_mask, pair_mask, attn_mask)
        keys, causal = [query, *key.unbind(-3)], self.causal or is_causal
        found = simplicial_weights(keys, pair_mask=pairs, causal=causal, form=self.form)
        return found if memory is not None else without_queries(found, key_padding_mask, self.order)

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        return self.features + 1, "features + 1", None

    def _projected(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, *, is_causal: bool, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of all N, on an axis of their own behind that of the heads."""
        del first
        checks.flags(is_causal=is_causal)
        keys = self._keys_of(x, padding, memory, is_causal=self.causal or is_causal)
        query = self._split(self.keys[0], keys if memory is None else x)
        key, value = (
            torch.stack([self._split(htc, keys) for htc in maps], -3) for maps in (self.keys[1:], self.values)
        )
        return query, key, value

    def _split(self, project: nn.Module, x: Tensor) -> Float[Tensor, "*batch heads nodes channels"]:
        return split_heads(space_of(cast("HTC", project), x), self.heads)

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        pairs = allowed_pairs(query, key.shape[-2], masks.padding, None, None)
        return self._mixed(query, key, value, pairs, causal=masks.is_causal)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, pair_mask: Tensor | None, *, causal: bool) -> Tensor:
        keys, values = [query, *key.unbind(-3)], value.unbind(-3)
        how: dict[str, Any] = {"pair_mask": pair_mask, "form": self.form, "lower_orders": self.lower_orders}
        return simplicial_attention(keys, values, causal=causal, **how)

    def _result(self, attended: Tensor, padding: Tensor | None) -> Tensor:
        space = without_padding(merge_heads(attended), padding)
        return change_curvature(space, self.manifold_hidden, self.manifold_out)

    def extra_repr(self) -> str:
        """Heads, order and form, for ``repr``."""
        return f"heads={self.heads}, order={self.order}, form={self.form!r}"
