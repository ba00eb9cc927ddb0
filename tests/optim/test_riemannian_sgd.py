"""RiemannianSGD does what Geoopt's does, but for the start of the momentum on a manifold."""

from __future__ import annotations

import copy
import io

import geoopt
import pytest
import torch

from holonomy.manifolds import Lorentz, LorentzPoints
from holonomy.optim import RiemannianSGD
from tests.optim.problems import deviation, elsewhere, euclidean, everything, on, tables, train

OPTIONS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.8},
    "dampening": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "stabilize": {"momentum": 0.5, "stabilize": 3},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@each_option
def test_steps_agree_with_geoopt(options):
    ours = RiemannianSGD(everything(), lr=0.02, **options)
    theirs = geoopt.optim.RiemannianSGD(everything(), lr=0.02, **options)
    train(ours, 1)
    # From here on with our points and our momenta.
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for a, b in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            b.copy_(a)
    a, b = train(ours, 15, start=1), train(theirs, 15, start=1)
    assert min(deviation([x], [y]) for x, y in zip(b, everything(), strict=True)) > 0.01
    assert deviation(a, b) <= 1e-10


@each_option
def test_vectors_agree_with_geoopt_from_the_first_step(options):
    ours = train(RiemannianSGD(euclidean(), lr=0.02, **options), 15)
    theirs = train(geoopt.optim.RiemannianSGD(euclidean(), lr=0.02, **options), 15)
    assert deviation(ours, theirs) <= 1e-12


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_first_step_has_the_momentum_of_the_riemannian_gradient(decay):
    """Geoopt takes the Euclidean gradient there, without weight decay; told of this one it makes the same step."""
    options = {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "weight_decay": decay}
    ours, theirs = RiemannianSGD(everything(), **options), geoopt.optim.RiemannianSGD(everything(), **options)
    gradients = RiemannianSGD(everything(), lr=0.02, momentum=0.8)
    train(gradients, 1)  # which leaves them in the parameters
    for p, like in zip(theirs.param_groups[0]["params"], gradients.param_groups[0]["params"], strict=True):
        manifold = getattr(p, "manifold", geoopt.Euclidean())
        gradient = like.grad + decay * p.detach()
        theirs.state[p]["momentum_buffer"] = manifold.egrad2rgrad(p.detach(), gradient).clone()
    assert deviation(train(ours, 1), train(theirs, 1)) <= 1e-12


@each_option
def test_our_lorentz_moves_as_geoopts(options):
    ours = train(RiemannianSGD(tables(kind=Lorentz), lr=0.02, **options), 15)
    theirs = train(RiemannianSGD(tables(), lr=0.02, **options), 15)
    assert deviation(ours, theirs) <= 1e-10


def test_gradients_are_left_as_they_are():
    parameters = everything()
    optimizer = RiemannianSGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.1)
    train(optimizer, 1)
    grads = [p.grad.clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, grads, strict=True))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_points_stay_finite_and_on_the_manifold(dtype, size):
    manifold = Lorentz(-0.5, dtype=dtype)
    start = manifold.lift(torch.tensor([[0.0, 0.0], [1e-6, 0.0], [3.0, 4.0], [1e9, -1e9]], dtype=dtype))
    parameter = on(manifold, start, dtype)
    optimizer = RiemannianSGD([parameter], lr=0.5, momentum=0.9, nesterov=True)
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        parameter.grad = size * torch.randn(parameter.shape, generator=draw, dtype=dtype)
        optimizer.step()
        assert parameter.isfinite().all()
        assert torch.allclose(manifold.projx(parameter), parameter)
        assert optimizer.state[parameter]["momentum_buffer"].isfinite().all()


def test_a_learned_curvature_is_followed():
    manifold = Lorentz(-1.0, learnable=True)
    points = LorentzPoints(5, 3, manifold, generator=torch.Generator().manual_seed(0))
    optimizer = RiemannianSGD(points.parameters(), lr=0.1, momentum=0.5)
    aim = torch.full((5,), 2.0)
    for _ in range(300):
        optimizer.zero_grad()
        (manifold.dist0(points()) - aim).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(manifold.dist0(points()), aim, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stabilize", [None, 1])
@each_option
def test_points_are_read_by_their_space_part(options, stabilize):
    """Where a curvature moved, times in memory are those of another one."""
    clean, spoilt = tables(kind=Lorentz), tables(kind=Lorentz)
    a, b = (RiemannianSGD(each, lr=0.02, **{**options, "stabilize": stabilize}) for each in (clean, spoilt))
    train(a, 3), train(b, 3)
    for q in spoilt:
        q.data[..., 0] = 17.0
        if "momentum" in options:
            b.state[q]["momentum_buffer"][..., 0] = -3.0
        q.grad = None
    b.step()  # of no point, but it may stabilize
    for p, q in zip(clean, spoilt, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    a.step(), b.step()
    assert deviation(clean, spoilt) <= 1e-12


def test_a_state_saved_to_a_file_goes_on_in_the_same_bits():
    ours = RiemannianSGD(everything(), lr=0.02, momentum=0.9)
    train(ours, 5)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = RiemannianSGD(everything(), lr=0.5, momentum=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(ours.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            b.copy_(a)
    a, b = train(ours, 5, start=5), train(other, 5, start=5)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_groups_and_closures():
    optimizer = RiemannianSGD([{"params": euclidean(), "lr": 0.5}, {"params": elsewhere(), "momentum": 0.5}], lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = RiemannianSGD([x], lr=torch.tensor(0.5))

    def closure():
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lr", {"lr": -1.0}),
        ("lr", {"lr": float("nan")}),
        ("lr", {"lr": float("inf")}),
        ("momentum", {"momentum": -0.1}),
        ("weight_decay", {"weight_decay": -1.0}),
        ("dampening", {"dampening": float("nan")}),
        ("dampening", {"dampening": float("inf")}),
        ("nesterov", {"nesterov": True}),
        ("nesterov", {"nesterov": True, "momentum": 0.5, "dampening": 0.5}),
        ("stabilize", {"stabilize": 0}),
    ],
)
def test_options_out_of_range_are_refused(name, options):
    with pytest.raises(ValueError, match=f"^{name}"):
        RiemannianSGD(euclidean(), **{"lr": 0.1, **options})
    optimizer = RiemannianSGD(euclidean(), lr=0.1)
    with pytest.raises(ValueError, match=f"^{name}"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1


def test_code_that_asks_for_geoopts_class_goes_on_working():
    assert isinstance(RiemannianSGD(euclidean(), lr=0.1), geoopt.optim.RiemannianSGD)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_of_torchs_sgd_loads(momentum):
    ours, theirs = RiemannianSGD(euclidean(), lr=0.5), torch.optim.SGD(euclidean(), lr=0.02, momentum=momentum)
    train(theirs, 5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for a, b in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            a.copy_(b)
    assert deviation(train(ours, 5, start=5), train(theirs, 5, start=5)) <= 1e-14


def test_a_missing_momentum_starts_anew():
    ours = RiemannianSGD(euclidean(), lr=0.02, momentum=0.9)
    for parameter in ours.param_groups[0]["params"]:
        ours.state[parameter]["momentum_buffer"] = None
    assert deviation(train(ours, 3), train(RiemannianSGD(euclidean(), lr=0.02, momentum=0.9), 3)) == 0


def test_gradient_ascent_is_refused():
    ours, theirs = RiemannianSGD(euclidean(), lr=0.5), torch.optim.SGD(euclidean(), lr=0.02, maximize=True)
    with pytest.raises(ValueError, match="maximize must be left out of a state for RiemannianSGD, got True"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="maximize is not offered by RiemannianSGD, got True"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "maximize": True})


def test_a_state_of_adam_is_refused():
    weights = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"^momentum must be in each group of a state for RiemannianSGD, got"):
        RiemannianSGD(weights, lr=0.2).load_state_dict(torch.optim.Adam(weights).state_dict())
