"""Rows on several processes give what one process gives, and bytes grow neither with the rows nor with the table."""

from __future__ import annotations

import copy
import io
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holonomy.distributed import ShardedLorentzEmbedding, sum_gradients
from holonomy.layers import HypBatchNorm, HypLinearAttention, HypSoftmaxAttention, TokenAttention
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.models import Hypformer
from tests.distributed.processes import CASES, DIM, WORLDS
from tests.distributed.tables import OPTIMIZERS


@pytest.mark.parametrize("world", WORLDS)
def test_processes_that_share_rows_are_one_process(world, started):
    """Outputs, all gradients, steps of tables, bytes."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(started.glob(f"{world}-*.json"))]
    assert len(found) == world
    for each in found:
        assert each["modules"].keys() == {*CASES, "Hypformer, DistributedDataParallel"}
        assert each["tables"].keys() == OPTIMIZERS.keys()
        errors = {
            (kind, case, name): value
            for kind in ("modules", "tables", "streams")
            for case, values in each[kind].items()
            for name, value in values.items()
            if "bytes" not in name and name != "moved"
        }
        assert {place: value for place, value in errors.items() if not value <= 1e-12} == {}
        assert all(values["moved"] > 0.1 for values in each["tables"].values())
        for kind in ("modules", "tables"):
            for case, values in each[kind].items():
                assert values["bytes"] == values["bytes at another size"], case
                assert (values["bytes"] > 0) == (case != "batch norm, eval"), case
        # One sum of heads x channels x (channels + 1) numbers each way, and the largest key of each head.
        heads, channels = 2, DIM // 2
        assert each["modules"]["attention"]["bytes"] == 8 * (2 * heads * channels * (channels + 1) + heads)
    assert all(each["gathered"] == [[rank, rank] for rank in range(world) for _ in range(rank)] for each in found)
    drawn = torch.tensor([row for each in found for row in each["drawn"]])
    assert len(drawn) == len(drawn.unique(dim=0)) == 20


@pytest.fixture
def world():
    """One process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def refused(module, *inputs, group, **options):
    with pytest.raises(ValueError, match="group"):
        module(*inputs, group=group, **options)


def test_what_is_no_sum_over_rows_is_refused(world):
    manifold = Lorentz(-1.0)
    x, points = torch.randn(5, 4), manifold.lift(torch.randn(5, 4))
    refused(HypSoftmaxAttention(4, 2, manifold), points, group=world)
    refused(TokenAttention(4, 2), x, group=world)
    refused(HypLinearAttention(4, 2, manifold), points, group=world, is_causal=True)
    refused(Hypformer(4, 4, 2), x, torch.tensor([[0], [1]]), group=world)
    refused(Hypformer(4, 4, 2, graph_encoder=None), x, batch=torch.zeros(5, dtype=torch.int64), group=world)
    refused(Hypformer(4, 4, 2, graph_encoder=None, attention="softmax"), x, group=world)


def test_what_is_no_group_is_refused(without_shape_checks):
    layer = HypLinearAttention(4, 2, Lorentz(-1.0))
    with pytest.raises(TypeError, match=r"must be .*ProcessGroup, got str"):
        layer(layer.manifold_in.lift(torch.randn(5, 4)), group="all")
    with pytest.raises(TypeError, match=r"ProcessGroup, got NoneType; .* which is None before init_process_group\."):
        sum_gradients(layer, None)


def test_a_table_is_copied_with_the_processes_it_lies_on(world):
    table = ShardedLorentzEmbedding(5, 2, Lorentz(-1.0))
    copied = copy.deepcopy(table)
    assert copied.group is table.group
    assert copied.unit is not table.unit
    index = torch.tensor([4, 0])
    assert torch.equal(copied(index), table(index))
    assert torch.equal(table(index), table.read(table.unit)[index])


def test_the_state_of_another_process_is_refused(world):
    """One file for all processes, as of other modules, gave each the rows of the first."""
    tables = [nn.Sequential(ShardedLorentzEmbedding(5, 2, Lorentz(-1.0))) for _ in range(2)]
    file = io.BytesIO()
    torch.save(tables[0].state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    tables[1].load_state_dict(state)
    tables[1][0].group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    with pytest.raises(
        RuntimeError, match=r"0\.unit must hold the rows of process 1 of 2, got those of process 0 of 1"
    ):
        tables[1].load_state_dict(state)


def test_sparse_gradients_of_a_table_that_every_process_holds_are_refused(world):
    table = LorentzEmbedding(5, 2, Lorentz(-1.0), sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="module must have dense gradients, or its tables be ShardedLorentzEmbedding"):
        sum_gradients(table, world)


def test_a_weight_without_a_gradient_on_any_process_keeps_none(world):
    """As with one process, where optimizers leave it alone: with one of zeros weight decay would shrink it."""
    layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
    layers[0](torch.ones(3, 2)).sum().backward()
    sum_gradients(layers, world)
    assert layers[0].weight.grad.tolist() == [[3.0, 3.0]]
    assert layers[1].weight.grad is None


def test_second_derivatives_pass_through_the_sum(world):
    layer = HypLinearAttention(4, 2, Lorentz(-1.0), dtype=torch.float64)
    x = layer.manifold_in.lift(torch.randn(5, 4, dtype=torch.float64)).detach().requires_grad_()
    found = []
    for group in (world, None):
        (first,) = torch.autograd.grad(layer(x, group=group).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("points", [0, 1])
def test_running_statistics_are_not_drawn_towards_those_of_less_than_two_points(world, points):
    """They became nan, and every later evaluation with them."""
    layer = HypBatchNorm(3, Lorentz(-1.0))
    layer(layer.manifold_in.lift(torch.randn(points, 3)), group=world).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.function.parameters())
    kept = dict(layer.named_buffers())
    assert torch.equal(kept["function.norm.running_mean"], torch.zeros(3))
    assert torch.equal(kept["function.norm.running_var"], torch.ones(3))
