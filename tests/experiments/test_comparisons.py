"""Comparisons: equal conditions, the search, the epoch that is measured, resume, and what the files hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
from bisect import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.engine import comparisons, runs
from experiments.engine.comparisons import Question, Settings, fit, main, schedule


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Line:
    """Points of a line with noise: 12 to train, 6 to validate, 6 to test."""

    x: Tensor
    y: Tensor


def load(dataset: str, _: Path | None, __: Settings, seed: int) -> Line:
    if dataset == "absent":
        raise FileNotFoundError("there is no file absent.npz")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 1, generator=generator)
    return Line(x, 2 * x + 0.1 * torch.randn(24, 1, generator=generator))


def error(network: nn.Module, data: Line, part: slice) -> float:
    return nn.functional.mse_loss(network(data.x[part]), data.y[part]).item()


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.nan


def build(model: str, settings: Settings, _: Line) -> nn.Module:
    return {"line": nn.Linear(1, 1), "constant": nn.Linear(1, 1, bias=False), "broken": Broken(1, 1)}[model]


def test_scores(network: nn.Module, data: Line) -> dict[str, float]:
    return {"error": error(network, data, slice(18, 24))}


test_scores.__test__ = False


def wide(model: str, settings: Settings, _: Line) -> nn.Module:
    """Make a network of the width that is asked for; one refuses widths that its heads do not divide."""
    width, heads = settings.hidden, settings.heads
    if model == "broken":
        return nn.Sequential(nn.Linear(1, width), nn.TransformerEncoderLayer(width, heads, 8), nn.Linear(width, 1))
    return nn.Sequential(nn.Linear(1, width), *([nn.Linear(width, width)] * (model == "line")), nn.Linear(width, 1))


LINE = Question(
    module="experiments.line",
    text="Fit a line.\n\nNothing more.\n",
    models={"line": "a line", "constant": "through zero", "broken": "not a number"},
    datasets={"noisy": "generated", "absent": "a file that is not there"},
    settings=Settings,
    load=load,
    size=lambda _: 12,
    build=build,
    loss=lambda network, data, chosen: nn.functional.mse_loss(network(data.x[chosen]), data.y[chosen]),
    validate=lambda network, data: -error(network, data, slice(12, 18)),
    test=test_scores,
    score=("error", "squared error"),
    percent=False,
    defaults={"noisy": {"epochs": 4, "batch": 5, "lr": 0.1}},
)
WORDS = ["--models", "line", "constant", "--quiet", "--threads", "1"]


def table(tmp_path: Path, words: Sequence[str] = (), question: Question = LINE) -> dict[str, Any]:
    assert main(question, [*WORDS, "--out", str(tmp_path), *words]) == 0
    return json.loads((tmp_path / "table.json").read_text())


def test_the_schedule_rises_and_falls_to_zero() -> None:
    shares = [schedule(step, 100, 0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10] == 1.0
    assert shares[55] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(shares[10:]))
    assert 0 < shares[-1] < 0.01
    assert schedule(0, 1, 0.1) == 1.0


def test_the_test_data_are_measured_at_the_first_best_validation_epoch() -> None:
    states: list[dict[str, Tensor]] = []
    values = iter([0.1, 0.7, 0.7, 0.2])

    def validate(network: nn.Module, _: Line) -> float:
        states.append({key: value.clone() for key, value in network.state_dict().items()})
        return next(values)

    measured: list[dict[str, Tensor]] = []

    def test(network: nn.Module, _: Line) -> dict[str, float]:
        assert not network.training
        measured.append(network.state_dict())
        return {"error": 0.0}

    question = dataclasses.replace(LINE, validate=validate, test=test)
    settings = LINE.settings_for("noisy")
    record = fit(question, "line", settings, load("noisy", None, settings, 0), 0)
    assert record["best_epoch"] == 2
    assert record["val"] == 0.7
    assert len(measured) == 1
    assert all(torch.equal(measured[0][key], states[1][key]) for key in states[1])


def test_what_was_held_out_comes_back_over_a_schedule_of_as_many_epochs_as_were_best() -> None:
    values = iter([0.1, 0.7, 0.2, 0.2])
    taught: list[tuple[int, float]] = []
    measured: list[Line] = []

    def test(network: nn.Module, data: Line) -> dict[str, float]:
        measured.append(data)
        return LINE.test(network, data)

    class Recorded(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:
            taught[-1] = (taught[-1][0], self.param_groups[0]["lr"])
            super().step(closure)

    def loss(network: nn.Module, data: Line, chosen: Tensor) -> Tensor:
        taught.append((len(data.x), 0.0))
        return LINE.loss(network, data, chosen)

    def whole(data: Line) -> Line:
        return dataclasses.replace(data, x=torch.cat([data.x, data.x]), y=torch.cat([data.y, data.y]))

    question = dataclasses.replace(LINE, validate=lambda *_: next(values), loss=loss, test=test)
    question = dataclasses.replace(
        question, whole=whole, size=lambda data: len(data.x), batches=lambda *_: [torch.arange(3)]
    )
    settings = LINE.settings_for("noisy")
    question = dataclasses.replace(question, optimizer=Recorded)
    record = fit(question, "line", settings, load("noisy", None, settings, 0), 0)
    assert [rows for rows, _ in taught] == 4 * [24] + 2 * [48]
    assert [rate for _, rate in taught[4:]] == pytest.approx(
        [0.1 * schedule(step, 2, settings.warmup) for step in range(2)]
    )
    assert (record["best_epoch"], record["val"]) == (2, 0.7)
    assert [len(data.x) for data in measured] == [48]
    assert question.rule.startswith(LINE.rule)
    assert "once more" in question.rule


def test_every_example_is_seen_once_an_epoch() -> None:
    seen: list[int] = []

    def loss(network: nn.Module, data: Line, chosen: Tensor) -> Tensor:
        seen.extend(chosen.tolist())
        return LINE.loss(network, data, chosen)

    settings = LINE.settings_for("noisy")
    fit(dataclasses.replace(LINE, loss=loss), "line", settings, load("noisy", None, settings, 0), 0)
    assert [sorted(seen[start : start + 12]) for start in range(0, 48, 12)] == [list(range(12))] * 4
    assert seen[:12] != seen[12:24]


def test_a_question_cuts_its_own_batches_and_the_schedule_follows_them() -> None:
    seen: list[list[int]] = []
    rates: list[float] = []

    def loss(network: nn.Module, data: Line, chosen: Tensor) -> Tensor:
        seen.append(chosen.tolist())
        return LINE.loss(network, data, chosen)

    class Recorded(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    def batches(_: Line, size: int) -> list[Tensor]:
        assert size == 5
        return [torch.arange(2), torch.arange(2, 12)]

    settings = LINE.settings_for("noisy")
    question = dataclasses.replace(LINE, loss=loss, batches=batches, optimizer=Recorded)
    fit(question, "line", settings, load("noisy", None, settings, 0), 0)
    assert seen == 4 * [[0, 1], list(range(2, 12))]
    assert rates == pytest.approx([0.1 * schedule(step, 8, settings.warmup) for step in range(8)])


def test_a_question_names_its_usual_models_and_a_score_for_a_dataset(tmp_path: Path) -> None:
    question = dataclasses.replace(LINE, usual=("constant",), scores={"noisy": ("worst", "largest error")})
    question = dataclasses.replace(question, test=lambda *_: {"error": 1.0, "worst": 2.0})
    assert main(question, ["--quiet", "--seeds", "1", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "table.json").read_text())
    assert list(content["models"]) == ["constant"]
    assert content["score"] == "worst"
    assert question.score_of("absent") == LINE.score


def test_what_is_given_several_values_is_searched_alike_by_the_validation_value_of_the_first_seed(
    tmp_path: Path,
) -> None:
    content = table(tmp_path, ["--seeds", "2", "--lr", "0.001", "0.2", "--epochs", "1", "3", "--clip", "9"])
    for model, row in content["models"].items():
        assert set(row["search"]) == {f"lr-{lr}-epochs-{epochs}" for lr in (0.001, 0.2) for epochs in (1, 3)}
        best = max(row["search"], key=row["search"].__getitem__)
        assert f"lr-{row['settings']['lr']:g}-epochs-{row['settings']['epochs']}" == best
        assert row["settings"]["clip"] == 9
        assert row["val"][0] == row["search"][best]
        assert len(row["scores"]["error"]) == 2
        # The others were not run with the second seed.
        worst = tmp_path / f"{model}-{min(row['search'], key=row['search'].__getitem__)}"
        assert not (worst / "part-seed-1.json").exists()


def test_the_table_holds_what_a_reader_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "deep" / "copy.json"
    content = table(tmp_path, ["--json", str(copy)])
    assert content["command"].startswith("python -m experiments.line --models line constant")
    assert content["versions"]["torch"] == torch.__version__
    assert (content["note"], content["rule"]) == ("generated", comparisons.RULE)
    row = content["models"]["line"]
    assert row["settings"]["epochs"] == 4
    assert row["parameters"] == 2
    assert row["summary"]["error"]["mean"] == pytest.approx(sum(row["scores"]["error"]) / 2)
    assert {len(history["val"]) for history in row["history"]} == {4}
    short = json.loads(copy.read_text())
    assert "history" not in short["models"]["line"]
    assert short["models"]["line"]["scores"] == row["scores"]
    printed = capsys.readouterr().out
    assert f"| through zero | {content['models']['constant']['summary']['error']['mean']:.4f}" in printed
    for name in ("table.png", "training.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_resumed_comparison_keeps_what_is_finished_and_ends_alike(tmp_path: Path) -> None:
    whole = table(tmp_path / "whole", ["--seeds", "2"])
    first = table(tmp_path / "halves", ["--seeds", "1"])
    part = tmp_path / "halves" / "line-lr-0.1" / "part-seed-0.json"
    before = part.stat().st_mtime_ns
    both = table(tmp_path / "halves", ["--seeds", "2", "--resume"])
    assert part.stat().st_mtime_ns == before
    for model in ("line", "constant"):
        assert both["models"][model]["scores"] == whole["models"][model]["scores"]
        assert both["models"][model]["scores"]["error"][:1] == first["models"][model]["scores"]["error"]


def test_a_run_stopped_within_a_seed_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    whole = table(tmp_path / "whole", ["--seeds", "1"])
    calls = iter(range(100))

    def stop(network: nn.Module, data: Line) -> float:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return LINE.validate(network, data)

    words = [*WORDS, "--seeds", "1", "--checkpoint-every", "1", "--out", str(tmp_path / "halves")]
    assert main(dataclasses.replace(LINE, validate=stop), words) == 130
    assert (tmp_path / "halves" / "line-lr-0.1" / "part-seed-0.checkpoint.pt").exists()
    resumed = table(tmp_path / "halves", ["--seeds", "1", "--resume"])
    for model, row in whole["models"].items():
        for key in ("scores", "history", "val", "best_epochs"):
            assert resumed["models"][model][key] == row[key]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--dataset", "absent"], 2, "there is no file absent.npz"),
        (["--seeds", "0"], 2, "--seeds must be at least 1, got 0"),
        (["--epochs", "0"], 2, "--epochs must be at least 1, got 0"),
        (["--lr", "-1"], 2, "--lr must be positive, got -1.0"),
        (["--models", "broken"], 1, "the loss is nan at epoch 1"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    assert main(LINE, [*WORDS, "--out", str(tmp_path), *words]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_another_run_is_not_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path)
    assert main(LINE, [*WORDS, "--out", str(tmp_path), "--resume", "--epochs", "3"]) == 2
    assert "epochs" in capsys.readouterr().err


def test_the_help_names_every_setting_and_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(LINE, ["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(Settings):
        assert "--" + field.name.replace("_", "-") in said
    assert "noisy: epochs 4, batch 5, lr 0.1" in " ".join(said.split())


def test_more_pictures_are_drawn_from_the_trained_models(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    def draw(networks: dict[str, nn.Module], data: Line, run: runs.Run) -> None:
        assert run.folder == tmp_path
        seen.update({name: test_scores(network, data)["error"] for name, network in networks.items()})

    content = table(tmp_path, ["--seeds", "1"], dataclasses.replace(LINE, draw=draw))
    assert seen == {name: row["scores"]["error"][0] for name, row in content["models"].items()}


def test_with_a_budget_every_model_has_the_largest_width_that_it_allows(tmp_path: Path) -> None:
    question = dataclasses.replace(LINE, build=wide)
    words = ["--budget", "2000", "--seeds", "1", "--epochs", "1", "--quiet", "--heads", "3", "--out", str(tmp_path)]
    assert main(question, words) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["models"]

    def size(model: str, width: int) -> int:
        network = wide(model, Settings(hidden=width, heads=3), load("noisy", None, Settings(), 0))
        return sum(parameter.numel() for parameter in network.parameters())

    for model, row in rows.items():
        step = 3 if model == "broken" else 1
        below = bisect(range(step, 700 * step, step), 2000, key=lambda width: size(model, width))
        assert row["parameters"] == size(model, step * below)
        assert row["settings"]["budget"] == 2000


def test_a_budget_that_is_too_small_and_one_that_the_build_keeps(tmp_path: Path, capsys) -> None:
    words = ["--budget", "3", "--models", "line", "--seeds", "1", "--epochs", "1", "--quiet", "--out", str(tmp_path)]
    assert main(dataclasses.replace(LINE, build=wide), words) == 2
    assert "--budget must be at least 6 for the smallest model, got 3" in capsys.readouterr().err
    assert main(dataclasses.replace(LINE, sized=True), words) == 0
