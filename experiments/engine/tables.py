"""The command line of a script that makes one table, beside ``comparisons``: its options, its run, what it leaves."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.engine import options, runs
from experiments.engine.options import RefusedError


@dataclasses.dataclass(frozen=True)
class Script:
    """What one script asks, and how it answers.

    Attributes:
        module: how the script is started, such as ``"experiments.tree_maps"``.
        about: its docstring: the first paragraph heads the help, the rest ends it.
        options: gives the parser the script's own options.
        config: what tells one run from another; refuses what cannot be done.
        compute: the content of the result, by parts of the run.
        text: what is printed of a content.
        folder: of the run, if none is given; options in braces.
        at_least_one: names of options that are counts.
        cpu_only: whether a GPU has nothing to do.
    """

    module: str
    about: str
    options: Callable[[argparse.ArgumentParser], None]
    config: Callable[[argparse.Namespace], Mapping[str, Any]]
    compute: Callable[[argparse.Namespace, runs.Run], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    folder: str
    at_least_one: Sequence[str] = ()
    cpu_only: bool = False


def parser(script: Script) -> argparse.ArgumentParser:
    """Return the command line."""
    out = options.parser(script.module, script.about)
    script.options(out)
    options.add_folder(out, re.sub(r"\{(.*?)\}", lambda name: name[1].upper(), script.folder), checkpoint_every=None)
    out.add_argument("--json", type=Path, metavar="FILE", help="at the end also write the result there")
    options.add_machine(out)
    out.add_argument("--quiet", action="store_true", help="no progress lines")
    return out


def main(script: Script, argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 if what was asked cannot be done."""
    return runs.start(script.module, parser(script), functools.partial(_main, script), argv)


def _main(script: Script, arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, *script.at_least_one)
    config = script.config(arguments)
    runs.use_machine(arguments.threads, arguments.device)
    if script.cpu_only and arguments.device != "cpu":
        raise RefusedError(f"--device must be cpu: the graphs here are too small for {arguments.device}")
    runs.check_result(arguments.json, overwrite=arguments.overwrite)
    folder = arguments.out or Path(script.folder.format(**vars(arguments)))
    run = runs.Run(folder, config, resume=arguments.resume, overwrite=arguments.overwrite)
    content = {"command": command, "versions": runs.versions()} | script.compute(arguments, run)
    run.write_json("results.json", content)
    run.finish()
    if arguments.json:
        runs.write_json(arguments.json, content)
    print(script.text(content))
    return 0
