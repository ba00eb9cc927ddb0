"""The optimizer beside torch's and Geoopt's: states of the former, sharded parameters, the latter's line search."""

from __future__ import annotations

import copy
from typing import Any

import geoopt
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from holonomy.manifolds import Lorentz, LorentzPoints
from holonomy.optim import RiemannianAdam, RiemannianSGD


def test_the_state_of_torch_adam_loads_where_no_parameter_is_a_point() -> None:
    ours, theirs = (nn.Linear(3, 2) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    adam = torch.optim.Adam(theirs.parameters(), lr=0.1)
    optimizer = RiemannianAdam(ours.parameters(), stabilize=3)
    optimizer.load_state_dict(torch.optim.Adam(theirs.parameters(), lr=0.1).state_dict())
    for _ in range(3):
        for module, rule in ((ours, optimizer), (theirs, adam)):
            rule.zero_grad()
            module(torch.ones(1, 3)).square().sum().backward()
            rule.step()
        torch.testing.assert_close(ours.weight, theirs.weight)
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))  # and goes on from any step
    assert optimizer.param_groups[0]["stabilize"] == 3


@pytest.mark.parametrize("options", [{"maximize": True}, {"decoupled_weight_decay": True}])
def test_a_state_that_goes_on_differently_is_refused(options: dict[str, Any]) -> None:
    weight = nn.Linear(3, 2).weight
    optimizer = RiemannianAdam([weight])
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be left out of a state for RiemannianAdam"):
        optimizer.load_state_dict(torch.optim.Adam([weight], **options).state_dict())
    assert optimizer.param_groups[0]["stabilize"] is None


def test_second_moments_of_coordinates_are_none_of_a_point() -> None:
    points = LorentzPoints(4, 2, Lorentz())
    adam = torch.optim.Adam([points.unit])
    points()[:, 1].square().sum().backward()
    adam.step()
    with pytest.raises(ValueError, match=r"^exp_avg_sq must be one number for each point"):
        RiemannianAdam([points.unit]).load_state_dict(adam.state_dict())


def test_points_that_were_sharded_are_refused_unless_they_are_ignored(mesh: DeviceMesh) -> None:
    """They are no points any more: steps went in straight lines, without a word."""
    points = LorentzPoints(4, 2, Lorentz())
    ignored = nn.Sequential(points, nn.Linear(3, 2))
    fully_shard(ignored, mesh=mesh, ignored_params={points.unit})
    RiemannianAdam(ignored.parameters())
    cut = nn.Sequential(LorentzPoints(4, 2, Lorentz()), nn.Linear(3, 2))
    fully_shard(cut, mesh=mesh)
    with pytest.raises(TypeError, match=r"^params must not hold learned points that fully_shard has cut up"):
        RiemannianAdam(cut.parameters())
    torch.optim.Adam(cut.parameters())


@pytest.mark.parametrize("method", ["armijo", "wolfe"])
@pytest.mark.parametrize("direction", ["steepest", "fr", "pr"])
def test_the_line_search_of_geoopt_finds_the_point(method: str, direction: str) -> None:
    manifold = Lorentz(-0.5, learnable=True, dtype=torch.float64)
    points = LorentzPoints(3, 2, manifold, dtype=torch.float64)
    target = manifold.expmap0(torch.tensor([0.0, 0.5, -0.3], dtype=torch.float64)).detach()
    search: Any = geoopt.optim.RiemannianLineSearch([points.unit], line_search_method=method, cg_method=direction)

    def closure() -> float:
        search.zero_grad()
        loss = manifold.dist(points(), target).pow(4).sum()
        loss.backward()
        return loss.item()

    losses = [search.step(closure) for _ in range(6)]
    assert losses[-1] < 0.1 * losses[0]


def test_a_state_of_another_kind_of_optimizer_is_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    theirs = torch.optim.SGD(weights, lr=0.1).state_dict()
    ours = RiemannianAdam(weights, lr=0.2)
    with pytest.raises(ValueError, match=r"^betas must be in each group of a state for RiemannianAdam, got"):
        ours.load_state_dict(theirs)
    assert ours.param_groups[0]["lr"] == 0.2


@pytest.mark.usefixtures("without_decorators")
@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_a_compiled_step_moves_parameters_alike(kind: type[RiemannianAdam | RiemannianSGD]) -> None:
    plain = nn.Linear(3, 2)
    compiled = copy.deepcopy(plain)
    ours, theirs = kind(plain.parameters(), lr=0.1), kind(compiled.parameters(), lr=0.1)
    for module, step in ((plain, ours.step), (compiled, torch.compile(theirs.step, backend="aot_eager"))):
        for _ in range(2):
            module(torch.ones(1, 3)).square().sum().backward()
            step()
    torch.testing.assert_close(list(compiled.parameters()), list(plain.parameters()))
