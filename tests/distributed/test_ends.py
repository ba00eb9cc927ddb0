"""What destroy_process_group destroys is gone: a thread of gloo that outlives the interpreter ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: once something else has imported what holds the group, nothing does any more.
PROGRAM = """
import weakref, torch, torch.distributed as dist
{module}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gone = weakref.ref(dist.group.WORLD)
{use}
dist.destroy_process_group()
assert gone() is None, "the group is alive"
"""
USES = {
    "DistributedDataParallel": (
        "import holonomy.distributed",
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()",
    ),
    "counted bytes": (
        "from experiments.large_graph import SentBytes",
        "with SentBytes(): dist.all_reduce(torch.ones(1))",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_destroyed_group_is_gone(use):
    module, lines = USES[use]
    program = PROGRAM.format(module=module, use=lines)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
