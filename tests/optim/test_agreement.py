"""RiemannianAdam does what Geoopt's does, and loads what Geoopt's saved, and the other way round."""

from __future__ import annotations

import copy
import io
import pickle

import geoopt
import pytest
import torch

from holonomy.manifolds import Lorentz
from holonomy.optim import RiemannianAdam
from tests.optim.problems import deviation, elsewhere, euclidean, everything, on, tables, train

OPTIONS = {
    "defaults with a longer step": {"lr": 0.02},
    "betas": {"lr": 0.05, "betas": (0.8, 0.99)},
    "no momentum": {"lr": 0.02, "betas": (0.0, 0.9)},
    "eps": {"lr": 0.02, "eps": 0.1},
    "weight decay": {"lr": 0.02, "weight_decay": 0.1},
    "amsgrad": {"lr": 0.02, "amsgrad": True},
    "stabilize": {"lr": 0.02, "stabilize": 3},
    "all": {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.05, "amsgrad": True, "stabilize": 7},
    "a tensor": {"lr": torch.tensor(0.02, dtype=torch.float64)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_two_hundred_steps_agree_with_geoopt(options):
    ours = train(RiemannianAdam(everything(), **options), 200)
    theirs = train(geoopt.optim.RiemannianAdam(everything(), **options), 200)
    moved = [deviation([a], [b]) for a, b in zip(theirs, everything(), strict=True)]
    assert min(moved) > 0.01
    assert deviation(ours, theirs) <= 1e-10


def test_groups_with_their_own_options_agree():
    def groups():
        return [
            {"params": euclidean(), "lr": 0.1, "weight_decay": 0.01},
            {"params": tables(), "amsgrad": True, "betas": (0.5, 0.9)},
            {"params": elsewhere(), "eps": 1e-3, "stabilize": 5},
        ]

    ours = train(RiemannianAdam(groups(), lr=0.02), 200)
    theirs = train(geoopt.optim.RiemannianAdam(groups(), lr=0.02), 200)
    assert deviation(ours, theirs) <= 1e-10


def test_our_lorentz_moves_as_geoopts():
    ours = train(RiemannianAdam(tables(kind=Lorentz), lr=0.02), 200)
    theirs = train(geoopt.optim.RiemannianAdam(tables(), lr=0.02), 200)
    assert deviation(ours, theirs) <= 1e-10


def test_geoopts_optimizer_agrees_on_our_lorentz():
    # The manifold's own methods against the closed form. They leave out the derivative with respect
    # to time ("a point is its space part"), so the gradients here have none.
    def run(optimizer):
        for step in range(40):
            draw = torch.Generator().manual_seed(step)
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype) + 0.3 * p.detach()
                p.grad[..., 0] = 0
            optimizer.step()
        return [p.detach() for p in optimizer.param_groups[0]["params"]]

    ours = run(RiemannianAdam(tables(kind=Lorentz), lr=0.02))
    theirs = run(geoopt.optim.RiemannianAdam(tables(kind=Lorentz), lr=0.02))
    assert deviation(ours, theirs) <= 1e-10


def test_defaults_and_format_are_geoopts():
    ours, theirs = RiemannianAdam(everything()), geoopt.optim.RiemannianAdam(everything())
    assert ours.defaults == theirs.defaults
    train(ours, 2), train(theirs, 2)
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, expected in b["state"].items():
        found = a["state"][index]
        assert found.keys() == expected.keys()
        assert found["step"] == expected["step"]
        for name in expected.keys() - {"step"}:
            assert found[name].shape == expected[name].shape
            assert found[name].is_contiguous()
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def reload(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("carry", [copy.deepcopy, reload], ids=["in memory", "through a file"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("first", [RiemannianAdam, geoopt.optim.RiemannianAdam])
@pytest.mark.parametrize("second", [RiemannianAdam, geoopt.optim.RiemannianAdam])
def test_state_dicts_are_exchanged(first, second, amsgrad, carry):
    options = {"lr": 0.02, "betas": (0.7, 0.95), "amsgrad": amsgrad}
    whole = train(RiemannianAdam(everything(), **options), 24)
    start = first(everything(), **options)
    points = train(start, 12)
    parameters = everything()
    for p, x in zip(parameters, points, strict=True):
        p.data.copy_(x)
    # The options come with the state.
    end = second(parameters, lr=1.0)
    end.load_state_dict(carry(start.state_dict()))
    # After loading, Geoopt's counts steps in float32 and so corrects its bias to seven digits.
    tolerance = 1e-10 if second is RiemannianAdam else 1e-6
    assert deviation(train(end, 12, start=12), whole) <= tolerance


@pytest.mark.parametrize(
    "carry",
    [reload, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))],
    ids=["file", "deepcopy", "pickle"],
)
def test_resuming_continues_bit_for_bit(carry, dtype):
    options = {"lr": 0.02, "amsgrad": True, "stabilize": 4}
    whole = train(RiemannianAdam(everything(dtype), **options), 40)
    start = RiemannianAdam(everything(dtype), **options)
    points = train(start, 17)
    parameters = everything(dtype)
    for p, x in zip(parameters, points, strict=True):
        p.data.copy_(x)
    end = RiemannianAdam(parameters)
    end.load_state_dict(carry(start.state_dict()))
    assert all(map(torch.equal, train(end, 23, start=17), whole))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_alone(clone):
    optimizer = RiemannianAdam(everything(), lr=0.02)
    before = train(optimizer, 5)
    twin = clone(optimizer)
    after = train(twin, 5, start=5)
    assert deviation(before, [p.detach() for p in optimizer.param_groups[0]["params"]]) == 0
    assert deviation(after, train(optimizer, 5, start=5)) == 0


def test_it_is_geoopts_optimizer_to_isinstance_and_to_schedulers():
    manifold = geoopt.Lorentz()
    point = on(manifold, torch.ones(2, 3, dtype=torch.float64))
    optimizer = RiemannianAdam([point], lr=0.1)
    assert isinstance(optimizer, geoopt.optim.RiemannianAdam)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    train(optimizer, 1)
    schedule.step()
    before = point.detach().clone()
    train(optimizer, 1)
    assert torch.allclose(before, point.detach(), rtol=1e-15, atol=0)
