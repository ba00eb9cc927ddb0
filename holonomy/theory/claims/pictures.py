"""What a report draws: pictures as functions of axes and trials, so that no claim needs a plotting library.

:data:`holonomy.theory.claims.verify.PICTURES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holonomy.theory.claims.verdict import Claim, Trial

Trials = Mapping[str, Sequence[Trial]]


@dataclass(frozen=True)
class Picture:
    """A picture of measured claims."""

    title: str  # above it
    caption: str  # below it: what one sees
    claims: tuple[str, ...]  # names of the claims that it needs; it is left out where one of them was not measured
    # Is given a list of matplotlib's axes, side by side, and each claim's trials.
    draw: Callable[[Sequence[Any], Trials], None]
    panels: int = 1  # how many axes


def ratios(claim: Claim) -> Picture:
    """Draw measured over bound for each trial, over the claim's axis."""
    axis = claim.axis or ""

    def draw(axes: Sequence[Any], trials: Trials) -> None:
        (plot,) = axes
        for counts, colour in ((True, "C0"), (False, "0.8")):
            shown = [t for t in trials[claim.name] if t.counts is counts and t.ratio > 0 and axis in t.at]
            plot.plot([t.at[axis] for t in shown], [t.ratio for t in shown], ".", color=colour, markersize=4)
        plot.axhline(1.0, color="C3", linewidth=1)
        plot.set(yscale="log", xlabel=axis, ylabel="measured / bound")
        plot.set_ylim(bottom=max(plot.get_ylim()[0], 0.1**12))

    return Picture(claim.name, claim.statement, (claim.name,), draw)


def _decay(axes: Sequence[Any], trials: Trials) -> None:
    for plot, order in zip(axes, (1.0, 2.0, 3.0), strict=True):
        shown = [t for t in trials["collapse.decay"] if t.at["N"] == order]
        depth = [t.at["depth"] for t in shown]
        above = [t for t in shown if t.measured > t.floor]
        plot.plot([t.at["depth"] for t in above], [t.measured for t in above], "o-", label="measured")
        plot.plot(depth, [t.bound for t in shown], "s--", label="Theorem RC")
        plot.plot(depth, [t.at["printed"] for t in shown], "^:", label="Corollary 3.2")
        plot.plot(depth, [t.floor for t in shown], "-", color="0.7", label="rounding")
        plot.set(yscale="log", xlabel="depth", title=f"N = {order:g}", ylim=(min(t.floor for t in shown) / 100, 1e12))
    axes[0].set_ylabel("diameter, residual")
    axes[0].legend(fontsize="small")


def _sandwich(axes: Sequence[Any], trials: Trials) -> None:
    for plot, logits in zip(axes, (0.3, 3.0, 10.0), strict=True):
        shown = [t for t in trials["lipschitz.plus_sharp"] if t.at["b"] == logits]
        tokens = [t.at["n"] for t in shown]
        for key, label, style in (
            ("printed", "Theorem 3.7", "^:"),
            ("castin", "Castin et al.", "v-."),
            ("plus", "Theorem L+", "s--"),
            ("lower", "measured", "o-"),
        ):
            plot.plot(tokens, [t.at[key] for t in shown], style, label=label)
        plot.set(xscale="log", yscale="log", xlabel="tokens n", title=f"b = {logits:g}")
    axes[0].set_ylabel("Lipschitz constant")
    axes[0].legend(fontsize="small")


def _radius(axes: Sequence[Any], trials: Trials) -> None:
    for plot, order in zip(axes, (1.0, 2.0, 3.0), strict=True):
        shown = [t for t in trials["lipschitz.ball"] if t.at["N"] == order]
        radius = [t.at["radius"] for t in shown]
        plot.plot(radius, [t.at["printed"] for t in shown], "^:", label="Theorem 3.7")
        plot.plot(radius, [t.bound for t in shown], "s--", label="Theorem L+")
        plot.plot(radius, [t.measured for t in shown], "o-", label="measured")
        plot.set(yscale="log", xlabel="radius R", title=f"N = {order:g}")
    axes[0].set_ylabel("Lipschitz constant")
    axes[0].legend(fontsize="small")


def attention_pictures() -> tuple[Picture, ...]:
    """The pictures of rank collapse and of Lipschitz constants."""
    return (
        Picture(
            "Rank collapse over depth",
            "The diameter of four tokens through equal layers, Theorem RC iterated from the first input alone, and "
            "Corollary 3.2 as printed, in its own norm, with the least gamma that its proof can assume.",
            ("collapse.decay",),
            _decay,
            3,
        ),
        Picture(
            "The Lipschitz sandwich",
            "Ordinary attention on the sharp family, for three sizes b of the logits: what is measured, and three "
            "upper bounds, over the number of tokens.",
            ("lipschitz.plus_sharp",),
            _sandwich,
            3,
        ),
        Picture(
            "Lipschitz constants over the radius",
            "Four tokens, matrices of norm 1: the best of an ascent over the ball, and upper bounds.",
            ("lipschitz.ball",),
            _radius,
            3,
        ),
    )
