"""Several models on one question, with the same data, the same epochs and the same search for each.

An experiment says what its question is (a ``Question``): its data, its models, a loss, and how a model is measured.
Here is the rest: every model is trained with every seed; its state at the first epoch of best validation value is
kept, and only then measured on the test data. Where the validation set is a part of the training set, the model is
trained once more before that, on all of it. Where a hyper-parameter that every question has is given several values,
each model runs all combinations with the first seed and goes on with the one of best validation value. The result is
one JSON file with the command that made it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.engine import options, plots, runs
from experiments.engine.options import RefusedError, option

RULE = (
    "the same epochs and the same search for every model, by the validation value of the first seed; "
    "test data measured once, with the state of the first epoch of best validation value"
)
AGAIN = (
    "; before that trained once more from the start, with what was held out among the training examples and a schedule "
    "of as many epochs"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyper-parameters that every question has; each is an option of the command line."""

    hidden: int = option("width of the model", default=64)
    layers: int = option("layers of the model", default=3)
    heads: int = option("attention heads", default=4)
    dropout: float = option("dropout", default=0.0)
    lr: float = option("largest learning rate", default=0.001)
    weight_decay: float = option("weight decay of AdamW", default=0.0001)
    warmup: float = option("share of the steps in which the learning rate grows to its largest", default=0.1)
    clip: float = option("largest norm of the gradient", default=1.0)
    batch: int = option("examples in a batch", default=32)
    epochs: int = option("epochs", default=20)
    budget: int = option("parameters of every model, none has more; 0 gives all --hidden", default=0, least=0)


SEARCHED = tuple(field.name for field in dataclasses.fields(Settings) if field.name != "budget")


@dataclasses.dataclass(frozen=True)
class Question:
    """What an experiment compares.

    Attributes:
        module: how the script is started, such as ``"experiments.long_range_chains"``.
        text: its docstring; the first paragraph says what it is.
        models: title of each model by name.
        datasets: what each dataset is, by name; the first needs no file.
        settings: the dataclass of the hyper-parameters.
        load: called with the name of a dataset, the folder of the files or None, the settings and a seed.
        size: number of training examples of the data.
        build: makes a model for the data.
        loss: of a model on the training examples with the given indices (m,).
        validate: one number, larger is better.
        test: every score of the test data by name.
        score: name of the main one, and how to call it on a picture.
        percent: whether scores are shares, to be shown in percent.
        defaults: settings of a dataset that differ from those of the dataclass.
        draw: draws more pictures, from models of the first seed by name, their data and the run whose files they are.
        batches: cuts the training examples into batches of about the given size, anew for each epoch; at random where
            it is left out.
        usual: the models that are compared where none are named; all where it is left out.
        scores: in place of ``score``, for some datasets.
        place: puts data on a device; where they stay, the loss moves what a batch needs.
        whole: makes data in which what was held out to validate is among the training examples; only where it is a
            part of them.
        optimizer: called with the parameters, ``lr`` and ``weight_decay``.
        details: what else JSON holds of a measured model, of the first seed's in a table.
        sized: whether ``build`` itself keeps to the budget; else a model's width is chosen so that it does.
    """

    module: str
    text: str
    models: Mapping[str, str]
    datasets: Mapping[str, str]
    settings: type[Settings]
    load: Callable[[str, Path | None, Any, int], Any]
    size: Callable[[Any], int]
    build: Callable[[str, Any, Any], nn.Module]
    loss: Callable[[nn.Module, Any, Tensor], Tensor]
    validate: Callable[[nn.Module, Any], float]
    test: Callable[[nn.Module, Any], dict[str, float]]
    score: tuple[str, str]
    percent: bool = True
    defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    draw: Callable[[Mapping[str, nn.Module], Any, runs.Run], object] | None = None
    batches: Callable[[Any, int], Sequence[Tensor]] | None = None
    usual: Sequence[str] = ()
    scores: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    place: Callable[[Any, str], Any] = runs.moved
    whole: Callable[[Any], Any] | None = None
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    details: Callable[[nn.Module, Any], Any] | None = None
    sized: bool = False

    def settings_for(self, dataset: str, given: Mapping[str, Any] | None = None) -> Any:
        """Return the settings of a dataset, with what is given on top."""
        return self.settings(**{**self.defaults.get(dataset, {}), **(given or {})})

    def score_of(self, dataset: str) -> tuple[str, str]:
        """Return the name of a dataset's main score, and how to call it."""
        return self.scores.get(dataset, self.score)

    @property
    def rule(self) -> str:
        """How models are chosen and measured."""
        return RULE + (AGAIN if self.whole is not None else "")

    def cut(self, data: Any, batch: int) -> Sequence[Tensor]:
        """Cut the training examples into the batches of an epoch."""
        if self.batches is not None:
            return self.batches(data, batch)
        return torch.randperm(self.size(data)).split(batch)


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return the share of the largest learning rate at a step from 0: linear growth, then half a cosine to zero.

    Not one of torch's schedulers: those hold a count that a resumed run would have to restore, and want the number of
    steps before the first epoch is cut into batches.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def fit(
    question: Question,
    model: str,
    settings: Any,
    data: Any,
    seed: int,
    run: runs.Run | None = None,
    *,
    label: str = "",
    stream: TextIO | None = None,
    checkpoint_every: int = 5,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train one model with one seed, and measure it once, at its best validation epoch.

    Args:
        question: what is asked.
        model: which one.
        settings: hyper-parameters.
        data: as the question loads it.
        seed: seed of weights, batches and dropout.
        run: where checkpoints and the best weights go, or None.
        label: beginning of the progress line.
        stream: where progress goes, or None.
        checkpoint_every: epochs between checkpoints.
        device: where it is trained.

    Returns:
        What JSON holds of it: scores, epochs, seconds, parameters, history.
    """
    key = f"seed-{seed}"
    train = functools.partial(
        _trained, question, model, seed, device, run=run, stream=stream, checkpoint_every=checkpoint_every
    )
    network, trained = train(settings, data, question.validate, key=key, label=label)
    seconds = trained.seconds
    if question.whole is not None:
        data = question.whole(data)
        # With a schedule that ends there: in the middle of a longer one, where the steps are long, nothing has settled.
        settings = dataclasses.replace(settings, epochs=trained.best_epoch)
        network, again = train(settings, data, None, key=f"{key}-whole", label=f"{label}  whole")
        seconds += again.seconds
    if run is not None:
        run.write_state(f"part-{key}.model.pt", network.state_dict())
    network.eval()
    with torch.no_grad():
        placed = question.place(data, device)
        scores = question.test(network, placed)
        details = {} if question.details is None else {"details": question.details(network, placed)}
    return {
        "seed": seed,
        "val": trained.best["val"],
        "scores": scores,
        "best_epoch": trained.best_epoch,
        "seconds": round(seconds, 1),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "history": trained.history,
        **details,
    }


def built(question: Question, model: str, settings: Any, data: Any, device: str = "cpu") -> tuple[nn.Module, Optimizer]:
    """Build a network and its optimizer; refuse settings that they refuse."""
    with options.of_the_command():
        network = made(question, model, settings, data).to(device)
        return network, question.optimizer(network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)


def made(question: Question, model: str, settings: Any, data: Any) -> nn.Module:
    """Build a network, of the largest width that the budget allows, if there is one and ``build`` does not see to it.

    A model that refuses a width, for its heads do not divide it, gets multiples of the heads.
    """
    if not settings.budget or question.sized:
        return question.build(model, settings, data)

    def of(width: int) -> nn.Module:
        return question.build(model, dataclasses.replace(settings, hidden=width), data)

    try:
        with torch.device("meta"):
            of(settings.heads + 1)
        unit = 1
    except (ValueError, AssertionError):  # torch's own attention asserts
        unit = settings.heads
    return of(unit * largest(lambda n: of(unit * n), settings.budget, 1))


def largest(make: Callable[[int], nn.Module], budget: int, least: int) -> int:
    """Return the largest number, not below ``least``, of which a model has no more parameters than the budget.

    Raises:
        ValueError: if there is none.
    """

    def size(number: int) -> int:
        # Nothing is drawn or stored on this device: only sizes are wanted.
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make(number).parameters())

    if size(least) > budget:
        raise RefusedError(f"--budget must be at least {size(least)} for the smallest model, got {budget}")
    low, high = least, 2 * least
    while size(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle)
    return low


def _trained(
    question: Question,
    model: str,
    seed: int,
    device: str,
    settings: Any,
    data: Any,
    validate: Callable[[nn.Module, Any], float] | None,
    **training: Any,
) -> tuple[nn.Module, runs.Trained]:
    """Train a new network; keep the epoch of best validation value, or the last one where nothing is validated."""
    runs.seed_everything(seed)
    network, optimizer = built(question, model, settings, data, device)
    data = question.place(data, device)
    size = question.size(data)

    def epoch_of_training(epoch: int) -> float:
        network.train()
        cut = question.cut(data, settings.batch)
        total, done = 0.0, (epoch - 1) * len(cut)
        for place, chosen in enumerate(cut):
            share = schedule(done + place, settings.epochs * len(cut), settings.warmup)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * share
            optimizer.zero_grad()
            loss = question.loss(network, data, chosen)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
            optimizer.step()
            total += loss.item() * len(chosen)
        return total / size

    @torch.no_grad()
    def evaluate(epoch: int) -> runs.Record:
        network.eval()
        return {"epoch": epoch} if validate is None else {"val": validate(network, data)}

    watch = "epoch" if validate is None else "val"
    return network, runs.train(
        network, optimizer, epoch_of_training, evaluate, epochs=settings.epochs, watch=watch, **training
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One question on one dataset, in one folder.

    Attributes:
        question: what is asked.
        dataset: of which data.
        data: the folder of the files, or None.
        base: the run whose parts these are.
        checkpoint_every: epochs between checkpoints.
        stream: where progress goes, or None.
        device: where models are trained.
        searched: names of the settings that have several values; the learning rate names a run without them, too.
    """

    question: Question
    dataset: str
    data: Path | None
    base: runs.Run
    searched: Sequence[str] = ("lr",)
    checkpoint_every: int = 5
    stream: TextIO | None = None
    device: str = "cpu"

    def name(self, settings: Any) -> str:
        """Return what is searched, such as ``lr-0.001`` or ``lr-0.001-dropout-0.5``."""
        return "-".join(f"{name.replace('_', '-')}-{options.word(getattr(settings, name))}" for name in self.searched)

    def run(self, model: str, settings: Any) -> runs.Run:
        """Return the run of a model with these settings."""
        config = {"dataset": self.dataset, "model": model, "settings": dataclasses.asdict(settings)}
        return self.base.child(f"{model}-{self.name(settings)}", config)

    def cell(self, model: str, settings: Any, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Return the records of some seeds of a model, computed now or before."""
        run = self.run(model, settings)
        records = []
        for seed in seeds:

            def compute(seed: int = seed) -> dict[str, Any]:
                return fit(
                    self.question,
                    model,
                    settings,
                    self.question.load(self.dataset, self.data, settings, seed),
                    seed,
                    run,
                    label=f"{self.dataset}  {model}  {self.name(settings)}  seed {seed}",
                    stream=self.stream,
                    checkpoint_every=self.checkpoint_every,
                    device=self.device,
                )

            records.append(run.part(f"seed-{seed}", compute))
        return records

    def row(self, model: str, tried: Sequence[Any], seeds: Sequence[int]) -> dict[str, Any]:
        """Try these settings with the first seed, and run the best with all seeds."""
        searched = [self.cell(model, one, seeds[:1])[0]["val"] for one in tried]
        chosen = tried[max(range(len(tried)), key=searched.__getitem__)]
        records = self.cell(model, chosen, seeds)
        names = list(records[0]["scores"])
        return {
            "title": self.question.models[model],
            "settings": dataclasses.asdict(chosen),
            "search": {self.name(one): value for one, value in zip(tried, searched, strict=True)},
            "parameters": records[0]["parameters"],
            "summary": {name: runs.summary([record["scores"][name] for record in records]) for name in names},
            "scores": {name: [record["scores"][name] for record in records] for name in names},
            "val": [record["val"] for record in records],
            "best_epochs": [record["best_epoch"] for record in records],
            "seconds": [record["seconds"] for record in records],
            "history": [record["history"] for record in records],
            **{key: value for key, value in records[0].items() if key == "details"},
        }

    def first_network(self, model: str, settings: Any, data: Any, seed: int) -> nn.Module:
        """Return a trained model of a seed, as it was measured."""
        network = made(self.question, model, settings, data)
        network.load_state_dict(runs.read_state(self.run(model, settings).path(f"part-seed-{seed}.model.pt")))
        return network.eval()


def parser(question: Question) -> argparse.ArgumentParser:
    """Return the command line of a question."""
    differ = "; ".join(
        f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}"
        for name, row in question.defaults.items()
        if row
    )
    out = options.parser(question.module, question.text)
    add = out.add_argument
    names = list(question.datasets)
    known = "; ".join(f"{name}: {text}" for name, text in question.datasets.items()).replace("%", "%%")
    add("--dataset", choices=names, default=names[0], help=f"{known} (default {names[0]})")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add(
        "--models",
        nargs="+",
        choices=list(question.models),
        default=list(question.usual or question.models),
        metavar="MODEL",
        help=f"of {', '.join(question.models)} (default {', '.join(question.usual) or 'all'})",
    )
    add("--seeds", type=int, default=2, metavar="N", help="run seeds 0 .. N-1 (default 2)")
    options.add_folder(out, "runs/EXPERIMENT-DATASET", checkpoint_every=5)
    add("--json", type=Path, metavar="FILE", help="at the end also write the table there, without the histories")
    options.add_machine(out)
    add("--pictures", action=argparse.BooleanOptionalAction, default=True, help="save pictures with the runs")
    add("--quiet", action="store_true", help="no progress lines")
    remark = "of every model; of several values each model gets the one of best validation value"
    remark += f"; defaults that differ from those below are, for {differ}" if differ else ""
    options.add_settings(out, question.settings, remark=remark, several=SEARCHED)
    return out


def main(question: Question, argv: Sequence[str] | None = None) -> int:
    """Run the command line of a question; return 0, 1 if training failed, 2 if what was asked cannot be done."""
    return runs.start(question.module, parser(question), functools.partial(_main, question), argv)


def _main(question: Question, arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, "seeds", "checkpoint_every")
    runs.use_machine(arguments.threads, arguments.device)
    given = options.given_settings(arguments, question.settings)
    several = {name: given.pop(name) for name in SEARCHED if name in given}
    tried = [
        question.settings_for(arguments.dataset, {**given, **dict(zip(several, values, strict=True))})
        for values in itertools.product(*several.values())
    ]
    for settings in tried:
        options.check(settings, "lr", "clip")
        for name in ("dropout", "warmup"):
            if not 0 <= getattr(settings, name) <= 1:
                raise RefusedError(f"--{name} must lie in [0, 1], got {getattr(settings, name)}")
    runs.check_result(arguments.json, overwrite=arguments.overwrite)
    with options.of_the_command():
        data = question.load(arguments.dataset, arguments.data, tried[0], 0)
    # What cannot be built is refused before --overwrite removes anything.
    for model, settings in itertools.product(arguments.models, tried):
        built(question, model, settings, data)
    name = question.module.rpartition(".")[2]
    base = runs.Run(
        arguments.out or Path("runs") / f"{name}-{arguments.dataset}",
        {"question": name, "dataset": arguments.dataset},
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    comparison = Comparison(
        question,
        arguments.dataset,
        arguments.data,
        base,
        searched=list(dict.fromkeys(["lr", *(name for name, values in several.items() if len(values) > 1)])),
        checkpoint_every=arguments.checkpoint_every,
        stream=None if arguments.quiet else sys.stderr,
        device=arguments.device,
    )
    content: dict[str, Any] = {
        "question": name,
        "dataset": arguments.dataset,
        "note": question.datasets[arguments.dataset],
        "score": question.score_of(arguments.dataset)[0],
        "rule": question.rule,
        "command": command,
        "versions": runs.versions(),
        "models": {},
    }
    for model in arguments.models:
        content["models"][model] = comparison.row(model, tried, range(arguments.seeds))
        base.write_json("table.json", content)
    if arguments.pictures:
        draw(comparison, content, data)
    base.finish()
    # Last: a run that is killed before can be resumed with the same words.
    if arguments.json:
        runs.write_json(arguments.json, without_histories(content))
    print(text(content, percent=question.percent))
    print(f"\nnumbers{' and pictures' if arguments.pictures else ''} in {base.folder}")
    return 0


def without_histories(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without every epoch's values."""
    rows = {
        model: {key: value for key, value in row.items() if key != "history"}
        for model, row in content["models"].items()
    }
    return {**content, "models": rows}


def draw(comparison: Comparison, content: Mapping[str, Any], data: Any) -> None:
    """Save the pictures: the main score of each model, validation over the epochs, and the question's own."""
    question, rows = comparison.question, content["models"]
    score, label = question.score_of(comparison.dataset)
    title = f"{question.module.rpartition('.')[2].replace('_', ' ')}: {comparison.dataset}"
    plots.comparison(
        {row["title"]: (row["summary"][score]["mean"], row["summary"][score]["std"]) for row in rows.values()},
        comparison.base.own("table.png"),
        title=title,
        label=label,
        factor=100.0 if question.percent else 1.0,
        digits=1 if question.percent else 3,
        caption="mean and standard deviation over seeds, test data",
    )
    plots.validation_curves(
        {row["title"]: [history["val"] for history in row["history"]] for row in rows.values()},
        comparison.base.own("training.png"),
        title=title,
    )
    if question.draw is not None:
        networks = {
            model: comparison.first_network(model, question.settings(**row["settings"]), data, 0)
            for model, row in rows.items()
        }
        with torch.no_grad():
            question.draw(networks, data, comparison.base)


def text(content: Mapping[str, Any], *, percent: bool) -> str:
    """Write the table as Markdown."""
    rows = content["models"].values()
    scores = list(next(iter(rows))["summary"])
    factor, digits, unit = (100, 1, ", %") if percent else (1, 4, "")
    lines = [
        f"| {content['dataset']}{unit} | {' | '.join(scores)} | seeds | parameters | s/seed |",
        "|---" * (len(scores) + 4) + "|",
    ]
    for row in rows:
        cells = [row["summary"][name] for name in scores]
        shown = " | ".join(f"{factor * cell['mean']:.{digits}f} ± {factor * cell['std']:.{digits}f}" for cell in cells)
        seconds = statistics.fmean(row["seconds"])
        lines.append(f"| {row['title']} | {shown} | {cells[0]['n']} | {row['parameters']} | {seconds:.1f} |")
    return "\n".join(lines)
