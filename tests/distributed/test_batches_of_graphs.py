"""Processes that share batches of graphs train as one process does, and share them by their nodes."""

from __future__ import annotations

import json
import math
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from holonomy.distributed import GraphBatchSampler, mean_over_processes
from tests.distributed.processes import WORLDS
from tests.distributed.trajectories import CASES, EPOCHS, resumed, sampler_of


@pytest.mark.parametrize("world", WORLDS)
def test_losses_of_several_processes_are_those_of_one(world, started):
    """With learned points and curvatures, under what torch offers: DDP, ZeRO, FSDP2, checkpoints."""
    paths = sorted(started.glob(f"{world}-*.json"))
    first, *others = (json.loads(path.read_text(encoding="utf-8"))["batches"] for path in paths)
    assert len(others) == world - 1
    for name in CASES:
        losses = torch.tensor(first[name]["losses"], dtype=torch.float64)
        one = torch.tensor(first[name]["of one"], dtype=torch.float64)
        assert len(losses) == EPOCHS * len(sampler_of(world, 0)), name
        assert (losses - one).abs().max() <= 1e-10, name
        assert all(other[name]["losses"] == first[name]["losses"] for other in others), name
        assert len(first[name]["errors"]) >= 2, name
        assert {place: value for place, value in first[name]["errors"].items() if not value <= 1e-10} == {}, name
        assert min(first[name]["moved"].values()) > 1e-5, name
    # Means of each process's own losses, which are not the mean of all, would be noticed.
    own = torch.tensor(first["own means"]["losses"]) - torch.tensor(first["descent"]["losses"])
    assert own.abs().max() > 1e-4, own
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        found = resumed(world, started)
    assert found == pytest.approx(first["resumed"]["losses"], abs=1e-10)


@example([3, 0, 0], 3, 3, math.inf, 0)
@example([0, 0, 0, 0], 4, 2, math.inf, 0)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=50),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.05, math.inf]),
    st.integers(0, 99),
)
def test_every_graph_goes_to_one_process_and_nodes_are_shared(sizes, batch_size, world, padding, seed):
    if min(batch_size, len(sizes)) < world:
        with pytest.raises(ValueError, match=f"must be at least {world}, a graph for each process"):
            GraphBatchSampler(sizes, batch_size, num_replicas=world, rank=0)
        return
    options = {"padding": padding, "seed": seed, "num_replicas": world}
    samplers = [GraphBatchSampler(torch.tensor(sizes), batch_size, **options, rank=rank) for rank in range(world)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = list(zip(*samplers, strict=True))
        assert len(batches) == len(samplers[0])
        assert sorted(chain(*chain(*batches))) == list(range(len(sizes)))
        for shares in batches:
            assert all(shares)
            assert sum(map(len, shares)) <= batch_size + 2 * (world - 1)
            nodes = [sum(sizes[graph] for graph in share) for share in shares]
            assert max(nodes) - min(nodes) <= max(sizes[graph] for share in shares for graph in share)
        assert list(zip(*samplers, strict=True)) == batches


def test_epochs_and_seeds_draw_other_batches():
    samplers = [GraphBatchSampler(range(30), 6, seed=seed, num_replicas=2, rank=1) for seed in (0, 1)]
    found = [list(sampler) for sampler in samplers]
    samplers[0].set_epoch(1)
    found.append(list(samplers[0]))
    assert found[0] != found[1]
    assert found[0] != found[2]


def test_nodes_are_nearer_to_equal_than_graphs_are():
    """Of sizes as wide as those of molecules and proteins, processes differ by a few hundredths."""
    sizes = torch.rand(600, generator=torch.Generator().manual_seed(0)).pow(-1).clamp(max=100).mul(10).long()
    shares = list(zip(*(GraphBatchSampler(sizes, 64, num_replicas=4, rank=rank) for rank in range(4)), strict=True))
    nodes = torch.tensor([[int(sizes[share].sum()) for share in each] for each in shares]).double()
    assert (nodes.amax(1) / nodes.mean(1)).median() < 1.05
    graphs = torch.stack([sizes[torch.randperm(600)[:64]].view(4, 16).sum(1) for _ in shares]).double()
    assert (graphs.amax(1) / graphs.mean(1)).median() > 1.2


def test_a_weighted_mean_is_that_of_all_and_so_is_its_gradient():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.randn(3, 2, requires_grad=True)
    weights = torch.rand(3, 2)
    found = mean_over_processes(values, dist.group.WORLD, weights=weights)
    torch.testing.assert_close(found, (weights * values).sum() / weights.sum())
    found.backward()
    torch.testing.assert_close(values.grad, weights / weights.sum())
    with pytest.raises(ValueError, match=r"weights must have shape values.shape = \(3, 2\), got \(3,\)"):
        mean_over_processes(values, dist.group.WORLD, weights=weights[:, 0])
    with pytest.raises(TypeError, match="values must be a floating-point tensor"):
        mean_over_processes(torch.tensor([1]), dist.group.WORLD)
    for dtype in (torch.float16, torch.bfloat16):  # float16 holds no 70,000, and bfloat16 no 257
        mean = mean_over_processes(torch.ones(70_000, dtype=dtype), dist.group.WORLD)
        torch.testing.assert_close(mean, torch.ones((), dtype=dtype))
    dist.destroy_process_group()


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sizes": 3}, "sizes must be a sequence of integers, got 3"),
        ({"sizes": [3.5, 2]}, "sizes must be a sequence of integers, got 3.5 in it"),
        ({"sizes": [-1, 2]}, "sizes must be at least 0, got -1"),
        ({"sizes": [5]}, "sizes must be at least 2, a graph for each process, got 1"),
        ({"batch_size": 1}, "batch_size must be at least 2, a graph for each process, got 1"),
        ({"batch_size": 2.0}, "batch_size must be a positive integer, got 2.0"),
        ({"padding": 0.5}, r"padding must lie in \[1.0, inf\], got 0.5"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"num_replicas": 0}, "num_replicas must be a positive integer, got 0"),
        ({"rank": 2}, "rank must be less than num_replicas = 2, got 2"),
        ({"rank": -1}, "rank must be at least 0, got -1"),
    ],
)
def test_what_makes_no_batches_is_refused(wrong, said):
    given = {"sizes": [3, 2, 4], "batch_size": 2, "num_replicas": 2, "rank": 0} | wrong
    with pytest.raises((TypeError, ValueError), match=said):
        GraphBatchSampler(given.pop("sizes"), given.pop("batch_size"), **given)
