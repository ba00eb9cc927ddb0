"""The hyperbolic branch of Hypformer (section 4.6, figure 4), which other models of tokens share.

Curvatures are negative and, by default, learned: one for the input, one between blocks, and two inside each block
(attention and feed-forward).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._autograd import may_bypass
from holonomy._parts import Group
from holonomy._shapes import Bool, Float
from holonomy.layers.hyperbolic.block import BlockState, HypformerBlock
from holonomy.layers.hyperbolic.feedforward import ActivationDropout
from holonomy.layers.hyperbolic.linear import ExpMapHTC, space_of
from holonomy.layers.hyperbolic.refinement import HRC, HypDropout, change_curvature, drop_some
from holonomy.manifolds import Lorentz

_MOST_WEIGHTS = 2**30


class HypformerEncoder(nn.Module):
    """The hyperbolic branch of figure 4: features to points, then blocks, each manifold with a curvature of its own."""

    # What is not named goes to each :class:`HypformerBlock`.

    def __init__(
        self,
        in_features: int,
        features: int,
        manifold_out: Lorentz,
        *,
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        curvature: float = -1.0,
        learnable_curvature: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **block: Any,
    ) -> None:
        super().__init__()
        checks.positive_int("layers", layers)
        checks.in_range("output_dropout", output_dropout, 0.0, 1.0)

        def manifold() -> Lorentz:
            return Lorentz(curvature, learnable=learnable_curvature, device=device, dtype=dtype)

        between = [manifold() for _ in range(layers)] + [manifold_out]
        blocks = [
            HypformerBlock(
                features,
                heads,
                before,
                after,
                manifold_attention=manifold(),
                manifold_feedforward=manifold(),
                dropout=dropout,
                activation=activation,
                device=device,
                dtype=dtype,
                **block,
            )
            for before, after in itertools.pairwise(between)
        ]
        self.embedding = ExpMapHTC(in_features, features, manifold(), between[0], device=device, dtype=dtype)
        self.refine = HRC(ActivationDropout(activation, dropout), between[0])
        self.blocks = nn.ModuleList(blocks)
        self.drop = HypDropout(output_dropout, manifold_out)

    def points(self, x: Tensor) -> Float[Tensor, "*batch ambient"]:
        """The points that the first block takes."""
        if not may_bypass(self.refine, HRC):
            return self.refine(self.embedding(x))
        # The time of the embedding has no use here.
        there = self.refine.manifold_out
        return change_curvature(self.refine.function(space_of(self.embedding, x)), self.refine.manifold_in, there)

    def forward(
        self,
        x: Float[Tensor, "... nodes ambient"],
        key_padding_mask: Bool[Tensor, "... nodes"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        group: Group | None = None,
        **memory: Any,
    ) -> Float[Tensor, "... nodes ambient"]:
        """Apply the blocks; a memory and its mask are for those that read one."""
        for block in self.blocks:
            x = block(x, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, group=group, **memory)
        return drop_some(self.drop, x)

    def attention_maps(
        self,
        x: Float[Tensor, "... nodes ambient"],
        key_padding_mask: Bool[Tensor, "... nodes"] | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **memory: Any,
    ) -> list[Tensor]:
        """The weights of each block's attention; then, where there is a memory, of those to it."""
        self._check_maps(x, memory.get("memory"))
        own, crossed = list[Tensor](), list[Tensor]()
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
        for module in self.blocks:
            block = cast("HypformerBlock", module)
            own.append(block.weights(x, key_padding_mask, **masks))
            if memory:
                crossed.append(block.weights(x, key_padding_mask, **masks, **memory))
            x = block(x, key_padding_mask, **masks, **memory)
        return own + crossed

    def _check_maps(self, x: Tensor, memory: Tensor | None) -> None:
        """Refuse attention maps too large for the memory of any machine."""
        heads = getattr(cast("HypformerBlock", self.blocks[0]).attention, "heads", 1)
        keys = x.shape[-2] + (0 if memory is None else memory.shape[-2])
        count = len(self.blocks) * heads * x.shape[:-1].numel() * keys
        if count > _MOST_WEIGHTS:
            raise ValueError(
                f"attention_maps must have at most 2**30 = {_MOST_WEIGHTS} weights, 4 GiB in float32, got {count}: "
                f"{len(self.blocks)} blocks of {heads} heads of {x.shape[-2]} rows. Ask for fewer rows at once."
            )

    def step(
        self,
        x: Float[Tensor, "... nodes ambient"],
        state: tuple[BlockState, ...] | None = None,
        key_padding_mask: Bool[Tensor, "... nodes"] | None = None,
        **memory: Any,
    ) -> tuple[Float[Tensor, "... nodes ambient"], tuple[BlockState, ...]]:
        """Apply the blocks to the next tokens of a sequence."""
        self.check_state(state)
        states = [None] * len(self.blocks) if state is None else state
        after: list[BlockState] = []
        for block, before in zip(self.blocks, states, strict=True):
            x, kept = cast("HypformerBlock", block).step(x, before, key_padding_mask, **memory)
            after.append(kept)
        return drop_some(self.drop, x), tuple(after)

    def check_state(self, state: object) -> None:
        """Refuse what is not a state for each block."""
        if state is not None and (not isinstance(state, tuple) or len(state) != len(self.blocks)):
            raise TypeError(
                f"state must be what step returned, a tuple of {len(self.blocks)}, got {type(state).__name__}."
            )

    def curvatures(self) -> dict[str, Float[Tensor, " 1"]]:
        """The curvature of every manifold but the last, by where it lies."""
        named = {"input": self.embedding.manifold_in}
        for index, module in enumerate(self.blocks):
            block = cast("HypformerBlock", module)
            named[f"block{index}"] = block.manifold_in
            named[f"block{index}.attention"] = block.manifold_attention
            named[f"block{index}.feedforward"] = block.manifold_feedforward
        return {name: manifold.curvature for name, manifold in named.items()}
