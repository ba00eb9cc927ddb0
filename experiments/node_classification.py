"""Train a hyperbolic transformer to classify the nodes of a graph.

Without arguments: the nodes of a random tree on which an infection spread, about a minute on two
cores. The test score is read at the first epoch of best validation score; nothing is ever chosen by
it.

    python -m experiments.node_classification
    python -m experiments.node_classification --dataset cora --data ../shared/data --seeds 5
    python -m experiments.node_classification --baseline all --seeds 3
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from geoopt import ManifoldParameter
from torch import Tensor, nn

from experiments.data import datasets
from experiments.data.datasets import NodeData
from experiments.engine import options, plots, runs
from experiments.engine.options import RefusedError, option
from experiments.models.at_scale import SGFormer
from experiments.models.baselines import (
    MLP,
    EuclideanFormer,
    LinearPropagation,
    NodeFormer,
    OnDense,
    nearest_neighbours,
)
from experiments.models.message_passing import MessagePassing
from holonomy.layers import GCN, Propagation
from holonomy.models import HGCN, Hypformer
from holonomy.optim import RiemannianAdam

Usual = Literal["hypformer", "gcn", "mlp", "knn", "euclidean"]
# The baselines of Hypformer's table 2 that are small enough to stand here.
More = Literal["gat", "sgc", "appnp", "hgcn", "hgat", "lgcn", "nodeformer", "sgformer"]
Model = Usual | More
USUAL: tuple[Usual, ...] = typing.get_args(Usual)
MODELS: tuple[Model, ...] = (*USUAL, *typing.get_args(More))
ABLATIONS: dict[str, dict[str, Any]] = {
    "fixed-curvature": {"learnable_curvature": False},
    "no-graph": {"graph": "none"},
    "no-transformer": {"transformer": False},
    "softmax": {"attention": "softmax"},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every hyper-parameter of a run; each is an option of the command line."""

    hidden: int = option("width of the model", default=64)
    layers: int = option("transformer blocks", default=1)
    heads: int = option("attention heads", default=1)
    feedforward: int = option("width of the feed-forward layers", default=128)
    attention: Literal["linear", "softmax"] = option("kind of attention", default="linear")
    power: float = option("sharpening p of the linear attention", default=2.0)
    dropout: float = option("dropout inside the transformer, and in the MLP", default=0.2)
    output_dropout: float = option("dropout of the transformer's output before the mixing", default=0.0)
    curvature: float = option("curvature at the start, negative", default=-1.0)
    learnable_curvature: bool = option("whether curvatures are trained", default=True)
    transformer: bool = option("whether the transformer branch takes part", default=True)
    decoder: Literal["linear", "mlr", "prototypes"] = option("classifier of Hypformer", default="linear")
    graph: Literal["propagation", "linear", "gcn", "none"] = option(
        "graph branch; linear: propagation of a linear map, without a hidden layer", default="gcn"
    )
    graph_layers: int = option("layers of the GCN, or steps of the propagation", default=2)
    graph_hidden: int = option("width inside the graph branch", default=64)
    graph_dropout: float = option("dropout inside the graph branch and the GCN", default=0.5)
    graph_residual: bool = option("whether the layers of the GCN have a residual", default=False)
    graph_weight: float = option("weight of the graph branch in the mixture", default=0.5)
    teleport: float = option("share of the start that each propagation step keeps", default=0.1)
    neighbours: int = option("k of the nearest neighbours", default=1)
    features: Literal["raw", "row", "standard", "columns"] = option(
        "raw, rows to sum 1, measured columns standardised, or all columns", default="raw"
    )
    scale: float = option("factor on the features; deviation of standardised ones", default=1.0)
    lr: float = option("learning rate", default=0.01)
    weight_decay: float = option("weight decay (not on curvatures)", default=0.001)
    average: float = option(
        "measure the running mean of the weights, which keeps this share each epoch; 0: the weights", default=0.0
    )
    epochs: int = option("epochs at most", default=500)
    patience: int = option("epochs without a better validation score before stopping", default=200)


_CITATION = {
    "graph": "propagation", "graph_layers": 8, "graph_weight": 0.9, "dropout": 0.5, "output_dropout": 0.5,
    "patience": 60, "epochs": 300,
}  # fmt: skip
# What differs from the defaults above: for every model on a dataset, then for one model on it.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "tree": {
        "all": {"hidden": 32, "feedforward": 64, "graph_layers": 6, "graph_residual": True, "graph_weight": 0.8,
                "graph_dropout": 0.2, "epochs": 300, "patience": 150},
        "gcn": {"hidden": 64},
    },
    "cora": {
        "all": {**_CITATION, "weight_decay": 0.005},
        "gcn": {"graph_layers": 2},
    },
    "citeseer": {
        "all": {**_CITATION, "weight_decay": 0.02},
        "gcn": {"graph_layers": 2},
    },
    "pubmed": {
        "all": {**_CITATION, "weight_decay": 0.005, "hidden": 32, "feedforward": 64},
        "gcn": {"graph_layers": 2},
    },
    "airport": {
        "all": {"features": "standard", "scale": 10.0, "graph_layers": 2, "graph_weight": 0.2,
                "graph_dropout": 0.0, "dropout": 0.1, "weight_decay": 0.0, "epochs": 500, "patience": 80},
    },
    "disease_lp": {
        "all": {"graph_layers": 5, "graph_residual": True, "graph_dropout": 0.0, "weight_decay": 0.0,
                "patience": 100},
        # They leave the score of "all infected" late; with the others' patience they stop at it.
        "gcn": {"patience": 300},
        "mlp": {"patience": 300},
    },
    **{name: {"all": {"epochs": 150, "patience": 40, "weight_decay": 0.0005, "graph_weight": 0.5}}
       for name in ("digits", "topics")},
}  # fmt: skip
# Layers that read neighbours, as many of them as a GCN has.
OF_NEIGHBOURS = ("gcn", "gat", "hgcn", "hgat", "lgcn", "nodeformer")


def settings_for(dataset: str, model: str, given: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a model on a dataset, with what is given on top."""
    table = DEFAULTS.get(dataset, {})
    own = table.get("gcn" if model in OF_NEIGHBOURS else model, {})
    settings = Settings(**{**table.get("all", {}), **own, **(given or {})})
    options.check(settings, "lr")
    return settings


def graph_branch(settings: Settings, in_features: int, out_features: int) -> nn.Module | None:
    """Build the graph encoder that the settings ask for."""
    match settings.graph:
        case "none":
            return None
        case "gcn":
            return GCN(
                in_features,
                settings.graph_hidden,
                out_features,
                layers=settings.graph_layers,
                dropout=settings.graph_dropout,
                residual=settings.graph_residual,
            )
        case "linear":
            return LinearPropagation(
                in_features,
                out_features,
                steps=settings.graph_layers,
                teleport=settings.teleport,
                dropout=settings.graph_dropout,
            )
        case "propagation":
            return Propagation(
                in_features,
                settings.graph_hidden,
                out_features,
                steps=settings.graph_layers,
                teleport=settings.teleport,
                dropout=settings.graph_dropout,
            )


def build(model: Model, settings: Settings, data: NodeData) -> nn.Module:
    """Build a model for the data; nearest neighbours is not one."""
    sizes = (data.num_features, settings.hidden, data.num_classes)
    match model:
        case "gcn":
            return GCN(
                *sizes,
                layers=settings.graph_layers,
                dropout=settings.graph_dropout,
                residual=settings.graph_residual,
            )
        case "mlp":
            return MLP(*sizes, dropout=settings.dropout)
        case "knn":
            raise RefusedError("nearest neighbours has nothing to train")
        case "sgc":
            return LinearPropagation(
                data.num_features,
                data.num_classes,
                steps=settings.graph_layers,
                teleport=0.0,
                dropout=settings.graph_dropout,
            )
        case "appnp":
            return Propagation(
                *sizes, steps=settings.graph_layers, teleport=settings.teleport, dropout=settings.graph_dropout
            )
        case "gat":
            return OnDense(
                MessagePassing(
                    "gat",
                    *sizes,
                    layers=settings.graph_layers,
                    level="node",
                    heads=settings.heads,
                    dropout=settings.graph_dropout,
                )
            )
        case "hgcn" | "hgat" | "lgcn":
            heads = {"heads": settings.heads} if model == "hgat" else {}
            return OnDense(
                HGCN(
                    *sizes,
                    conv=model,
                    layers=settings.graph_layers,
                    dropout=settings.graph_dropout,
                    curvature=settings.curvature,
                    learnable_curvature=settings.learnable_curvature,
                    level="node",
                    **heads,
                )
            )
        case "nodeformer":
            return OnDense(
                NodeFormer(*sizes, layers=settings.graph_layers, heads=settings.heads, dropout=settings.graph_dropout)
            )
        case "sgformer":
            return OnDense(
                SGFormer(
                    *sizes,
                    layers=settings.layers,
                    heads=settings.heads,
                    graph_encoder=graph_branch(settings, data.num_features, settings.hidden),
                    graph_weight=settings.graph_weight,
                )
            )
        case _:
            pass
    common: dict[str, Any] = {
        "layers": settings.layers,
        "heads": settings.heads,
        "feedforward": settings.feedforward,
        "attention": settings.attention,
        "power": settings.power,
        "dropout": settings.dropout,
        "transformer": settings.transformer,
        "graph_weight": settings.graph_weight,
        "graph_encoder": graph_branch(settings, data.num_features, settings.hidden),
        "output_dropout": settings.output_dropout,
    }
    if model == "euclidean":
        return EuclideanFormer(*sizes, **common)
    return Hypformer(
        *sizes,
        **common,
        curvature=settings.curvature,
        learnable_curvature=settings.learnable_curvature,
        decoder=settings.decoder,
    )


def optimizer_for(model: nn.Module, settings: Settings) -> RiemannianAdam:
    """Riemannian Adam; curvatures, scales and points of a manifold are not pulled towards zero."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        held = name.endswith(("log_ratio", "log_scale")) or isinstance(parameter, ManifoldParameter)
        (free if held else decayed).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, settings.weight_decay), (free, 0.0))
        if parameters
    ]
    return RiemannianAdam(groups, lr=settings.lr)


class RunningMean(nn.Module):
    """A network and the running mean of its weights, in one ``state_dict``.

    The mean moves less from epoch to epoch than the weights do, and with it the validation score: with few
    validation nodes the epoch of the best score is otherwise a matter of luck.

    Args:
        network: what is trained.
        share: what the mean keeps in an epoch, in [0, 1); less in the first ones, so that the start is forgotten.
    """

    def __init__(self, network: nn.Module, share: float) -> None:
        super().__init__()
        if not 0 <= share < 1:
            raise RefusedError(f"average must lie in [0, 1), got {share}")
        self.network, self.share = network, share
        self.mean = copy.deepcopy(network).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def update(self, epoch: int) -> None:
        """Take in the weights of an epoch, counted from 1."""
        share = min(self.share, (epoch - 1) / (epoch + 9))
        for mean, present in zip(self.mean.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(present, 1 - share)
            if isinstance(mean, ManifoldParameter):
                mean.copy_(mean.manifold.projx(mean))
        for mean, present in zip(self.mean.buffers(), self.network.buffers(), strict=True):
            mean.copy_(present)


def curvatures_of(model: nn.Module) -> dict[str, float]:
    """Return the present curvatures of a model by name; none for a Euclidean one."""
    read = getattr(model, "curvatures", None)
    return {} if read is None else {name: value.item() for name, value in read().items()}


def fit(
    model: Model,
    settings: Settings,
    data: NodeData,
    seed: int,
    run: runs.Run | None = None,
    *,
    label: str = "",
    stream: TextIO | None = None,
    checkpoint_every: int = 50,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train one model with one seed and measure it at its best validation epoch.

    Args:
        model: which one.
        settings: hyper-parameters.
        data: the graph, features as the file has them.
        seed: seed of initial weights and dropout.
        run: where checkpoints and the best weights go, or None.
        label: beginning of the progress line.
        stream: where progress goes, or None.
        checkpoint_every: epochs between checkpoints.
        device: where it is trained.

    Returns:
        What JSON holds of it: scores, epochs, histories, and the confusion matrix of the test
        nodes.
    """
    data = runs.moved(datasets.prepared(data, settings.features, settings.scale), device)
    lists = {"val": data.val, "test": data.test, **data.also}
    runs.seed_everything(seed)
    if model == "knn":
        logits = _neighbour_votes(data, settings)
        best = {key: data.score(logits, nodes) for key, nodes in lists.items()}
        return _record(seed, best, runs.Trained(0, best, {}, 0, stopped=False, seconds=0.0), 0, data, logits)
    with options.of_the_command():
        network = build(model, settings, data).to(device)
        optimizer = optimizer_for(network, settings)
    averaged = RunningMean(network, settings.average) if settings.average else None
    measured = averaged.mean if averaged else network

    def step(epoch: int) -> float:
        network.train()
        optimizer.zero_grad()
        logits = network(data.x, data.edge_index)
        loss = nn.functional.cross_entropy(logits[data.train], data.y[data.train])
        loss.backward()
        optimizer.step()
        if averaged:
            averaged.update(epoch)
        return loss.item()

    @torch.no_grad()
    def predict() -> Tensor:
        measured.eval()
        return measured(data.x, data.edge_index)

    def evaluate(_: int) -> runs.Record:
        logits = predict()
        scores = {key: data.score(logits, nodes) for key, nodes in lists.items()}
        return scores | {f"curvature {name}": value for name, value in curvatures_of(measured).items()}

    key = f"seed-{seed}"
    trained = runs.train(
        averaged or network,
        optimizer,
        step,
        evaluate,
        epochs=settings.epochs,
        patience=settings.patience,
        run=run,
        key=key,
        label=label,
        stream=stream,
        checkpoint_every=checkpoint_every,
    )
    if run is not None:
        run.write_state(f"part-{key}.model.pt", measured.state_dict())
    size = sum(parameter.numel() for parameter in network.parameters())
    best = {key: trained.best[key] for key in lists}
    return _record(seed, best, trained, size, data, predict())


def _neighbour_votes(data: NodeData, settings: Settings) -> Tensor:
    asked = torch.cat([data.val, data.test, *data.also.values()]).unique()
    votes = torch.zeros(data.num_nodes, data.num_classes, device=data.y.device)
    votes[asked] = nearest_neighbours(
        data.x, data.y, data.train, asked, k=settings.neighbours, classes=data.num_classes
    )
    return votes


def _record(
    seed: int, best: runs.Record, trained: runs.Trained, size: int, data: NodeData, logits: Tensor
) -> dict[str, Any]:
    truth, predicted = data.y[data.test], logits[data.test].argmax(dim=-1)
    counts = torch.bincount(truth * data.num_classes + predicted, minlength=data.num_classes**2)
    prefix = "curvature "
    return {
        "seed": seed,
        "scores": best,
        "best_epoch": trained.best_epoch,
        "epochs": trained.epochs,
        "stopped_early": trained.stopped,
        "seconds": round(trained.seconds, 3),
        "parameters": size,
        "confusion": counts.reshape(data.num_classes, -1).tolist(),
        "history": {key: v for key, v in trained.history.items() if not key.startswith(prefix)},
        "curvature": {key.removeprefix(prefix): v for key, v in trained.history.items() if key.startswith(prefix)},
    }


def classify(
    data: Callable[[int], NodeData],
    model: Model = "hypformer",
    settings: Settings | None = None,
    *,
    seeds: Sequence[int] = (0,),
    run: runs.Run | None = None,
    command: str = "",
    stream: TextIO | None = None,
    checkpoint_every: int = 50,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run a model over several seeds; with a run, a seed that is finished there is not run again.

    Args:
        data: gives the data of a seed; the same graph for all of them where there is one split.
        model: which model.
        settings: hyper-parameters; the defaults of the dataset if None.
        seeds: the seeds.
        run: folder for checkpoints and results, or None.
        command: the command line, to be kept beside the numbers.
        stream: where progress goes, or None.
        checkpoint_every: epochs between checkpoints.
        device: where models are trained.

    Returns:
        What ``results.json`` holds: settings, versions, each seed, and mean and deviation over
        seeds.
    """
    first = data(seeds[0])
    settings = settings or settings_for(first.name.split("/", maxsplit=1)[0], model)
    records = []
    for seed in seeds:

        def compute(seed: int = seed) -> dict[str, Any]:
            label = f"{first.name}  {model}  seed {seed}"
            return fit(
                model,
                settings,
                data(seed),
                seed,
                run,
                label=label,
                stream=stream,
                checkpoint_every=checkpoint_every,
                device=device,
            )

        records.append(compute() if run is None else run.part(f"seed-{seed}", compute))
    results = {
        "dataset": first.name,
        "note": first.note,
        "nodes": first.num_nodes,
        "edges": first.edge_index.shape[1] // 2,
        "metric": first.metric,
        "model": model,
        "settings": dataclasses.asdict(settings),
        "command": command,
        "versions": runs.versions(),
        "summary": {key: runs.summary([record["scores"][key] for record in records]) for key in records[0]["scores"]},
        "seeds": records,
    }
    if run is not None:
        run.write_json("results.json", results)
    return results


def draw(results: Mapping[str, Any], data: NodeData, run: runs.Run) -> list[Path]:
    """Save the pictures of a run; the embedding is that of the first seed."""
    model, settings = results["model"], Settings(**results["settings"])
    title = f"{TITLES[model]} on {results['dataset']}"
    records = results["seeds"]
    made = [
        plots.confusion(
            torch.tensor([record["confusion"] for record in records]).sum(dim=0),
            class_names(data),
            run.own("confusion.png"),
            title=title,
            caption=f"test nodes, {len(records)} seed{'s' * (len(records) > 1)}",
        )
    ]
    if model == "knn":
        return made
    histories = [record["history"] for record in records]
    made.append(
        plots.training_curves(
            histories,
            [record["best_epoch"] for record in records],
            run.own("training.png"),
            title=title,
            metric=METRIC_NAMES[data.metric],
        )
    )
    if records[0]["curvature"]:
        made.append(
            plots.curvatures([record["curvature"] for record in records], run.own("curvature.png"), title=title)
        )
    data = datasets.prepared(data, settings.features, settings.scale)
    network = build(model, settings, data)
    network.load_state_dict(run.read_state(f"part-seed-{records[0]['seed']}.model.pt"))
    network.eval()
    with torch.no_grad():
        made.append(_draw_embedding(network, data, run.own("embedding.png"), title))
    return made


TITLES: dict[str, str] = {
    "hypformer": "Hypformer",
    "gcn": "GCN",
    "mlp": "MLP",
    "knn": "Nearest neighbours",
    "euclidean": "Euclidean twin",
    "gat": "GAT",
    "sgc": "SGC",
    "appnp": "APPNP",
    "hgcn": "HGCN",
    "hgat": "HGAT",
    "lgcn": "LGCN",
    "nodeformer": "NodeFormer",
    "sgformer": "SGFormer",
}
METRIC_NAMES = {"accuracy": "accuracy", "f1": "F1"}
CLASS_NAMES = {
    "tree": ("healthy", "infected"),
    "disease_lp": ("healthy", "infected"),
    "cora": ("theory", "reinforcement", "genetic", "neural nets", "probabilistic", "case-based", "rules"),
    "citeseer": ("AI", "learning", "retrieval", "databases", "agents", "interaction"),
    "pubmed": ("experimental", "type 1", "type 2"),
}


def class_names(data: NodeData) -> Sequence[str]:
    """Return the names of the classes."""
    return CLASS_NAMES.get(data.name.split("/", maxsplit=1)[0], [f"class {label}" for label in range(data.num_classes)])


def _draw_embedding(network: nn.Module, data: NodeData, path: Path, title: str) -> Path:
    if isinstance(network, Hypformer):
        points, manifold = network.embed(data.x, data.edge_index), network.manifold_out
        xy, share = plots.principal_disk(points, manifold)
        caption = (
            "Poincaré disk: tangent vectors at the Frechet mean, two principal directions "
            f"({share:.0%} of the squared length)"
        )
    else:
        embed = getattr(network, "embed", network)
        hidden = embed(data.x, data.edge_index)
        xy, share = plots.principal_directions((hidden - hidden.mean(dim=0)).double())
        caption = f"two principal directions of the hidden features ({share:.0%} of the variance)"
    return plots.embedding(
        xy,
        data.y,
        class_names(data),
        path,
        title=f"{title}: nodes by class",
        caption=caption,
        disk=isinstance(network, Hypformer),
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give a parser one option for each hyper-parameter."""
    options.add_settings(parser, Settings, remark="what is not given is taken from the dataset's row of DEFAULTS")


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the hyper-parameters that the command line gives, ablations first."""
    given: dict[str, Any] = {}
    for ablation in getattr(arguments, "ablate", None) or ():
        given |= ABLATIONS[ablation]
    return given | options.given_settings(arguments, Settings)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    rows = "\n".join(
        f"  {dataset:11s}{'' if model == 'all' else model + ': '}"
        + " ".join(f"{key}={value}" for key, value in row.items())
        for dataset, table in DEFAULTS.items()
        for model, row in table.items()
    )
    out = options.parser(
        "experiments.node_classification",
        __doc__ or "",
        f"\ndefaults that differ from those above, by dataset:\n{rows}",
    )
    out.add_argument(
        "--dataset",
        choices=list(datasets.PROTOCOLS),
        default="tree",
        help="which graph (default tree, generated)",
    )
    out.add_argument("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    out.add_argument(
        "--protocol",
        help="which split: "
        + "; ".join(f"{name}: {', '.join(known)}" for name, known in datasets.PROTOCOLS.items() if len(known) > 1)
        + " (default the first)",
    )
    out.add_argument(
        "--baseline",
        choices=[*MODELS[1:], "all"],
        help=f"run this instead of Hypformer; all: {', '.join(USUAL)}, and a table",
    )
    out.add_argument(
        "--ablate",
        nargs="+",
        choices=list(ABLATIONS),
        metavar="PART",
        help=f"take a part of Hypformer away: {', '.join(ABLATIONS)}",
    )
    out.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="run seeds 0 .. N-1 and give mean and deviation (default 3)",
    )
    options.add_folder(out, "runs/DATASET-PROTOCOL-MODEL", checkpoint_every=25)
    options.add_machine(out)
    out.add_argument(
        "--pictures",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="save pictures with the run",
    )
    out.add_argument("--quiet", action="store_true", help="no progress lines")
    add_settings(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if training failed, 2 if what was asked cannot be done."""
    return runs.start("experiments.node_classification", parser(), _main, argv)


def _main(arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, "seeds", "checkpoint_every")
    runs.use_machine(arguments.threads, arguments.device)
    if arguments.ablate and arguments.baseline:
        raise RefusedError("--ablate takes parts of Hypformer away: leave --baseline out")
    given, stream = given_settings(arguments), None if arguments.quiet else sys.stderr

    def data(seed: int) -> NodeData:
        return datasets.load(arguments.dataset, arguments.data, protocol=arguments.protocol, seed=seed)

    first = data(0)
    models: Sequence[Model] = USUAL if arguments.baseline == "all" else [arguments.baseline or "hypformer"]
    chosen = {model: settings_for(arguments.dataset, model, given) for model in models}
    configs: dict[str, dict[str, Any]] = {
        model: {"dataset": first.name, "model": model, "settings": dataclasses.asdict(settings)}
        for model, settings in chosen.items()
    }
    # What cannot be built is refused before --overwrite removes anything.
    with options.of_the_command():
        for model, settings in chosen.items():
            if model == "knn":
                none = first.train[:0]
                nearest_neighbours(
                    first.x, first.y, first.train, none, k=settings.neighbours, classes=first.num_classes
                )
            else:
                network = build(model, settings, first)
                optimizer_for(network, settings)
                RunningMean(network, settings.average)
    words = [first.name.replace("/", "-"), arguments.baseline or "hypformer", *(arguments.ablate or ())]
    base = runs.Run(
        arguments.out or Path("runs") / "-".join(words),
        configs[models[0]] if len(models) == 1 else {"dataset": first.name, "models": list(models)},
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    table = {}
    for model, settings in chosen.items():
        run = base.child(model, configs[model]) if len(models) > 1 else base
        results = classify(
            data,
            model,
            settings,
            seeds=range(arguments.seeds),
            run=run,
            command=command,
            stream=stream,
            checkpoint_every=arguments.checkpoint_every,
            device=arguments.device,
        )
        table[model] = results
        if arguments.pictures:
            draw(results, first, run)
    print(report(table))
    if len(models) > 1:
        rows = {model: results["summary"] for model, results in table.items()}
        content = {
            "dataset": first.name,
            "note": first.note,
            "metric": first.metric,
            "command": command,
            "summary": rows,
        }
        base.write_json("table.json", content)
        if arguments.pictures:
            plots.comparison(
                {TITLES[model]: (row["test"]["mean"], row["test"]["std"]) for model, row in rows.items()},
                base.own("table.png"),
                title=f"Test {METRIC_NAMES[first.metric]} on {first.name}",
                label=f"{METRIC_NAMES[first.metric]} (%)",
                caption=f"mean and standard deviation of {arguments.seeds} seeds"
                if arguments.seeds > 1
                else "one seed",
            )
    base.finish()
    print(f"numbers{' and pictures' if arguments.pictures else ''} in {base.folder}")
    return 0


def report(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Write results side by side as text, in percent."""
    first = next(iter(table.values()))
    scores = list(first["summary"])
    seeds = len(first["seeds"])
    counted = f"{first['nodes']} nodes, {first['edges']} edges"
    measured = f"{METRIC_NAMES[first['metric']]} in percent, {seeds} seed{'s' * (seeds > 1)}"
    lines = [
        f"{first['dataset']}: {counted}; {measured}",
        first["note"],
        f"{'':16s}" + "".join(f"{key:>15s}" for key in scores) + f"{'parameters':>12s}{'s/seed':>9s}",
    ]
    for model, results in table.items():
        cells = [results["summary"][key] for key in scores]
        shown = "".join(
            f"{100 * cell['mean']:15.1f}" if seeds == 1 else f"{100 * cell['mean']:8.1f} ± {100 * cell['std']:4.1f}"
            for cell in cells
        )
        seconds = sum(record["seconds"] for record in results["seeds"]) / seeds
        lines.append(f"{TITLES[model]:16s}{shown}{results['seeds'][0]['parameters']:12d}{seconds:9.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
