"""Processes, started once for all tests of this folder, whichever of pytest's workers run them."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.distributed.processes import WORLDS, run


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what processes wrote, forked from one that has imported all, which takes them seconds."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    ended = folder / "ended"
    try:
        folder.mkdir()
    except FileExistsError:  # another worker has begun
        while not ended.exists():
            time.sleep(0.1)
        return folder
    try:
        multiprocessing.set_forkserver_preload([run.__module__])
        mp.start_processes(run, args=(WORLDS, str(folder)), nprocs=max(WORLDS), start_method="forkserver")
    finally:
        ended.touch()
    return folder
