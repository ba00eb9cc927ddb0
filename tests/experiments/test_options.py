"""Command lines: what they refuse is one sentence, an error of the program keeps its traceback, devices are checked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import long_range_chains, node_classification
from experiments.data.graph_sets import chains
from experiments.engine import comparisons, options, runs
from experiments.engine.options import RefusedError
from holonomy.layers import HypLinearAttention
from holonomy.manifolds import Lorentz
from tests.experiments.interruptions import COMMANDS

CHAINS = ["--chains", "4", "--epochs", "1", "--seeds", "1", "--hidden", "4", "--quiet", "--no-pictures"]


def test_an_error_of_the_program_keeps_its_traceback(tmp_path: Path) -> None:
    def loss(*_: object) -> Tensor:
        raise ValueError("a mistake in one's own loss")

    def build(*_: object) -> torch.nn.Module:
        return HypLinearAttention(8, 3, Lorentz(-1.0))

    own = dataclasses.replace(long_range_chains.QUESTION, loss=loss)
    with pytest.raises(ValueError, match="a mistake in one's own loss"):
        comparisons.main(own, [*CHAINS, "--models", "gcn", "--out", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="invalid literal"):
        options.guarded(lambda: int("one's own"))
    with pytest.raises(ValueError, match="invalid literal"), options.of_the_command():
        int("one's own")
    with pytest.raises(RefusedError, match="heads"), options.of_the_command():
        build()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--models", "hot", "--hidden", "6", "--heads", "4"], "heads"),
        (["--models", "gat", "--hidden", "6", "--heads", "4"], "features must be a multiple of heads=4, got 6"),
        (["--models", "gcn", "--dropout", "2"], "--dropout must lie in [0, 1], got 2.0"),
        (["--models", "gcn", "--warmup", "2"], "--warmup must lie in [0, 1], got 2.0"),
        (["--models", "gcn", "--warmup", "-1"], "--warmup must lie in [0, 1], got -1.0"),
        (["--models", "gcn", "--weight-decay", "-1"], "weight_decay"),
    ],
)
def test_a_hyper_parameter_that_cannot_be_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert long_range_chains.main([*CHAINS, *words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


SHARED = sorted(COMMANDS)
WIDE = sorted(
    COMMANDS.keys()
    - {
        "acquired_traits",
        "certified_training",
        "hierarchy",
        "hypernymy",
        "label_trees",
        "linear_maps",
        "link_prediction",
        "mixed_curvature",
        "phylogeny",
        "tree_maps",
    }
)


@pytest.mark.parametrize("name", WIDE)
def test_a_width_of_zero_is_refused_by_the_name_of_the_option(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"experiments.{name}").main
    assert main([*COMMANDS[name].split(), "--hidden", "0", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: --hidden must be at least 1, got 0\n"


QUESTIONS = {
    name: module.QUESTION
    for name in SHARED
    if hasattr(module := importlib.import_module(f"experiments.{name}"), "QUESTION")
}
COUNTS = [
    (name, field.name.replace("_", "-"), field.metadata["least"])
    for name, question in QUESTIONS.items()
    for field in dataclasses.fields(question.settings)
    if isinstance(field.default, int) and not isinstance(field.default, bool)
]


@pytest.mark.parametrize(("name", "flag", "least"), COUNTS)
def test_a_count_below_its_least_is_refused_by_the_name_of_the_option(
    name: str, flag: str, least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS[name].split(), f"--{flag}", str(least - 1), "--out", str(tmp_path / "run")]
    assert comparisons.main(QUESTIONS[name], words) == 2
    assert capsys.readouterr().err == f"error: --{flag} must be at least {least}, got {least - 1}\n"


COMMON = {field.name for field in dataclasses.fields(comparisons.Settings)}


@pytest.mark.parametrize(("name", "flag", "least"), [row for row in COUNTS if row[1].replace("-", "_") not in COMMON])
def test_a_count_at_its_least_is_trained_with_or_refused(
    name: str, flag: str, least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMANDS[name].split(), "--seeds", "1", "--epochs", "1", f"--{flag}"]
    # Of molecules 0 takes all.
    words.append(str(1 if flag in {"train", "tests"} else least))
    code = comparisons.main(QUESTIONS[name], [*words, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert (code, said) == (0, "") or (code == 2 and said.count("\n") == 1)


class ShownError(Exception):
    """The parser of a script, instead of what it parses."""


@pytest.mark.parametrize("name", [*SHARED, "large_graph"])
def test_no_option_takes_a_number_that_json_does_not_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ShownError(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", show)
    with pytest.raises(ShownError) as caught:
        importlib.import_module(f"experiments.{name}").main([])
    for action in caught.value.args[0]._actions:
        if action.type is not None and isinstance(action.type("1"), float):
            for word in ("nan", "inf", "-inf"):
                with pytest.raises(argparse.ArgumentTypeError, match="must be finite"):
                    action.type(word)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("long_range_chains", ["--weight-decay", "-1"]),
        ("long_range_chains", ["--hidden", "7"]),
        ("digits", ["--models", "flat", "--hidden", "6", "--heads", "4"]),
        ("set_to_graph", ["--dataset", "jets-generated", "--tests", "1"]),
        ("node_classification", ["--dropout", "2"]),
        ("node_classification", ["--average", "1"]),
        ("node_classification", ["--baseline", "knn", "--neighbours", "1000"]),
        ("attention_in_colors", ["--heads", "3"]),
        ("attention_in_colors", ["--molecule", "400"]),
    ],
)
def test_what_cannot_be_built_overwrites_nothing(name: str, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = runs.Run(folder, {"old": name})
    run.write_json("results.json", {"score": 0.5})
    run.finish()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    main = importlib.import_module(f"experiments.{name}").main
    assert main([*COMMANDS[name].split(), *words, "--overwrite", "--out", str(folder)]) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("device", ["nowhere", "meta"])
def test_every_script_takes_a_device_and_refuses_one_that_is_not_there(
    name: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", device, "--out", str(tmp_path / "run")]
    assert importlib.import_module(f"experiments.{name}").main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --device {device} cannot be used here: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", SHARED)
def test_the_help_names_the_folder_that_a_run_gets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{name}").main(["--help"])
    assert "default RUNS" not in " ".join(capsys.readouterr().out.split())


def test_data_move_to_a_device_as_a_whole() -> None:
    data = node_classification.datasets.load("tree")
    there = runs.moved({"graphs": [chains(2, 5, seed=0)], "tree": data, "other": 3}, "meta")
    assert there["other"] == 3
    for thing in (there["tree"], there["graphs"][0]):
        tensors = [value for value in vars(thing).values() if isinstance(value, Tensor)]
        assert tensors
        assert all(tensor.device.type == "meta" for tensor in tensors)
    assert data.x.device.type == "cpu"


@pytest.mark.parametrize("value", [0.1, 0.003, 1e-9, 3.0, 1.0, 0.1234567, 0.12345678901, -1.0])
def test_a_word_reads_back_as_the_number(value: float) -> None:
    assert float(options.word(value)) == value


def test_the_usual_numbers_have_the_words_that_earlier_runs_gave_them() -> None:
    assert [options.word(value) for value in (0.1, 0.003, 1e-9, 3.0, 3, 0.123456)] == [
        "0.1", "0.003", "1e-09", "3", "3", "0.123456",
    ]  # fmt: skip
