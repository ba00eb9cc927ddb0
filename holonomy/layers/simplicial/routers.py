r"""Routers, which choose the simplexes to evaluate: along paths, or among few tokens (Simplicial section 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.ops.heads import without_padding
from holonomy.ops.simplicial_attention.paths import best_neighbours, find_duplicates, step_scores


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

    >>> from holonomy.layers import SimplicialAttention
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
        self.features = checks.positive_int("features", features)
        self.heads = checks.positive_int("heads", heads)
        self.gate = nn.Linear(features, heads, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        query: Float[Tensor, "*batch heads tokens dim"],
        key: Float[Tensor, "*batch heads tokens dim"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> tuple[Int[Tensor, "*batch tokens k"], Float[Tensor, "*batch tokens k"]]:
        """The steps of each token, and zeros of that shape that carry the gradient of the scores.

        They are ``(*batch, tokens, k)``: tokens, of equal ones the first, and -1 where there are fewer than k. ``x``
        ``(*batch, tokens, features)`` is finite, ``query`` and ``key`` are ``(*batch, heads, tokens, dim)``, and
        ``key_padding_mask`` ``(*batch, tokens)`` is ``True`` at tokens from and to which there is no step.
        """
        checks.rows("x", x, self.features, "features", self.gate)
        handed = (*x.shape[:-2], self.heads, x.shape[-2])
        checks.vectors(query=query, key=key)
        for name, projected in (("query", query), ("key", key)):
            checks.rows(name, projected, query.shape[-1], "dim", self.gate)
            checks.shaped(name, projected, (*handed, query.shape[-1]), "(*batch, heads, tokens, dim) = ")
        if key_padding_mask is not None:
            checks.padding_mask("key_padding_mask", key_padding_mask, x.shape[:-1])
        # Only the gate learns by the choice; what it reads learns by the attention itself.
        x, query, key = x.detach(), query.detach(), key.detach()
        gate, hidden = self.gate(x), key_padding_mask
        if self.distinct:
            again = find_duplicates(x, key_padding_mask)
            hidden = again if hidden is None else hidden | again
        steps = best_neighbours(query, key, gate, self.k, causal=self.causal, key_padding_mask=hidden)
        if key_padding_mask is not None:
            steps = steps.masked_fill(key_padding_mask[..., None], -1)
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

    >>> from holonomy.layers import SimplicialAttention
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
        self, x: Float[Tensor, "*batch tokens features"], key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch tokens features"]:
        """Apply the inner layer to the chosen tokens: ``(*batch, tokens, features)``, zero at padding.

        ``key_padding_mask`` ``(*batch, tokens)`` is ``True`` at padding, which is chosen last.
        """
        checks.vectors(x=x)
        x = without_padding(x, key_padding_mask)
        return x + self.weighted(x, key_padding_mask)

    def weighted(
        self, x: Float[Tensor, "*batch tokens features"], key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch tokens features"]:
        """What is added: :math:`s_i f(X_S)_i` at the chosen tokens, zero at the others."""
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
        checks.shaped("inner(x)", result, some.shape, "(*batch, k, features) = ")
        result = scores.gather(-1, chosen)[..., None] * result
        return torch.zeros_like(x, dtype=result.dtype).scatter(-2, index, result)
