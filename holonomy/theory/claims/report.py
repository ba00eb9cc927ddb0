"""What a run of :func:`holonomy.theory.verify` leaves: a table, JSON, and one HTML page with its pictures inside.

Pictures need matplotlib (the extra ``report``); without it the page has the table and says so.
"""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    from matplotlib import figure as drawing
    from matplotlib import rc_context
except ImportError:
    drawing = rc_context = None
import torch

import holonomy
from holonomy.theory.claims.pictures import Picture, ratios
from holonomy.theory.claims.verdict import Claim, Trial, Verdict


@dataclass
class Run:
    """Claims, verdicts and trials, in the order in which they were measured; :meth:`add` is what ``verify`` watches."""

    settings: Mapping[str, Any]  # what reproduces it: seed, device, dtype, budget
    claims: list[Claim] = field(default_factory=list[Claim])  # the claims
    verdicts: list[Verdict] = field(default_factory=list[Verdict])  # their verdicts
    trials: dict[str, list[Trial]] = field(default_factory=dict[str, list[Trial]])  # by the claim's name

    def add(self, claim: Claim, verdict: Verdict, trials: list[Trial]) -> None:
        """Keep one claim's result."""
        self.claims.append(claim)
        self.verdicts.append(verdict)
        self.trials[claim.name] = trials

    @property
    def surprising(self) -> list[str]:
        """Names of the claims that should hold and are violated."""
        return [verdict.claim for verdict in self.verdicts if verdict.surprising]


def said(verdict: Verdict) -> str:
    """Say a verdict in a word or three."""
    if verdict.holds is None:
        return "undecided"
    if verdict.holds:
        if verdict.sharper:
            return "holds, sharper"
        return "holds here" if verdict.expected is False else "holds"
    return {True: "VIOLATED", False: "fails, as known", None: "fails"}[verdict.expected]


def statement(claim: Claim, verdict: Verdict) -> str:
    """Say what a claim states, and on which data it was judged."""
    return f"{claim.statement}; judged on {verdict.judged_on}" if verdict.judged_on else claim.statement


def seen(verdict: Verdict) -> str:
    """Say what the search could have seen: times which factor a bound, or which difference, would have been noticed."""
    if not verdict.holds:
        return ""
    return f"> {verdict.bound:.1g}" if verdict.kind == "equal" else _number(verdict.sees)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


_COLUMNS = ("verdict", "worst", "median", "counted", "sees", "note")


def _cells(v: Verdict) -> tuple[str, ...]:
    return said(v), _number(v.ratio), _number(v.median), f"{v.counted}/{v.trials}", seen(v), v.note


def as_table(verdicts: Sequence[Verdict]) -> str:
    """Lay verdicts out as text, one line each."""
    rows = [("claim", *_COLUMNS)] + [(v.claim, *_cells(v)) for v in verdicts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(run: Run) -> str:
    """Write a run as JSON; numbers that are not finite are null."""
    document = {
        "holonomy": holonomy.__version__,
        "torch": torch.__version__,
        "settings": dict(run.settings),
        "violated": run.surprising,
        "claims": [
            {
                "claim": claim.name,
                "source": claim.source,
                "statement": statement(claim, verdict),
                "verdict": said(verdict),
                **{name: _finite(value) for name, value in vars(verdict).items() if name not in ("claim", "source")},
            }
            for claim, verdict in zip(run.claims, run.verdicts, strict=True)
        ],
    }
    return json.dumps(document, indent=1)


def svg(picture: Picture, trials: Mapping[str, Sequence[Trial]]) -> str | None:
    """Draw a picture as SVG, to stand within a page."""
    if drawing is None or rc_context is None:
        return None
    # Names within the drawing and its date would differ from run to run.
    with rc_context({"svg.hashsalt": picture.title, "svg.fonttype": "none", "font.size": 9}):
        figure = drawing.Figure(figsize=(3.4 * picture.panels, 2.8), layout="constrained")
        axes = [figure.add_subplot(1, picture.panels, index + 1) for index in range(picture.panels)]
        picture.draw(axes, trials)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } th, td { text-align: left; vertical-align: top;
padding: .25rem .6rem; border-bottom: 1px solid #ddd; } figure { display: inline-block; margin: 1rem 1rem 1rem 0; }
figcaption { max-width: 34rem; font-size: 13px; } .holds { color: #176b2c; } .VIOLATED { color: #b00020;
font-weight: 600; } .fails { color: #8a5a00; } .undecided { color: #666; }
"""


def as_html(run: Run, pictures: Sequence[Picture]) -> str:
    """Write a run as one page that needs nothing beside it."""
    settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Claims, measured</title><style>{_STYLE}</style>",
        f"<h1>Claims, measured</h1><p>holonomy {holonomy.__version__}, torch {torch.__version__};",
        f"{html.escape(settings)}.",
        "Worst and median are the measured value over its bound, of the trials that count; a bound times less than",
        "what the column sees says, or a difference above it, would have been noticed.</p>",
        _html_table(run),
    ]
    wanted = [picture for picture in pictures if all(name in run.trials for name in picture.claims)]
    special = {name for picture in wanted for name in picture.claims}
    wanted += [ratios(claim) for claim in run.claims if claim.axis is not None and claim.name not in special]
    drawn = [(picture, svg(picture, run.trials)) for picture in wanted]
    if any(image is None for _, image in drawn):
        parts.append("<p>Pictures need matplotlib: <code>pip install 'holonomy[report]'</code>.</p>")
    parts += [
        f"<figure><h3>{html.escape(picture.title)}</h3>{image}<figcaption>{html.escape(picture.caption)}"
        "</figcaption></figure>"
        for picture, image in drawn
        if image is not None
    ]
    return "\n".join([*parts, "</html>\n"])


def _html_table(run: Run) -> str:
    rows: list[str] = []
    for claim, verdict in zip(run.claims, run.verdicts, strict=True):
        name, source, stated, word, *numbers = map(
            html.escape, (claim.name, claim.source, statement(claim, verdict), *_cells(verdict))
        )
        marked = f"<span class='{word.split(',')[0].split(' ')[0]}'>{word}</span>"
        cells = [f"<code>{name}</code>", source, stated, marked, *numbers]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = ("claim", "source", "statement", *_COLUMNS)
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" + "\n".join(rows) + "</table>"
