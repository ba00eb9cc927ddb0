r"""A standard transformer encoder layer on tokens: pre-norm, GELU, softmax or kernel attention (TokenGT A.1, A.3).

Axes are ``(*batch, tokens, features)``; a padding mask is boolean ``(*batch, tokens)``, ``True`` at padding, whose
content has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.layers.tokens.attention import TokenAttention
from holonomy.ops.heads import without_padding


def stochastic_depth(
    branch: Float[Tensor, "*batch tokens features"], p: float, *, training: bool
) -> Float[Tensor, "*batch tokens features"]:
    """Drop the whole branch of a graph with probability p, and divide the others by 1 - p (Huang et al. 2016)."""
    if p == 0.0 or not training:
        return branch
    return branch * functional.dropout(branch.new_ones(*branch.shape[:-2], 1, 1), p, training)


class PreNormLayer(nn.Module):
    """A residual block around any attention, and one around an MLP, each after layer normalisation.

    ``attention`` is called, and asked for ``weights`` and a ``step``, as :class:`TokenAttention` is; the formula and
    the other arguments are those of :class:`TokenEncoderLayer`.
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
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
    ) -> Float[Tensor, "*batch tokens features"]:
        """The layer's result ``(*batch, tokens, features)``, finite at padding.

        The arguments are those of :class:`TokenAttention`: ``x`` is ``(*batch, tokens, features)``,
        ``key_padding_mask`` ``(*batch, tokens)`` with ``True`` at padding. A ``memory`` ``(*batch, keys, features)``,
        to which x attends instead of to itself, is not normalised.
        """
        return self._around(x, key_padding_mask, memory=memory, attn_mask=attn_mask, is_causal=is_causal)

    def weights(
        self,
        x: Float[Tensor, "*batch tokens features"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys features"] | None = None,
    ) -> Float[Tensor, "..."]:
        """The weights of the attention, with the arguments of :meth:`forward`.

        They are ``(*batch, heads, tokens, keys)``, or with N axes of keys where ``attention`` has them: rows sum to
        one, or are zero where a token attends to none.
        """
        self._refuse("weights")
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "memory": memory}
        x = self._unpadded(x, key_padding_mask, memory)
        return cast("Any", self.attention).weights(self.norm_attention(x), key_padding_mask, **masks)

    def step(
        self,
        x: Float[Tensor, "*batch tokens features"],
        state: Any = None,
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens features"], Any]:
        """The next tokens of a sequence and the state after them, see :meth:`TokenAttention.step`.

        Hooks of this layer and of its attention belong to ``forward`` and do not run.
        """
        self._refuse("step")
        x = self._unpadded(x, key_padding_mask, None)
        attended, after = cast("Any", self.attention).step(self.norm_attention(x), state, key_padding_mask)
        return self.fed_forward(x + self.branch(attended)), after

    def fed_forward(self, x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch tokens features"]:
        """The second block alone."""
        # H + MLP(LN H).
        hidden = self._dropped(self.activation(self.expand(self.norm_feedforward(x))))
        return x + self.branch(self.contract(hidden))

    def branch(self, x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch tokens features"]:
        """What a block adds, after dropout and stochastic depth."""
        return stochastic_depth(self._dropped(x), self.stochastic_depth, training=self.training)

    def _refuse(self, method: str) -> None:
        """A ValueError where the attention, as it is set, has no such method; here it has them all."""

    def _around(self, x: Tensor, padding: Tensor | None, memory: Tensor | None, **masks: Any) -> Tensor:
        x = self._unpadded(x, padding, memory)
        attended = self.attention(self.norm_attention(x), padding, memory=memory, **masks)
        return self.fed_forward(x + self.branch(attended))

    def _unpadded(self, x: Tensor, padding: Tensor | None, memory: Tensor | None) -> Tensor:
        """Tokens, zero at padding, which the residual would pass on; with a memory padding is that of its tokens."""
        checks.rows("x", x, self.features, "features", self.norm_attention)
        return x if memory is not None else without_padding(x, padding)

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class TokenEncoderLayer(PreNormLayer):
    r"""One layer of a pre-norm transformer, TokenGT A.1 with the layer normalisations of A.3.

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
        ValueError: if a size, probability or choice is not allowed.

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
