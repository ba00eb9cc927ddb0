"""Runs: what lies in the folder is whole, early stopping stops where it says, a killed run ends in the same bits."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

from experiments import hierarchy
from experiments.engine import runs
from experiments.engine.runs import Run, StaleError, progress, summary, train, write_atomically
from experiments.node_classification import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def scripted(scores: list[float], **options: Any) -> tuple[runs.Trained, nn.Linear]:
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

    def half(stream: BinaryIO) -> None:
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


def test_finished_parts_are_kept_until_the_run_is_overwritten(tmp_path: Path) -> None:
    # One that wrote nothing is in nobody's way.
    Run(tmp_path, {"a": 2}).child("inner", {})
    run = Run(tmp_path, {"a": 1})
    run.part("seed-0", lambda: {"score": 0.5})
    with pytest.raises(StaleError, match="holds an unfinished run: --resume goes on with it, --overwrite removes it"):
        Run(tmp_path, {"a": 1})
    run.finish()
    with pytest.raises(StaleError, match="holds a finished run: --resume shows its results, --overwrite removes it"):
        Run(tmp_path, {"a": 1})
    assert Run(tmp_path, {"a": 1}, resume=True, overwrite=True).part("seed-0", lambda: 1 / 0) == {"score": 0.5}
    assert Run(tmp_path, {"a": 1}, overwrite=True).part("seed-0", lambda: {"score": 0.7}) == {"score": 0.7}


FOREIGN = ("part-one.json", "part-two.pt", "results.json", "thesis.tmp", "table.json", "run.json.txt")


def test_a_run_removes_only_what_it_wrote(tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}

    for name in FOREIGN:
        (tmp_path / name).write_text("mine")
    with pytest.raises(StaleError, match=r"part-one.json is there already, and not from this run: move it away"):
        Run(tmp_path, {}, overwrite=True)
    assert contents() == dict.fromkeys(FOREIGN, b"mine")
    for name in ("part-one.json", "part-two.pt", "results.json", "table.json"):
        (tmp_path / name).unlink()
    run = Run(tmp_path, {})
    run.write_json("results.json", {})
    run.child("inner", {}).write_state("part-seed-0.model.pt", {})
    run.finish()
    (tmp_path / f"results.json.{2**22 + 1}.tmp").write_text("what a kill left")
    (tmp_path / "inner" / "notes.txt").write_text("mine")
    (tmp_path / "picture.png").write_text("mine")
    Run(tmp_path, {}, overwrite=True)
    kept = {"thesis.tmp", "run.json.txt", "inner/notes.txt", "picture.png"}
    assert contents().keys() == kept | {"run.json"}
    with pytest.raises(StaleError, match=r"picture.png is there already"):
        Run(tmp_path, {}, resume=True).own("picture.png")


@pytest.mark.parametrize("name", ["../mine", "..", "", "/etc/mine", "inner/mine", 3])
def test_a_list_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {}, "files": [name], "finished": True}))
    with pytest.raises(StaleError, match="names files outside its folder"):
        Run(tmp_path / "run", {}, overwrite=True)
    assert (tmp_path / "mine").read_text() == "mine"


def test_another_programs_list_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for content in ("{}", "[]", '{"config": [], "files": [], "finished": false}', '{"files": {}}'):
        path.write_text(content)
        with pytest.raises(StaleError, match="is not the list of a run's files"):
            Run(tmp_path, {}, overwrite=True)
        assert path.read_text() == content


def test_another_config_is_not_resumed(tmp_path: Path) -> None:
    Run(tmp_path, {"lr": 0.1, "model": "gcn"})
    with pytest.raises(StaleError, match=r"holds another run \(lr was 0.1 and is now 0.2\)"):
        Run(tmp_path, {"lr": 0.2, "model": "gcn"}, resume=True)
    Run(tmp_path / "many", {"settings": {"dim": 2, "epochs": 20}})
    with pytest.raises(StaleError, match=r"holds another run \(epochs was 20 and is now 30\)"):
        Run(tmp_path / "many", {"settings": {"dim": 2, "epochs": 30}}, resume=True)
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="a run needs a folder"):
        Run(path, {})


def test_a_checkpoint_that_is_not_one_has_its_sentence(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    path = run.own("part-run.checkpoint.pt")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(StaleError, match="is not a checkpoint of this program"):
        scripted([0.1], run=run)
    run.write_state(path.name, {"model": {"weight": torch.zeros(2, 2)}})
    with pytest.raises(StaleError, match="does not fit this model"):
        scripted([0.1], run=run)
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(StaleError, match="is not JSON"):
            Run(tmp_path, {}, resume=True)


def test_every_truncation_and_every_changed_byte_of_a_file_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    whole = run.write_state("state.pt", {"model": torch.arange(6.0), "epoch": 3}).read_bytes()
    for place in range(0, len(whole), 7):
        for broken in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            run.path("state.pt").write_bytes(broken)
            with pytest.raises(StaleError, match=r"state.pt is not a checkpoint of this program"):
                run.read_state("state.pt")
    part = run.path("part-a.json")
    run.part("a", lambda: {"score": 0.25, "history": [1, 2]})
    text = part.read_text()
    for changed in (text.replace("0.25", "0.75"), "[]", "{}", text.replace("result", "other"), text[:-9]):
        part.write_text(changed)
        with pytest.raises(StaleError, match=r"part-a.json is not"):
            run.part("a", lambda: 1 / 0)


class Malicious:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    run, trace = Run(tmp_path, {}), tmp_path / "trace"
    path = run.write_state("part-run.checkpoint.pt", {"model": Malicious(trace)})
    with pytest.raises(StaleError, match="is not a checkpoint of this program"):
        scripted([0.1], run=run)
    assert not trace.exists()
    # The same file does its harm where it is read without care.
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_the_progress_line_is_rewritten_on_a_terminal_and_seldom_written_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for stream in (Terminal(), io.StringIO()):
        line = progress("tree", 400, stream, initial=2, unit="epoch")
        for loss in (0.25, 0.125):
            line.last_print_t -= 5  # as if five seconds had passed
            line.set_postfix({"loss": loss}, refresh=False)
            line.update()
        line.close()
        shown[type(stream)] = stream.getvalue()
    assert [text in shown[Terminal] for text in ("3/400", "loss=0.25")] == [True, True]
    assert [text in shown[io.StringIO] for text in ("3/400", "loss=0.25")] == [False, False]
    assert all("tree" in text and "4/400" in text and "loss=0.125" in text for text in shown.values())
    assert progress("tree", 400, None).disable


def test_means_have_the_deviation_of_a_sample() -> None:
    assert summary([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "n": 2}
    assert summary([1.0])["std"] == 0.0


TINY = [
    "--hidden", "8", "--feedforward", "8", "--graph-hidden", "8", "--graph-layers", "2", "--epochs", "24",
    "--patience", "24", "--seeds", "2", "--threads", "1", "--checkpoint-every", "5", "--no-pictures", "--quiet",
]  # fmt: skip


def bits(folder: Path) -> list[dict[str, Any]]:
    records = json.loads((folder / "results.json").read_text())["seeds"]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_a_run_killed_at_any_moment_and_resumed_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*TINY, "--out", str(whole)]) == 0
    command = [sys.executable, "-W", "ignore", "-m", "experiments.node_classification", *TINY, "--out", str(killed)]
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
    assert not list(killed.glob("*.tmp"))
    assert not list(killed.glob("*.checkpoint.pt"))
    first, second = bits(whole)
    assert first["history"] != second["history"]


def test_a_full_disk_has_its_sentence_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    words = ["--nodes", "30", "--epochs", "6", "--evaluate-every", "2", "--checkpoint-every", "2", "--seeds", "2"]
    words += ["--dims", "2", "--threads", "1", "--quiet"]
    assert hierarchy.main([*words, "--no-pictures", "--out", str(whole)]) == 0
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that grows beyond the limit fails as on a full disk: the list of files fits, a checkpoint does not.
    for limit, name in ((100, "run.json"), (3000, "part-seed-0.checkpoint.pt")):
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
        code = hierarchy.main([*words, "--no-pictures", "--out", str(full), "--resume"])
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        said = capsys.readouterr().err
        assert (code, said.count("\n")) == (2, 1)
        assert re.fullmatch(rf"error: .*{name} cannot be written: File too large\n", said)
        assert not list(full.rglob("*.tmp"))
    assert hierarchy.main([*words, "--no-pictures", "--out", str(full), "--resume"]) == 0
    tables = [json.loads((folder / "table.json").read_text())["rows"] for folder in (whole, full)]
    for row in (row for table in tables for row in table):
        row["seeds"] = [{k: v for k, v in seed.items() if "seconds" not in k} for seed in row["seeds"]]
    assert tables[0] == tables[1]


def test_a_folder_that_may_not_be_written_has_its_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run(folder, {}).finish()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        # The superuser may write everywhere.
        tmp_path.parent.parent.chmod(0o755)
        tmp_path.parent.chmod(0o755)
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(PermissionError, match=r"Permission denied"):
                Run(folder, {}, **options)
        with pytest.raises(PermissionError, match=r"Permission denied"):
            Run(folder / "inner", {})
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_repeated_command_says_that_the_run_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    words = ["--dims", "2", "--nodes", "30", "--epochs", "2", "--no-pictures", "--quiet", "--json", str(result)]
    folder = ["--out", str(tmp_path / "run")]
    assert hierarchy.main([*words, *folder]) == 0
    before = result.read_bytes()
    for more, said in (
        (folder, f"{result} holds a result already: --overwrite replaces it, or choose another name"),
        (["--out", str(tmp_path / "other"), "--epochs", "1"], f"{result} holds a result already"),
        ([*folder, "--json", str(tmp_path / "new.json")], "run holds a finished run: --resume shows its results"),
    ):
        capsys.readouterr()
        assert hierarchy.main([*words, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error
    assert result.read_bytes() == before
    assert not (tmp_path / "other").exists()
    assert hierarchy.main([*words, *folder, "--overwrite", "--seeds", "2"]) == 0
    assert result.read_bytes() != before


def test_the_commit_is_dirty_where_a_source_differs_and_not_where_a_result_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, result = tmp_path / "experiments" / "runs.py", tmp_path / "benchmarks" / "results" / "a.json"
    for path in (source, result):
        path.parent.mkdir(parents=True)
        path.write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(runs, "__file__", str(source))
    clean = runs.commit()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    result.write_text("after")
    assert runs.commit() == clean
    source.write_text("after")
    assert runs.commit() == f"{clean}-dirty"


def test_a_command_can_be_typed_again() -> None:
    words = ["--data", "tree x sphere", "--steps", "3"]
    assert shlex.split(runs.command_line("experiments.mixed_curvature", words))[3:] == words


@pytest.mark.parametrize("how", ["threads", "device"])
def test_a_run_is_not_resumed_with_other_rounding(tmp_path, monkeypatch, how):
    """Half of the seeds on one thread and half on two, or on a GPU, were a mixture that nothing recorded."""
    began = {"threads": 1, "device": "cpu"}
    monkeypatch.setattr(runs, "machine", lambda: began)
    runs.Run(tmp_path, {"task": "toy"}).write_json("results.json", {})
    runs.Run(tmp_path, {"task": "toy"}, resume=True)
    other = began | {how: {"threads": 2, "device": "cuda"}[how]}
    monkeypatch.setattr(runs, "machine", lambda: other)
    with pytest.raises(runs.StaleError, match=rf"--{how} was {began[how]} and is now {other[how]}"):
        runs.Run(tmp_path, {"task": "toy"}, resume=True)
    # Lists of earlier versions do not say.
    said = runs.read_json(tmp_path / runs.LIST)
    del said["machine"]
    runs.write_json(tmp_path / runs.LIST, said)
    runs.Run(tmp_path, {"task": "toy"}, resume=True)
