"""The entropy is that of the grammar, neither model sees ahead, and both learn below what the last character tells."""

from __future__ import annotations

import math

import pytest
import torch

from examples.characters import Flat, Hyperbolic, drawn, main


def test_texts_are_nested_and_their_entropy_is_that_of_the_grammar():
    texts, chance = drawn(200, 16, torch.Generator().manual_seed(0))
    counted = 0.0
    for text in texts.tolist():
        stack = []
        for place, character in enumerate(text):
            if character < 2:
                counted += (place > 0) * (1.0 + (math.log2(1 / 0.4) if stack else 0.0))
                stack.append(character)
            else:
                counted += math.log2(1 / 0.6)
                assert stack.pop() == character - 2
    assert chance == pytest.approx(counted / (200 * 15))


@pytest.mark.parametrize("kind", [Hyperbolic, Flat])
def test_no_character_sees_later_ones(kind):
    model, text = kind(16, 8).eval(), torch.randint(4, (2, 8))
    changed = text.clone()
    changed[:, 5:] = 3 - changed[:, 5:]
    torch.testing.assert_close(model(text)[:, :5], model(changed)[:, :5], rtol=1e-4, atol=1e-4)


def test_both_models_learn_in_bfloat16(tmp_path):
    words = ["--texts", "150", "--length", "16", "--width", "16", "--steps", "60", "--lr", "0.01", "--bfloat16"]
    scores = main([*words, "--out", str(tmp_path)])
    assert scores["chance"] < scores["Hyperbolic"] < 2.0
    assert scores["chance"] < scores["Flat"] < 2.0
