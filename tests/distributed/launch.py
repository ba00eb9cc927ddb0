"""Runs a module in several processes, with the environment that torchrun gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def launch(count: int, module: str, options: Sequence[str]) -> None:
    """Wait for all of them; what they printed is shown if one fails.

    The port of the store is taken before they start and kept until they end: torchrun itself, run in two tests at once
    on a busy machine, failed now and then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}  # the store is there: no rank makes it
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *options],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
