r"""N-simplicial self-attention as layers: projections, routers, and a pre-norm encoder layer (Simplicial section 2).

Axes are ``(*batch, tokens, features)`` as in :class:`torch.nn.TransformerEncoder` with ``batch_first=True``; padding is
``True`` in a ``key_padding_mask`` and has no effect, whatever it holds. Other masks are ``True`` where something takes
part. Projections have no bias, as printed; at N = 1 the softmax would not see that of the keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy.ops.heads import head_count, merge_heads, split_heads, without_padding
from holonomy.ops.simplicial_attention import check_window, simplicial_attention
from holonomy.ops.simplicial_attention.duplicates import find_duplicates
from holonomy.ops.simplicial_attention.logits import FORMS, Form, chunks, rotary
from holonomy.ops.simplicial_attention.paths import best_neighbours, simplicial_path_attention, step_scores

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class SimplicialAttention(nn.Module):
    r"""Multi-head N-simplicial self-attention, without the skip connection.

    .. math:: x'_i = W_O \bigoplus_h \sum_{k_1 .. k_N} A^h_{i k_1 .. k_N} \prod_{m=1}^N W^h_{V,m} x_{k_m}, \qquad
        A^h_i = \mathrm{softmax}\bigl( \langle W^h_{K,0} x_i, W^h_{K,1} x_{k_1}, \dots \rangle / \sqrt{d_h} \bigr)

    See :func:`~holonomy.ops.simplicial_attention.simplicial_attention` for the forms, the masks and the cost:
    :math:`n^{N+1}` in time, :math:`n^{N-1}` in memory. With ``form="determinant"`` queries and keys have the largest
    multiple of N + 1 channels up to :math:`d_h`, so that none is idle.

    Args:
        features: width d of a token.
        heads: number of heads; each has d / heads channels.
        order: N; 1 is ordinary attention.
        form: of the logits: ``"product"`` (section 2.2) or ``"determinant"`` (section 2.4).
        lower_orders: all orders 1 .. N in one softmax (appendix F.1).
        causal: keys later than the query take no part.
        window: keys that are w places from the query or further take no part; one number, or one for each key. The
            window is one of places in the sequence: renumbering the tokens changes the result.
        rope: turn queries and keys by their positions (section 2.4). Only for logits that a common rotation does not
            change: determinants, or products at N = 1.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if sizes do not fit, or ``rope`` has no meaning with the form.

    >>> SimplicialAttention(12, 2, order=2)(torch.randn(3, 5, 12)).shape
    torch.Size([3, 5, 12])
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        order: int = 2,
        form: Form = "product",
        lower_orders: bool = False,
        causal: bool = False,
        window: int | tuple[int, ...] | None = None,
        rope: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(lower_orders=lower_orders, causal=causal, rope=rope)
        checks.floating_dtype(dtype)
        self.features, self.heads = features, head_count(features, heads)
        self.order = checks.positive_int("order", order)
        checks.one_of("form", form, FORMS)
        self.form: Form = form
        self.lower_orders, self.causal, self.rope = lower_orders, causal, rope
        self.window = check_window(window, order)
        if rope and form == "product" and order > 1:
            raise ValueError("rope must be False with form 'product' and order > 1: rotations change these logits.")
        if rope and lower_orders:
            raise ValueError("rope must be False with lower_orders: each order needs chunks of another size.")
        width = features // heads
        # Determinants read chunks of N + 1 channels: a remainder would never get a gradient.
        if form == "determinant":
            width = chunks(width, order) * (order + 1)
        self.key = nn.Linear(features, (order + 1) * heads * width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(features, order * features, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(features, features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that keep the variance of a token: products of N + 1 projections are of order one, too."""
        for linear in (self.key, self.value):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(self.features))
        self.out.reset_parameters()

    def projected(
        self, x: Float[Tensor, "*batch tokens features"], positions: Int[Tensor, "*#batch tokens"] | None = None
    ) -> tuple[list[Float[Tensor, "*batch heads tokens dim"]], list[Float[Tensor, "*batch heads tokens values"]]]:
        r"""Queries and keys :math:`K_0, \dots, K_N`, and values :math:`V_1, \dots, V_N`.

        Args:
            x: ``(*batch, tokens, features)``.
            positions: of the tokens, for ``rope``; 0 .. n - 1 if left out.

        Returns:
            N + 1 tensors ``(*batch, heads, tokens, dim)`` and N tensors ``(*batch, heads, tokens, values)``.

        Raises:
            ValueError: if there are positions without ``rope``, which they are for.
        """
        if positions is not None and not self.rope:
            raise ValueError("positions must be None without rope, which they are for.")
        if positions is not None:
            checks.integers("positions", positions)
            checks.broadcasting("positions", positions, x.shape[:-1], 1, "(*batch, tokens)")
        # One product for K_0 .. K_N, cut afterwards.
        keys = [split_heads(slot, self.heads) for slot in self.key(x).chunk(self.order + 1, -1)]
        if self.rope:
            at = None if positions is None else positions[..., None, :]
            keys = [rotary(key, at, size=self.order + 1) for key in keys]
        return keys, [split_heads(slot, self.heads) for slot in self.value(x).chunk(self.order, -1)]

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        pair_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        attn_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        is_causal: bool = False,
        positions: Int[Tensor, "*#batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding.
            mask: which simplexes there are, for every head: ``(*batch, tokens, .., tokens)``, N + 1 axes of tokens.
            pair_mask: ``(*batch, tokens, tokens)``, ``True`` where a token may attend to another; a simplex needs it of
                all its keys.
            attn_mask: the same in torch's words, ``True`` where a token must *not* attend to another.
            is_causal: keys later than the query take no part, as with ``causal``.
            positions: of the tokens, for ``rope``; 0 .. n - 1 if left out.

        Returns:
            ``(*batch, tokens, features)``; the bias of the last map at tokens that are in no simplex.

        Raises:
            TypeError: if a mask is not boolean.
            ValueError: if the shape of one does not fit.
        """
        checks.rows("x", x, self.features, "features", self.key)
        x = without_padding(x, key_padding_mask)
        for name, given in (("pair_mask", pair_mask), ("attn_mask", attn_mask)):
            if given is not None:
                pairs = (*x.shape[:-1], x.shape[-2])
                checks.broadcasting_mask(name, given, pairs, 2, "(*batch, tokens, tokens)")
        if attn_mask is not None:
            pair_mask = ~attn_mask if pair_mask is None else pair_mask & ~attn_mask
        if key_padding_mask is not None:
            # A simplex counts where its query may attend to each of its keys, of which none may be padding.
            there = ~key_padding_mask[..., None, :]
            pair_mask = there if pair_mask is None else pair_mask & there
        keys, values = self.projected(x, positions)
        return self.attend(keys, values, mask=mask, pair_mask=pair_mask, is_causal=is_causal)

    def attend(
        self,
        keys: list[Float[Tensor, "*batch heads tokens dim"]],
        values: list[Float[Tensor, "*batch heads tokens values"]],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        pair_mask: Bool[Tensor, "*#batch #tokens tokens"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend, with what :meth:`projected` gave.

        Args:
            keys: N + 1 tensors ``(*batch, heads, tokens, dim)``.
            values: N tensors ``(*batch, heads, tokens, values)``.
            mask: as in :meth:`forward`.
            pair_mask: as in :meth:`forward`.
            is_causal: as in :meth:`forward`.

        Returns:
            ``(*batch, tokens, features)``.

        Raises:
            TypeError: if a mask is not boolean.
            ValueError: if the shape of one does not fit.
        """
        checks.flags(is_causal=is_causal)
        batch, tokens = keys[0].shape[:-3], keys[0].shape[-2]
        if mask is not None:
            axes = self.order + 1
            checks.broadcasting_mask("mask", mask, (*batch, *[tokens] * axes), axes, "(*batch, tokens, .., tokens)")
        if pair_mask is not None:
            checks.broadcasting_mask("pair_mask", pair_mask, (*batch, tokens, tokens), 2, "(*batch, tokens, tokens)")
        mixed = simplicial_attention(
            keys,
            values,
            mask=None if mask is None else mask.unsqueeze(-self.order - 2),
            pair_mask=None if pair_mask is None else pair_mask[..., None, :, :],
            causal=self.causal or is_causal,
            window=self.window,
            form=self.form,
            lower_orders=self.lower_orders,
        )
        return self.out(merge_heads(mixed))

    def along_paths(
        self,
        keys: list[Float[Tensor, "*batch heads tokens dim"]],
        values: list[Float[Tensor, "*batch heads tokens values"]],
        neighbours: Int[Tensor, "*#batch tokens k"],
        scores: Float[Tensor, "*#batch tokens k"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend along paths of neighbours only, in linear time (section 2.3); see :class:`PathRouter`.

        Args:
            keys: N + 1 tensors ``(*batch, heads, tokens, dim)`` from :meth:`projected`.
            values: N tensors ``(*batch, heads, tokens, values)``.
            neighbours: ``(*batch, tokens, k)``; -1 is no neighbour. Neighbours that are never later than their token
                make this causal.
            scores: ``(*batch, tokens, k)``, added to the logits, one for each step of a path.

        Returns:
            ``(*batch, tokens, features)``; the bias of the last map at tokens from which no path starts.

        Raises:
            ValueError: if the layer mixes lower orders, whose paths have other lengths, or has a window.

        >>> layer = SimplicialAttention(8, 2)
        >>> layer.along_paths(*layer.projected(torch.randn(5, 8)), torch.zeros(5, 1, dtype=torch.int64)).shape
        torch.Size([5, 8])
        """
        if self.lower_orders:
            raise ValueError("lower_orders must be False for attention along paths, got True.")
        if self.window is not None:
            raise ValueError(
                f"window must be None for attention along paths, got {self.window}: neighbours say it all."
            )
        mixed = simplicial_path_attention(
            keys,
            values,
            neighbours[..., None, :, :],
            form=self.form,
            scores=None if scores is None else scores[..., None, :, :],
        )
        return self.out(merge_heads(mixed))


class PathRouter(nn.Module):
    r"""Selects the steps of simplicial path sparse attention: the k best of each token (section 2.3).

    .. math:: s_{ij} = \sum_h w_{ih}\, \mathrm{ReLU}(\langle q_{ih}, k_{jh} \rangle), \qquad w_i = W x_i

    with the first two projections q, k of the previous attention layer. The selection has no gradient, and the paper
    does not say how W is trained. Here the router also returns the scores as numbers that are zero and have a gradient
    with respect to W only: added to the logits they do not change them, and W gets the gradient of a bias of each step.
    Layers below the router get no gradient from the selection.

    Equal tokens of a set have equal scores, so that the k best may all be copies of one. With ``distinct`` steps to
    copies of an earlier token are left out, and k steps reach k different tokens.

    Args:
        features: width of a token.
        heads: of the previous attention layer.
        k: steps from a token.
        causal: only steps to the token itself and earlier ones.
        distinct: no steps to tokens that are equal to an earlier one, up to rounding.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is not positive.

    >>> layer = SimplicialAttention(8, 2)
    >>> x = torch.randn(5, 8)
    >>> keys, _ = layer.projected(x)
    >>> steps, scores = PathRouter(8, 2, 3)(x, keys[0], keys[1])
    >>> steps.shape, scores.abs().max().item()
    (torch.Size([5, 3]), 0.0)
    """

    def __init__(
        self,
        features: int,
        heads: int,
        k: int,
        *,
        causal: bool = False,
        distinct: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.flags(causal=causal, distinct=distinct)
        checks.floating_dtype(dtype)
        self.k, self.causal, self.distinct = checks.positive_int("k", k), causal, distinct
        checks.positive_int("features", features)
        self.gate = nn.Linear(features, checks.positive_int("heads", heads), bias=False, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        query: Float[Tensor, "*batch heads tokens dim"],
        key: Float[Tensor, "*batch heads tokens dim"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> tuple[Int[Tensor, "*batch tokens k"], Float[Tensor, "*batch tokens k"]]:
        """Choose.

        Args:
            x: ``(*batch, tokens, features)``, finite.
            query: ``(*batch, heads, tokens, dim)``.
            key: ``(*batch, heads, tokens, dim)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at tokens to which there is no step.

        Returns:
            Steps ``(*batch, tokens, k)``, of equal ones those to the first tokens, -1 where there are fewer; and zeros
            of that shape that carry the gradient of the scores.
        """
        checks.rows("x", x, self.gate.in_features, "features", self.gate)
        handed = (*x.shape[:-2], self.gate.out_features, x.shape[-2])
        checks.vectors(query=query, key=key)
        for name, projected in (("query", query), ("key", key)):
            checks.rows(name, projected, query.shape[-1], "dim", self.gate)
            checks.shaped(name, projected, (*handed, query.shape[-1]), "(*batch, heads, tokens, dim) = ")
        if key_padding_mask is not None:
            checks.padding_mask("key_padding_mask", key_padding_mask, x.shape[:-1])
        # Only the gate learns by the choice; what it reads learns by the attention itself.
        x, query, key = x.detach(), query.detach(), key.detach()
        gate = self.gate(x)
        if self.distinct:
            again = find_duplicates(x, key_padding_mask)
            key_padding_mask = again if key_padding_mask is None else key_padding_mask | again
        steps = best_neighbours(query, key, gate, self.k, causal=self.causal, key_padding_mask=key_padding_mask)
        scores = step_scores(query, key, gate, steps)
        # Zero in value, so that logits stay those of the formula; the gradient is that of the scores.
        return steps, scores - scores.detach()


class ExpertChoice(nn.Module):
    r"""A layer that is applied only to the k tokens with the highest scores (section 2.3).

    .. math:: x_i \mapsto x_i + s_i f(X_S)_i \;\; (i \in S), \qquad x_i \mapsto x_i \;\; (i \notin S),
        \qquad s_i = w \cdot x_i

    S are the k tokens with the largest scores; ties go to the first. The factor :math:`s_i` gives the router a
    gradient. **Not causal**: whether a token is chosen depends on the scores of later ones.

    Args:
        features: width of a token.
        capacity: k; all tokens where there are fewer.
        inner: f, from ``(*batch, k, features)`` to the same. Where there is a key-padding mask it gets the one of the
            chosen tokens as its second argument.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is not positive.

    >>> ExpertChoice(12, 3, SimplicialAttention(12, 2))(torch.randn(2, 6, 12)).shape
    torch.Size([2, 6, 12])
    """

    def __init__(
        self,
        features: int,
        capacity: int,
        inner: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.capacity = checks.positive_int("capacity", capacity)
        self.features = checks.positive_int("features", features)
        checks.function("inner", inner)
        self.router = nn.Linear(features, 1, bias=False, device=device, dtype=dtype)
        self.inner = inner

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Apply the inner layer to the chosen tokens.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding, which is chosen last.

        Returns:
            ``(*batch, tokens, features)``; zero at padding.
        """
        checks.vectors(x=x)
        x = without_padding(x, key_padding_mask)
        return x + self.weighted(x, key_padding_mask)

    def weighted(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """What is added: :math:`s_i f(X_S)_i` at the chosen tokens, zero at the others.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding, which is chosen last.

        Returns:
            ``(*batch, tokens, features)``.
        """
        checks.rows("x", x, self.features, "features", self.router)
        x = without_padding(x, key_padding_mask)
        scores = self.router(x).squeeze(-1)
        ranked = scores if key_padding_mask is None else scores.masked_fill(key_padding_mask, -torch.inf)
        # A stable sort, so that of equal scores the first tokens are chosen; then in the order of the sequence.
        best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : self.capacity]
        chosen = best.sort(-1).values
        index = chosen[..., None].expand(*chosen.shape, x.shape[-1])
        some = x.gather(-2, index)
        if key_padding_mask is None:
            result = self.inner(some)
        else:
            padding = key_padding_mask.gather(-1, chosen)
            result = without_padding(self.inner(some, padding), padding)
        result = scores.gather(-1, chosen)[..., None] * result
        return torch.zeros_like(x, dtype=result.dtype).scatter(-2, index, result)
