"""CPU time and memory of a training step on a table in a file mapped to memory, or in memory, at sizes that are given.

python -m benchmarks.mapped_table 10000 1000000000 [--memory] [--folder FOLDER] [--read-ahead] [--json FILE]

A step looks 512 random rows of 10 dimensions up, and moves them. It takes turns with the same step on a table of 10,000
rows, and the median of the ratios is written beside the time: of the rows' first visits, each of which brings a page of
the file in, and of their second ones. A row of the file holds a point and its moments, so that this is one page. The
file starts as zeros, which take no room on the disk: only rows that were named do. Each size has a process of its own,
whose peak is that of the operating system. The system reads pages ahead of those that a process asks for, unless it is
told that rows are read in no order; ``--read-ahead`` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam

DIM, LOOKED_UP, STEPS, SHORT = 10, 512, 60, 10_000


def mapped(path, rows, width, *, read_ahead):
    with path.open("a+b") as file:
        file.truncate(4 * rows * width)
        memory = mmap.mmap(file.fileno(), 0)
    if not read_ahead:
        memory.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, width)


def stepper(rows, path, *, read_ahead):
    """A step on the rows that are named, of a table in a file, or in memory without one; it returns its CPU seconds."""
    manifold = Lorentz(-1.0, learnable=True)
    table = LorentzEmbedding(rows, DIM, manifold, sparse=True, device=None if path is None else "meta")
    if path is not None:
        file = mapped(path, rows, 2 * DIM + 3, read_ahead=read_ahead)
        points, moments, squares = file.split([DIM + 1, DIM + 1, 1], dim=1)
        table.load_state_dict({"unit": points}, assign=True, strict=False)
    optimizer = RiemannianAdam(table.parameters(), lr=0.1)
    if path is not None:
        optimizer.state[table.unit].update(step=0, exp_avg=moments, exp_avg_sq=squares.expand(rows, DIM + 1))

    def step(index):
        start = time.process_time()
        optimizer.zero_grad()
        (table(index)[:, 1:] - 1).square().sum().backward()
        optimizer.step()
        return time.process_time() - start

    return step


def measure(rows, folder, options, queue):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    long, short = (
        stepper(size, None if options.memory else folder / str(size), read_ahead=options.read_ahead)
        for size in (rows, SHORT)
    )
    batches = [(torch.randint(rows, (LOOKED_UP,)), torch.randint(SHORT, (LOOKED_UP,))) for _ in range(STEPS)]
    found = {"rows": rows, "in": "memory" if options.memory else "a file", "read_ahead": options.read_ahead}
    for visit in ("first", "second"):
        turns = [(long(index), short(other)) for index, other in batches]
        ratios = [one / other for one, other in turns]
        found[f"{visit}_visit"] = {
            "cpu_milliseconds_a_step": 1e3 * statistics.median(one for one, _ in turns),
            f"over_{SHORT}_rows": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    queue.put(found | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--memory", action="store_true", help="a table in memory")
    parser.add_argument("--folder", type=Path, help="where a folder of the files is made and removed")
    parser.add_argument("--read-ahead", action="store_true", help="as the system does if it is told nothing")
    parser.add_argument("--json", type=Path, help="where the results are written, too")
    options = parser.parse_args()
    if options.folder and not options.folder.is_dir():
        parser.error(f"--folder must be a folder that is there, got {options.folder}")
    context = multiprocessing.get_context("spawn")
    runs = []
    for size in options.rows:
        queue = context.Queue()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            process = context.Process(target=measure, args=(size, Path(folder), options, queue))
            process.start()
            runs.append(queue.get())
            print(json.dumps(runs[-1]), flush=True)
            process.join()
    if options.json:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
        command = " ".join(["python -m benchmarks.mapped_table", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, "commit": commit, "runs": runs}, indent=1) + "\n")
