"""Command lines: hyper-parameters of a dataclass as options, and what a failed run says.

A settings class is a frozen dataclass whose fields are made by ``option``; ``add_settings`` gives a parser
one option for each field, ``given_settings`` reads back those that were typed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

MOST = 3.4e38  # beyond which no float32 is finite


class RefusedError(ValueError):
    """What was asked for cannot be done; the message is one sentence for whoever typed the command."""


def option(text: str, *, default: Any, least: int = 1) -> Any:
    """Return a dataclass field that is also a command-line option; ``least`` is the smallest of whole numbers."""
    return dataclasses.field(default=default, metadata={"help": text, "least": least})


def number(word: str) -> float:
    """Read a number; JSON, in which every run says what it is, has none for infinity and nan."""
    value = float(word)
    if not abs(value) <= MOST:
        raise argparse.ArgumentTypeError(f"must be finite in float32, got {word}")
    return value


def word(value: float) -> str:
    """Write a number so that it reads back as itself: what names a part of a run must tell it from all others."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def add_settings(
    parser: argparse.ArgumentParser, settings: type, *, remark: str, several: Collection[str] = ()
) -> None:
    """Give a parser one option for each hyper-parameter.

    Args:
        parser: the parser.
        settings: a dataclass of ``option`` fields: numbers, words, truth values or ``Literal`` choices.
        remark: stands above the options in the help.
        several: names of those that take one or more values.
    """
    group = parser.add_argument_group("hyper-parameters", remark)
    kinds = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kind = kinds[field.name]
        flag = "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} (default {field.default})"
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif typing.get_origin(kind) is Literal:
            group.add_argument(flag, choices=typing.get_args(kind), help=text)
        else:
            metavar, nargs = "N" if kind is int else "X", "+" if field.name in several else None
            group.add_argument(flag, type=number if kind is float else kind, nargs=nargs, metavar=metavar, help=text)


def parser(module: str, about: str, more: str = "") -> argparse.ArgumentParser:
    """Return the command line of a script: the first paragraph of its docstring heads the help, the rest ends it."""
    head, tail = about.split("\n\n", maxsplit=1)
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=head,
        epilog=tail + more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_folder(parser: argparse.ArgumentParser, default: str, *, checkpoint_every: int | None) -> None:
    """Give a parser the options of a run's folder."""
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help=f"folder of the run (default {default})")
    add("--resume", action="store_true", help="go on with the run in that folder; finished seeds are kept")
    add(
        "--overwrite",
        action="store_true",
        help="begin anew: remove the run in that folder (the files that it wrote, no others)",
    )
    if checkpoint_every is not None:
        text = f"epochs between checkpoints (default {checkpoint_every})"
        add("--checkpoint-every", type=int, default=checkpoint_every, metavar="K", help=text)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that say what computes."""
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's choice)")
    parser.add_argument("--device", default="cpu", help="where models are trained, such as cuda (default cpu)")


def given_settings(arguments: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the hyper-parameters that the command line gives, by name: lists of those that may have several values."""
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse an option below 1; one that was not given (None) passes."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise RefusedError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check(settings: Any, *names: str) -> None:
    """Refuse hyper-parameters of these names that are not above 0, and whole numbers below their least."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if type(value) is int and value < field.metadata["least"]:
            flag = field.name.replace("_", "-")
            raise RefusedError(f"--{flag} must be at least {field.metadata['least']}, got {value}")
    for name in names:
        if not getattr(settings, name) > 0:
            raise RefusedError(f"--{name.replace('_', '-')} must be positive, got {getattr(settings, name)}")


@contextlib.contextmanager
def of_the_command() -> Iterator[None]:
    """Refuse hyper-parameters that a constructor of this library or of torch refuses; other errors pass."""
    try:
        yield
    except (ValueError, AssertionError) as error:  # torch's own attention asserts
        raised_in = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if raised_in.partition(".")[0] in {"holonomy", "torch"}:
            raise RefusedError(str(error)) from error
        raise


def guarded(
    body: Callable[[], int], stopped: str = "the same command with --resume goes on from the last checkpoint"
) -> int:
    """Run a command; return 0, 1 if training failed, 2 if what was asked cannot be done, 130 if stopped."""
    try:
        return body()
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RefusedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; {stopped}", file=sys.stderr)
        return 130
