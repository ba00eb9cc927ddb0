"""The document of a device as a page of tables, one a case; a target is judged on one thread, or on a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["page"]


def page(document: Mapping[str, Any], order: list[str]) -> str:
    """Markdown: the machine, then the cases in their order, missed targets in bold with the note that explains them."""
    machine, versions = document["machine"], document["versions"]
    lines = [
        f"# Benchmarks, {machine['device']}",
        "",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
        "Medians of ratios within a round, with quartiles; memory by the allocator's accounting, a turn above what was",
        "there before it (workspace: without its results). `python -m benchmarks` makes this page, the document of the",
        "same name with every turn's seconds and bytes, and the plots.",
    ]
    cases = document["cases"]
    for name in sorted(cases, key=lambda name: order.index(name) if name in order else len(order)):
        lines += ["", f"## {name}", "", *_case(cases[name])]
    return "\n".join(lines) + "\n"


def _case(case: Mapping[str, Any]) -> list[str]:
    title = f"{case['title'][0].upper()}{case['title'][1:]} ({case['date']})."
    if not case["threads"]:
        return [title, "", "Not measured on this device."]
    counts = list(case["threads"])
    named = {count: {(row["size"], row["name"]): row for row in case["threads"][count]["rows"]} for count in counts}
    head = " | ".join("1 thread" if count == "1" else f"{count} threads" for count in counts)
    lines = [title, "", f"| | {case['unit']} | {head} | target |", "|---|---|" + "---|" * len(counts) + "---|"]
    notes: list[str] = []
    for key, row in named[counts[0]].items():
        shown = " | ".join(_number(named[count].get(key), judged=count == counts[0]) for count in counts)
        size = "" if row["size"] is None else f"{row['size']:,}"
        lines.append(f"| {row['name']} | {size} | {shown} | {row['target']} |")
        if row["note"] and row["note"] not in notes:
            notes.append(row["note"])
    return [*lines, *(f"\n{note[0].upper()}{note[1:]}." for note in notes)]


def _number(row: Mapping[str, Any] | None, *, judged: bool) -> str:
    if row is None:
        return ""
    number = f"{row['value']:.3g}"
    if judged and row["met"] is False:
        number = f"**{number}**"
    return number if row["quartiles"] is None else number + " [{:.3g}, {:.3g}]".format(*row["quartiles"])
