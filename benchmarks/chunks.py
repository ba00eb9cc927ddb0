"""Peak memory and CPU time of a training step over rows in chunks, at sizes given on the command line.

python -m benchmarks.chunks 1000000 10000000

The rows are drawn when they are read, so that what is measured is the step and not a file. Each size has a process of
its own, whose peak is that of the operating system, torch included.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time

import torch

from holonomy.distributed import stream_backward
from holonomy.models import Hypformer

FEATURES, CHUNK = 16, 2**16


class Drawn:
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for start in range(0, self.rows, CHUNK):
            count = min(CHUNK, self.rows - start)
            yield torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(start))


def step(rows, queue):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Hypformer(FEATURES, 16, 4, layers=1, heads=2, graph_encoder=None)
    start = time.process_time()
    stream_backward(lambda x, group: model(x, group=group).square().sum() / rows, Drawn(rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    queue.put({"rows": rows, "peak_mib": round(peak), "cpu_seconds": round(time.process_time() - start, 1)})


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for size in map(int, sys.argv[1:]):
        queue = context.Queue()
        process = context.Process(target=step, args=(size, queue))
        process.start()
        print(json.dumps(queue.get()), flush=True)
        process.join()
