"""What RiemannianAdam does by itself: exact steps, float32, extremes, and what it leaves alone."""

from __future__ import annotations

from collections import Counter

import geoopt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holonomy import numerics
from holonomy.manifolds import Lorentz, LorentzPoints
from holonomy.optim import RiemannianAdam, adam
from holonomy.optim import tables as optim_tables
from tests.optim.problems import deviation, elsewhere, euclidean, everything, normal, on, tables, train
from tests.optim.reference import Point


def hyperboloid_point(space, k, dtype):
    space = torch.tensor(space, dtype=torch.float64)
    time = (space.square().sum() + k).sqrt().reshape(1)
    manifold = geoopt.Lorentz(torch.tensor(k, dtype=torch.float64))
    point = torch.cat([time, space])[None].to(dtype)
    # Geoopt's own check of a point, made on assignment to a manifold, has one tolerance for all sizes.
    parameter = geoopt.ManifoldParameter(point, manifold=geoopt.Euclidean())
    parameter.manifold = manifold
    return parameter


def against_the_reference(space, k, gradients, dtype, **options):
    parameter = hyperboloid_point(space, k, dtype)
    exact = Point(parameter[0, 1:].tolist(), k, **options)
    optimizer = RiemannianAdam([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=dtype)[None]
        exact.step(parameter.grad[0].tolist())
        optimizer.step()
    found = parameter.detach()[0].double()
    expected = torch.tensor([float(a) for a in exact.x], dtype=torch.float64)
    return float((found - expected).norm() / expected.norm())


@given(
    radius=st.sampled_from([0.0, 1e-6, 0.3, 3.0, 1e3, 1e5, 1e9]),
    k=st.sampled_from([0.01, 1.0, 100.0]),
    lr=st.sampled_from([1e-7, 1e-3, 0.1, 2.0]),
    decay=st.sampled_from([0.0, 0.1]),
    amsgrad=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_the_step_is_the_formula(radius, k, lr, decay, amsgrad, seed):
    draw = torch.Generator().manual_seed(seed)
    direction = normal(draw, 4)
    space = (direction / direction.norm() * radius).tolist()
    gradients = normal(draw, 6, 5).tolist()
    options = {"lr": lr * k**0.5, "weight_decay": decay, "amsgrad": amsgrad, "betas": (0.8, 0.9)}
    assert against_the_reference(space, k, gradients, torch.float64, **options) <= 1e-9
    # Neighbouring float32 points are eps * radius apart: further out there is nothing to compare.
    if radius <= 1e3:
        assert against_the_reference(space, k, gradients, torch.float32, **options) <= 2e-4


@pytest.mark.parametrize("lr", [1e-3, 0.01, 0.1])
def test_float32_follows_float64_for_two_hundred_steps(lr):
    single = train(RiemannianAdam(tables(torch.float32), lr=lr), 200)
    double = train(RiemannianAdam(tables(torch.float64), lr=lr), 200)
    assert deviation(single, double) <= 1e-5


def off_manifold(point, curvature):
    """|<x, x> - 1/kappa| relative to t^2, in float64."""
    x = point.detach().double()
    defect = x[..., 1:].square().sum(-1) - x[..., 0].square() - 1 / curvature.detach().double()
    return float((defect.abs() / x[..., 0].square()).max())


@pytest.mark.parametrize("target", [1.0, 30.0])
def test_a_thousand_steps_stay_on_the_manifold(target):
    manifold = Lorentz(-1.0, learnable=True)
    draw = torch.Generator().manual_seed(0)
    table = on(manifold, normal(draw, 20, 5, scale=0.5), torch.float32)
    goal = normal(draw, 20, 4, scale=target).float()
    learned, log_ratio = LorentzPoints(20, 4, manifold), manifold.curvature_parameter.log_ratio
    with pytest.warns(UserWarning, match=r"^params hold a point of Lorentz\(.*LorentzPoints, which follows\.$"):
        optimizer = RiemannianAdam([table, learned.unit, log_ratio], lr=0.1)
    for step in range(1000):
        for point in (table, learned.unit):
            point.grad = torch.nn.functional.pad(point.detach()[:, 1:] - goal, (1, 0))
        log_ratio.grad = (log_ratio.detach() - 1).sign()
        before = manifold.curvature.detach().clone()
        optimizer.step()
        if step % 50 == 49:
            # The table moved on the manifold as it was when the step was taken.
            assert off_manifold(table, before) <= 1e-6
            assert off_manifold(learned.unit, torch.tensor(-1.0)) <= 1e-6
            assert off_manifold(learned(), manifold.curvature) <= 1e-6
    assert float((learned.unit[:, 1:] - goal).abs().mean().detach()) < 0.2 * target
    assert float(manifold.curvature.detach()) < -1.5


def test_a_learned_curvature_of_geoopts_manifold_is_warned_of():
    manifold = geoopt.Lorentz(2.0, learnable=True)
    point = geoopt.ManifoldParameter(manifold.origin(3).detach(), manifold=manifold)
    with pytest.warns(UserWarning, match=r"LorentzPoints, which follows\.$"):
        RiemannianAdam([point])


def test_points_are_read_by_their_space_part():
    clean, spoilt = tables(), tables()
    a, b = RiemannianAdam(clean, lr=0.1), RiemannianAdam(spoilt, lr=0.1)
    train(a, 3), train(b, 3)
    for p, q in zip(clean, spoilt, strict=True):
        q.data[..., 0] = 17.0
        b.state[q]["exp_avg"][..., 0] = -3.0
        p.grad = q.grad = torch.ones_like(p)
    a.step(), b.step()
    assert all(map(torch.equal, clean, spoilt))


def test_time_follows_a_curvature_that_moved(dtype):
    manifold = Lorentz(-1.0, learnable=True, dtype=dtype)
    point = on(manifold, torch.ones(3, 4, dtype=torch.float64), dtype)
    with pytest.warns(UserWarning, match="when the curvature moves"):
        optimizer = RiemannianAdam([point], lr=0.0)
    with torch.no_grad():
        manifold.curvature_parameter.log_ratio.fill_(2.0)
    point.grad = torch.ones_like(point)
    optimizer.step()
    assert torch.equal(point[:, 1:], torch.ones(3, 3, dtype=dtype))
    assert off_manifold(point, manifold.curvature) <= 4 * torch.finfo(dtype).eps


def test_a_float32_curvature_serves_float64_points():
    manifold = Lorentz(-0.7, dtype=torch.float32)
    double, single = (on(manifold, torch.ones(3, 4, dtype=torch.float64), t) for t in (torch.float64, torch.float32))
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = RiemannianAdam([double, single, weight, torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for step in range(10):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 2.0 - step)
        optimizer.step()
    assert double.dtype == torch.float64
    assert off_manifold(double, manifold.curvature) <= 1e-15
    assert 0 < deviation([double], [single]) < 1e-5


@pytest.mark.parametrize("radius", [0.0, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e20, 1e37])
@pytest.mark.parametrize(("lr", "kappa"), [(1e-3, -1.0), (1e3, -1.0), (0.1, -1e8), (0.1, -1e-8)])
def test_finite_gradients_give_finite_points(dtype, radius, size, lr, kappa):
    draw = torch.Generator().manual_seed(0)
    manifold = Lorentz(kappa, dtype=dtype)
    space = radius * torch.nn.functional.normalize(normal(draw, 8, 4))
    point = geoopt.ManifoldParameter(manifold.lift(space.to(dtype)), manifold=geoopt.Euclidean())
    point.manifold = manifold
    for eps in (0.0, 1e-8):
        optimizer = RiemannianAdam([point], lr=lr, eps=eps, weight_decay=0.1 * (eps > 0))
        for _ in range(6):
            point.grad = (size * normal(draw, 8, 5)).to(dtype)
            optimizer.step()
            for tensor in (point, *optimizer.state_dict()["state"][0].values()):
                assert torch.as_tensor(tensor).isfinite().all()
    # numpy's long double squares every float64.
    x = point.detach().double().numpy().astype(np.longdouble)
    np.testing.assert_allclose(x[:, 0], np.sqrt((x[:, 1:] ** 2).sum(-1) - 1 / kappa), rtol=1e-6)


def test_a_point_without_gradient_stays_where_geoopt_lets_it_drift(dtype):
    def run(kind):
        points = [on(geoopt.Lorentz(), torch.ones(2, 3, dtype=torch.float64), dtype)]
        optimizer = kind(points, lr=0.1)
        for _ in range(300):
            points[0].grad = torch.zeros_like(points[0])
            optimizer.step()
        return points[0].detach()[:, 1:]

    assert torch.equal(run(RiemannianAdam), torch.ones(2, 2, dtype=dtype))
    if dtype == torch.float64:
        assert float((run(geoopt.optim.RiemannianAdam) - 1).abs().max()) > 1e-7


@pytest.mark.parametrize("size", [1e19, 1e25, 1e37])
def test_a_gradient_whose_square_overflows_makes_an_ordinary_step(size):
    """The first step of Adam is as long as the learning rate, whatever the gradient: it went to the edge of float32."""
    manifold, direction = geoopt.Lorentz(), torch.tensor([[0.0, 0.6, -0.8]])
    points = [on(manifold, torch.ones(1, 3, dtype=torch.float64), torch.float32) for _ in range(2)]
    for point, length in zip(points, (1.0, size), strict=True):
        point.grad = length * direction
        RiemannianAdam([point], lr=0.1).step()
    torch.testing.assert_close(points[1].detach(), points[0].detach(), rtol=1e-5, atol=1e-6)


def test_one_quiet_row_beside_a_loud_one():
    point = on(geoopt.Lorentz(), torch.ones(2, 3, dtype=torch.float64), torch.float32)
    optimizer = RiemannianAdam([point], lr=0.1, eps=0.0)
    for _ in range(5):
        point.grad = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1e20, 1.0]])
        optimizer.step()
    assert torch.equal(point[0, 1:], torch.ones(2))
    assert float((point[1, 1:] - 1).abs().max().detach()) > 0.1


def test_nan_gradients_are_not_hidden(dtype):
    point = on(geoopt.Lorentz(), torch.ones(2, 3, dtype=torch.float64), dtype)
    point.grad = torch.tensor([[0.0, float("nan"), 0.0], [0.0, 1.0, 0.0]], dtype=dtype)
    RiemannianAdam([point]).step()
    assert point[0, 1:].isnan().all()
    assert point[1].isfinite().all()


def test_the_step_in_place_is_the_reference(monkeypatch):
    plain = train(RiemannianAdam(tables(), lr=0.1, weight_decay=0.1, amsgrad=True), 20)
    monkeypatch.setattr(numerics, "is_ordinary", lambda x, *_: torch.zeros_like(x, dtype=torch.bool))
    careful = train(RiemannianAdam(tables(), lr=0.1, weight_decay=0.1, amsgrad=True), 20)
    assert 0 < deviation(plain, careful) <= 1e-12


@pytest.mark.parametrize("wild", ["far", "farther", "steep"])
def test_only_the_rows_that_need_float64_are_stepped_in_it(monkeypatch, wild):
    """Such a row once sent all others of its block there, at twice the price; one that is only far once was careful."""
    draw = torch.Generator().manual_seed(0)
    space, grad = normal(draw, 40, 5).float(), normal(draw, 40, 6).float()
    (grad if wild == "steep" else space)[7] *= {"far": 1e6, "farther": 1e9, "steep": 1e30}[wild]
    careful, counts = optim_tables._step_reference, []

    def counted(rows, *rest):
        counts.append(len(rows.point))
        careful(rows, *rest)

    def stepped():
        manifold = Lorentz(-1.0)
        table = geoopt.ManifoldParameter(manifold.lift(space), manifold=manifold)
        optimizer = RiemannianAdam([table], lr=0.01)
        for _ in range(2):
            table.grad = grad.clone()
            optimizer.step()
        return table.detach(), optimizer.state[table]["exp_avg"]

    monkeypatch.setattr(optim_tables, "_step_reference", counted)
    points, momenta = stepped()
    assert counts == ([] if wild == "far" else [1, 1])
    monkeypatch.setattr(numerics, "is_ordinary", lambda x, *_: torch.zeros_like(x, dtype=torch.bool))
    for mixed, widened in zip((points, momenta), stepped(), strict=True):
        torch.testing.assert_close(mixed[7], widened[7], rtol=0 if counts else 1e-7, atol=0)
        torch.testing.assert_close(mixed, widened, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 40, 700, 2**17])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_blocks_do_not_change_the_result(monkeypatch, elements, amsgrad):
    def run(parameters):
        optimizer = RiemannianAdam(parameters, lr=0.1, amsgrad=amsgrad)
        for step in range(10):
            for p in parameters:
                p.grad = torch.sin(step * p.detach() + torch.arange(p.numel()).view(p.shape))
            optimizer.step()
        return parameters

    alone = [run([table])[0] for table in tables(torch.float32)]
    monkeypatch.setattr(optim_tables, "_BLOCK_ELEMENTS", elements)
    assert deviation(alone, run(tables(torch.float32))) <= 1e-6


def test_any_memory_layout_gives_the_same_numbers():
    def parameters(layout):
        draw = torch.Generator().manual_seed(0)
        table = on(geoopt.Lorentz(), normal(draw, 6, 5))
        block = on(geoopt.Lorentz(), normal(draw, 3, 4, 5))
        if layout == "strided":
            table.data = table.data.t().contiguous().t()
            block.data = block.data.transpose(0, 1).contiguous().transpose(0, 1)
        weight, kernel = normal(draw, 4, 6), normal(draw, 2, 3, 4, 4)
        if layout == "strided":
            weight, kernel = weight.t().contiguous().t(), kernel.to(memory_format=torch.channels_last)
            assert not weight.is_contiguous()
            assert not block.is_contiguous()
        return [table, block, torch.nn.Parameter(weight), torch.nn.Parameter(kernel)]

    dense = train(RiemannianAdam(parameters("dense"), lr=0.1, amsgrad=True), 10)
    assert deviation(train(RiemannianAdam(parameters("strided"), lr=0.1, amsgrad=True), 10), dense) <= 1e-13
    # A gradient that repeats one number in memory.
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.ones(()).expand(3, 4)
    RiemannianAdam([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), -0.1))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gradients_are_left_alone(decay):
    parameters = everything()
    optimizer = RiemannianAdam(parameters, lr=0.1, weight_decay=decay)
    train(optimizer, 1)
    grads = [p.grad for p in parameters]
    kept = [g.clone() for g in grads]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(parameters, grads, strict=True))
    assert all(map(torch.equal, grads, kept))


def operations(count):
    """How often each operation ran in one step over so many Euclidean tensors, below Python too.

    But for the count of steps, which torch's fused kernel reads once for each of its tensors.
    """
    inside = {"aten::item", "aten::_local_scalar_dense"}
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(count)]
    optimizer = RiemannianAdam([*parameters, *tables(torch.float32)], lr=0.1)
    train(optimizer, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    return Counter(name for name in names if name.startswith("aten::") and name not in inside)


def test_the_number_of_operations_does_not_grow_with_euclidean_tensors():
    assert operations(2) == operations(50)
    assert operations(2)["aten::_fused_adam_"] == 1


def test_tables_of_one_width_are_stepped_together():
    def count(number):
        manifolds = [geoopt.Lorentz(1.0 + i) for i in range(number)]
        optimizer = RiemannianAdam([on(m, torch.ones(4, 3), torch.float32) for m in manifolds])
        train(optimizer, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        return Counter(event.name for event in profile.events())["aten::sinh"]

    assert count(2) == count(9) == 1


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.complex64"):
        RiemannianAdam([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    optimizer = RiemannianAdam(euclidean())
    with pytest.raises(TypeError, match="complex"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "name", ["maximize", "capturable", "differentiable", "decoupled_weight_decay", "foreach", "fused"]
)
def test_options_that_geoopt_ignores_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is not offered"):
        RiemannianAdam([{"params": euclidean(), name: True}])
    with pytest.raises(TypeError):
        RiemannianAdam(euclidean(), **{name: True})


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must "):
        RiemannianAdam(euclidean(), **options)


def test_a_closure_is_called_once_with_gradients_on():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = RiemannianAdam([weight], lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))


def test_parameters_without_gradient_or_without_rows_do_no_harm():
    manifold = geoopt.Lorentz()
    idle, empty = on(manifold, torch.ones(2, 3)), on(manifold, torch.ones(0, 3))
    busy = [on(manifold, torch.ones(2, 3)) for _ in range(2)]
    optimizer = RiemannianAdam([idle, empty, *busy, torch.nn.Parameter(torch.zeros(0))], lr=0.1)
    empty.grad = torch.zeros_like(empty)
    for step in range(3):
        busy[0].grad = torch.ones_like(busy[0])
        # Counts of steps differ from here on: these two can no longer share a block.
        busy[1].grad = torch.ones_like(busy[1]) if step else None
        optimizer.step()
    assert torch.equal(idle.detach()[:, 1:], torch.ones(2, 2, dtype=torch.float64))
    assert optimizer.state[busy[0]]["step"] == 3
    assert optimizer.state[busy[1]]["step"] == 2
    lonely = on(manifold, torch.ones(2, 3))
    alone = RiemannianAdam([lonely], lr=0.1)
    for _ in range(2):
        lonely.grad = torch.ones_like(lonely)
        alone.step()
    assert torch.equal(lonely, busy[1])


@pytest.mark.parametrize("every", [0, -1])
def test_stabilize_is_a_number_of_steps(every):
    point = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="stabilize must be a positive integer"):
        RiemannianAdam([point], stabilize=every)
    optimizer = RiemannianAdam([point])
    with pytest.raises(ValueError, match="stabilize must be a positive integer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "stabilize": every})
    assert len(optimizer.param_groups) == 1


def test_stabilize_repairs_time_and_projects_the_rest():
    table, sphere = tables()[0], elsewhere()[0]
    optimizer = RiemannianAdam([table, sphere], lr=0.1)
    train(optimizer, 2)
    good = table.detach().clone()
    table.data[..., 0] += 1.0
    sphere.data.mul_(2.0)
    optimizer.stabilize()
    torch.testing.assert_close(table.detach(), good, rtol=1e-14, atol=0)
    torch.testing.assert_close(sphere.detach().norm(dim=-1), torch.ones(6, dtype=torch.float64))


def test_sharded_parameters_and_others(mesh):
    """As ``fully_shard`` leaves them, with parameters that it is told to ignore; torch has no one call for both."""
    start = [torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (2,), (1,))]
    grads = [torch.randn_like(x) for x in start]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    ours[0] = nn.Parameter(distribute_tensor(start[0], mesh, [Shard(0)]))
    for parameters in (ours, theirs):
        optimizer = RiemannianAdam(parameters, lr=0.1)
        for _ in range(3):
            for parameter, grad in zip(parameters, grads, strict=True):
                sharded = isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(grad, mesh, [Shard(0)]) if sharded else grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours[0].full_tensor(), theirs[0])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, other)


def test_a_rate_beside_the_parameters_stays_on_their_device() -> None:
    """To read it would wait for the device; meta, which nothing can be read from, stands in for one."""
    rate = torch.tensor(0.1, device="meta")
    assert adam._rate(rate, torch.device("meta")).is_meta
    assert adam._rate(torch.tensor(0.1), torch.device("meta")) == pytest.approx(0.1)
