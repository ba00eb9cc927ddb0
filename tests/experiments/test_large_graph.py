"""The modes that read the same rows train the same model; a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data.large_graphs import generate
from experiments.large_graph import main

ROOT = Path(__file__).parents[2]


def ran(folder, mode, *more, epochs=3):
    size = ["--nodes", "600", "--epochs", str(epochs), "--every", "3"]
    return main([*size, "--out", str(folder), "--mode", mode, *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data that are there already: a process to make them would take seconds."""
    folder = tmp_path_factory.mktemp("large")
    generate(folder / "data-600-0", 600, 0)
    return folder


def losses(result):
    return torch.tensor([epoch["loss"] for epoch in result["history"]])


def test_rows_chunks_and_processes_are_one_run(folder):
    rows, chunks = ran(folder, "rows"), ran(folder, "stream", "--chunk", "250")
    torch.testing.assert_close(losses(chunks), losses(rows), rtol=1e-5, atol=0)
    assert chunks["history"][-1]["accuracy"] == pytest.approx(rows["history"][-1]["accuracy"], abs=0.01)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "experiments.large_graph"]
    options = ["--nodes", "600", "--epochs", "3", "--every", "3", "--out", str(folder), "--mode", "rows"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *options], check=True, cwd=ROOT, env=environment, capture_output=True)
    two = json.loads((folder / "rows-2-600.json").read_text(encoding="utf-8"))
    torch.testing.assert_close(losses(two), losses(rows), rtol=1e-5, atol=0)
    assert all(epoch["bytes_sent"] > 0 for epoch in two["history"])


@pytest.mark.parametrize("mode", ["whole", "partitions", "stream"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(folder, mode):
    whole = ran(folder, mode)
    ran(folder, mode, epochs=1)
    resumed = ran(folder, mode, "--resume")
    assert torch.equal(losses(resumed), losses(whole))
    assert whole["history"][-1]["loss"] < whole["history"][0]["loss"]


def test_the_graph_has_classes_and_hubs(tmp_path):
    """Half of the edges look for a node of their class, and one in ten of the others finds one."""
    generate(tmp_path, 3000, 1)
    y, edges = np.fromfile(tmp_path / "labels", np.int16), np.fromfile(tmp_path / "edges", np.int32).reshape(2, -1)
    assert np.mean(y[edges[0]] == y[edges[1]]) == pytest.approx(0.55, abs=0.02)
    degrees = np.bincount(edges[0], minlength=3000)
    assert degrees.mean() == 10
    assert degrees.max() > 60
    pairs = set(zip(*edges.tolist(), strict=True))
    assert all((b, a) in pairs for a, b in pairs)


def test_edges_are_not_shared(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--mode", "whole"])
    assert "rows or stream" in capsys.readouterr().err
