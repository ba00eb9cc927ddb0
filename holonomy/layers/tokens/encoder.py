r"""A standard transformer encoder layer on tokens: pre-norm, GELU, softmax or kernel attention (TokenGT 2, A.4).

Axes are ``(*batch, tokens, features)``; a mask is boolean ``(*batch, tokens)``, ``True`` at padding, whose content has
no effect. Keys have no bias: softmax does not see it, and it would never receive a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._parts import Group
from holonomy.ops.dot_product import dot_product_attention
from holonomy.ops.heads import head_count, merge_heads, split_heads, without_padding
from holonomy.ops.performer import orthogonal_projection, performer_attention, redraw

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def stochastic_depth(
    branch: Float[Tensor, "*batch tokens features"], p: float, *, training: bool
) -> Float[Tensor, "*batch tokens features"]:
    """Drop the whole branch of a graph with probability p, and divide the others by 1 - p (Huang et al. 2016)."""
    if p == 0.0 or not training:
        return branch
    return branch * functional.dropout(branch.new_ones(*branch.shape[:-2], 1, 1), p, training)


class TokenAttention(nn.Module):
    r"""Multi-head self-attention of tokens, TokenGT eq. 6.

    .. math:: \sum_h \alpha^h X w_h^V w_h^O, \qquad
        \alpha^h = \mathrm{softmax}\bigl( X w_h^Q (X w_h^K)^\top / \sqrt{d_H} \bigr)

    Args:
        features: width d of a token.
        heads: number of heads H.
        head_features: :math:`d_H`, of queries, keys and values; d / H if left out.
        kernel: ``"softmax"``, or ``"performer"``: FAVOR+, at a cost linear in the tokens.
        random_features: of ``"performer"``, :math:`2 d_H` if left out. They are drawn at construction and kept with
            the parameters; :meth:`redraw` draws others.
        dropout: probability that a weight of softmax attention is dropped in training.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size or choice is none of the allowed, or an option has no effect beside the others.

    >>> TokenAttention(8, 2)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    projection: Tensor | None

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        head_features: int | None = None,
        kernel: Literal["softmax", "performer"] = "softmax",
        random_features: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.floating_dtype(dtype)
        self.features = checks.positive_int("features", features)
        self.heads = checks.positive_int("heads", heads)
        self.kernel = checks.one_of("kernel", kernel, ("softmax", "performer"))
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        if head_features is None:
            head_count(features, heads)
        width = features // heads if head_features is None else checks.positive_int("head_features", head_features)
        if kernel == "softmax" and random_features is not None:
            raise ValueError(f"random_features must be None with kernel 'softmax', got {random_features}.")
        if kernel == "performer" and dropout > 0:
            raise ValueError(f"dropout must be 0 with kernel 'performer', which has no weights to drop, got {dropout}.")
        self.query = nn.Linear(features, heads * width, device=device, dtype=dtype)
        self.key = nn.Linear(features, heads * width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(features, heads * width, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(heads * width, features, device=device, dtype=dtype)
        projection = None
        if kernel == "performer":
            count = 2 * width if random_features is None else checks.positive_int("random_features", random_features)
            projection = orthogonal_projection(count, width, device=device, dtype=dtype)
        self.register_buffer("projection", projection)

    def reset_parameters(self) -> None:
        """Draw everything anew, random features among it."""
        for linear in (self.query, self.key, self.value, self.out):
            linear.reset_parameters()
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw other random features; nothing where the kernel is ``"softmax"``.

        Args:
            generator: source of the random numbers, torch's seeded state if left out.
        """
        redraw(self.projection, generator)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
        *,
        group: Group | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Attend.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at tokens that nobody attends to.
            group: with kernel ``"performer"``, processes that share the tokens: x holds those of this one, which attend
                to the tokens of all. Random features must be the same on all.

        Returns:
            ``(*batch, tokens, features)``; the bias of the last map at tokens of a graph that is all padding.

        Raises:
            TypeError: if ``group`` is none.
            ValueError: if there is a ``group`` with kernel ``"softmax"``.
        """
        if group is not None and self.projection is None:
            raise ValueError(
                "group must be None with kernel 'softmax', whose weights are of single pairs of tokens; kernel "
                "'performer' takes tokens that processes share."
            )
        query, key, value, mask = self._heads_of(x, key_padding_mask)
        if self.projection is not None:
            attended = performer_attention(query, key, value, self.projection, mask, group=group)
        else:
            allowed = None if mask is None else ~mask[..., None, :]
            dropout = self.dropout if self.training else 0.0
            attended = dot_product_attention(query, key, value, allowed, dropout=dropout)
        return self.out(merge_heads(attended))

    def weights(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch heads tokens tokens"]:
        r"""The attention matrices :math:`\alpha^h` themselves, without dropout.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at tokens that nobody attends to.

        Returns:
            ``(*batch, heads, tokens, tokens)``, rows of queries that sum to one; zero where all keys are padding.
        """
        query, key, _, mask = self._heads_of(x, key_padding_mask)
        if self.projection is not None:
            # The rows of the identity as values: the average of them is the row of weights.
            every = torch.eye(x.shape[-2], device=x.device, dtype=query.dtype).expand(*key.shape[:-1], -1)
            return performer_attention(query, key, every, self.projection, mask)
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        if mask is None:
            return logits.softmax(-1)
        hidden = mask[..., None, :]
        lowest = torch.finfo(logits.dtype).min  # not -inf, of which a row has no softmax
        return logits.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)

    def _heads_of(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        checks.rows("x", x, self.features, "features", self.query)
        x = without_padding(x, padding)
        query, key, value = (split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        return query, key, value, None if padding is None else padding[..., None, :]


class PreNormLayer(nn.Module):
    r"""A residual block around any attention, and one around an MLP, each after layer normalisation.

    .. math:: H = X + \mathrm{Attention}(\mathrm{LN}\,X), \qquad H + \mathrm{MLP}(\mathrm{LN}\,H)

    ``attention`` takes ``(*batch, tokens, features)`` and a key-padding mask; the other arguments are those of
    :class:`TokenEncoderLayer`.
    """

    def __init__(
        self,
        features: int,
        attention: nn.Module,
        *,
        feedforward: int | None = None,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = checks.positive_int("features", features)
        hidden = 4 * features if feedforward is None else checks.positive_int("feedforward", feedforward)
        self.dropout = checks.in_range("dropout", dropout, 0.0, 1.0)
        self.stochastic_depth = checks.in_range("stochastic_depth", stochastic_depth, 0.0, 1.0)
        checks.function("activation", activation)
        self.activation = activation
        self.norm_attention = nn.LayerNorm(features, device=device, dtype=dtype)
        self.attention = attention
        self.norm_feedforward = nn.LayerNorm(features, device=device, dtype=dtype)
        self.expand = nn.Linear(features, hidden, device=device, dtype=dtype)
        self.contract = nn.Linear(hidden, features, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """Apply the layer.

        Args:
            x: ``(*batch, tokens, features)``.
            key_padding_mask: ``(*batch, tokens)``, ``True`` at padding.

        Returns:
            ``(*batch, tokens, features)``; finite at padding.
        """
        checks.rows("x", x, self.features, "features", self.norm_attention)
        x = without_padding(x, key_padding_mask)  # which goes nowhere, but would come out again
        return self.fed_forward(x + self.branch(self.attention(self.norm_attention(x), key_padding_mask)))

    def fed_forward(self, x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch tokens features"]:
        """The second block alone."""
        # H + MLP(LN H).
        hidden = self._dropped(self.activation(self.expand(self.norm_feedforward(x))))
        return x + self.branch(self.contract(hidden))

    def branch(self, x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch tokens features"]:
        """What a block adds, after dropout and stochastic depth."""
        return stochastic_depth(self._dropped(x), self.stochastic_depth, training=self.training)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class TokenEncoderLayer(PreNormLayer):
    r"""One layer of a pre-norm transformer, TokenGT A.1 with the layer normalisations of A.4.

    .. math:: H = X + \mathrm{MSA}(\mathrm{LN}\,X), \qquad H + \mathrm{MLP}(\mathrm{LN}\,H)

    Args:
        features: width d of a token.
        heads: number of attention heads.
        feedforward: width of the MLP's one hidden layer, 4 d if left out.
        attention: ``"softmax"``, or ``"performer"``: linear in the tokens, see :class:`TokenAttention`.
        random_features: of ``"performer"``.
        dropout: probability that an entry of what attention or MLP add, or of the hidden layer, is dropped.
        attention_dropout: probability that a weight of softmax attention is dropped.
        stochastic_depth: probability that a graph passes by attention, and that it passes by the MLP.
        activation: of the MLP.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size, probability or choice is none of the allowed.

    >>> layer = TokenEncoderLayer(8, 2, attention="performer")
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    attention: TokenAttention

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        feedforward: int | None = None,
        attention: Literal["softmax", "performer"] = "softmax",
        random_features: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.floating_dtype(dtype)
        checks.one_of("attention", attention, ("softmax", "performer"))
        checks.in_range("attention_dropout", attention_dropout, 0.0, 1.0)
        if attention == "performer" and attention_dropout > 0:
            raise ValueError(f"attention_dropout must be 0 with attention 'performer', got {attention_dropout}.")
        super().__init__(
            features,
            TokenAttention(
                features,
                heads,
                kernel=attention,
                random_features=random_features,
                dropout=attention_dropout,
                device=device,
                dtype=dtype,
            ),
            feedforward=feedforward,
            dropout=dropout,
            stochastic_depth=stochastic_depth,
            activation=activation,
            device=device,
            dtype=dtype,
        )
