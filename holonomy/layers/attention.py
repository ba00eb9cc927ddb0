"""What attention layers share that weigh single pairs of tokens, or tuples of them: ``step`` and ``weights``.

A layer projects tokens to queries, keys and values, averages the values, and makes its result of the averages. How it
does each is its equation; that keys and values of earlier tokens are kept from step to step is not.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Bool, Float
from holonomy.ops.heads import KeyValueState, check_memory, extended, hidden_keys, without_padding, without_queries

Map = TypeVar("Map", bound=nn.Module)  #: what makes queries, keys and values of tokens


class Masks(NamedTuple):
    """What hides pairs of queries and keys, the queries being those of the last keys."""

    padding: Bool[Tensor, "*batch keys"] | None
    attn_mask: Tensor | None = None
    is_causal: bool = False


class KeyValueAttention(nn.Module, Generic[Map]):
    """Attention whose state is all keys and values so far; a layer defines what raises NotImplementedError here."""

    # The tensors between ``_projected`` and ``_result`` have an axis of heads before that of the tokens.

    query: Map
    key: Map
    value: Map

    def step(
        self,
        x: Float[Tensor, "*batch tokens width"],
        state: KeyValueState | None = None,
        key_padding_mask: Bool[Tensor, "*batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, "*batch tokens width"], KeyValueState]:
        """The next tokens of a sequence, as the causal pass over all of it gives them.

        Hooks of this layer belong to ``forward`` and do not run.

        Args:
            x: tokens as ``forward`` takes them: one, or several.
            state: what the step before returned; ``None`` at the first. A named tuple of tensors, batch axes first.
            key_padding_mask: ``(*batch, tokens)``, ``True`` where x is padding, to which no later step attends either.

        Returns:
            What ``forward`` returns of these tokens, and the state after them: all keys and values.

        Raises:
            TypeError: if ``state`` is not one of this layer.
            ValueError: if it is of another batch or of other sizes.

        >>> import torch
        >>> from holonomy.layers import TokenAttention
        >>> layer, x = TokenAttention(8, 2), torch.randn(6, 8)
        >>> first, state = layer.step(x[:5])
        >>> last, state = layer.step(x[5:], state)
        >>> torch.allclose(torch.cat([first, last]), layer(x, is_causal=True), atol=1e-5)
        True
        """
        first = state.key.shape[-2] if isinstance(state, KeyValueState) else 0
        query, key, value = self._projected(x, key_padding_mask, None, is_causal=True, first=first)
        after = extended(state, x, key, value, key_padding_mask)
        attended = self._average(query, after.key, after.value, Masks(hidden_keys(after), is_causal=True))
        return self._result(attended, key_padding_mask), after

    def weights(
        self,
        x: Float[Tensor, "*batch tokens width"],
        key_padding_mask: Bool[Tensor, "*batch keys"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Float[Tensor, "*batch keys width"] | None = None,
    ) -> Float[Tensor, "*batch heads tokens keys"]:
        """The weights of the averages, ``(*batch, heads, tokens, keys)``, of which none is dropped.

        Arguments are those of ``forward``. Rows sum to one, or are zero where x is padding or a token may attend to
        none.
        """
        query, key, _ = self._projected(x, key_padding_mask, memory, is_causal=is_causal)
        found = self._weights(query, key, Masks(key_padding_mask, attn_mask, is_causal))
        return found if memory is not None else without_queries(found, key_padding_mask)

    def _keys_of(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, *, is_causal: bool
    ) -> Float[Tensor, "*batch keys width"]:
        """Check tokens and memory, and return those to attend to, zero at padding."""
        width, meaning, like = self._axis()
        checks.rows("x", x, width, meaning, like)
        check_memory(x, memory, width, meaning, is_causal=is_causal)
        return without_padding(x if memory is None else memory, padding)

    def _projected(
        self, x: Tensor, padding: Tensor | None, memory: Tensor | None, *, is_causal: bool, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of it or of the memory; x are the tokens from place ``first`` on."""
        del first  # which only rotations by places read
        keys = self._keys_of(x, padding, memory, is_causal=is_causal)
        query = self._split(self.query, keys if memory is None else x)
        return query, self._split(self.key, keys), self._split(self.value, keys)

    def _axis(self) -> tuple[int, str, nn.Module | None]:
        """The width of a token, what it is called in an error message, and a submodule that has its dtype."""
        raise NotImplementedError

    def _split(self, project: Map, x: Tensor) -> Float[Tensor, "*batch heads tokens channels"]:
        """Projected tokens, with an axis of heads."""
        raise NotImplementedError

    def _weights(self, query: Tensor, key: Tensor, masks: Masks) -> Float[Tensor, "*batch heads tokens keys"]:
        """The weights, without dropout."""
        raise NotImplementedError

    def _average(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        """The averages of the values, ``(*batch, heads, tokens, channels)``."""
        raise NotImplementedError

    def _result(self, attended: Tensor, padding: Tensor | None) -> Float[Tensor, "*batch tokens width"]:
        """What the layer returns, of the averages of tokens some of which are padding."""
        raise NotImplementedError
