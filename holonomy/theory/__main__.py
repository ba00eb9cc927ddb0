"""Measure the papers' claims: one line for each when it is done, then a table. Exit code 1 if one is violated.

``python -m holonomy.theory [--claims NAME ...] [--out DIR]``. With ``--out`` also ``theory.json`` and ``theory.html``.
A claim that is known to fail is not counted as violated.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from holonomy.theory.claims.molecules import read_molecules
from holonomy.theory.claims.report import Run, as_html, as_json, as_table, said
from holonomy.theory.claims.verdict import Claim, Trial, Verdict
from holonomy.theory.claims.verify import PICTURES, select, verify

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holonomy.theory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--claims", nargs="+", metavar="NAME", help="claims or families; all if left out")
    parser.add_argument("--list", action="store_true", help="list the claims and stop")
    parser.add_argument("--device", type=_device, default="cpu", help="where to compute, such as cuda")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float64", help="of the tensors that are drawn")
    parser.add_argument("--budget", type=_positive, default=1.0, help="multiplies the number of draws")
    parser.add_argument("--seed", type=_seed, default=0, help="of the draws")
    parser.add_argument("--data", type=_qm9, metavar="FOLDER", help="with qm9_graphs.npz, for the claims on molecules")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write theory.json and theory.html there")
    options = parser.parse_args(arguments)
    if options.out is not None and not options.list:
        # Before the claims are measured, not after.
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --out: {error}")
    return options


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device of this machine") from error
    return name


def _qm9(text: str) -> Path:
    folder = Path(text)
    if not (folder / "qm9_graphs.npz").is_file():
        raise argparse.ArgumentTypeError(f"must be a folder with qm9_graphs.npz, got {text}")
    return folder


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from error
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0 on, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _options(arguments)
    try:
        claims = select(options.claims)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.list:
        width = max(len(claim.name) for claim in claims)
        sys.stdout.writelines(f"{claim.name:{width}}  {claim.source}: {claim.statement}\n" for claim in claims)
        return 0
    # Tensors here are small: more threads gain nothing, and wait for each other where cores are shared.
    torch.set_num_threads(1)
    names = ("seed", "device", "dtype", "budget")
    run = Run({name: getattr(options, name) for name in names} | {"data": options.data and str(options.data)})
    started = time.perf_counter()
    last = started
    molecules = None if options.data is None else read_molecules(np.load(options.data / "qm9_graphs.npz"))

    def watch(claim: Claim, verdict: Verdict, trials: list[Trial]) -> None:
        nonlocal last
        run.add(claim, verdict, trials)
        now = time.perf_counter()
        done = f"[{len(run.claims):{len(str(len(claims)))}}/{len(claims)}]"
        sys.stdout.write(f"{done} {claim.name:34} {said(verdict):16} {now - last:5.1f} s\n")
        sys.stdout.flush()
        last = now

    verify(
        options.claims,
        seed=options.seed,
        device=options.device,
        dtype=_DTYPES[options.dtype],
        budget=options.budget,
        molecules=molecules,
        watch=watch,
    )
    sys.stdout.write(f"\n{as_table(run.verdicts)}\n\n{len(claims)} claims in {time.perf_counter() - started:.0f} s\n")
    if options.out is not None:
        (options.out / "theory.json").write_text(as_json(run) + "\n", encoding="utf-8")
        (options.out / "theory.html").write_text(as_html(run, PICTURES), encoding="utf-8")
        sys.stdout.write(f"written: {options.out / 'theory.json'}, {options.out / 'theory.html'}\n")
    if run.surprising:
        sys.stdout.write(f"violated, and should hold: {', '.join(run.surprising)}\n")
    return 1 if run.surprising else 0


if __name__ == "__main__":
    sys.exit(main())
