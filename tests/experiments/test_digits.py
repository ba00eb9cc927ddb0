"""Digits: figures for both models, chosen by validation; what an interrupted command has finished is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

digits = pytest.importorskip("experiments.digits")
pytest.importorskip("sklearn")

TOY = [
    "--epochs",
    "1",
    "--width",
    "4",
    "--layers",
    "1",
    "--heads",
    "1",
    "--batch",
    "100",
    "--seeds",
    "2",
    "--rates",
    "0.01",
    "0.03",
    "--quiet",
    "--json",
]


def test_both_models_are_compared_at_equal_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main([*TOY, str(tmp_path / "result.json")]) == 0
    result, told = json.loads((tmp_path / "result.json").read_text()), capsys.readouterr().out
    assert len(result["runs"]) == 2 * 2 * 2
    for kind, row in result["table"].items():
        runs = {name: run for name, run in result["runs"].items() if name.startswith(kind)}
        best = max(
            (0.01, 0.03), key=lambda rate: sum(r["validation"] for name, r in runs.items() if f"rate {rate:g}," in name)
        )
        assert row["rate"] == best
        assert 0 <= row["test"] <= 1
        assert f"{kind}  rate {best:g}  test {row['test']:.3f}" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_finished_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, file = tmp_path / "whole.json", tmp_path / "result.json"
    digits.main([*TOY, str(whole)])
    train, left = digits.train, iter(range(3))

    def stopped(*given: object) -> dict[str, float]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return train(*given)

    monkeypatch.setattr(digits, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        digits.main([*TOY, str(file)])
    assert not file.exists()
    calls: list[object] = []
    monkeypatch.setattr(digits, "train", lambda *given: calls.append(given) or train(*given))
    digits.main([*TOY, str(file)])
    assert len(calls) == 8 - 3
    assert json.loads(file.read_text())["runs"] == json.loads(whole.read_text())["runs"]


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
