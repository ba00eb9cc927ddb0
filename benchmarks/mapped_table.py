"""CPU time and memory of a training step on a table in files mapped to memory, at sizes given on the command line.

python -m benchmarks.mapped_table 1000000 1000000000 [--folder FOLDER] [--read-ahead]

A step looks 512 random rows of 10 dimensions up, and moves them. The files start as zeros, which take no room on the
disk: only rows that were named do. Each size has a process of its own, whose peak is that of the operating system. The
system reads pages ahead of those that a process asks for, unless it is told that rows are read in no order;
``--read-ahead`` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam

DIM, LOOKED_UP, STEPS = 10, 512, 60


def mapped(path, rows, width, *, read_ahead):
    with path.open("a+b") as file:
        file.truncate(4 * rows * width)
        memory = mmap.mmap(file.fileno(), 0)
    if not read_ahead:
        memory.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, width)


def steps(rows, folder, read_ahead, queue):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points, moments, squares = (
        mapped(folder / name, rows, width, read_ahead=read_ahead)
        for name, width in (("points", DIM + 1), ("moments", DIM + 1), ("squares", 1))
    )
    table = LorentzEmbedding(rows, DIM, Lorentz(-1.0, learnable=True), sparse=True, device="meta")
    table.load_state_dict({"unit": points}, assign=True, strict=False)
    optimizer = RiemannianAdam(table.parameters(), lr=0.1)
    optimizer.state[table.unit].update(step=0, exp_avg=moments, exp_avg_sq=squares.expand(rows, DIM + 1))
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        optimizer.zero_grad()
        (table(torch.randint(rows, (LOOKED_UP,)))[:, 1:] - 1).square().sum().backward()
        optimizer.step()
        seconds.append(time.process_time() - start)
    queue.put(
        {
            "rows": rows,
            "gigabytes_of_files": sum(path.stat().st_size for path in folder.iterdir()) / 1e9,
            "cpu_milliseconds_a_step": 1e3 * statistics.median(seconds),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "read_ahead": read_ahead,
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--folder", type=Path, help="where a folder of the files is made and removed")
    parser.add_argument("--read-ahead", action="store_true", help="as the system does if it is told nothing")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for size in options.rows:
        queue = context.Queue()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            process = context.Process(target=steps, args=(size, Path(folder), options.read_ahead, queue))
            process.start()
            print(json.dumps(queue.get()), flush=True)
            process.join()
