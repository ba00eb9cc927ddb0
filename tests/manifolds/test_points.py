"""Learned points under a learned curvature: they stay where they belong, in the order they had."""

from __future__ import annotations

import math
from collections.abc import Callable

import geoopt
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from holonomy.layers import HypPrototypes
from holonomy.manifolds import Lorentz, LorentzEmbedding, LorentzPoints
from holonomy.manifolds import points as points_module
from holonomy.optim import RiemannianAdam


def defect(points: Tensor, kappa: Tensor) -> float:
    """How far from the hyperboloid, relative to the squared time: max |<x,x> - 1/kappa| / x_t^2."""
    wide, kappa = points.detach().double(), kappa.detach().double()
    inner = wide[..., 1:].square().sum(-1) - wide[..., 0].square()
    return float(((inner - 1 / kappa).abs() / wide[..., 0].square()).max())


def stress(manifold: Lorentz, points: Tensor, wanted: Tensor) -> Tensor:
    """A loss that moves both the points and the curvature."""
    return (manifold.cdist(points, points) - wanted).square().mean()


def wanted_distances(count: int) -> Tensor:
    """The path metric of a line."""
    index = torch.arange(count, dtype=torch.float32)
    return (index[:, None] - index).abs()


def test_five_hundred_steps_on_the_manifold() -> None:
    manifold = Lorentz(-1.0, learnable=True)
    embedding = LorentzEmbedding(8, 3, manifold)
    optimizer = RiemannianAdam(embedding.parameters(), lr=0.1)
    wanted, rows = wanted_distances(8), torch.arange(8)
    first = stress(manifold, embedding(rows), wanted).item()
    for step in range(500):
        optimizer.zero_grad()
        stress(manifold, embedding(rows), wanted).backward()
        optimizer.step()
        if step % 50 == 49:
            assert defect(embedding(rows), manifold.curvature) < 1e-6
            assert defect(embedding.unit, torch.tensor([-1.0])) < 1e-6
    assert manifold.curvature.item() != -1.0
    assert stress(manifold, embedding(rows), wanted).item() < first / 4


def test_geoopts_own_class_leaves_it_after_three_steps() -> None:
    """What the pattern behind LorentzEmbedding is for: in Geoopt the points are stranded."""
    theirs = geoopt.Lorentz(torch.tensor(1.0), learnable=True)
    start = Lorentz(-1.0).lift(torch.randn(8, 3)).detach()
    points = geoopt.ManifoldParameter(start, manifold=theirs)
    optimizer = geoopt.optim.RiemannianAdam([points, theirs.k], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        theirs.dist(points[:4], points[4:]).sum().backward()
        optimizer.step()
    # Off the manifold, or not a number at all: Geoopt's distance is a square root of what cancels.
    assert not defect(points, -1 / theirs.k) < 1e-3


def test_rows_and_gradients() -> None:
    """A lookup reads rows of the table, and only those get a gradient, repeated ones included."""
    manifold = Lorentz(-0.25, learnable=True)
    embedding = LorentzEmbedding(6, 2, manifold)
    index = torch.tensor([[0, 5], [5, 2]])
    points = embedding(index)
    assert points.shape == (2, 2, 3)
    assert torch.equal(points[0, 1], points[1, 0])
    # Scaled from the unit hyperboloid by 1/sqrt|kappa| = 2.
    torch.testing.assert_close(points, 2 * embedding.unit[index])
    assert isinstance(embedding.unit, geoopt.ManifoldParameter)
    manifold.dist0(points).sum().backward()
    moved = embedding.unit.grad.abs().sum(-1) > 0
    assert moved.tolist() == [True, False, True, False, False, True]
    assert all(p.grad is not None for p in manifold.parameters() if p.requires_grad)


def test_points_on_their_own() -> None:
    manifold = Lorentz(-4.0, learnable=True)
    points = LorentzPoints(5, 3, manifold)
    assert points().shape == (5, 4)
    torch.testing.assert_close(points(), points.unit / 2)
    assert defect(points(), manifold.curvature) < 1e-6
    assert manifold.dist0(points()).min() > 0


def test_one_point_of_one_dimension_is_a_table() -> None:
    manifold = Lorentz(-4.0, dtype=torch.float64)
    points = manifold.lift(torch.tensor([[0.3]], dtype=torch.float64))
    table = LorentzEmbedding.from_pretrained(points, manifold)
    assert (table.num_embeddings, table.embedding_dim) == (1, 1)
    torch.testing.assert_close(table(torch.tensor([0])), points)


@pytest.mark.parametrize("rate", [1e-2, 10.0])
def test_a_step_on_kappa_keeps_the_order_of_distances(rate: float) -> None:
    manifold = Lorentz(-1.0, learnable=True, dtype=torch.float64)
    embedding = LorentzEmbedding(12, 3, manifold).double()
    rows = torch.arange(12)

    def distances() -> Tensor:
        points, pairs = embedding(rows), torch.triu_indices(12, 12, 1)
        return manifold.cdist(points, points)[pairs[0], pairs[1]]

    before, kappa = distances().detach(), manifold.curvature.item()
    curvatures = [p for p in manifold.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(curvatures, lr=rate)
    distances().sum().backward()
    optimizer.step()
    after = distances().detach()
    assert manifold.curvature.item() != kappa
    # Every distance moved, all by the one factor sqrt(kappa / kappa').
    factor = (kappa / manifold.curvature.item()) ** 0.5
    torch.testing.assert_close(after, before * factor, rtol=1e-12, atol=0)
    assert torch.equal(after.argsort(), before.argsort())


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("build", [LorentzPoints, LorentzEmbedding])
def test_what_does_not_fit_is_refused_at_construction(build) -> None:
    with pytest.raises(
        TypeError, match=r"manifold must be .*Lorentz \(Lorentz\(-1 / k\) of Geoopt's k\), got <class 'geoopt"
    ):
        build(3, 2, geoopt.Lorentz())
    for std in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="std must be finite and not negative"):
            build(3, 2, Lorentz(), std=std)


def test_points_made_on_the_meta_device_are_points_when_they_leave_it() -> None:
    """Torch made ordinary parameters of them, which an optimizer moves in straight lines; and nothing could be made."""
    with torch.device("meta"):
        table = LorentzEmbedding(5, 3, Lorentz(-0.5, learnable=True))
        assert table(torch.tensor([1, 2])).shape == (2, 4)
    state = LorentzEmbedding(5, 3, Lorentz(-2.0, learnable=True)).state_dict()
    for load in (
        lambda: table.to_empty(device="cpu").load_state_dict(state),
        lambda: table.load_state_dict(state, assign=True),
    ):
        load()
        assert isinstance(table.unit, geoopt.ManifoldParameter)
        assert table.unit.requires_grad
        assert table.unit.manifold.check_point_on_manifold(table.unit)
        assert table.manifold.curvature.item() == -2.0


FUNCTIONS_ELSEWHERE = {
    "dist": lambda m, x: m.dist(x, x),
    "cdist": lambda m, x: m.cdist(x, x),
    "expmap": lambda m, x: m.expmap(x, x),
    "logmap": lambda m, x: m.logmap(x, x),
    "transp": lambda m, x: m.transp(x, x, x),
    "inner": lambda m, x: m.inner(x, x),
    "projx": lambda m, x: m.projx(x),
    "centroid": lambda m, x: m.centroid(x),
    "egrad2rgrad": lambda m, x: m.egrad2rgrad(x, x),
}


@pytest.mark.parametrize("name", FUNCTIONS_ELSEWHERE)
def test_a_curvature_may_stay_on_another_device(name: str) -> None:
    """That of a ``ManifoldParameter`` does not move with its module; the meta device stands in for any other."""
    x = torch.empty(5, 4, device="meta")
    assert FUNCTIONS_ELSEWHERE[name](Lorentz(-0.5), x).is_meta


@pytest.mark.parametrize("kind", ["table", "layer"])
def test_an_optimizer_moves_points_that_torch_has_swapped(kind: str) -> None:
    """torch.__future__ may swap parameters where a module moves; new ones took their place, which nothing stepped."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = LorentzEmbedding(4, 2, Lorentz()) if kind == "table" else HypPrototypes(2, 4, Lorentz())
        table = module if kind == "table" else module.prototypes
        held, optimizer = table.unit, RiemannianAdam(module.parameters(), lr=0.1)
        module.double()
        module.load_state_dict(module.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert table.unit is held
    assert isinstance(held, geoopt.ManifoldParameter)
    assert held.dtype == torch.float64
    before = held.detach().clone()
    table()[:, 1].sum().backward()
    optimizer.step()
    assert not torch.equal(held, before)
    assert defect(held, torch.tensor([-1.0])) < 1e-12


def test_an_average_of_tables_is_a_table_of_points() -> None:
    """Torch averages coordinates; what is read stands above the mean of the space parts, and can learn on."""
    table = LorentzEmbedding(6, 3, Lorentz(-0.5, learnable=True))
    averaged, units = AveragedModel(table), []
    optimizer = RiemannianAdam(table.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        stress(table.manifold, table(), wanted_distances(6)).backward()
        optimizer.step()
        averaged.update_parameters(table)
        units.append(table.unit.detach()[:, 1:].clone())
    mean = averaged.module
    assert mean.manifold.check_point_on_manifold(mean())
    radius = mean.manifold.curvature.neg().rsqrt()
    torch.testing.assert_close(mean.manifold.space(mean()), torch.stack(units).mean(0) * radius)
    optimizer = RiemannianAdam(mean.parameters(), lr=0.1)
    stress(mean.manifold, mean(), wanted_distances(6)).backward()
    optimizer.step()
    assert mean.unit.manifold.check_point_on_manifold(mean.unit)


@pytest.mark.parametrize(("std", "kappa"), [(40.0, -0.0114), (3.8e9, -0.02), (3.8e9, -50.0)])
def test_points_beyond_what_the_dtype_holds_saturate(std: float, kappa: float, dtype: torch.dtype) -> None:
    """Read on a flatter space they would overflow; points and gradients stay finite."""
    torch.manual_seed(0)
    manifold = Lorentz(kappa, learnable=True, dtype=dtype)
    table = LorentzEmbedding(4, 3, manifold, std=std, dtype=dtype)
    points = table()
    assert points.isfinite().all()
    learned = [table.unit, manifold.curvature_parameter.log_ratio]
    for gradient in torch.autograd.grad(points.sum() + manifold.dist0(points).square().sum(), learned):
        assert gradient.isfinite().all()


def test_steps_of_any_size_leave_points_finite(dtype: torch.dtype) -> None:
    """The second step starts from where the first has saturated."""
    for rate in (1e3, 1e30):
        torch.manual_seed(0)
        table = LorentzEmbedding(5, 3, Lorentz(-1.0, dtype=dtype), dtype=dtype)
        optimizer = RiemannianAdam(table.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            stress(table.manifold, table(), wanted_distances(5).to(dtype)).backward()
            optimizer.step()
            assert table.unit.isfinite().all()


def test_squared_distances_of_the_farthest_points_have_gradients() -> None:
    manifold = Lorentz(-1.0, dtype=torch.float64)
    x = manifold.lift(torch.tensor([[9e306, 0.0]], dtype=torch.float64)).requires_grad_()
    distance = manifold.dist0(x)
    (gradient,) = torch.autograd.grad(distance.square().sum(), x)
    assert gradient[0, 1].item() == pytest.approx(2 * distance.item() / 9e306, rel=1e-12)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("key", "tamper"),
    [
        ("manifold.curvature_parameter.initial", torch.neg),
        ("manifold.curvature_parameter.initial", torch.zeros_like),
        ("manifold.curvature_parameter.initial", lambda x: x * float("nan")),
        ("manifold.curvature_parameter.initial", lambda x: x.to(torch.complex64)),
        ("manifold.curvature_parameter.initial", lambda x: x[:0]),
        ("unit", lambda x: x.to(torch.complex64)),
        ("unit", Tensor.to_sparse),
        ("unit", lambda x: x[:2]),
    ],
)
def test_a_state_that_was_tampered_with_is_refused_by_its_key(
    key: str, tamper: Callable[[Tensor], Tensor], *, assign: bool
) -> None:
    points = LorentzPoints(4, 2, Lorentz(-1.0))
    state = points.state_dict()
    with pytest.raises(RuntimeError, match=key):
        points.load_state_dict({**state, key: tamper(state[key].clone())}, assign=assign)
    assert points.manifold.curvature.item() == -1.0


def test_a_table_says_its_sizes() -> None:
    table = LorentzEmbedding(5, 3, Lorentz(-1.0), padding_idx=-1, sparse=True)
    assert (table.num_embeddings, table.embedding_dim) == (5, 3)
    assert "5, 3, padding_idx=4, sparse=True" in repr(table)


@pytest.mark.parametrize("kappa", [-1.0, -1e-6, -1e6])
@pytest.mark.parametrize("far", [None, 1e20, math.nan])
def test_points_are_read_as_by_the_definition(dtype: torch.dtype, kappa: float, far: float | None) -> None:
    """Points, gradients and second derivatives, also beside a row whose square overflows and one that is nan."""
    draw = torch.Generator().manual_seed(0)
    manifold = Lorentz(kappa, learnable=True, dtype=dtype)
    points = LorentzPoints(6, 3, manifold, std=2.0, generator=draw, dtype=dtype)
    with torch.no_grad():
        if far is not None:
            points.unit[2, 1:] = far * (1e140 if dtype == torch.float64 else 1.0)
    unit = points.unit.detach().as_subclass(torch.Tensor).requires_grad_()
    weights = torch.randn(6, 4, generator=draw, dtype=dtype)
    kept = torch.arange(6) != 2

    def derivatives(read: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        found, ratio = read(unit), manifold.curvature_parameter.log_ratio
        first = torch.autograd.grad(found, [unit, ratio], weights, retain_graph=True)
        again = torch.autograd.grad((found[kept] * weights[kept]).sum(), unit, create_graph=True)[0]
        second = torch.autograd.grad((again[kept] * weights[kept]).sum(), [unit, ratio])
        return [found, *first, again, second[0][kept], second[1]]

    ours = derivatives(points.read)
    expected = derivatives(lambda x: points_module._read_reference(x, manifold.curvature))
    for one, other in zip(ours, expected, strict=True):
        scale = other.abs().nan_to_num(0.0, 0.0).max().clamp(min=1.0)
        torch.testing.assert_close(
            one / scale, other / scale, rtol=1e-5, atol=4 * torch.finfo(dtype).eps, equal_nan=True
        )
