"""Random attention layers and tokens, for property tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from holonomy.theory.attention.projections import Projections
from holonomy.theory.claims.search import draw_input, draw_layer, draw_mask
from holonomy.theory.claims.verdict import Draws

TOKENS = {1: 6, 2: 4, 3: 3}
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, *, plain: bool | None = None) -> tuple[Projections, Tensor, Tensor]:
    """A layer, tokens for it, and a mask that fits."""
    draws = Draws(seed)
    order = draws.integer(1, 3)
    features, tokens = draws.integer(1, 4), draws.integer(1, TOKENS[order])
    simple = draws.integer(0, 1) == 0 if plain is None else plain
    heads = 1 if plain else draws.integer(1, 2)
    layer = draw_layer(draws, order, features, heads=heads, plain=simple)
    return layer, draw_input(draws, tokens, features), draw_mask(draws, tokens, order)


def jacobian_norm_by_svd(function, x: Tensor) -> float:
    jacobian = torch.func.jacrev(function)(x)
    return torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), ord=2).item()
