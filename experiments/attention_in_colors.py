"""Draw what the channels of chromatic attention look at, as maps of pairs and on molecules (CSA figure 3).

In each channel every atom attends to all atoms with a distribution of its own. Shown are channels of one layer that
differ most, from the nearest to the farthest view: above the whole map, row i for the atom that attends, then a few
rows on the molecule, the atom that attends ringed in red. The table says how the attention of each channel is shared
out, averaged over molecules: to the atom itself, to its neighbours, to other atoms of its rings, to the rest.

The model is one that ``experiments.molecules`` trained (``--run``, the folder with its ``run.json``), or a small one
that is trained first, on generated molecules.

    python -m experiments.attention_in_colors
    python -m experiments.molecules --dataset zinc --data ../shared/data --models csa-rings --seeds 1
    python -m experiments.attention_in_colors --run runs/molecules-zinc/csa-rings-lr-0.002 --data ../shared/data
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments import molecules
from experiments.data import encoded_graphs
from experiments.engine import comparisons, options, plots, runs
from experiments.engine.options import RefusedError
from holonomy.layers import ring_membership, shortest_path_encoding
from holonomy.models import ChromaticGraphTransformer

# Kinds of atoms, in the order of their features; generated ones have letters.
ATOMS: dict[str, tuple[str, ...]] = {
    "zinc": ("C", "O", "N", "F", "C", "S", "Cl", "O⁻", "N⁺", "Br", "N⁺", "N⁺", "N⁺", "N⁻", "S⁻", "I", "P", "O⁺", "N⁻",
             "O⁺", "S⁺", "P", "P", "C⁻", "P⁺", "S⁺", "C⁻", "P⁺"),
    "qm9": ("C", "N", "O", "F"),
    "esol": ("C", "N", "O", "F", "P", "S", "Cl", "Br", "I"),
    "generated": ("A", "B", "C", "D"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Attention:
    """What one layer looks at in one molecule.

    Attributes:
        maps: (channels, n, n); in each channel row i is a distribution over j.
        hops: (n, n) bonds between two atoms.
        rings: (n, n), whether two atoms share a ring.
        bonds: (2, m), each bond in both directions.
        kinds: (m,) of the bonds.
        atoms: (n,) kinds of the atoms.
    """

    maps: Tensor
    hops: Tensor
    rings: Tensor
    bonds: Tensor
    kinds: Tensor
    atoms: Tensor


def attention(network: ChromaticGraphTransformer, data: molecules.Data, number: int, layer: int) -> Attention:
    """Look at a layer of a model in the test molecule with the given number."""
    chosen = data.test[number : number + 1]
    part = data.graphs.graphs.take(chosen)
    inputs, _ = encoded_graphs.arguments(network, data.graphs, chosen)
    with torch.no_grad():
        maps = network.eval().attention_maps(**inputs)[layer][0].permute(2, 0, 1)
    n = len(part.x)
    return Attention(
        maps,
        shortest_path_encoding(part.edge_index, n, n),
        ring_membership(part.edge_index, n, molecules.LARGEST_RING),
        part.edge_index,
        part.edge_attr.argmax(dim=1),
        part.x.argmax(dim=1),
    )


def shares(seen: Sequence[Attention]) -> Tensor:
    """Return what each channel gives to the atom itself, its neighbours, its rings' others and the rest: (channels, 4).

    Averaged over the atoms of each molecule, then over molecules.
    """
    total = torch.zeros(len(seen[0].maps), 4)
    for one in seen:
        near, ring = one.hops <= 1, one.rings & (one.hops > 1)
        itself = one.hops == 0
        parts = torch.stack([itself, near & ~itself, ring, ~near & ~ring]).to(one.maps.dtype)
        total += torch.einsum("cij,pij->cp", one.maps, parts) / len(one.hops)
    return total / len(seen)


def diverse(seen: Sequence[Attention], count: int) -> list[int]:
    """Choose channels whose maps differ most, and order them by the distance they look over.

    First the channel of the shortest mean distance, then again and again the one that is farthest from all that are
    chosen; two channels are as far apart as half the sum of absolute differences of their rows, averaged.
    """
    channels = len(seen[0].maps)
    apart, reach = torch.zeros(channels, channels), torch.zeros(channels)
    for one in seen:
        flat = one.maps.flatten(1)
        apart += torch.cdist(flat, flat, p=1) / (2 * len(one.hops))
        reach += (one.maps * one.hops).sum(dim=(1, 2)) / len(one.hops)
    chosen = [int(reach.argmin())]
    while len(chosen) < min(count, channels):
        nearest = apart[chosen].amin(dim=0)
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
    return sorted(chosen, key=lambda channel: float(reach[channel]))


def spread(hops: Tensor, count: int) -> list[int]:
    """Choose atoms that are far apart: an end of the molecule, then the atom farthest from all chosen."""
    chosen = [int(hops.sum(dim=1).argmax())]
    while len(chosen) < min(count, len(hops)):
        chosen.append(int(hops[chosen].amin(dim=0).argmax()))
    return chosen


def layout(hops: Tensor, steps: int = 300) -> Tensor:
    """Place atoms (n, 2) so that distances are hops, where the plane allows it (Kamada and Kawai 1989).

    The stress, the sum of (distance - hops)^2 / hops^2, is lowered by steps of majorisation, each of which minimises
    a quadratic bound, from the two main directions of the hops.
    """
    wanted = hops.double()
    n = len(wanted)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    values, vectors = torch.linalg.eigh(-0.5 * centre @ wanted.square() @ centre)
    found = torch.zeros(n, 2, dtype=torch.float64)
    kept = min(2, n)
    found[:, :kept] = vectors[:, -kept:] * values[-kept:].clamp(min=0).sqrt()
    # A path lies on a line, where nothing would ever leave it; a slight bend lets crossing branches pass each other.
    found = found + 0.01 * torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.where(wanted > 0, wanted.clamp(min=1).square().reciprocal(), 0.0)
    bound = torch.linalg.pinv(torch.diag(weight.sum(dim=1)) - weight)
    for _ in range(steps):
        distance = torch.cdist(found, found)
        pull = torch.where(distance > 0, weight * wanted / torch.where(distance > 0, distance, 1.0), 0.0)
        found = bound @ ((torch.diag(pull.sum(dim=1)) - pull) @ found)
    return found.float()


def draw(seen: Attention, channels: Sequence[int], names: Sequence[str], path: Path) -> Path:
    """Draw some channels, a column each: the map, then its rows of four atoms on the molecule."""
    places = layout(seen.hops)
    rows = spread(seen.hops, 4)
    with mpl.rc_context({**plots.STYLE, "axes.grid": False}):
        figure = Figure(figsize=(4.2 * len(channels), 3.6 * (len(rows) + 1)), layout="constrained")
        panels = figure.subplots(len(rows) + 1, len(channels), squeeze=False)
        for column, channel in enumerate(channels):
            top = panels[0, column]
            top.imshow(seen.maps[channel].numpy(), cmap="cividis", vmin=0)
            top.set_title(f"channel {channel}")
            top.set(xticks=[], yticks=rows, yticklabels=[f"{names[int(seen.atoms[row])]} {row}" for row in rows])
            for panel, row in zip(panels[1:, column], rows, strict=True):
                _molecule(panel, seen, places, row, seen.maps[channel, row], names)
        figure.supxlabel("above: row i attends to column j; below: what the ringed atom attends to", fontsize=12)
        return plots.save(figure, path)


def _molecule(panel: Axes, seen: Attention, places: Tensor, row: int, weights: Tensor, names: Sequence[str]) -> None:
    once = seen.bonds[0] < seen.bonds[1]
    lines = places[seen.bonds[:, once].T].numpy()
    panel.add_collection(LineCollection(list(lines), colors="#999999", linewidths=1.0 + 1.2 * seen.kinds[once].numpy()))
    panel.scatter(
        *places.T, c=weights.numpy(), cmap="cividis", vmin=0, s=150, edgecolors="#777777", linewidths=0.8, zorder=2
    )
    panel.scatter(*places[row], s=290, facecolors="none", edgecolors="#D55E00", linewidths=2.6, zorder=3)
    dark = weights < 0.6 * weights.max()
    for place, kind, faint in zip(places.tolist(), seen.atoms.tolist(), dark.tolist(), strict=True):
        colour = "white" if faint else "black"
        panel.text(*place, names[kind], ha="center", va="center", fontsize=7, color=colour, zorder=4)
    panel.set_aspect("equal", adjustable="datalim")
    panel.set_axis_off()


Asked = tuple[nn.Module, molecules.Settings, molecules.Data, str]


def asked(arguments: argparse.Namespace) -> Asked:
    """Build the model, untrained; return it with its settings, its molecules and the name of their set."""
    if arguments.run is None:
        settings = molecules.QUESTION.settings_for("generated", options.given_settings(arguments, molecules.Settings))
        options.check(settings, "lr", "clip")
        data = molecules.load("generated", None, settings, 0)
        return comparisons.built(molecules.QUESTION, "csa-rings", settings, data)[0], settings, data, "generated"
    path = arguments.run / "part-seed-0.model.pt"
    config = (runs.listed(arguments.run) or {"config": {}})["config"]
    if "model" not in config or not path.is_file():
        raise RefusedError(f"--run must be the folder of one model of a run that is finished, got {arguments.run}")
    if config["model"] not in molecules.OPTIONS:
        raise RefusedError(f"--run must hold a chromatic model, got {config['model']!r}")
    settings = molecules.Settings(**config["settings"])
    if config["dataset"] != "generated":
        # The test molecules only; two to train with stand for the scale, which nothing here reads.
        settings = dataclasses.replace(settings, train=2, tests=max(arguments.molecule + 1, arguments.molecules))
    data = molecules.load(config["dataset"], arguments.data, settings, 0)
    network = molecules.build(config["model"], settings, data)
    network.load_state_dict(runs.read_state(path))
    return network, settings, data, config["dataset"]


def trained(arguments: argparse.Namespace, base: runs.Run, settings: molecules.Settings, data: molecules.Data) -> Any:
    """Train a small model; return its weights."""
    run = base.child("model", {"model": "csa-rings", "settings": dataclasses.asdict(settings)})
    stream = None if arguments.quiet else sys.stderr
    train = functools.partial(
        comparisons.fit, molecules.QUESTION, "csa-rings", settings, data, 0, run, device=arguments.device
    )
    run.part("seed-0", lambda: train(label="csa-rings", stream=stream, checkpoint_every=arguments.checkpoint_every))
    return run.read_state("part-seed-0.model.pt")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    out = options.parser("experiments.attention_in_colors", __doc__ or "")
    add = out.add_argument
    add("--run", type=Path, metavar="FOLDER", help="a model of experiments.molecules; without it one is trained")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files, where the run read one")
    add("--molecule", type=int, default=0, metavar="N", help="which test molecule is drawn, from 0 (default 0)")
    add("--molecules", type=int, default=50, metavar="N", help="test molecules that choose the channels (default 50)")
    add("--layer", type=int, default=-1, metavar="N", help="which layer, from 0; -1 is the last (default -1)")
    add("--channels", type=int, default=3, metavar="N", help="channels that are drawn (default 3)")
    options.add_folder(out, "runs/attention_in_colors", checkpoint_every=5)
    options.add_machine(out)
    add("--quiet", action="store_true", help="no progress lines")
    options.add_settings(out, molecules.Settings, remark="of the model that is trained where there is no --run")
    return out


def table(channels: Sequence[int], given: Tensor) -> str:
    """Write as Markdown what the channels look at, in percent."""
    lines = ["| channel | itself | neighbours | rings | the rest |", "|---|---|---|---|---|"]
    for channel in channels:
        cells = " | ".join(f"{100 * float(share):.1f}" for share in given[channel])
        lines.append(f"| {channel} | {cells} |")
    return "\n".join(lines)


def _main(arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, "molecules", "channels", "checkpoint_every")
    runs.use_machine(arguments.threads, arguments.device)
    # What cannot be done is refused before --overwrite removes anything.
    network, settings, data, dataset = asked(arguments)
    if not 0 <= arguments.molecule < len(data.test):
        raise RefusedError(
            f"--molecule must be less than the {len(data.test)} test molecules, got {arguments.molecule}"
        )
    if not -len(network.layers) <= arguments.layer < len(network.layers):
        raise RefusedError(f"--layer must be one of {len(network.layers)} layers, got {arguments.layer}")
    base = runs.Run(
        arguments.out or Path("runs/attention_in_colors"),
        {"question": "attention_in_colors", "run": arguments.run and str(arguments.run)},
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    if arguments.run is None:
        network.load_state_dict(trained(arguments, base, settings, data))
    many = range(min(arguments.molecules, len(data.test)))
    seen = [attention(network, data, number, arguments.layer) for number in many]
    channels = diverse(seen, arguments.channels)
    given = shares(seen)
    shown = attention(network, data, arguments.molecule, arguments.layer)
    draw(shown, channels, ATOMS[dataset], base.own("channels.png"))
    content: Mapping[str, object] = {
        "command": command,
        "versions": runs.versions(),
        "dataset": dataset,
        "molecules": len(many),
        "layer": arguments.layer % len(network.layers),
        "drawn": channels,
        "shares": {
            "of": ["itself", "neighbours", "rings", "rest"],
            "channels": np.round(given.tolist(), 4).tolist(),
        },
    }
    base.write_json("channels.json", content)
    base.finish()
    print(table(channels, given))
    print(f"\nnumbers and pictures in {base.folder}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if training failed, 2 if what was asked cannot be done."""
    return runs.start("experiments.attention_in_colors", parser(), _main, argv)


if __name__ == "__main__":
    sys.exit(main())
