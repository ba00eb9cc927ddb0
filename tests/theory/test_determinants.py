"""Determinant logits, rotary positions and lower orders: identities that hold, and those that do not."""

from __future__ import annotations

import itertools

import pytest
import torch

from holonomy.layers import simplicial_attention
from holonomy.theory.attention.determinants import determinant_logits, mixture_of_orders, rotate_chunks, rotation
from holonomy.theory.attention.projections import Projections, attention_heads


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_logits_are_sums_of_determinants(order):
    keys = torch.randn(order + 1, 3, 2 * (order + 1) + 1).double()
    found = determinant_logits(keys)
    for tuple_ in itertools.product(range(3), repeat=order + 1):
        rows = torch.stack([keys[m, i] for m, i in enumerate(tuple_)])
        chunks = rows[:, :-1].chunk(2, 1)
        torch.testing.assert_close(found[tuple_], sum(torch.linalg.det(chunk) for chunk in chunks))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_cross_product_of_projections_gives_the_same_logits(order):
    eye = torch.eye(8).double()
    layer = Projections(torch.randn(order + 1, 1, 8, 8).double(), eye.expand(order, 1, 8, 8), form="determinant")
    x = torch.randn(4, 8).double()
    heads = attention_heads(x, layer)
    logits = (heads.keys[0] @ heads.kappa.mT)[0]
    torch.testing.assert_close(logits, determinant_logits(heads.keys[:, 0]).reshape(4, -1))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_rotations_reflections_shifts(order, generator):
    keys = torch.randn(order + 1, 4, 2 * (order + 1)).double()
    turn = rotation(order + 1, generator=generator)
    once, positions = torch.ones(4), torch.arange(4.0)

    def turned(by, at):
        return determinant_logits(torch.stack([rotate_chunks(key, by, at) for key in keys]))

    torch.testing.assert_close(turned(turn, once), determinant_logits(keys))
    mirror = torch.cat([-turn[:1], turn[1:]])
    torch.testing.assert_close(turned(mirror, once), -determinant_logits(keys))
    torch.testing.assert_close(turned(turn, positions), turned(turn, positions + 5))


def test_pairs_of_channels_do_not_shift(generator):
    keys = torch.randn(3, 4, 6).double()
    pair = torch.block_diag(*[rotation(2, generator=generator)] * 3)
    at = torch.arange(4.0)
    here = determinant_logits(torch.stack([rotate_chunks(key, pair, at) for key in keys]))
    there = determinant_logits(torch.stack([rotate_chunks(key, pair, at + 5) for key in keys]))
    assert (here - there).abs().max() > 0.1


def test_appended_ones_mix_both_orders_as_the_layer_does():
    keys, values = torch.randn(3, 4, 3).double(), torch.randn(2, 4, 3).double()
    whole, mixed = mixture_of_orders(keys, values, 0.5)
    torch.testing.assert_close(whole, mixed)
    layer = simplicial_attention(list(keys), list(values), scale=0.5, lower_orders=True)
    torch.testing.assert_close(layer, whole)
