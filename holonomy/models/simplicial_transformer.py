r"""The simplicial transformer: ordinary and N-simplicial layers in one stack (Dussolle and Lio 2025, section 2).

Shapes are those of :class:`torch.nn.TransformerEncoder` with ``batch_first=True``, so that it takes that one's place:
causal for sequences, without positions for sets, with a mask of pairs for graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers import SimplicialEncoderLayer
from holonomy.ops.simplicial_attention.logits import Form


class SimplicialTransformer(nn.Module):
    r"""Pre-norm layers of any orders, and a last layer normalisation.

    A layer of order 1 is an ordinary one; its logits are dot products. One of order N >= 2 attends to tuples of N
    tokens, at a cost of :math:`n^{N+1}`, or :math:`n k^N` with ``steps=k``.

    Args:
        features: width d of a token.
        heads: attention heads of each layer.
        orders: N of each layer.
        feedforward: width of the MLPs, 4 d if left out.
        form: logits of the layers of order 2 and more, ``"product"`` or ``"determinant"``.
        lower_orders: such a layer has all orders up to its own in one softmax.
        causal: decoder-style: no token sees later ones.
        rope: turn queries and keys by their positions, in the layers where that has a meaning: of order 1, and
            determinants. Without it the order of the tokens plays no part but through ``causal``, and where ``steps``
            or ``capacity`` choose among equal scores, of which they take the first: those of steps are zero wherever
            no head's product is positive.
        steps: layers of order 2 and more attend along paths of so many steps from each token only, chosen by the
            projections of the layer before (path sparse attention, section 2.3). The first layer must be of order 1.
        distinct: with ``steps``: none to a token that is equal to an earlier one, so that k steps reach k tokens that
            differ. For sets in which tokens repeat.
        capacity: layers of order 2 and more attend among so many tokens only (expert choice, section 2.3).
        dropout: probability that an entry of what attention or MLPs add, or of a hidden layer, is dropped.
        activation: of the MLPs.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed, or an option has no effect beside the
            others.

    A model that no token of which looks ahead:

    >>> _ = torch.manual_seed(0)
    >>> model = SimplicialTransformer(8, 2, orders=(1, 2), causal=True)
    >>> x = torch.randn(1, 5, 8)
    >>> torch.allclose(model(x)[:, :3], model(x[:, :3]), atol=1e-5)
    True
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        orders: Sequence[int] = (1, 2),
        feedforward: int | None = None,
        form: Form = "product",
        lower_orders: bool = False,
        causal: bool = False,
        rope: bool = False,
        steps: int | None = None,
        distinct: bool = False,
        capacity: int | None = None,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(lower_orders=lower_orders, causal=causal, rope=rope, distinct=distinct)
        orders = [checks.positive_int("orders", order) for order in checks.sequence("orders", orders, "integers")]
        if not orders:
            raise ValueError("orders must name at least one layer, got none.")
        if max(orders) == 1 and (form != "product" or lower_orders or steps is not None or capacity is not None):
            raise ValueError(f"orders must have a layer of order 2 or more for its options to act on, got {orders}.")
        if steps is not None and orders[0] != 1:
            raise ValueError(f"orders must begin with 1 where steps are set: paths need a layer before, got {orders}.")
        if distinct and steps is None:
            raise ValueError("distinct must be False without steps, which it is about.")
        if rope and form == "product" and 1 not in orders:
            raise ValueError("rope must be False where no layer has order 1 or determinants: it would have no effect.")
        # Options of simplexes are for the layers of order 2 and more; those of order 1 are ordinary attention.
        self.layers = nn.ModuleList(
            SimplicialEncoderLayer(
                features,
                heads,
                order=order,
                feedforward=feedforward,
                form=form if order > 1 else "product",
                lower_orders=lower_orders and order > 1,
                causal=causal,
                rope=rope and (order == 1 or form == "determinant"),
                steps=steps if order > 1 else None,
                distinct=distinct and order > 1,
                capacity=capacity if order > 1 else None,
                dropout=dropout,
                activation=activation,
                device=device,
                dtype=dtype,
            )
            for order in orders
        )
        self.features, self._chooses = features, steps is not None or capacity is not None
        self.norm = nn.LayerNorm(features, device=device, dtype=dtype)

    def forward(
        self,
        src: Float[Tensor, "*batch tokens features"],
        mask: Bool[Tensor, "*#batch tokens tokens"] | None = None,
        src_key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Encode.

        Args:
            src: ``(*batch, tokens, features)``.
            mask: ``(*batch, tokens, tokens)``, broadcasting, ``True`` where a token must *not* attend to another, as in
                torch; a simplex is left out if its query must not attend to one of its keys.
            src_key_padding_mask: ``(*batch, tokens)``, ``True`` at padding, which has no effect.
            is_causal: no token sees later ones, as with ``causal``. It needs no ``mask``, as torch's does.

        Returns:
            ``(*batch, tokens, features)``; finite at padding.

        Raises:
            TypeError: if a mask is not boolean.
            ValueError: if the shape of one does not fit, or for ``mask`` or ``is_causal`` beside ``steps`` or
                ``capacity``.
        """
        checks.rows("src", src, self.features, "features", self.norm)
        if src_key_padding_mask is not None:
            checks.padding_mask("src_key_padding_mask", src_key_padding_mask, src.shape[:-1])
        if mask is not None:
            if self._chooses:
                raise ValueError("mask must be None with steps or capacity, which choose the simplexes.")
            checks.broadcasting_mask("mask", mask, (*src.shape[:-1], src.shape[-2]), 2, "(*batch, tokens, tokens)")
        # torch says what is hidden, the layers what is there.
        pairs = None if mask is None else ~mask
        x, handed = src, None
        layers = [cast("SimplicialEncoderLayer", module) for module in self.layers]
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            # Section 2.3: a layer with paths chooses them by the queries and keys of the one before.
            previous = None if layer.router is None else handed
            # A layer is called where it can be: hooks, sharding and checkpoints hold on to calls.
            if after is None or after.router is None:
                x = layer(x, src_key_padding_mask, pair_mask=pairs, is_causal=is_causal, previous=previous)
                handed = None
            else:
                x, handed = layer.with_projections(x, src_key_padding_mask, pair_mask=pairs, previous=previous)
        return self.norm(x)
