"""The table of the papers' tables: every command is one that its script takes, every verdict follows its file."""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
import warnings
from collections import Counter

import pytest

from benchmarks import orders
from benchmarks.orders import LINES, RESULTS, Figure, Layers, Order, ahead, figure, outcome


class ParsedError(BaseException):
    """Raised where a script has read its command line, so that nothing runs; no script catches it."""


@pytest.mark.parametrize("line", LINES, ids=[line.place for line in LINES])
def test_the_script_of_a_command_exists_and_takes_its_words(line, monkeypatch: pytest.MonkeyPatch) -> None:
    python, dash_m, module, *words = shlex.split(line.command)
    assert (python, dash_m) == ("python", "-m")
    accepted(module, words, monkeypatch)


def accepted(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def read_and_stop(self: argparse.ArgumentParser, *args, **kwargs) -> None:
        parse(self, *args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with warnings.catch_warnings():
        # A script that another test has imported is run anew.
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        with pytest.raises(ParsedError):
            runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("experiments.molecules", ["--colour", "red"]),
        ("experiments.molecules", ["--models", "hot"]),
        ("experiments.table", ["--dataset", "moon"]),
    ],
)
def test_words_that_a_script_does_not_take_are_noticed(module, words, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        accepted(module, words, monkeypatch)


def test_cases_of_benchmarks_and_claims_are_there() -> None:
    from benchmarks.__main__ import chosen  # noqa: PLC0415

    for line in LINES:
        words = shlex.split(line.command)
        if words[2] == "benchmarks":
            assert chosen(words[3:])


def test_there_is_a_line_for_each_table_and_figure_and_each_file_is_there() -> None:
    assert len({line.place for line in LINES}) == len(LINES) == 26
    assert Counter(line.place.split(",")[0] for line in LINES) == {
        "Hypformer": 7, "HOT": 5, "TokenGT": 4, "CSA": 9, "Simplicial": 1,
    }  # fmt: skip
    for line in LINES:
        for one in line.judged:
            assert (RESULTS / f"{one.file}.json").is_file()
            assert one.verdict() in {"yes", "weakly", "no"}


def test_ahead_is_by_more_than_both_deviations() -> None:
    assert ahead(Figure(0.9, 0.02, 3), Figure(0.8, 0.03, 3), less=False) == "yes"
    assert ahead(Figure(0.9, 0.08, 3), Figure(0.8, 0.03, 3), less=False) == "weakly"
    assert ahead(Figure(0.9, 0.0, 1), Figure(0.8, 0.03, 3), less=False) == "weakly"
    assert ahead(Figure(0.8, 0.0, 3), Figure(0.8, 0.0, 3), less=False) == "no"
    assert ahead(Figure(0.8, 0.0, 3), Figure(0.9, 0.0, 3), less=False) == "no"
    assert ahead(Figure(0.8, 0.0, 3), Figure(0.9, 0.0, 3), less=True) == "yes"
    assert ahead(Figure(float("nan"), 0.0, 3), Figure(0.9, 0.0, 3), less=True) == "no"


def test_an_order_is_as_good_as_its_worst_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"a": (0.9, 0.01, 3), "b": (0.8, 0.01, 3), "c": (0.79, 0.02, 3), "d": (0.95, 0.0, 3)}
    rows = {model: {"summary": {"test": Figure(*value)._asdict()}} for model, value in summary.items()}
    layers = {"details": {"hops": [[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]]}, "seconds": [1.0, 3.0]}
    monkeypatch.setattr(orders, "content", lambda _: {"models": {**rows, "t": layers}, "ablations": {}})

    def verdict(*groups: tuple[str, ...]) -> str:
        return Order("", "", "test", groups).verdict()

    assert verdict(("a",), ("b", "c")) == "yes"
    assert verdict(("a",), ("b",), ("c",)) == "weakly"
    assert verdict(("a",), ("b",), ("d",)) == "no"
    assert verdict(("d",), ("a",), ("c",)) == "yes"
    assert Order("x", "", "test", (("a",), ("b",))).shown() == "x: a 90.0 ± 1.0 > b 80.0 ± 1.0"
    assert Layers("", "", "t").verdict() == "yes"
    assert figure("", "t", "hops1") == Figure(pytest.approx(2.05), pytest.approx(0.0707, abs=1e-4), 2)
    assert figure("", "t", "seconds") == Figure(2.0, pytest.approx(2**0.5), 2)


def test_what_a_line_is_counted_as() -> None:
    assert outcome([]) == "not compared"
    assert outcome(["yes", "yes"]) == "as in the paper"
    assert outcome(["yes", "weakly"]) == "as in the paper, weakly"
    assert outcome(["no", "weakly"]) == "in part"
    assert outcome(["no"]) == "not as in the paper"
