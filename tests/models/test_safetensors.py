"""Models in files of safetensors, whose shared curvatures lie there once."""

from __future__ import annotations

import pytest
import torch

from tests.registry.graphs import BATCHED, made

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@pytest.mark.parametrize("name", BATCHED)
def test_a_model_comes_back_whole(name, tmp_path):
    model, again = (made(name, seed=seed) for seed in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    safetensors.save_model(model, str(tmp_path / "model"))
    assert safetensors.load_model(again, str(tmp_path / "model")) == (set(), [])
    kinds = {key: type(value) for key, value in model.named_parameters()}
    assert {key: type(value) for key, value in again.named_parameters()} == kinds
    for (key, ours), theirs in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key


def test_what_shares_curvatures_takes_save_model(tmp_path):
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(made("Hypformer").state_dict(), str(tmp_path / "model"))
