"""A table in files that are mapped to memory: the same steps in the same bits, and only the rows that were named."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import torch

from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam, RiemannianSGD
from tests.optim.test_sparse import each_kind

ROWS, DIM = 200, 3
WIDTHS = {"exp_avg": DIM + 1, "exp_avg_sq": 1, "max_exp_avg_sq": 1, "momentum_buffer": DIM + 1}


def mapped(path, width, dtype):
    """A file of zeros, or the one that is there."""
    return torch.from_file(str(path), shared=True, size=ROWS * width, dtype=dtype).view(ROWS, width)


def table_in(folder, manifold, dtype):
    table = LorentzEmbedding(ROWS, DIM, manifold, sparse=True, device="meta")
    table.load_state_dict({"unit": mapped(folder / "unit", DIM + 1, dtype)}, assign=True, strict=False)
    return table


def keep_state_in(folder, optimizer, unit, names, steps):
    state = {name: mapped(folder / name, WIDTHS[name], unit.dtype).expand(unit.shape) for name in names}
    optimizer.state[unit].update(state | ({"step": steps} if "exp_avg" in names else {}))


def names_of(kind, options):
    """What the optimizer keeps of each row."""
    if kind is RiemannianSGD:
        return ["momentum_buffer"] * ("momentum" in options)
    return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * ("amsgrad" in options)


def run(table, optimizer, steps):
    for step in steps:
        index = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (table(index)[:, 1:] - 1).square().sum().backward()
        optimizer.step()


@each_kind
def test_a_table_in_files_is_one_in_memory_in_the_same_bits(kind, options, dtype, tmp_path):
    """Also where a run stops in between and another one goes on with the files."""
    memory = LorentzEmbedding(ROWS, DIM, Lorentz(-0.7, learnable=True, dtype=dtype), sparse=True, dtype=dtype)
    beside = kind(memory.parameters(), **options)
    manifold = Lorentz(-0.7, learnable=True, dtype=dtype)
    table = table_in(tmp_path, manifold, dtype)
    assert type(table.unit) is type(memory.unit)
    with torch.no_grad():
        table.unit.copy_(memory.unit)
    start, names = memory.unit.detach().clone(), names_of(kind, options)
    if kind is RiemannianSGD and names:  # of which it makes another first step than from a buffer of zeros
        beside.state[memory.unit]["momentum_buffer"] = torch.zeros_like(start)
    run(memory, beside, range(10))
    optimizer = kind(table.parameters(), **options)
    keep_state_in(tmp_path, optimizer, table.unit, names, 0)
    run(table, optimizer, range(6))
    again = table_in(tmp_path, manifold, dtype)
    resumed = kind(again.parameters(), **options)
    keep_state_in(tmp_path, resumed, again.unit, names, 6)
    of_curvature = manifold.curvature_parameter.log_ratio
    resumed.state[of_curvature] = optimizer.state[of_curvature]
    run(again, resumed, range(6, 10))
    assert torch.equal(again.unit, memory.unit)
    assert torch.equal(manifold.curvature, memory.manifold.curvature)
    for name in names:
        on_disk = mapped(tmp_path / name, WIDTHS[name], dtype)
        assert torch.equal(on_disk, beside.state[memory.unit][name][:, : WIDTHS[name]])
    touched = torch.cat([torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(s)) for s in range(10)])
    still = torch.ones(ROWS, dtype=torch.bool).index_fill(0, touched, value=False)
    assert torch.equal(again.unit[still], start[still])
    assert (again.unit[touched] != start[touched]).any(-1).all()


def test_a_table_and_its_moments_may_lie_side_by_side_in_one_file(dtype, tmp_path):
    """Views of the columns of one matrix, whose rows are further apart than they are long."""
    memory = LorentzEmbedding(ROWS, DIM, Lorentz(-0.7, learnable=True, dtype=dtype), sparse=True, dtype=dtype)
    whole = mapped(tmp_path / "table", 2 * DIM + 3, dtype)
    unit, first, second = whole.split([DIM + 1, DIM + 1, 1], dim=1)
    unit.copy_(memory.unit.detach())
    manifold = Lorentz(-0.7, learnable=True, dtype=dtype)
    table = LorentzEmbedding(ROWS, DIM, manifold, sparse=True, device="meta")
    table.load_state_dict({"unit": unit}, assign=True, strict=False)
    beside, optimizer = RiemannianAdam(memory.parameters(), lr=0.05), RiemannianAdam(table.parameters(), lr=0.05)
    optimizer.state[table.unit].update(step=0, exp_avg=first, exp_avg_sq=second.expand(unit.shape))
    run(memory, beside, range(10))
    run(table, optimizer, range(10))
    again = mapped(tmp_path / "table", 2 * DIM + 3, dtype)
    state = beside.state[memory.unit]
    assert torch.equal(again, torch.cat([memory.unit.detach(), state["exp_avg"], state["exp_avg_sq"][:, :1]], 1))


def test_a_killed_run_leaves_points_that_another_one_goes_on_with(tmp_path):
    """Wherever it was killed: a row that was half written is a point above its space part."""
    with subprocess.Popen([sys.executable, "-m", __name__, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        for _ in range(20):
            assert child.stdout.readline()
        child.kill()
    assert child.returncode == -signal.SIGKILL
    before, after = mapped(tmp_path / "count", 1, torch.int64)[:2, 0].tolist()
    assert before - after in {0, 1}
    assert after >= 20
    manifold = Lorentz(-0.7, dtype=torch.float64)
    table = table_in(tmp_path, manifold, torch.float64)
    assert table().isfinite().all()
    assert (table()[:, 1:] != 0).any()
    assert manifold.check_point_on_manifold(table().detach(), atol=1e-9)
    optimizer = RiemannianAdam(table.parameters(), lr=0.05)
    keep_state_in(tmp_path, optimizer, table.unit, ["exp_avg", "exp_avg_sq"], after)
    far = (table()[:, 1:] - 1).abs().mean()
    run(table, optimizer, range(after, after + 400))
    assert (table()[:, 1:] - 1).abs().mean() < far / 2


def train_until_killed(folder):
    table = table_in(folder, Lorentz(-0.7, dtype=torch.float64), torch.float64)
    optimizer = RiemannianAdam(table.parameters(), lr=0.05)
    keep_state_in(folder, optimizer, table.unit, ["exp_avg", "exp_avg_sq"], 0)
    count = mapped(folder / "count", 1, torch.int64)
    step = 0
    while True:
        count[0] = step + 1
        run(table, optimizer, [step])
        step += 1
        count[1] = step
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    train_until_killed(Path(sys.argv[1]))
