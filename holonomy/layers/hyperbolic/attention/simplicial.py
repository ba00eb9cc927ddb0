r"""N-simplicial attention in hyperbolic space: the kernel of Simplicial section 2.2 on Hypformer's space parts.

In neither paper: queries, keys and values are HTC of the input (Hypformer eq. 14), their space parts go through the
Euclidean kernel, and the time coordinate of the result is the one that its space part asks for (eq. 18).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.refinement import change_curvature, resolve
from holonomy.manifolds import Lorentz
from holonomy.ops.heads import (
    KeyValueState,
    check_memory,
    extended,
    head_count,
    hidden_keys,
    later_keys,
    merge_heads,
    split_heads,
    split_mask,
    without_padding,
)
from holonomy.ops.simplicial_attention import simplicial_attention
from holonomy.ops.simplicial_attention.logits import FORMS, Form, chunks

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class HypSimplicialAttention(nn.Module):
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
        """Attend.

        Args:
            x: points ``(*batch, nodes, d + 1)`` on ``manifold_in``.
            key_padding_mask: ``(*batch, nodes)``, ``True`` at padding; of the tokens of ``memory`` if there is one.
            pair_mask: ``(*batch, nodes, keys)``, ``True`` where a node may attend to another; a simplex needs it of
                all its keys.
            attn_mask: the same in torch's words, ``True`` where a node must *not* attend to another: ``(nodes, keys)``,
                ``(*batch, heads, nodes, keys)``, what broadcasts to that, or ``(batch * heads, nodes, keys)``.
            is_causal: keys later than the query take no part, as with ``causal``.
            memory: points ``(*batch, keys, d + 1)`` on ``manifold_in``, of which all keys and values are.

        Returns:
            Points ``(*batch, nodes, d + 1)`` on ``manifold_out``; the origin where x is padding, and at nodes in no
            simplex.

        Raises:
            TypeError: if a mask is not boolean.
            ValueError: if the shape of one does not fit, or for ``is_causal`` or ``causal`` beside ``memory``.
        """
        checks.rows("x", x, self.features + 1, "features + 1")
        checks.flags(is_causal=is_causal)
        causal = self.causal or is_causal
        check_memory(x, memory, self.features + 1, is_causal=causal)
        keys = without_padding(x if memory is None else memory, key_padding_mask)
        if attn_mask is not None:
            checks.boolean("attn_mask", attn_mask, None, "pairs that must not attend")
        hidden, _ = split_mask(attn_mask, (*x.shape[:-2], self.heads, x.shape[-2], keys.shape[-2]), x)
        there = None if key_padding_mask is None else ~key_padding_mask[..., None, None, :]
        pairs = [None if pair_mask is None else pair_mask[..., None, :, :], None if hidden is None else ~hidden, there]
        given = [mask for mask in pairs if mask is not None]
        key, value = self._projected(self.keys[1:], keys), self._projected(self.values, keys)
        (query,) = self._projected(self.keys[:1], keys if memory is None else x)
        space = self._attend([query, *key], value, reduce(torch.logical_and, given) if given else None, causal=causal)
        space = space if memory is not None else without_padding(space, key_padding_mask)
        return change_curvature(space, self.manifold_hidden, self.manifold_out)

    def step(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        state: KeyValueState | None = None,
        key_padding_mask: Bool[Tensor, "*batch nodes"] | None = None,
    ) -> tuple[Float[Tensor, "*batch nodes dim_plus_1"], KeyValueState]:
        """The next tokens of a sequence, as the causal pass over all of it gives them.

        Hooks of this layer belong to ``forward`` and do not run.

        Args:
            x: points ``(*batch, nodes, d + 1)`` on ``manifold_in``: one token, or several.
            state: what the step before returned; ``None`` at the first. A named tuple of tensors, batch axes first.
            key_padding_mask: ``(*batch, nodes)``, ``True`` where x is padding, to which no later step attends either.

        Returns:
            Points ``(*batch, nodes, d + 1)`` on ``manifold_out``, and the state after them: all keys and values.

        Raises:
            TypeError: if ``state`` is not one of this layer.
            ValueError: if it is of another batch or of other sizes.

        >>> from holonomy.manifolds import Lorentz
        >>> m = Lorentz(-1.0)
        >>> layer, x = HypSimplicialAttention(8, 2, m), m.lift(torch.randn(6, 8))
        >>> first, state = layer.step(x[:5])
        >>> last, state = layer.step(x[5:], state)
        >>> torch.allclose(torch.cat([first, last]), layer(x, is_causal=True), atol=1e-4)
        True
        """
        checks.rows("x", x, self.features + 1, "features + 1")
        x = without_padding(x, key_padding_mask)
        query, *key = self._projected(self.keys, x)
        after = extended(
            state, x, torch.stack(key, -3), torch.stack(self._projected(self.values, x), -3), key_padding_mask
        )
        later = later_keys(x.shape[-2], after.key.shape[-2], x)
        pairs = None if later is None else ~later
        hidden = hidden_keys(after)
        if hidden is not None:
            there = ~hidden[..., None, None, :]
            pairs = there if pairs is None else there & pairs
        keys, values = after.key.unbind(-3), after.value.unbind(-3)
        space = without_padding(self._attend([query, *keys], values, pairs, causal=False), key_padding_mask)
        return change_curvature(space, self.manifold_hidden, self.manifold_out), after

    def _projected(self, maps: Iterable[nn.Module], x: Tensor) -> list[Tensor]:
        return [split_heads(space_of(cast("HTC", htc), x), self.heads) for htc in maps]

    def _attend(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], pair_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        return merge_heads(
            simplicial_attention(
                keys, values, pair_mask=pair_mask, causal=causal, form=self.form, lower_orders=self.lower_orders
            )
        )

    def extra_repr(self) -> str:
        """Heads, order and form, for ``repr``."""
        return f"heads={self.heads}, order={self.order}, form={self.form!r}"
