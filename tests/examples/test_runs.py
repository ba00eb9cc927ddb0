"""Runs: what lies in the folder is whole, early stopping stops where it says, a killed run ends in the same bits."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples import runs
from examples.node_classification import main
from examples.runs import Progress, Run, StaleError, clock, summary, train, write_atomically

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def scripted(scores: list[float], **options: object) -> tuple[runs.Trained, nn.Module]:
    """Train one weight that counts the epochs, with given validation scores."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(_: int) -> float:
        with torch.no_grad():
            model.weight += 1
        return 0.5

    def evaluate(epoch: int) -> runs.Record:
        return {"val": scores[epoch - 1], "test": float(epoch)}

    return train(model, optimizer, step, evaluate, epochs=len(scores), stream=None, **options), model


def test_the_first_best_epoch_is_kept_and_its_state_left_in_the_model() -> None:
    trained, model = scripted([0.1, 0.7, 0.3, 0.7, 0.2])
    assert (trained.best_epoch, trained.best["test"], trained.epochs) == (2, 2.0, 5)
    assert model.weight.item() == 2.0
    assert trained.history["val"] == [0.1, 0.7, 0.3, 0.7, 0.2]
    assert not trained.stopped


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (3, 5), (8, 10), (20, 10)])
def test_patience_counts_epochs_without_a_better_one(patience: int, epochs: int) -> None:
    trained, _ = scripted([0.5, 0.6, *[0.6] * 8], patience=patience)
    assert trained.epochs == epochs
    assert trained.stopped == (epochs < 10)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="the loss is nan at epoch 1"):
        train(model, optimizer, lambda _: float("nan"), lambda _: {"val": 0.0}, epochs=2, stream=None)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        train(model, optimizer, lambda _: 0.0, lambda _: {"val": 0.0}, epochs=0, stream=None)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, lambda stream: stream.write(b"old"))

    def half(stream: io.BufferedWriter) -> None:
        stream.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_random_numbers_continue_after_their_state_is_restored() -> None:
    runs.seed_everything(3)
    state = runs.random_state()
    first = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())  # noqa: NPY002
    runs.restore_random_state(state)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == first  # noqa: NPY002


def test_finished_parts_are_kept_by_a_resumed_run_only(tmp_path: Path) -> None:
    Run(tmp_path, {"a": 1}).part("seed-0", lambda: {"score": 0.5})
    assert Run(tmp_path, {"a": 1}, resume=True).part("seed-0", lambda: 1 / 0) == {"score": 0.5}
    assert Run(tmp_path, {"a": 1}).part("seed-0", lambda: {"score": 0.7}) == {"score": 0.7}


def test_another_config_is_not_resumed(tmp_path: Path) -> None:
    Run(tmp_path, {"lr": 0.1, "model": "gcn"})
    with pytest.raises(StaleError, match=r"holds another run \(lr was 0.1 and is now 0.2\)"):
        Run(tmp_path, {"lr": 0.2, "model": "gcn"}, resume=True)
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="a run needs a folder"):
        Run(path, {})


def test_a_checkpoint_that_is_not_one_has_its_sentence(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    path = run.path("part-run.checkpoint.pt")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(StaleError, match="is not a checkpoint of this program"):
        scripted([0.1], run=run)
    # Code in a file is not run: an object of a class is refused.
    torch.save({"model": io.StringIO}, path)
    with pytest.raises(StaleError, match="is not a checkpoint of this program"):
        scripted([0.1], run=run)
    run.write_state(path.name, {"model": {"weight": torch.zeros(2, 2)}})
    with pytest.raises(StaleError, match="does not fit this model"):
        scripted([0.1], run=run)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StaleError, match="is not JSON"):
        Run(tmp_path, {}, resume=True)


def test_the_progress_line_is_rewritten_on_a_terminal_and_seldom_written_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for stream in (Terminal(), io.StringIO()):
        progress = Progress("tree", 400, stream=stream)
        progress.last -= 5
        progress.update(3, {"loss": 0.25})
        progress.update(4, {"loss": 0.125})
        progress.close(4, {"loss": 0.125}, "best at epoch 2")
        shown[type(stream)] = stream.getvalue()
    assert shown[Terminal].count("\r") == 2
    assert shown[Terminal].count("\n") == 1
    assert "epoch 3/400  loss 0.2500  at most" in shown[Terminal]
    assert shown[io.StringIO].count("\n") == 1
    assert "epoch 4/400  loss 0.1250  best at epoch 2" in shown[io.StringIO]


def test_durations_and_means_are_written_as_people_read_them() -> None:
    assert [clock(seconds) for seconds in (3.14, 59.7, 65, 3725)] == ["3.1s", "1:00", "1:05", "1:02:05"]
    assert summary([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "n": 2}
    assert summary([1.0])["std"] == 0.0


TINY = [
    "--hidden", "8", "--feedforward", "8", "--graph-hidden", "8", "--graph-layers", "2", "--epochs", "24",
    "--patience", "24", "--seeds", "2", "--threads", "1", "--checkpoint-every", "5", "--no-pictures", "--quiet",
]  # fmt: skip


def bits(folder: Path) -> list[dict]:
    records = json.loads((folder / "results.json").read_text())["seeds"]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_a_run_killed_at_any_moment_and_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*TINY, "--out", str(whole)]) == 0
    command = [sys.executable, "-W", "ignore", "-m", "examples.node_classification", *TINY, "--out", str(killed)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    checkpoint = killed / "part-seed-1.checkpoint.pt"
    deadline = time.monotonic() + 300
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    _, complaint = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaint.decode()
    # In the middle of the second seed: the first is finished, the second has a checkpoint and no result.
    assert (killed / "part-seed-0.json").exists()
    assert checkpoint.exists()
    assert not (killed / "part-seed-1.json").exists()
    before = (killed / "part-seed-0.json").read_bytes()
    assert main([*TINY, "--out", str(killed), "--resume"]) == 0
    assert (killed / "part-seed-0.json").read_bytes() == before
    assert bits(killed) == bits(whole)
    assert not list(killed.glob("*.checkpoint.pt"))
    first, second = bits(whole)
    assert first["history"] != second["history"]
