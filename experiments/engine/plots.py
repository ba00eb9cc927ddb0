"""Pictures of a run, drawn to be shown in a talk.

Large type, few lines, and colours that everybody can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from experiments.engine import runs
from holonomy.manifolds import Lorentz, frechet_mean, tangent_pca

# Okabe and Ito's palette, told apart with every kind of colour vision; its yellow, weak on white, comes last.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#F0E442")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 15,
    "axes.titlesize": 17,
    "axes.labelsize": 15,
    "legend.fontsize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "lines.linewidth": 2.0,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}


def save(figure: Figure, path: Path) -> Path:
    """Save a figure; the suffix of the path chooses the format."""
    return runs.write_atomically(path, lambda stream: figure.savefig(stream, format=path.suffix[1:]))


def figure_of(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels side by side, apart from pyplot and its global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, [figure.add_subplot(1, panels, place + 1) for place in range(panels)]


def training_curves(
    histories: Sequence[Mapping[str, Sequence[float]]],
    best_epochs: Sequence[int],
    path: Path,
    *,
    title: str,
    metric: str = "accuracy",
    evaluated: Mapping[str, str] | None = None,
) -> Path:
    """Draw the loss and the scores of every seed over the epochs.

    Args:
        histories: one for each seed: ``"loss"`` and the scores by name, a value for each epoch.
        best_epochs: the epoch, from 1, that each seed was measured at.
        path: the picture.
        title: above the picture.
        metric: what the scores are.
        evaluated: names of the scores and how to call them; validation and test by default.

    Returns:
        The path.
    """
    evaluated = evaluated or {"val": "validation", "test": "test"}
    with mpl.rc_context(STYLE):
        figure, (left, right) = figure_of(12, 4.8, panels=2)
        figure.suptitle(title, fontsize=18)
        for place, (history, best) in enumerate(zip(histories, best_epochs, strict=True)):
            epochs = range(1, len(history["loss"]) + 1)
            # One seed stands out, the others show the spread behind it.
            look: dict[str, Any] = {"alpha": 1.0, "zorder": 3} if place == 0 else {"alpha": 0.3, "linewidth": 1.0}
            left.plot(epochs, history["loss"], color=PALETTE[0], **look)
            for colour, (key, name) in zip((PALETTE[1], PALETTE[2]), evaluated.items(), strict=False):
                right.plot(epochs, history[key], color=colour, label=name if place == 0 else None, **look)
                if place == 0:
                    right.plot(best, history[key][best - 1], "o", color=colour, markersize=9, zorder=4)
        best = best_epochs[0]
        right.axvline(best, color="#777777", linestyle=":", label=f"chosen epoch, {best}")
        left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
        right.set(xlabel="epoch", ylabel=metric)
        right.legend(loc="lower right", frameon=True)
        if len(histories) > 1:
            left.set_title(f"first of {len(histories)} seeds bold", fontsize=13, loc="right")
        return save(figure, path)


def validation_curves(curves: Mapping[str, Sequence[Sequence[float]]], path: Path, *, title: str) -> Path:
    """Draw the validation value of several models over the epochs: the first seed's lines, the others' thin behind.

    Args:
        curves: a list for each seed, with a value for each epoch, by the model's name.
        path: the picture.
        title: above the picture.

    Returns:
        The path.
    """
    with mpl.rc_context(STYLE):
        figure, (axes,) = figure_of(11, 5.2)
        for place, (name, seeds) in enumerate(curves.items()):
            for number, values in enumerate(seeds):
                look: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.25} if number else {"label": name}
                colour, dashes = PALETTE[place % 8], ("-", "--")[place // 8 % 2]
                axes.plot(range(1, len(values) + 1), values, color=colour, linestyle=dashes, **look)
        axes.set(xlabel="epoch", ylabel="validation")
        axes.set_title(title)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return save(figure, path)


def predictions(said: Mapping[str, Tensor], truth: Tensor, path: Path) -> Path:
    """Draw what models predict against the truth, a panel for each model.

    Args:
        said: predictions (n,) by the model's name.
        truth: (n,).
        path: the picture.

    Returns:
        The path.
    """
    with mpl.rc_context(STYLE):
        figure, panels = figure_of(4 * len(said), 4.2, panels=len(said))
        for place, (panel, (name, values)) in enumerate(zip(panels, said.items(), strict=True)):
            panel.axline((float(truth.mean()), float(truth.mean())), slope=1.0, color="#999999", linewidth=1.0)
            panel.scatter(truth, values, s=6, alpha=0.4, color=PALETTE[place % 8], linewidths=0)
            panel.set(xlabel="true", title=name)
        panels[0].set_ylabel("predicted")
        return save(figure, path)


def curvatures(histories: Sequence[Mapping[str, Sequence[float]]], path: Path, *, title: str) -> Path:
    """Draw each layer's curvature over the epochs: the first seed's lines, the others' thin behind.

    Args:
        histories: one for each seed: curvature by the layer's name, a value for each epoch.
        path: the picture.
        title: above the picture.

    Returns:
        The path.
    """
    names = list(histories[0])
    with mpl.rc_context(STYLE):
        figure, (axes,) = figure_of(11, 5.2)
        dashes = ("-", "--", ":", "-.")
        for place, history in enumerate(histories):
            for number, name in enumerate(names):
                values = history[name]
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    color=PALETTE[number % 6],
                    linestyle=dashes[number // 6 % 4],
                    alpha=1.0 if place == 0 else 0.25,
                    linewidth=2.2 if place == 0 else 1.0,
                    label=name if place == 0 else None,
                )
        axes.set(xlabel="epoch", ylabel=r"curvature $\kappa$")
        axes.set_title(f"{title}: curvature of each layer")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return save(figure, path)


def principal_disk(points: Tensor, manifold: Lorentz) -> tuple[Tensor, float]:
    """Show points of many dimensions on the Poincare disk, honestly.

    The points are seen from their Frechet mean, in two principal directions: see ``tangent_pca``. What the others hold
    is lost, and its share is returned so that it can be said.

    Args:
        points: points (n, d+1) of ``manifold``, d >= 1.
        manifold: the hyperboloid they lie on.

    Returns:
        Coordinates (n, 2) in the open unit disk, and the share of the squared lengths that they
        keep.
    """
    points = points.detach().double()
    plane = tangent_pca(points, manifold).detach()
    spread = manifold.dist(frechet_mean(points, manifold), points).detach().square().sum().item()
    share = manifold.dist0(plane).detach().square().sum().item() / spread if spread > 0 else 1.0
    return (manifold.to_poincare(plane) * (-manifold.curvature).sqrt()).detach(), share


def principal_directions(vectors: Tensor) -> tuple[Tensor, float]:
    """Return vectors (n, d) in their two principal directions, and the share of squares kept."""
    if vectors.shape[1] < 2:
        vectors = torch.nn.functional.pad(vectors, (0, 2 - vectors.shape[1]))
    _, lengths, directions = torch.linalg.svd(vectors, full_matrices=False)
    squares = lengths.square()
    kept = vectors @ directions[:2].T
    return kept, float(squares[:2].sum() / squares.sum()) if squares.sum() > 0 else 1.0


def embedding(
    xy: Tensor,
    labels: Tensor,
    names: Sequence[str],
    path: Path,
    *,
    title: str,
    caption: str = "",
    disk: bool = True,
    edges: Tensor | None = None,
    texts: Mapping[int, str] | None = None,
) -> Path:
    """Draw nodes coloured by class, on the Poincare disk or on a plane.

    Args:
        xy: coordinates (n, 2); inside the unit disk if ``disk``.
        labels: classes (n,).
        names: name of each class.
        path: the picture.
        title: above the picture.
        caption: below it: what was done to the points.
        disk: whether to draw the rim of the disk.
        edges: pairs (2, m) to join, on the disk by geodesics.
        texts: words to write beside some nodes.

    Returns:
        The path.
    """
    xy, labels = xy.detach().cpu().double(), labels.detach().cpu()
    with mpl.rc_context(STYLE):
        figure, (axes,) = figure_of(9.2, 8.2)
        axes.grid(visible=False)
        if disk:
            axes.add_patch(Circle((0, 0), 1, facecolor="#F7F7F7", edgecolor="#555555", linewidth=1.5))
            axes.set(xlim=(-1.04, 1.04), ylim=(-1.04, 1.04))
            axes.set_axis_off()
        else:
            axes.set(xlabel="first direction", ylabel="second direction")
        axes.set_aspect("equal", adjustable="box" if disk else "datalim")
        if edges is not None:
            ends = xy[edges[0]], xy[edges[1]]
            lines = geodesics(*ends) if disk else torch.stack(ends, dim=1)
            axes.add_collection(
                LineCollection(list(lines.numpy()), colors="#999999", linewidths=0.5, alpha=0.6, zorder=1)
            )
        size = float(min(90, max(10, 30000 / max(len(xy), 1) ** 0.95)))
        # A random order, the same each time, so that no class covers the others.
        order = torch.randperm(len(xy), generator=torch.Generator().manual_seed(0))
        _scatter(axes, xy[order], labels[order], size)
        handles = [
            Line2D(
                [],
                [],
                linestyle="",
                marker=MARKERS[place % 8],
                color=PALETTE[place % 8],
                markersize=10,
                label=name,
            )
            for place, name in enumerate(names)
        ]
        figure.legend(handles=handles, loc="outside right center", frameon=False)
        for node, text in (texts or {}).items():
            axes.annotate(
                text,
                (float(xy[node, 0]), float(xy[node, 1])),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=12,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
                zorder=5,
            )
        axes.set_title(title)
        if caption:
            figure.supxlabel(caption, fontsize=12, color="#444444")
        return save(figure, path)


def _scatter(axes: Axes, xy: Tensor, labels: Tensor, size: float) -> None:
    # Chunks in the shuffled order: one scatter call has one marker shape, and each class has its
    # own.
    for chunk in range(0, len(xy), max(1, len(xy) // 20)):
        part = slice(chunk, chunk + max(1, len(xy) // 20))
        for label in labels[part].unique().tolist():
            mine = labels[part] == label
            axes.scatter(
                *xy[part][mine].T.numpy(),
                s=size,
                color=PALETTE[label % 8],
                marker=MARKERS[label % 8],
                alpha=0.75,
                linewidths=0.2,
                edgecolors="white",
                zorder=2,
            )


def geodesics(starts: Tensor, ends: Tensor, steps: int = 24) -> Tensor:
    """Return points (m, steps, 2) of the geodesics between points (m, 2) of the Poincaré disk.

    Geodesics are chords of the Klein disk. The steps lie close where a chord comes near the rim, where the Poincaré
    disk bends it most: points spread evenly by distance would leave the middle of a long geodesic to one straight line.
    """
    start, end = (2 * p / (1 + p.square().sum(1, keepdim=True)) for p in (starts.double(), ends.double()))
    share = (1 - torch.linspace(0, math.pi, steps, dtype=torch.float64).cos()[:, None]) / 2
    chord = torch.lerp(start[:, None], end[:, None], share)
    return chord / (1 + (1 - chord.square().sum(2, keepdim=True)).clamp(min=0).sqrt())


def confusion(counts: Tensor, names: Sequence[str], path: Path, *, title: str, caption: str = "") -> Path:
    """Draw a confusion matrix: shares of each true class, with the counts written in.

    Args:
        counts: (classes, classes), row = true class, column = predicted class.
        names: name of each class.
        path: the picture.
        title: above the picture.
        caption: what was counted.

    Returns:
        The path.
    """
    counts = counts.double()
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    side = 3.6 + 0.85 * len(names)
    style: dict[Any, Any] = {**STYLE, "axes.grid": False}
    with mpl.rc_context(style):
        figure, (axes,) = figure_of(side + 1.2, side)
        image = axes.imshow(shares.numpy(), cmap="cividis", vmin=0, vmax=1)
        for row in range(len(names)):
            for column in range(len(names)):
                share = float(shares[row, column])
                axes.text(
                    column,
                    row,
                    f"{share:.0%}\n{int(counts[row, column])}",
                    ha="center",
                    va="center",
                    fontsize=13,
                    color="black" if share > 0.5 else "white",
                )
        axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 3 else 0, ha="center")
        axes.set_yticks(range(len(names)), names)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set(xlabel="predicted", ylabel="true")
        axes.set_title(title)
        figure.colorbar(image, ax=axes, shrink=0.8, format=PercentFormatter(1.0, decimals=0)).set_label(
            "share of the true class"
        )
        if caption:
            figure.supxlabel(caption, fontsize=12, color="#444444")
        return save(figure, path)


def comparison(
    scores: Mapping[str, tuple[float, float]],
    path: Path,
    *,
    title: str,
    label: str,
    caption: str = "",
    factor: float = 100.0,
    digits: int = 1,
) -> Path:
    """Draw a dot with its deviation for each model; dots, because the axis does not start at zero.

    Args:
        scores: mean and deviation by name.
        path: the picture.
        title: above the picture.
        label: what is measured.
        caption: what the deviation is.
        factor: on every score; 100 shows shares in percent.
        digits: after the point.

    Returns:
        The path.
    """
    with mpl.rc_context(STYLE):
        figure, (axes,) = figure_of(10, 1.6 + 0.7 * len(scores))
        for place, (mean, spread) in enumerate(scores.values()):
            axes.errorbar(
                factor * mean,
                place,
                xerr=factor * spread,
                fmt="o",
                markersize=11,
                capsize=6,
                color=PALETTE[0 if place == 0 else 5],
            )
            axes.annotate(
                f"{factor * mean:.{digits}f}",
                (factor * mean, place),
                xytext=(0, 9),
                ha="center",
                textcoords="offset points",
                fontsize=13,
            )
        axes.set_yticks(range(len(scores)), list(scores))
        axes.set(xlabel=label, ylim=(len(scores) - 0.4, -0.7))
        axes.grid(visible=False, axis="y")
        axes.set_title(title)
        if caption:
            figure.supxlabel(caption, fontsize=12, color="#444444")
        return save(figure, path)
