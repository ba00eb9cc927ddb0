"""Digits: both models learn from the same images, and tokens are the patches of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from experiments import digits

TOY = ["--epochs", "1", "--hidden", "4", "--layers", "1", "--heads", "1", "--batch", "100", "--seeds", "1", "--quiet"]


def test_both_models_are_compared_at_equal_search(tmp_path: Path) -> None:
    assert digits.main([*TOY, "--lr", "0.01", "0.03", "--no-pictures", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["models"]
    assert rows.keys() == {"hyperbolic", "flat"}
    for row in rows.values():
        assert row["search"].keys() == {"lr-0.01", "lr-0.03"}
        assert row["settings"]["lr"] == max((0.01, 0.03), key=lambda rate: row["search"][f"lr-{rate:g}"])


def test_tokens_are_patches_of_the_images() -> None:
    x, labels = digits.digits()
    assert (x.shape, labels.shape) == ((1797, 16, 4), (1797,))
    image = x.view(-1, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(-1, 8, 8)
    from sklearn.datasets import load_digits  # noqa: PLC0415

    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).numpy()
    known = pixels[order].reshape(-1, 8, 8)[:1000]
    expected = (known - known.mean()) / known.std() / 2
    torch.testing.assert_close(image[:1000], torch.from_numpy(expected).float(), atol=1e-3, rtol=1e-3)
    assert labels.tolist() == classes[order].tolist()
    assert [len(part[1]) for part in digits.load("digits", None, digits.Settings(), 0)] == [1000, 200, 597]
