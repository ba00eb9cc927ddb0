"""Every benchmark with its targets: a table, a document with machine, versions and date, and plots.

    python -m benchmarks [NAME ...] [--device cuda] [--seconds 8] [--threads 1 2] [--fresh] [--out FOLDER]

A name is that of a case or its beginning; without names all run, each in a process of its own. Contenders take turns
after it was checked that their results agree; what is printed are medians and quartiles of ratios within a round.
Targets are those of one thread, or of a CUDA device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.case import Case
from benchmarks.measure import Measured, Row, figures, measured, rows
from benchmarks.picture import draw
from benchmarks.record import Record
from benchmarks.table import page

RESULTS = Path(__file__).parent / "results"
# In the order of PERFORMANCE's sections; each holds CASES.
TOPICS = (
    "hyperbolic_attention",
    "training_step",
    "layers",
    "manifold",
    "optimizer",
    "distances",
    "simplicial",
    "chromatic",
    "equivariant",
    "performer",
    "sparse_gradient",
    "propagation",
    "models",
    "triton_kernels",
)


def chosen(names: list[str]) -> list[Case]:
    cases = [case for topic in TOPICS for case in importlib.import_module(f"benchmarks.{topic}").CASES]
    for name in names:
        if not any(case.name.startswith(name) for case in cases):
            known = ", ".join(case.name for case in cases)
            raise SystemExit(f"NAME must begin the name of a case, got {name!r}; there are {known}.")
    return [case for case in cases if not names or case.name.startswith(tuple(names))]


def run(case: Case, device: torch.device, counts: list[int], budget: float) -> dict[int, tuple[dict, list[Row]]]:
    """Every size at every count of threads, and the figures once."""
    if device.type not in case.devices:
        return {}
    done: dict[int, tuple[dict[int, Measured], list[Row]]] = {}
    for threads in counts:
        found = {size: measured(case, size, device, threads, budget) for size in case.sizes}
        done[threads] = found, rows(case, found, memory=threads == 1)
        if threads == counts[0]:
            done[threads][1].extend(figures(case, device))
    return done


def show(case: Case, done: dict[int, tuple[dict, list[Row]]], counts: list[int]) -> None:
    print(f"\n{case.name}: {case.title}")
    if not done:
        print(f"  not measured: it needs {' or '.join(case.devices)}")
    for threads, (_, found) in done.items():
        judged = threads == counts[0]
        print(f"  {threads} thread{'s' * (threads > 1)}")
        for row in found:
            at = "" if row.size is None else f"{row.size:,} {case.unit}"
            spread = "" if row.quartiles is None else "[{:.3g}, {:.3g}]".format(*row.quartiles)
            target = f"target {row.target}" if judged and row.target else ""
            missed = "" if row.met is not False or not judged else f"  MISSED  {row.note}"
            print(f"    {row.name:52.52} {at:>18} {row.value:9.3g} {spread:16} {target}{missed}")
    sys.stdout.flush()


def one(case: Case, record: Record, options: argparse.Namespace) -> None:
    """Measure a case, print it, and put it into the document and a picture."""
    device = torch.device(options.device)
    counts = options.threads or ([1] if device.type == "cuda" else sorted({1, torch.get_num_threads()}))
    torch.backends.cuda.matmul.allow_tf32 = False  # where it would lie
    done = run(case, device, counts, options.seconds)
    show(case, done, counts)
    record.keep(case, done)
    record.path.with_suffix(".md").write_text(page(record.document, [c.name for c in chosen([])]), encoding="utf-8")
    if done and len(done[counts[0]][0]) > 1:
        draw(case, done[counts[0]][0], options.out / f"bench_{device.type}_{case.name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=8.0, help="for the rounds of one size (default 8)")
    parser.add_argument("--threads", type=int, nargs="+", help="counts of threads (default 1, and all)")
    parser.add_argument("--fresh", action="store_true", help="do not go on where a run was killed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the document and the plots")
    parser.add_argument("--alone", action="store_true", help="measure the one case NAME in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"bench_{options.device}.json"
    record = Record(path, torch.device(options.device), {"seconds": options.seconds})
    if options.alone:
        one(next(case for case in chosen(options.names) if case.name == options.names[0]), record, options)
        return
    asked = record.ask([case.name for case in chosen(options.names)], fresh=options.fresh)
    for place, name in enumerate(asked, 1):
        print(f"[{place}/{len(asked)}] {name}", file=sys.stderr, flush=True)
        # A process each: what one case leaves of the allocator's state would be measured in the next.
        words = ["--device", options.device, "--seconds", str(options.seconds), "--out", str(options.out), "--alone"]
        threads = ["--threads", *map(str, options.threads)] if options.threads else []
        subprocess.run([sys.executable, "-m", "benchmarks", name, *words, *threads], check=True)
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    judged = [row for name in asked for row in next(iter(cases[name]["threads"].values()), {"rows": []})["rows"]]
    missed = sum(row["met"] is False for row in judged)
    print(f"\n{missed} target{'s' * (missed != 1)} missed; {path.name}, a page and plots lie in the folder of results.")


if __name__ == "__main__":
    main()
