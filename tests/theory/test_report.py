"""The command: progress, table, JSON, one page, and an exit code that CI can act on."""

from __future__ import annotations

import json
import sys

import pytest

from holonomy.theory import verify
from holonomy.theory.__main__ import main
from holonomy.theory.claims import report
from holonomy.theory.claims.pictures import Picture, attention_pictures, ratios
from holonomy.theory.claims.report import Run, as_html, as_json, as_table, said, svg
from holonomy.theory.claims.statements import hyperbolic_attention
from holonomy.theory.claims.verdict import Claim, Draws, Trial, judge

pytestmark = pytest.mark.usefixtures("without_shape_checks")

VERIFY = sys.modules["holonomy.theory.claims.verify"]  # the package has a function of this name
NAMES = ["collapse.decay", "collapse.half_constant", "masked.dobrushin", "determinant.equal"]


@pytest.fixture
def run():
    found = Run({"seed": 0})
    verify(NAMES, watch=found.add)
    return found


def test_command_writes_what_it_measured(tmp_path, capsys):
    assert main(["--claims", *NAMES, "--budget", "0.5", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "[1/4]" in shown
    assert "[4/4]" in shown
    assert "fails, as known" in shown
    document = json.loads((tmp_path / "theory.json").read_text())
    assert document["settings"] == {"seed": 0, "device": "cpu", "dtype": "float64", "budget": 0.5, "data": None}
    assert [entry["claim"] for entry in document["claims"]] == sorted(NAMES, key=[c.name for c in all_claims()].index)
    assert document["violated"] == []
    page = (tmp_path / "theory.html").read_text()
    assert all(name in page for name in NAMES)
    assert "http" not in page.split("</style>")[0]
    assert "src=" not in page


def all_claims():
    return VERIFY.CLAIMS


def test_command_lists_and_refuses(capsys):
    assert main(["--claims", "determinant", "--list"]) == 0
    assert "determinant.shift" in capsys.readouterr().out
    assert main(["--claims", "no.such"]) == 2
    assert "claims must be among" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "nowhere"], "'nowhere' is no device of this machine"),
        (["--device", "meta"], "'meta' is no device of this machine"),
        (["--budget", "0"], "must be positive and finite, got 0"),
        (["--budget", "nan"], "must be positive and finite, got nan"),
        (["--budget", "inf"], "must be positive and finite, got inf"),
        (["--budget", "much"], "must be a number, got much"),
        (["--seed", "-1"], "must be an integer from 0 on, got -1"),
        (["--seed", "x"], "must be an integer from 0 on, got x"),
        (["--out", __file__], "argument --out"),
        (["--data", "nowhere"], "must be a folder with qm9_graphs.npz, got nowhere"),
    ],
)
def test_command_refuses_before_it_measures(arguments, sentence, capsys, monkeypatch):
    """With exit code 2: 1 is that of a violated claim."""
    monkeypatch.setattr(VERIFY, "CLAIMS", ())
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_exit_code_of_a_violated_claim(monkeypatch, capsys):
    broken = Claim("a.b", "nowhere", "2 <= 1", lambda draws: [Trial(2.0, 1.0)])
    monkeypatch.setattr(VERIFY, "CLAIMS", (broken,))
    assert main([]) == 1
    assert "violated, and should hold: a.b" in capsys.readouterr().out
    known = Claim("a.b", "nowhere", "2 <= 1", lambda draws: [Trial(2.0, 1.0)], expected=False)
    monkeypatch.setattr(VERIFY, "CLAIMS", (known,))
    assert main([]) == 0


@pytest.mark.parametrize(
    ("measured", "expected", "word"),
    [
        (0.5, True, "holds"),
        (2.0, True, "VIOLATED"),
        (2.0, False, "fails, as known"),
        (2.0, None, "fails"),
        (0.5, False, "holds here"),
        (0.0, True, "undecided"),
    ],
)
def test_words(measured, expected, word):
    found = judge("a.b", "", [Trial(measured, 1.0, floor=0.1)], expected=expected)
    assert said(found) == word
    assert word in as_table([found])


def test_pages_repeat(run):
    assert as_html(run, attention_pictures()) == as_html(run, attention_pictures())
    assert "Infinity" not in as_json(run)


def test_pictures_are_drawn_where_their_claims_were_measured(run):
    page = as_html(run, attention_pictures())
    assert "Rank collapse over depth" in page
    assert "sandwich" not in page
    assert page.count("<svg") >= 2


def test_without_matplotlib_the_page_has_its_table(run, monkeypatch):
    monkeypatch.setattr(report, "drawing", None)
    page = as_html(run, attention_pictures())
    assert "Pictures need matplotlib" in page
    assert "<svg" not in page
    assert "collapse.decay" in page


def test_every_picture_can_be_drawn(monkeypatch):
    # What the search finds is for the tests of the claims; here it would take most of the time.
    monkeypatch.setattr(hyperbolic_attention, "worst", lambda *_, **__: 0.5)
    for picture in VERIFY.PICTURES:
        trials = {name: measured(name) for name in picture.claims}
        assert svg(picture, trials).startswith("<svg")


def measured(name):
    (claim,) = [claim for claim in all_claims() if claim.name == name]
    return claim.measure(Draws(budget=0.05))[1]


def test_ratios_leave_out_what_cannot_be_drawn():
    trials = [Trial(0.0, 1.0, at={"n": 1.0}), Trial(1.0, 2.0), Trial(0.1, 1.0, at={"n": 2.0})]
    picture = ratios(Claim("a.b", "nowhere", "", lambda draws: trials, axis="n"))
    assert isinstance(picture, Picture)
    assert svg(picture, {"a.b": trials}).startswith("<svg")
