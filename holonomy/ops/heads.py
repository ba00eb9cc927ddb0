"""Steps that all multi-head attentions share: heads to batch axes and back, zeros at padding, memories and states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Float


def head_count(features: int, heads: int, name: str = "features") -> int:
    """Check that heads divide the features."""
    checks.positive_int(name, features)
    checks.positive_int("heads", heads)
    if features % heads:
        raise ValueError(f"{name} must be a multiple of heads, got {features} and {heads}.")
    return heads


def split_heads(space: Float[Tensor, "*batch nodes dim"], heads: int) -> Float[Tensor, "*batch heads nodes channels"]:
    """Heads are consecutive slices of the channels; their axis comes before that of the nodes."""
    return space.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge_heads(heads: Float[Tensor, "*batch heads nodes channels"]) -> Float[Tensor, "*batch nodes dim"]:
    """The inverse of :func:`split_heads`."""
    return heads.transpose(-3, -2).flatten(-2)


def without_padding(
    x: Float[Tensor, "*batch nodes dim"], mask: Bool[Tensor, "*batch nodes"] | None, name: str = "key_padding_mask"
) -> Float[Tensor, "*batch nodes dim"]:
    """The tokens, with zeros at padding."""
    if mask is None:
        return x
    checks.padding_mask(name, mask, x.shape[:-1])
    return x.masked_fill(mask[..., None], 0.0)


def of_all_heads(mask: Bool[Tensor, "*batch nodes"] | None) -> Bool[Tensor, "*batch 1 nodes"] | None:
    """A mask of tokens with an axis of heads."""
    return None if mask is None else mask[..., None, :]


def without_queries(
    weights: Float[Tensor, "..."], mask: Bool[Tensor, "*batch query"] | None, order: int = 1
) -> Float[Tensor, "..."]:
    """Weights ``(*batch, heads, query, keys, .., keys)``, ``order`` axes of keys; zero where the query is padding."""
    if mask is None:
        return weights
    return weights.masked_fill(mask[..., None, :].unflatten(-1, (-1, *[1] * order)), 0.0)


def check_memory(
    x: Tensor, memory: Tensor | None, width: int, meaning: str = "features + 1", *, is_causal: bool
) -> None:
    """Refuse keys and values of other tokens that do not go with queries."""
    checks.flags(is_causal=is_causal)
    if memory is None:
        return
    checks.rows("memory", memory, width, meaning)
    checks.on_device(x.device, memory=memory)
    if memory.shape[:-2] != x.shape[:-2] or memory.dtype != x.dtype:
        wanted = f"{tuple(x.shape[:-2])} and dtype {x.dtype}"
        raise ValueError(
            f"memory must have the batch axes {wanted} of x, got {tuple(memory.shape[:-2])} and {memory.dtype}."
        )
    if is_causal:
        raise ValueError("is_causal must be False with memory, whose tokens are neither before nor after those of x.")


def refuse_memory(**by_place: object) -> None:
    """Refuse a memory beside options that are about places, where one is set."""
    for name, option in by_place.items():
        if option:
            raise ValueError(f"memory must be None with {name}: its tokens are neither before nor after those of x.")


def refuse_shared_order(*, is_causal: bool) -> None:
    """Refuse causality among the tokens of several processes."""
    if is_causal:
        raise ValueError("is_causal must be False with group, whose processes hold tokens in no order, got True.")


_State = TypeVar("_State", bound=tuple[Tensor, ...])


def check_state(state: _State, expected: _State, grows: Sequence[int] = ()) -> _State:
    """Refuse a state of other sizes than that of a layer, but for an axis of each tensor that grows with the tokens."""
    if not isinstance(state, type(expected)):
        raise TypeError(f"state must be what step returned, a {type(expected).__name__}, got {type(state).__name__}.")
    names: tuple[str, ...] = type(expected)._fields  # pyright: ignore[reportAttributeAccessIssue]
    for name, there, wanted, axis in zip_longest(names, state, expected, grows):
        checks.tensor(f"state.{name}", there)
        checks.on_device(wanted.device, **{f"state.{name}": there})
        shape = [*wanted.shape]
        if axis is not None and there.ndim == wanted.ndim:
            shape[axis] = there.shape[axis]
        if tuple(there.shape) != tuple(shape):
            raise ValueError(f"state must have {name} of shape {tuple(shape)} for this x, got {tuple(there.shape)}.")
        # Sums of half precision are held in float32, and autocast may be on in some steps only.
        if torch.float64 in {there.dtype, wanted.dtype} and there.dtype != wanted.dtype:
            raise TypeError(f"state must have {name} of {wanted.dtype} for this x, got {there.dtype}.")
    return state


class KeyValueState(NamedTuple):
    """Keys and values of the tokens so far, batch axes first."""

    # Space parts (*batch, heads, tokens, channels); of N keys (*batch, heads, N, tokens, channels).
    key: Float[Tensor, "*batch tokens key_channels"]
    value: Float[Tensor, "*batch tokens channels"]  # those of values
    hidden: Bool[Tensor, "*batch masked"]  # (*batch, tokens), True at padding; (*batch, 0) where no step had a mask


# A state holds tensors alone, so that torch.load(weights_only=True) may make one.
torch.serialization.add_safe_globals([KeyValueState])


# The axes of keys, values and hidden that tokens are on.
_GROW = (-2, -2, -1)


def check_keys_and_values(state: KeyValueState, expected: KeyValueState) -> KeyValueState:
    """:func:`check_state` of keys and values, of which there must be equally many."""
    keys, values, hidden = (
        part.shape[axis] for part, axis in zip(check_state(state, expected, _GROW), _GROW, strict=True)
    )
    if hidden not in (0, keys) or values != keys:
        got = f"{values} and {hidden}"
        raise ValueError(f"state must have as many values as keys, {keys}, and so many entries hidden or 0, got {got}.")
    return state


def hidden_keys(state: KeyValueState) -> Bool[Tensor, "*batch tokens"] | None:
    """Which of its tokens are padding; None where none is."""
    return state.hidden if state.hidden.shape[-1] else None


def extended(
    state: KeyValueState | None, x: Tensor, key: Tensor, value: Tensor, mask: Bool[Tensor, "*batch tokens"] | None
) -> KeyValueState:
    """The state after the keys and values of tokens x, some of which may be padding."""
    unmasked = x.new_zeros(*x.shape[:-2], 0, dtype=torch.bool)
    new = KeyValueState(key, value, unmasked if mask is None else mask)
    if state is None:
        return new
    before = check_keys_and_values(state, new).key.shape[-2]
    hidden = unmasked
    if mask is not None or state.hidden.shape[-1]:
        parts = (hidden_keys(state), before), (mask, x.shape[-2])
        hidden = torch.cat([unmasked.new_zeros(*x.shape[:-2], n) if part is None else part for part, n in parts], -1)
    return KeyValueState(torch.cat([state.key, key], -2), torch.cat([state.value, value], -2), hidden)
