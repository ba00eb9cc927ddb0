"""Training runs that survive being killed: folder, checkpoint, progress, early stopping, results.

A run is a folder. Everything in it is written whole or not at all (a temporary file beside the
target, flushed to disk, then renamed), and read back without running code (``weights_only``).
Random numbers are part of the checkpoint, so that a run killed at any moment and resumed ends in
the same bits on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import glob
import hashlib
import io
import json
import os
import pickle
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import geoopt
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from experiments.engine.options import RefusedError, guarded

Record = dict[str, float]
# What a JSON file or a checkpoint holds: plain values (tensors too), lists and dictionaries.
Plain = Any


class StaleError(RefusedError):
    """A file of a run does not belong to what is asked of it; the message is one clear sentence."""


LIST = "run.json"
# What every run writes sooner or later: files of these names that no run wrote are noticed before the work begins.
USUAL_FILES = ("part-*", "results.json", "table.json")


class Run:
    """The folder of one run. Its ``run.json`` says what the run is and lists the files that the run wrote.

    A run removes and replaces files of that list only. Runs within the run lie in folders of its own (``child``).

    Args:
        folder: created if it is not there.
        config: what the run is; a finished or half-finished part is only taken up by the same
            config.
        resume: take up the run that lies there.
        overwrite: remove the run that lies there; ``resume`` goes before it.

    Raises:
        StaleError: if the folder holds a run and nothing says what to do with it, if ``resume`` finds the run of
            another config, or if a file is in the way that no run wrote.
        NotADirectoryError: if there is a file in place of the folder.
    """

    def __init__(
        self, folder: str | Path, config: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.config = json.loads(json.dumps(config))
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file, a run needs a folder")
        before = listed(self.folder)
        if before and resume:
            self._check_config(before["config"])
            self._check_machine(before.get("machine"))
        elif before and (overwrite or _nothing_done(self.folder)):
            _remove(self.folder)
            before = None
        elif before:
            state = "a finished" if before["finished"] else "an unfinished"
            follow = "shows its results" if before["finished"] else "goes on with it"
            raise StaleError(
                f"{self.folder} holds {state} run: --resume {follow}, --overwrite removes it, or choose another folder"
            )
        self.files: list[str] = before["files"] if before else []
        for path in sorted(found for pattern in USUAL_FILES for found in self.folder.glob(pattern)):
            self._refuse_foreign(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in _leftovers(self.folder, self.files):
            path.unlink(missing_ok=True)
        self._write_list(finished=False)

    def _check_config(self, before: Mapping[str, Any]) -> None:
        changed = sorted(key for key in {*before, *self.config} if before.get(key) != self.config.get(key))
        if changed:
            said = "; ".join(_difference(key, before.get(key), self.config.get(key)) for key in changed)
            raise StaleError(f"{self.folder} holds another run ({said}): resume it as it was, or choose another folder")

    def _check_machine(self, before: Mapping[str, Any] | None) -> None:
        """Refuse to compute the rest with other rounding; lists of earlier versions do not say how it began."""
        if before is not None and before != machine():
            changed = [name for name, now in machine().items() if before.get(name) != now]
            said = ", ".join(f"--{name} was {before.get(name)} and is now {machine()[name]}" for name in changed)
            raise StaleError(f"{self.folder} was computed differently ({said}): resume it as it was")

    def _refuse_foreign(self, path: Path) -> None:
        if path.name not in self.files and path not in _leftovers(self.folder, self.files):
            raise StaleError(f"{path} is there already, and not from this run: move it away, or choose another folder")

    def _write_list(self, *, finished: bool) -> None:
        # Another process may be at work on other parts of the same run.
        there = listed(self.folder) or {"files": []}
        self.files = list(dict.fromkeys([*there["files"], *self.files]))
        said = {"config": self.config, "machine": machine(), "files": self.files, "finished": finished}
        write_json(self.folder / LIST, said)

    def own(self, name: str) -> Path:
        """Put a file or folder on the list of what the run writes, and return its path."""
        path = self.folder / name
        if name not in self.files:
            if path.exists():
                self._refuse_foreign(path)
            self.files.append(name)
            self._write_list(finished=False)
        return path

    def finish(self) -> None:
        """Mark the run as finished."""
        self._write_list(finished=True)

    def child(self, name: str, config: Mapping[str, Any]) -> Run:
        """Open a run in a folder of its own within this one; taken up if it is there."""
        if name not in self.files:
            if listed(self.folder / name):
                raise StaleError(
                    f"{self.folder / name} holds a run that is not part of this one: choose another folder"
                )
            self.files.append(name)
            self._write_list(finished=False)
        return Run(self.folder / name, config, resume=True)

    def path(self, name: str) -> Path:
        """Path of a file in the folder, to be read."""
        return self.folder / name

    def write_json(self, name: str, content: Plain) -> Path:
        """Write a JSON file whole or not at all."""
        return write_json(self.own(name), content)

    def write_state(self, name: str, state: Plain) -> Path:
        """Write tensors and plain values whole or not at all, with a checksum at the end."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        return write_atomically(self.own(name), lambda stream: stream.write(content + hashlib.sha256(content).digest()))

    def read_state(self, name: str) -> Plain | None:
        """Read them back, or None if the file is not there; no code in the file is run."""
        return read_state(self.path(name)) if self.path(name).exists() else None

    def part(self, key: str, compute: Callable[[], Plain]) -> Plain:
        """Return a finished part from the folder, or compute it, keep it, and drop its checkpoint.

        Args:
            key: name of the part, such as ``"seed-3"``.
            compute: called without arguments if the part is not there; returns what JSON can hold.

        Returns:
            What ``compute`` returned, now or in the run that is being resumed.
        """
        name = f"part-{key}.json"
        if not self.path(name).exists():
            result = compute()
            self.write_json(name, {"sha256": _digest(result), "result": result})
        for other in self.files:
            if other.startswith((f"part-{key}.", f"part-{key}-")) and other.endswith(".checkpoint.pt"):
                self.path(other).unlink(missing_ok=True)
        kept = read_json(self.path(name))
        if not isinstance(kept, dict) or kept.get("sha256") != _digest(kept.get("result")):
            raise StaleError(f"{self.path(name)} is not what this program wrote: delete it to go on")
        return kept["result"]


def _digest(content: Plain) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def listed(folder: Path) -> dict[str, Any] | None:
    """Return what the list of a run's folder says, or None where there is none."""
    path = folder / LIST
    if not path.exists():
        return None
    said = read_json(path)
    kinds = {"config": dict, "files": list, "finished": bool}
    kinds |= {"machine": dict} if isinstance(said, dict) and "machine" in said else {}
    if not isinstance(said, dict) or {key: type(value) for key, value in said.items()} != kinds:
        raise StaleError(f"{path} is not the list of a run's files: move it away, or choose another folder")
    # A list that somebody changed must not lead out of the folder.
    if not all(isinstance(name, str) and Path(name).name == name not in {"", ".."} for name in said["files"]):
        raise StaleError(f"{path} names files outside its folder: move it away, or choose another folder")
    return said


def _leftovers(folder: Path, files: Sequence[str]) -> set[Path]:
    """Temporary files of a killed run."""
    return {path for name in (LIST, *files) for path in _abandoned(folder / name)}


def _abandoned(path: Path) -> list[Path]:
    """Temporary files beside a path whose process is gone."""
    found: list[Path] = []
    for temporary in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        process = temporary.name.removeprefix(f"{path.name}.").removesuffix(".tmp")
        if process.isdecimal():
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                found.append(temporary)
            except (OSError, OverflowError):
                continue
    return found


def _difference(name: str, before: Any, now: Any) -> str:
    """How a setting changed; of settings that stand together, those that did."""
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return "; ".join(_difference(key, before.get(key), now.get(key)) for key in changed)
    return f"{name} was {before!r} and is now {now!r}"


def _nothing_done(folder: Path) -> bool:
    """Tell whether a run stopped before it wrote anything but its list."""
    paths = [folder / name for name in (listed(folder) or {"files": []})["files"]]
    return all(_nothing_done(path) if path.is_dir() else not path.exists() for path in paths)


def _remove(folder: Path) -> None:
    """Remove the files that a run's list names, the runs within it, and the folders that this leaves empty."""
    files = (listed(folder) or {"files": []})["files"]
    for path in (*(folder / name for name in files), *_leftovers(folder, files)):
        if path.is_dir():
            _remove(path)
        else:
            path.unlink(missing_ok=True)
    (folder / LIST).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def read_json(path: Path) -> Plain:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise StaleError(f"{path} is not JSON, or not a whole file: {error}") from None


def read_state(path: Path) -> Plain:
    """Read tensors and plain values that a run wrote; no code in the file is run."""
    # Torch does not compare the checksums within its own files.
    raw, bytes_of_checksum = path.read_bytes(), hashlib.sha256().digest_size
    content, checksum = raw[:-bytes_of_checksum], raw[-bytes_of_checksum:]
    if hashlib.sha256(content).digest() != checksum:
        raise StaleError(f"{path} is not a checkpoint of this program, or not a whole one: delete it to go on")
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StaleError(f"{path} is not a checkpoint of this program ({first})") from None


def check_result(path: Path | None, *, overwrite: bool) -> None:
    """Refuse to put a result in the place of one that is there; called before the work begins."""
    if path is not None and path.exists() and not overwrite:
        raise StaleError(f"{path} holds a result already: --overwrite replaces it, or choose another name")


def write_json(path: Path, content: Plain) -> Path:
    """Write a JSON file whole or not at all; NaN and infinity are refused."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return write_atomically(path, lambda stream: stream.write(text.encode()))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Call ``write`` on a temporary file beside ``path``, flush it to disk, and rename it.

    Raises:
        OSError: if it cannot be written; what was there before stays.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in _abandoned(path):
            left.unlink(missing_ok=True)
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and Python's own random numbers."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global state is what a checkpoint holds)
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's random numbers, as a checkpoint holds it."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def progress(label: str, total: int, stream: TextIO | None, **options: Any) -> tqdm[Any]:
    """Return tqdm's line for a loop: silent without a stream, written every ten seconds where it is no terminal."""
    live = stream is not None and stream.isatty()
    return tqdm(
        desc=label, total=total, file=stream, disable=stream is None, mininterval=0.1 if live else 10.0, **options
    )


@dataclasses.dataclass
class Trained:
    """What a training loop leaves: the best epoch, its record, and every epoch's record.

    Attributes:
        best_epoch: the first epoch, from 1, at which the watched value was best.
        best: the record of that epoch.
        history: one list per value, an entry per epoch.
        epochs: number of epochs taken.
        stopped: whether patience ran out before the epochs did.
        seconds: time taken, resumed parts included.
    """

    best_epoch: int
    best: Record
    history: dict[str, list[float]]
    epochs: int
    stopped: bool
    seconds: float


def train(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[int], float],
    evaluate: Callable[[int], Record],
    *,
    epochs: int,
    patience: int | None = None,
    watch: str = "val",
    run: Run | None = None,
    key: str = "run",
    checkpoint_every: int = 50,
    show: Sequence[str] = ("loss", "val"),
    label: str = "",
    stream: TextIO | None = sys.stderr,
) -> Trained:
    """Train, keep the state of the best epoch, and leave it in the model.

    An epoch is ``step(epoch)``, which returns the loss, then ``evaluate(epoch)``, which returns a
    record of numbers by name. The best epoch is the first at which ``record[watch]`` is largest.
    With a run, a checkpoint is written every ``checkpoint_every`` epochs, and one that lies there
    is taken up.

    Args:
        model: its ``state_dict`` is what is kept.
        optimizer: the optimizer that ``step`` uses.
        step: one epoch of training.
        evaluate: measures the model; may return other numbers to keep, such as curvatures.
        epochs: number of epochs at most.
        patience: stop after so many epochs without a better one; None never stops.
        watch: the value that chooses the epoch; larger is better.
        run: where checkpoints go; None writes none.
        key: name of this part of the run.
        checkpoint_every: epochs between checkpoints.
        show: names of the values on the progress line.
        label: beginning of the progress line.
        stream: where the progress line goes; None for silence.

    Returns:
        What the training left; the model holds the best epoch's state.

    Raises:
        FloatingPointError: if the loss is not finite.
        StaleError: if the checkpoint does not fit the model.
    """
    if epochs < 1:
        raise RefusedError(f"epochs must be at least 1, got {epochs}")
    name = f"part-{key}.checkpoint.pt"
    history: dict[str, list[float]] = {}
    best_epoch, best, best_state, done, spent = 0, {}, {}, 0, 0.0
    saved = run.read_state(name) if run is not None else None
    if saved is not None:
        try:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            history, best_epoch, best = saved["history"], saved["best_epoch"], saved["best"]
            best_state, done, spent = saved["best_state"], saved["epoch"], saved["seconds"]
            restore_random_state(saved["random"])
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            path = run.path(name) if run is not None else name
            raise StaleError(f"{path} does not fit this model ({str(error).splitlines()[0]})") from None
    start = time.monotonic() - spent
    line = progress(label, epochs, stream, initial=done, unit="epoch")
    record: Record = {}
    stopped = False
    for epoch in range(done + 1, epochs + 1):
        if patience is not None and best_epoch and epoch - 1 - best_epoch >= patience:
            stopped = True
            break
        loss = step(epoch)
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at epoch {epoch}: try a smaller learning rate")
        record = {"loss": loss, **evaluate(epoch)}
        for entry, value in record.items():
            history.setdefault(entry, []).append(value)
        done = epoch
        if not best or record[watch] > best[watch]:
            best_epoch, best = epoch, record
            best_state = {entry: value.detach().clone() for entry, value in model.state_dict().items()}
        if run is not None and epoch % checkpoint_every == 0:
            run.write_state(
                name,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": random_state(),
                    "epoch": epoch,
                    "history": history,
                    "best_epoch": best_epoch,
                    "best": best,
                    "best_state": best_state,
                    "seconds": time.monotonic() - start,
                },
            )
        line.set_postfix({entry: record[entry] for entry in show if entry in record}, refresh=False)
        line.update()
    model.load_state_dict(best_state)
    line.set_postfix({entry: best[entry] for entry in show if entry in best} | {"best epoch": best_epoch})
    line.close()
    return Trained(best_epoch, best, history, done, stopped, time.monotonic() - start)


# Where models of this process are trained.
_device = ["cpu"]


def machine() -> dict[str, int | str]:
    """What the bits of a result depend on beside its settings, by the names of the options."""
    return {"threads": torch.get_num_threads(), "device": _device[0]}


def use_machine(threads: int | None, device: str) -> None:
    """Set the number of threads, if one is given, and check that the device is there."""
    if threads is not None:
        if threads < 1:
            raise RefusedError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RefusedError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None
    _device[0] = device


def moved(thing: Any, device: str) -> Any:
    """Return a copy of tensors, and of dataclasses, lists and dictionaries that hold some, on a device."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {name: moved(value, device) for name, value in thing.items()}
    if isinstance(thing, list):
        return [moved(value, device) for value in thing]
    if not dataclasses.is_dataclass(thing):
        return thing
    out = copy.copy(thing)
    for field in dataclasses.fields(thing):
        object.__setattr__(out, field.name, moved(getattr(thing, field.name), device))
    return out


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Return mean, sample standard deviation (0 for a single value) and number of values."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "n": len(values)}


def versions() -> dict[str, str]:
    """Return what numbers depend on: versions, processor kind, threads, commit."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "geoopt": geoopt.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of the source, ``-dirty`` behind it where files differ, or ``unknown`` outside a repository.

    Results that a run writes are no source: they may differ.
    """
    asked = (
        ["git", "rev-parse", "HEAD"],
        ["git", "diff", "--name-only", "HEAD", ":/", ":(top,exclude)benchmarks/results"],
    )
    here = Path(__file__).parent
    try:
        answers = [subprocess.run(words, cwd=here, capture_output=True, text=True, check=True) for words in asked]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    found, changed = (answer.stdout.strip() for answer in answers)
    return found + ("-dirty" if changed else "")


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the command that starts this run, as one would type it."""
    return shlex.join(["python", "-m", module, *arguments])


def start(
    module: str,
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace, str], int],
    argv: Sequence[str] | None,
    **stopped: str,
) -> int:
    """Call ``body`` with what the command line says and with the command; return as ``guarded`` does."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    return guarded(lambda: body(arguments, command_line(module, words)), **stopped)
