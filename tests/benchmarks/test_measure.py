"""The measure of benchmarks itself, on steps whose numbers are known."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from benchmarks import measure
from benchmarks.case import Case, Growth, Line, stepped
from benchmarks.measure import Measured, Memory, Row
from benchmarks.record import Record

CPU = torch.device("cpu")


def doubled(size, device):
    x = torch.ones(size, device=device, requires_grad=True)
    return {"sum": stepped(lambda: x + x, [x]), "product": stepped(lambda: 2 * x, [x])}


def case(**changed):
    fields = {
        "name": "toy",
        "title": "",
        "unit": "numbers",
        "sizes": (8, 64),
        "contenders": doubled,
        "lines": (Line("sum", "product", {64: "<= 100"}), Line("sum", "product", of="memory"), Growth("sum")),
        "equal": (("sum", "product"),),
    }
    return Case(**fields | changed)


def test_memory_is_the_allocators():
    def step():
        large = torch.ones(1000)
        result = large[:100].clone()
        del large
        return [result]

    assert measure._memory(step, CPU) == Memory(peak=4400, results=400)


def test_a_turn_that_does_other_work_is_refused():
    def unequal(size, device):
        made = doubled(size, device)
        return made | {"product": lambda: [2 * x for x in made["sum"]()]}

    with pytest.raises(AssertionError, match="'sum' and 'product' must do the same work"):
        measure.measured(case(contenders=unequal), 8, CPU, 1, 0.0)


def test_rows_of_ratios_and_growth():
    seconds = {
        8: {"sum": [1.0, 2.0, 3.0], "product": [1.0, 1.0, 1.0]},
        64: {"sum": [8.0, 16.0, 24.0], "product": [4.0] * 3},
    }
    found = {
        size: Measured(taken, {"sum": Memory(30 * size, 10), "product": Memory(10 * size, 10)})
        for size, taken in seconds.items()
    }
    growth = Growth(
        "sum", exponent="<= 1.1", per_unit={64: "<= 2"}, bytes_per_unit="<= 20", microseconds_per_unit="<= 1"
    )
    lines = (Line("sum", "product", {64: ">= 4"}), Line("sum", "product", of="memory"), growth)
    rows = {(row.name, row.size): row for row in measure.rows(case(lines=lines), found, memory=True)}
    assert rows["sum / product", 8].value == 2.0
    assert rows["sum / product", 64] == Row(
        64, "sum / product", 4.0, tuple(statistics.quantiles([2, 4, 6], n=4)[::2]), ">= 4", ""
    )
    assert rows["sum / product, memory", 64].value == 3.0
    assert rows["sum, exponent of time", None].value == pytest.approx(1.0)
    assert rows["sum, a number over one at 8", 64].value == pytest.approx(1.0)
    assert rows["sum, bytes a number", 64].met is False
    assert rows["sum, microseconds a number", 64].met is False
    assert [row.met for row in rows.values() if row.size is None or row.target == ">= 4"] == [True, True]


def test_turns_are_interleaved_and_counted():
    order = []
    steps = {name: lambda name=name: order.append(name) or [] for name in ("a", "b")}
    taken = measure._turns(steps, lambda step: (step() and 0.0) or 1.0, budget=0.0)
    rounds = len(taken["a"])
    assert rounds == measure.FEWEST_ROUNDS
    assert order[-2 * rounds :] == ["a", "b"] * rounds


def test_a_killed_run_goes_on(tmp_path):
    path = tmp_path / "bench.json"
    settings = {"seconds": 1.0}
    record = Record(path, CPU, settings)
    assert record.ask(["toy", "other"], fresh=False) == ["toy", "other"]
    record.keep(
        case(), {1: ({8: Measured({"sum": [1.0]}, {"sum": Memory(8, 4)})}, [Row(8, "r", 1.0, None, "<= 2", "")])}
    )
    assert Record(path, CPU, settings).ask(["toy", "other"], fresh=False) == ["other"]
    assert Record(path, CPU, settings).ask(["toy", "other"], fresh=True) == ["toy", "other"]
    assert Record(path, CPU, settings).ask(["third"], fresh=False) == ["third"]
    written = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(written | {"versions": {}}), "utf-8")
    assert Record(path, CPU, settings).document["cases"] == {}
    assert written["cases"]["toy"]["threads"]["1"]["rows"][0]["met"] is True
    assert written["cases"]["toy"]["threads"]["1"]["turns"]["8"]["sum"] == {
        "seconds": 1.0, "rounds": 1, "peak_bytes": 8, "result_bytes": 4,
    }  # fmt: skip
