"""Any module whose rows processes share gives what one process gives, and its bytes do not grow with the rows."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holonomy.layers import HypLinearAttention, HypSoftmaxAttention, TokenAttention
from holonomy.manifolds import Lorentz
from holonomy.models import Hypformer
from tests.distributed.processes import CASES, DIM, run


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    """The errors of every process; all cases in one start of the processes, which takes seconds."""
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(run, args=(request.param, str(folder)), nprocs=request.param, start_method="spawn")
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_rows_are_one_process(case, found):
    for errors in found:
        wrong = {name: value for name, value in errors[case].items() if "bytes" not in name and not value <= 1e-12}
        assert wrong == {}


@pytest.mark.parametrize("case", CASES)
def test_bytes_do_not_grow_with_the_rows(case, found):
    for sent in found:
        assert sent[case]["bytes"] == sent[case]["bytes of ten times the rows"]
        assert (sent[case]["bytes"] > 0) == (case != "batch norm, eval")


def test_linear_attention_sends_one_sum_each_way(found):
    heads, channels = 2, DIM // 2
    numbers = 2 * heads * channels * (channels + 1) + heads  # and the largest key of each head
    assert {each["attention"]["bytes"] for each in found} == {8 * numbers}


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
    with pytest.raises(TypeError, match=r"must be .*ProcessGroup or None, got str"):
        layer(layer.manifold_in.lift(torch.randn(5, 4)), group="all")


def test_second_derivatives_pass_through_the_sum(world):
    layer = HypLinearAttention(4, 2, Lorentz(-1.0), dtype=torch.float64)
    x = layer.manifold_in.lift(torch.randn(5, 4, dtype=torch.float64)).detach().requires_grad_()
    found = []
    for group in (world, None):
        (first,) = torch.autograd.grad(layer(x, group=group).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)
