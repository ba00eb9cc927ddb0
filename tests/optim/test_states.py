"""States of other optimizers and of other parameters: each loads and goes on, or is refused before anything moves."""

from __future__ import annotations

import copy

import pytest
import torch
from geoopt import ManifoldParameter

from holonomy.manifolds import Lorentz
from holonomy.optim import RiemannianAdam, RiemannianSGD


def stepped(kind, shape=(3,), **options):
    point = torch.nn.Parameter(torch.ones(shape))
    point.grad = torch.ones(shape)
    optimizer = kind([point], lr=0.1, **options)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("ours", [RiemannianAdam, RiemannianSGD])
def test_what_is_no_state_of_adam_or_of_descent_is_refused(name, ours):
    """NAdam and RAdam were taken for Adam, RMSprop for descent, and Adamax failed at the next step."""
    optimizer = ours([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=f"must be in each group of a state for {ours.__name__}"):
        optimizer.load_state_dict(stepped(getattr(torch.optim, name)))


def test_the_state_of_torchs_sparse_adam_loads():
    table, ours = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4, 2))
    theirs = torch.optim.SparseAdam([table], lr=0.1)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True)
    theirs.step()
    optimizer = RiemannianAdam([ours], lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    ours.data.copy_(table.data)
    ours.grad = table.grad
    theirs.step(), optimizer.step()
    torch.testing.assert_close(ours.detach(), table.detach())


def test_a_run_that_came_to_nan_is_copied_and_saved_as_it_is():
    manifold = Lorentz(-1.0)
    point = ManifoldParameter(manifold.lift(torch.ones(3, 2)), manifold=manifold)
    point.grad = torch.ones(3, 3)
    point.grad[1] = torch.nan
    optimizer = RiemannianAdam([point], lr=0.1)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    assert optimizer.state[point]["exp_avg_sq"].isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(("ours", "options"), [(RiemannianAdam, {}), (RiemannianSGD, {"momentum": 0.9})])
def test_a_state_of_another_shape_is_refused(ours, options):
    """The fused kernel read what lies behind the shorter moments."""
    optimizer = ours([torch.nn.Parameter(torch.ones(5))], lr=0.1, **options)
    with pytest.raises(ValueError, match=r"must have the shape of its parameter, \(5,\), got \(3,\)"):
        optimizer.load_state_dict(copy.deepcopy(stepped(ours, **options)))


def test_groups_that_ask_for_what_is_ignored_are_refused():
    optimizer = RiemannianSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for name in ("differentiable", "foreach", "fused"):
        with pytest.raises(ValueError, match=f"{name} is not offered by RiemannianSGD"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], name: True})


OPTIMIZERS = [(RiemannianAdam, {}), (RiemannianAdam, {"amsgrad": True}), (RiemannianSGD, {"momentum": 0.9})]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("of_points", [False, True])
@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16])
def test_the_state_follows_a_parameter_to_another_dtype(kind, options, of_points, to):
    """As load_state_dict takes it there."""

    def parameter(x):
        return ManifoldParameter(x, manifold=Lorentz(-1.0)) if of_points else torch.nn.Parameter(x)

    def steps(optimizer, x):
        for _ in range(3):
            x.grad = torch.linspace(0.0, 1.0, x.numel(), dtype=x.dtype).view(x.shape)
            optimizer.step()

    moved = parameter(Lorentz(-1.0).lift(torch.linspace(-1.0, 1.0, 12).view(4, 3)))
    optimizer = kind([moved], lr=0.1, **options)
    steps(optimizer, moved)
    anew = parameter(moved.detach().to(to))
    other = kind([anew], lr=0.1, **options)
    other.load_state_dict(optimizer.state_dict())
    moved.grad, moved.data = None, moved.data.to(to)
    steps(optimizer, moved), steps(other, anew)
    assert torch.equal(moved.data, anew.data)
    state, expected = (each.state_dict()["state"][0] for each in (optimizer, other))
    for name in state.keys() - {"step"}:
        assert state[name].dtype == to
        assert torch.equal(state[name], expected[name]), name
        # Second moments of points are one number a row in memory, too.
        assert optimizer.state[moved][name].stride() == other.state[anew][name].stride(), name


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("stale", [False, True])
def test_a_parameter_of_another_shape_than_its_state_or_gradient_is_refused(kind, options, stale):
    """Torch's fused kernel went past the end of the shorter ones: wrong numbers, or the process aborted."""
    first, resized = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = kind([first, resized], lr=0.1, **options)
    first.grad, resized.grad = torch.ones(4), torch.ones(4)
    optimizer.step()
    before = first.detach().clone()
    resized.data = torch.ones(8)
    if not stale:
        resized.grad = torch.ones(8)
    with pytest.raises(RuntimeError, match=r"must have the shape of its parameter, \(8,\), got \(4,\)"):
        optimizer.step()
    assert torch.equal(first, before)
