r"""Multi-head hyperbolic softmax attention, Hypformer eqs. 3-5.

Points, padding, heads and curvatures are those of :mod:`holonomy.layers.hyperbolic.attention.linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.layers.attention import KeyValueAttention, Masks
from holonomy.layers.hyperbolic.linear import HTC, space_of
from holonomy.layers.hyperbolic.refinement import change_curvature, resolve
from holonomy.manifolds import Lorentz
from holonomy.ops.heads import (
    KeyValueState,
    check_keys_and_values,
    extended,
    head_count,
    hidden_keys,
    merge_heads,
    of_all_heads,
    refuse_memory,
    split_heads,
    without_padding,
)
from holonomy.ops.simplicial_attention.logits import rotary
from holonomy.ops.softmax_attention import (
    SIMILARITIES,
    Similarity,
    hyperbolic_softmax_attention,
    hyperbolic_softmax_weights,
)


class HypSoftmaxAttention(KeyValueAttention[HTC]):
    r"""Softmax attention in hyperbolic space, Hypformer eqs. 3-5.

    Queries, keys and values are HTC of x; in each head the weights are
    :math:`a_{ij} = \mathrm{softmax}_j(-D(q_i, k_j)/\sqrt{d'})`, d' the channels of a head, and the values are combined
    by the Lorentzian midpoint. D is, by ``similarity``, the squared geodesic distance (eq. 5 as printed), the squared
    Lorentzian distance (the released code), or the geodesic distance (whose Lipschitz constant needs no bound on the
    radius).
    In float32 the squared Lorentzian distance loses digits with the square of the time, 1e-3 at rapidity 4; see
    :func:`~holonomy.ops.softmax_attention.hyperbolic_softmax_attention`.

    **Rotary positions** (RoPE; on the hyperboloid HELM, He et al., NeurIPS 2025). With ``rope`` query i and key j are
    rotated by :math:`R^i` and :math:`R^j`, with R a rotation of pairs of space coordinates. It is an isometry that
    preserves the time and the origin, so that :math:`D(R^i q, R^j k) = D(q, R^{j-i} k)`: weights depend on differences
    of positions only, and padding in front has no effect.

    Args:
        features: d, a multiple of ``heads``.
        heads: number of heads.
        manifold_in: where the input lies, :math:`\kappa_1`.
        manifold_out: where the output lies, :math:`\kappa_3`; ``manifold_in`` if ``None``.
        manifold_hidden: where queries, keys and values lie, :math:`\kappa_2`; ``manifold_in`` if ``None``.
        similarity: ``"geodesic_squared"``, ``"lorentz_squared"`` or ``"geodesic"``.
        rope: turn queries and keys by their positions, from two channels a head on; an odd last one is not turned.
        dropout: probability that an attention weight is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    >>> from holonomy.manifolds import Lorentz, hyperboloid
    >>> m = Lorentz(-1.0)
    >>> layer = HypSoftmaxAttention(8, 2, m, similarity="lorentz_squared")
    >>> layer(m.lift(torch.randn(3, 5, 8)), torch.zeros(3, 5, dtype=torch.bool)).shape
    torch.Size([3, 5, 9])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        manifold_in: Lorentz,
        manifold_out: Lorentz | None = None,
        *,
        manifold_hidden: Lorentz | None = None,
        similarity: Similarity = "geodesic_squared",
        rope: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(rope=rope)
        checks.floating_dtype(dtype)
        self.features, self.heads = features, head_count(features, heads)
        checks.one_of("similarity", similarity, SIMILARITIES)
        self.similarity: Similarity = similarity
        if rope and features < 2 * heads:
            raise ValueError(f"rope must be False with one channel a head, which has no rotation, got {features=}.")
        self.rope = rope
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.manifold_in, self.manifold_out = resolve(manifold_in, manifold_out)
        _, self.manifold_hidden = resolve(self.manifold_in, manifold_hidden, "manifold_hidden")
        self.query, self.key, self.value = (
            HTC(features, features, manifold_in, self.manifold_hidden, device=device, dtype=dtype) for _ in range(3)
        )

    def forward(
        self,
        x: Float[Tensor, "*batch nodes dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys dim_plus_1"] | None = None,
        group: Group | None = None,
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Attend.

        Args:
            x: points ``(*batch, nodes, d + 1)`` on ``manifold_in``.
            key_padding_mask: ``(*batch, nodes)``, ``True`` at padding; of the tokens of ``memory`` if there is one.
            attn_mask: as in :class:`torch.nn.MultiheadAttention`: boolean, ``True`` where a node must *not* attend to
                another, or floating-point, added to the logits. ``(nodes, keys)``, ``(*batch, heads, nodes, keys)``,
                what broadcasts to that, or ``(batch * heads, nodes, keys)``.
            is_causal: no node attends to later ones.
            memory: points ``(*batch, keys, d + 1)`` on ``manifold_in``, to which x attends instead of to itself.
            group: must be None: the weights of all pairs are no sum over rows.

        Returns:
            Points ``(*batch, nodes, d + 1)`` on ``manifold_out``; the origin where x is padding, and at a node that
            may attend to none.

        Raises:
            TypeError: if a mask is of another dtype.
            ValueError: if a shape does not fit, for ``is_causal`` or ``rope`` beside ``memory``, or for a ``group``.
        """
        if group is not None:
            raise ValueError(
                "group must be None for softmax attention, whose weights are of single pairs of rows; linear attention "
                "takes rows that processes share."
            )
        query, key, value = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        attended = self._average(query, key, value, Masks(key_padding_mask, attn_mask, is_causal))
        return self._result(attended, None if memory is not None else key_padding_mask)

    def remember(
        self,
        memory: Float[Tensor, "*batch keys dim_plus_1"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
    ) -> KeyValueState:
        """The keys and values of a memory, computed once for many calls of :meth:`recall`.

        A named tuple, batch axes first. ``memory`` are points ``(*batch, keys, d + 1)`` of ``manifold_in``;
        ``key_padding_mask`` ``(*batch, keys)`` is ``True`` at padding.
        """
        _, key, value = self._projected(memory, key_padding_mask, memory, is_causal=False)
        return extended(None, memory, key, value, key_padding_mask)

    def recall(
        self, x: Float[Tensor, "*batch nodes dim_plus_1"], state: KeyValueState
    ) -> Float[Tensor, "*batch nodes dim_plus_1"]:
        """Attend to a memory, as ``forward`` with ``memory`` does.

        ``x`` are points ``(*batch, nodes, d + 1)`` of ``manifold_in``, ``state`` what :meth:`remember` returned of a
        memory with the same batch axes. A state of another layer is a TypeError, one of another batch or of other
        sizes, or beside ``rope``, a ValueError.

        >>> from holonomy.manifolds import Lorentz
        >>> m = Lorentz(-1.0)
        >>> layer, x, memory = HypSoftmaxAttention(8, 2, m), m.lift(torch.randn(6, 8)), m.lift(torch.randn(3, 8))
        >>> torch.allclose(layer.recall(x, layer.remember(memory)), layer(x, memory=memory), atol=1e-4)
        True
        """
        checks.rows("x", x, self.features + 1, "features + 1", self.query)
        refuse_memory(rope=self.rope)
        query = self._split(self.query, x)
        check_keys_and_values(state, KeyValueState(query, query, x[..., 0] > 0))
        return self._result(self._average(query, state.key, state.value, Masks(hidden_keys(state))), None)

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        return self.features + 1, "features + 1", self.query

    def _split(self, project: HTC, x: Tensor) -> Float[Tensor, "*batch heads nodes channels"]:
        return split_heads(space_of(project, x), self.heads)

    def _projected(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, *, is_causal: bool, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._projected(x, padding, memory, is_causal=is_causal)
        if not self.rope:
            return query, key, value
        if memory is not None:
            refuse_memory(rope=self.rope)
        places = torch.arange(first, first + key.shape[-2], device=key.device)
        return rotary(query, places, size=2), rotary(key, places, size=2), value

    def _weights(self, query: Tensor, key: Tensor, masks: Masks) -> Float[Tensor, "*batch heads nodes keys"]:
        return hyperbolic_softmax_weights(query, key, **self._how(masks))

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        """Space parts of midpoints of the values."""
        dropout = self.dropout if self.training else 0.0
        return hyperbolic_softmax_attention(query, key, value, dropout=dropout, **self._how(masks))

    def _result(self, attended: Tensor, padding: Tensor | None) -> Tensor:
        space = without_padding(merge_heads(attended), padding)
        return change_curvature(space, self.manifold_hidden, self.manifold_out)

    def _how(self, masks: Masks) -> dict[str, Any]:
        padding, attn_mask, is_causal = masks
        how = {"curvature": self.manifold_hidden.curvature, "similarity": self.similarity}
        return {"mask": of_all_heads(padding), "attn_mask": attn_mask, "is_causal": is_causal, **how}

    def extra_repr(self) -> str:
        """Heads and similarity, for ``repr``."""
        return f"heads={self.heads}, similarity={self.similarity!r}, rope={self.rope}, dropout={self.dropout}"
