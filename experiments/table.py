"""Compare Hypformer with a GCN, an MLP, nearest neighbours and its Euclidean twin: equal budget, equal search.

Each model gets the same epochs and patience and a grid of the same size (nearest neighbours has less to choose).
The point of the grid is chosen by the mean validation score of the first seeds (--search-seeds), then run with all
seeds; the test score is read at the first epoch of best validation score. Everything finished is kept, so the same
command goes on where it was stopped. The result is one JSON file with the command that made it.

    python -m experiments.table --data ../shared/data --dataset cora --protocol random --ablations
    python -m experiments.table --dataset tree --search-seeds 3 --grid lr=0.003,0.01 gcn:hidden=32,64
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import statistics
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.data import datasets
from experiments.data.datasets import NodeData
from experiments.engine import options, runs
from experiments.engine.options import RefusedError
from experiments.node_classification import (
    ABLATIONS,
    METRIC_NAMES,
    MODELS,
    OF_NEIGHBOURS,
    TITLES,
    USUAL,
    Model,
    Settings,
    add_settings,
    classify,
    given_settings,
    settings_for,
)

Grid = Mapping[str, Sequence[Any]]

# The same number of points for every model that is trained, at most six; what is not in the grid is the
# dataset's default. The twin searches what Hypformer searches, the weight of the graph branch included: the log
# map shrinks the hyperbolic branch, so that the same weight is another mixture.
_DECAY = [0.005, 0.02]
_WITH_GRAPH_BRANCH = ("hypformer", "euclidean", "sgformer")
_OF_GRAPHS = (*OF_NEIGHBOURS, "sgc", "appnp")


def _grids(beside: Grid, graphs: Grid, mlp: Grid, features: Sequence[str]) -> dict[str, Grid]:
    """Give each model its grid: of those with a graph branch, of those that are one, of the MLP, of the neighbours."""
    alike = dict.fromkeys(_WITH_GRAPH_BRANCH, beside) | dict.fromkeys(_OF_GRAPHS, graphs)
    return {**alike, "mlp": mlp, "knn": {"features": features}}


_CITATION = _grids(
    {"graph_weight": [0.7, 0.9], "weight_decay": _DECAY},
    {"graph_dropout": [0.5, 0.8], "weight_decay": _DECAY},
    {"dropout": [0.5, 0.8], "weight_decay": _DECAY},
    ["raw", "row"],
)
_TREE = _grids(
    {"graph_weight": [0.5, 0.8], "graph_layers": [4, 6]},
    {"graph_dropout": [0.0, 0.2], "graph_layers": [4, 6]},
    {"dropout": [0.0, 0.2], "weight_decay": [0.0, 0.005]},
    ["raw", "standard"],
)
_FEATURES = _grids(
    {"graph_weight": [0.2, 0.5], "dropout": [0.2, 0.5]},
    {"graph_dropout": [0.2, 0.5], "weight_decay": [0.0005, 0.005]},
    {"dropout": [0.2, 0.5], "weight_decay": [0.0005, 0.005]},
    ["raw", "standard"],
)
GRIDS: dict[str, dict[str, Grid]] = {
    "tree": _TREE,
    "disease_lp": {
        model: {**grid, "graph_layers": [4, 5]} if "graph_layers" in grid else grid for model, grid in _TREE.items()
    },
    "cora": _CITATION,
    "citeseer": _CITATION,
    "pubmed": _CITATION,
    "airport": _grids(
        {"features": ["standard", "columns"], "graph_weight": [0.2, 0.5]},
        {"features": ["standard", "columns"], "graph_layers": [2, 4]},
        {"features": ["standard", "columns"], "dropout": [0.0, 0.2]},
        ["raw", "standard", "columns"],
    ),
    "digits": _FEATURES,
    "topics": _FEATURES,
}


def points(grid: Grid) -> list[dict[str, Any]]:
    """Return every combination of a grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def grid_of(words: Sequence[str]) -> dict[str, Grid]:
    """Read a grid from words ``NAME=VALUE,VALUE`` (every trained model) or ``MODEL:NAME=VALUE,VALUE``.

    Args:
        words: the words; what one says of a model stands above what another says of all.

    Returns:
        A grid for each model that is trained.

    Raises:
        ValueError: if a word is none of these, or a value does not fit its hyper-parameter.
    """
    trained = [model for model in MODELS if model != "knn"]
    kinds = typing.get_type_hints(Settings)
    shared: dict[str, list[Any]] = {}
    own: dict[str, dict[str, list[Any]]] = {model: {} for model in trained}
    for word in words:
        left, equals, right = word.partition("=")
        model, _, name = left.rpartition(":")
        if not equals or name not in kinds or (model and model not in own):
            raise RefusedError(f"--grid must be words such as lr=0.01,0.02 or gcn:hidden=32,64, got {word!r}")
        (own[model] if model else shared)[name] = [_value(name, kinds[name], text) for text in right.split(",")]
    return {model: shared | own[model] for model in trained}


def _value(name: str, kind: Any, text: str) -> Any:
    allowed = ("false", "true") if kind is bool else typing.get_args(kind)
    if allowed:
        if text not in allowed:
            raise RefusedError(f"--grid: {name} must be one of {', '.join(allowed)}, got {text!r}")
        return text == "true" if kind is bool else text
    try:
        return kind(text)
    except ValueError:
        raise RefusedError(f"--grid: {name} must be a number, got {text!r}") from None


class Table:
    """The cells of one table, each in a folder named after its settings.

    Args:
        dataset: name of the dataset.
        data: the data of a seed.
        work: where the runs lie.
        given: hyper-parameters set for every model.
        quiet: whether to leave the progress lines out.
        device: where models are trained.
    """

    def __init__(
        self,
        dataset: str,
        data: Callable[[int], NodeData],
        work: Path,
        given: Mapping[str, Any],
        *,
        quiet: bool = False,
        device: str = "cpu",
    ) -> None:
        self.dataset, self.data, self.given, self.quiet, self.device = dataset, data, given, quiet, device
        self.name = data(0).name
        self.work = work / self.name.replace("/", "-")

    def cell(self, model: Model, settings: Settings, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Return the records of some seeds of a model, computed now or before."""
        config = {"dataset": self.name, "model": model, "settings": dataclasses.asdict(settings)}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
        run = runs.Run(self.work / f"{model}-{digest}", config, resume=True)
        stream = None if self.quiet else sys.stderr
        return classify(self.data, model, settings, seeds=seeds, run=run, stream=stream, device=self.device)["seeds"]

    def row(self, model: Model, grid: Grid, seeds: Sequence[int], search: int = 1) -> dict[str, Any]:
        """Search a grid by the mean validation score of the first seeds, and run the best point with all seeds."""
        grid = {key: values for key, values in grid.items() if key not in self.given}
        searched = []
        for point in points(grid):
            settings = settings_for(self.dataset, model, {**point, **self.given})
            scores = [record["scores"]["val"] for record in self.cell(model, settings, seeds[:search])]
            searched.append({"point": point, "val": statistics.fmean(scores), "vals": scores})
        chosen = max(searched, key=lambda entry: entry["val"])["point"]
        settings = settings_for(self.dataset, model, {**chosen, **self.given})
        return {"grid": dict(grid), "search": searched, "chosen": chosen} | self.measured(model, settings, seeds)

    def measured(self, model: Model, settings: Settings, seeds: Sequence[int]) -> dict[str, Any]:
        """Run settings with all seeds."""
        records = self.cell(model, settings, seeds)
        scores = {key: [record["scores"][key] for record in records] for key in records[0]["scores"]}
        return {
            "settings": dataclasses.asdict(settings),
            "parameters": records[0]["parameters"],
            "summary": {key: runs.summary(values) for key, values in scores.items()},
            "scores": scores,
            "best_epochs": [record["best_epoch"] for record in records],
            "seconds": [record["seconds"] for record in records],
            "curvature_at_the_end": [
                {name: values[-1] for name, values in record["curvature"].items()} for record in records
            ],
        }

    def ablations(self, row: Mapping[str, Any], seeds: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
        """Take each of the parts of the chosen Hypformer away; nothing is searched again."""
        out = {}
        for name in parts:
            settings = Settings(**{**row["settings"], **ABLATIONS[name]})
            if settings == Settings(**row["settings"]) or (settings.graph == "none" and not settings.transformer):
                continue
            measured = self.measured("hypformer", settings, seeds)
            pairs = zip(measured["scores"]["test"], row["scores"]["test"], strict=True)
            # Seed by seed, so that what the seeds share (the split) does not count as noise.
            differences = [without - whole for without, whole in pairs]
            measured["test_minus_whole"] = runs.summary(differences)
            out[name] = measured
        return out


def text(content: Mapping[str, Any]) -> str:
    """Write a table as Markdown, in percent."""
    rows = {TITLES[name]: row for name, row in content["models"].items()}
    rows |= {f"Hypformer, {name}": row for name, row in content["ablations"].items()}
    scores = list(next(iter(rows.values()))["summary"])
    lines = [
        f"| {content['dataset']} ({METRIC_NAMES[content['metric']]}, %) | {' | '.join(scores)} | s/seed |",
        "|---" * (len(scores) + 2) + "|",
    ]
    for name, row in rows.items():
        cells = (row["summary"][key] for key in scores)
        shown = " | ".join(f"{100 * cell['mean']:.1f} ± {100 * cell['std']:.1f}" for cell in cells)
        lines.append(f"| {name} | {shown} | {statistics.fmean(row['seconds']):.1f} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    out = options.parser("experiments.table", __doc__ or "")
    add = out.add_argument
    add("--dataset", choices=list(GRIDS), default="tree", help="which graph (default tree)")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add("--protocol", help="which split (default: the dataset's first)")
    add("--models", nargs="+", choices=MODELS, default=list(USUAL), help=f"default: {' '.join(USUAL)}")
    add("--ablations", nargs="*", choices=list(ABLATIONS), help="also take parts of Hypformer away (default: each)")
    add("--seeds", type=int, default=5, metavar="N", help="seeds 0 .. N-1 (default 5)")
    add(
        "--search-seeds", type=int, default=1, metavar="N", help="seeds whose mean validation score chooses (default 1)"
    )
    add(
        "--grid",
        nargs="+",
        metavar="WORD",
        help="search NAME=VALUE,VALUE for every trained model, MODEL:NAME=VALUE,VALUE for one, instead of the "
        "dataset's grid",
    )
    add("--work", type=Path, default=Path("runs/table"), metavar="FOLDER", help="where the runs lie")
    add("--out", type=Path, default=Path("runs/table"), metavar="FOLDER", help="where the table goes")
    add("--name", metavar="NAME", help="name of the table (default DATASET-PROTOCOL)")
    add("--overwrite", action="store_true", help="replace the table of that name")
    options.add_machine(out)
    add("--quiet", action="store_true", help="no progress lines")
    add_settings(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if training failed, 2 if what was asked cannot be done."""
    return runs.start("experiments.table", parser(), _main, argv, stopped="the same command goes on")


def _main(arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, "seeds", "search_seeds")
    runs.use_machine(arguments.threads, arguments.device)
    if arguments.search_seeds > arguments.seeds:
        raise RefusedError(f"--search-seeds must be at most --seeds={arguments.seeds}, got {arguments.search_seeds}")
    grids, given = GRIDS[arguments.dataset], given_settings(arguments)
    if arguments.grid:
        own = grid_of(arguments.grid)
        # What is given is left out of the dataset's grid; words that contradict each other are a mistake.
        if both := sorted({name for grid in own.values() for name in grid} & given.keys()):
            flag = "--" + both[0].replace("_", "-")
            raise RefusedError(f"--grid must not search what is given, got {both[0]} and {flag}")
        grids = grids | own

    def data(seed: int) -> NodeData:
        return datasets.load(arguments.dataset, arguments.data, protocol=arguments.protocol, seed=seed)

    first, seeds = data(0), range(arguments.seeds)
    path = arguments.out / f"{arguments.name or first.name.replace('/', '-')}.json"
    runs.check_result(path, overwrite=arguments.overwrite)
    table = Table(arguments.dataset, data, arguments.work, given, quiet=arguments.quiet, device=arguments.device)
    several = arguments.search_seeds > 1
    chosen_by = f"mean validation score of {arguments.search_seeds} seeds" if several else "validation score of seed 0"
    content: dict[str, Any] = {
        "dataset": first.name,
        "note": first.note,
        "metric": first.metric,
        "nodes": first.num_nodes,
        "edges": first.edge_index.shape[1] // 2,
        "rule": f"grid point by {chosen_by}; test at the first epoch of best validation score",
        "command": command,
        "versions": runs.versions(),
        "models": {},
        "ablations": {},
    }
    for model in arguments.models:
        content["models"][model] = table.row(model, grids[model], seeds, arguments.search_seeds)
    if arguments.ablations is not None and "hypformer" in content["models"]:
        parts = arguments.ablations or list(ABLATIONS)
        content["ablations"] = table.ablations(content["models"]["hypformer"], seeds, parts)
    runs.write_json(path, content)
    print(text(content))
    print(f"\nin {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
