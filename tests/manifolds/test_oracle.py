"""Every function of the manifold, and every gradient of it, against the oracle.

Points from the origin to distance 30 and to the largest that the dtype holds, pairs from coincident
to 60 apart, nearly coincident far out, antipodal, along axes (where cancellation is exact) and in
random directions. ``python -m tests.manifolds.accuracy_table`` prints the worst of all of it.
"""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.layers.hyperbolic.midpoint import lifted_midpoint
from holonomy.manifolds import Lorentz
from tests.manifolds import accuracy
from tests.manifolds.geometry import Pair, pairs, rapidity

pytestmark = pytest.mark.usefixtures("without_shape_checks")

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-8}


def judge(found: list[accuracy.Error], dtype: torch.dtype) -> None:
    """Fail with the worst offenders by name."""
    assert found
    wrong = sorted((e for e in found if not e.error <= LIMITS[dtype]), key=lambda e: -e.error)
    listing = "\n".join(f"{e.error:.1e}  {e.quantity}  {e.row}" for e in wrong[:12])
    assert not wrong, f"{len(wrong)} of {len(found)} beyond {LIMITS[dtype]:g}:\n{listing}"


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
@pytest.mark.parametrize("name", [name for name in accuracy.OPERATIONS if name != "ray_angle"])
def test_function(name: str, kappa: float, dtype: torch.dtype) -> None:
    # Midpoints of more points are judged below.
    often = kappa == -1.0 and "midpoint" not in name
    thin, dims = (97 if often else 291, (1, 3)) if dtype == torch.float32 else (307, (3,))
    judge(list(accuracy.errors(name, kappa, dtype, thin=thin, dims=dims)), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_angles_of_points_that_lie_on_no_line(kappa: float, dtype: torch.dtype) -> None:
    thin = 29 if dtype == torch.float32 else 97
    judge(list(accuracy.errors("ray_angle", kappa, dtype, thin=thin, dims=(2, 3))), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_cdist(kappa: float, dtype: torch.dtype) -> None:
    judge(list(accuracy.cdist_errors(kappa, dtype)), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_centroid(kappa: float) -> None:
    judge(list(accuracy.centroid_errors(kappa, torch.float32)), torch.float32)


@pytest.mark.parametrize("radius", [3.0, 10.0, 20.0, 40.0])
def test_near_points_and_vectors_along_their_ray(radius: float) -> None:
    """Pairs within a radius of curvature of one another, as float32 has them: at 20 and beyond they share a ray."""
    rows = []
    for factor in (1.0, 2.0, 3.0, 0.7, 1 + 2.0**-10):
        x = (torch.tensor([0.48, -0.6, 0.64]).double() * math.sinh(radius)).float()
        y = x * factor
        rows.append(Pair(f"r={radius:g} times {factor:g}", x, y, x * 2.0**-60, x * -0.5))
        nudged = y.clone()
        nudged[0] = torch.nextafter(y[0], y[1])
        rows.append(Pair(f"r={radius:g} times {factor:g} and an ulp", x, nudged, nudged - x * factor, x * 0.25))
    names = ("cdist", "dist", "expmap", "inner", "logmap", "midpoint", "midpoint row by row", "transp", "transp0back")
    for name in names:
        judge(list(accuracy.compare(name, -1.0, rows)), torch.float32)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_transport_past_the_origin(kappa: float) -> None:
    """From far out, inward along the ray and beyond: the angle that it turns by is a difference of large numbers.

    And what a vector loses as the curvature moves comes from its part along the ray, which is stretched by x_t.
    """
    rows = [row for row in pairs(kappa, 2, torch.float32) if " inward" in row.label and rapidity(row.x, kappa) > 3]
    judge(list(accuracy.compare("transp", kappa, rows)), torch.float32)


def test_gradcheck() -> None:
    """First derivatives in points, vectors, weights and curvature, in float64, all functions."""
    manifold = Lorentz(-0.7, learnable=True, dtype=torch.float64)
    x, y = (manifold.lift(torch.randn(3, 2).double()).detach().requires_grad_() for _ in range(2))
    u = manifold.proju(x, torch.randn(3, 3).double()).detach().requires_grad_()
    weights = torch.rand(3).double().requires_grad_()
    (parameter,) = [p for p in manifold.parameters() if p.requires_grad]

    def everything(x, y, u, weights, log_ratio):
        def call(name, *arguments):
            state = {"curvature_parameter.log_ratio": log_ratio}
            return torch.func.functional_call(Method(manifold, name), add_prefix(state), arguments)

        return (
            *(call(name, x, y) for name in ("dist", "cdist", "logmap")),
            *(call(name, x) for name in ("dist0", "logmap0", "to_poincare", "to_klein")),
            *(call(name, x, u) for name in ("expmap", "transp0", "transp0back", "inner")),
            call("expmap0", u),
            call("transp", x, y, u),
            call("centroid", x, weights),
        )

    assert torch.autograd.gradcheck(everything, (x, y, u, weights, parameter))


class Method(torch.nn.Module):
    """One method of a manifold as a module, for `torch.func.functional_call`."""

    def __init__(self, manifold: Lorentz, name: str) -> None:
        super().__init__()
        self.manifold, self.name = manifold, name

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return getattr(self.manifold, self.name)(*arguments)


def add_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"manifold.{name}": value for name, value in state.items()}


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
@pytest.mark.parametrize("name", ["from_poincare", "from_klein"])
def test_ball(name: str, kappa: float, dtype: torch.dtype) -> None:
    judge(list(accuracy.ball_errors(name, kappa, dtype)), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_coincident_points_have_zero_gradients(kappa: float, dtype: torch.dtype) -> None:
    """The distance has no derivative where the points meet: ours is the subgradient zero."""
    manifold = Lorentz(kappa, learnable=True, dtype=dtype)
    space = torch.tensor([[0.0, 0.0], [1e-6, 0.0], [1.0, 2.0], [3e5, -7e5], [1e30, 1e30]])
    x = manifold.lift(space.to(dtype)).detach().requires_grad_()
    y = x.detach().clone().requires_grad_()
    for distances in (manifold.dist(x, y), manifold.cdist(x, y).diagonal()):
        assert (distances == 0).all()
        for gradient in torch.autograd.grad(distances.sum(), [x, y]):
            assert (gradient == 0).all()
    # The log map is smooth there: d log_x(y) / dy is the identity on space parts at the origin.
    log = manifold.logmap(x, y)
    assert (log == 0).all()
    for gradient in torch.autograd.grad(log.sum(), [x, y]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("size", [1e60, 1e160, 1e242, 1e300])
@pytest.mark.parametrize("dim", [1, 3])
def test_midpoints_on_a_ray_at_the_end_of_float64(size: float, dim: int) -> None:
    """Far out the midpoint of x and 4 x is 2 x, and sqrt(x y) on the line."""
    manifold = Lorentz(-1.0, dtype=torch.float64)
    ray = torch.tensor([[0.5, -1.0, 0.75]], dtype=torch.float64)[:, :dim]
    spaces = [(ray * size * factor).requires_grad_() for factor in (1.0, 4.0)]
    x, y = (manifold.lift(space) for space in spaces)
    for middle in (lifted_midpoint(x, y, 1.0, manifold.curvature), manifold.centroid(torch.cat([x, y]))[None]):
        torch.testing.assert_close(middle[:, 1:], ray * size * 2, rtol=1e-14, atol=0)
        gradients = torch.autograd.grad((middle[:, 1:] * ray).sum(), spaces, retain_graph=True)
        for gradient, rate in zip(gradients, (1.0, 0.25), strict=True):
            torch.testing.assert_close(gradient, ray * rate, rtol=1e-12, atol=0)


@pytest.mark.parametrize("other", [0.3, 2.0, -1.27e308, 0.0, 1e-300])
def test_distances_to_the_farthest_points_that_float64_holds(other: float) -> None:
    """On a line a distance is a difference of rapidities, here up to 1420."""
    manifold = Lorentz(-1.0, learnable=True, dtype=torch.float64)
    parameter, _ = accuracy.curvature_of(manifold)
    spaces = (torch.tensor([[value]], dtype=torch.float64) for value in (1.27e308, other))
    far, near = (manifold.lift(space).detach().requires_grad_() for space in spaces)
    distance = manifold.cdist(far, near)
    assert distance.item() == pytest.approx(math.asinh(1.27e308) - math.asinh(other), rel=1e-14)
    of_far, of_near, of_parameter = torch.autograd.grad(distance, [far, near, parameter])
    assert of_far[0, 1].item() == pytest.approx(1 / 1.27e308, rel=1e-12, abs=1e-308)
    assert of_near[0, 1].item() == pytest.approx(-1 / math.hypot(1.0, other), rel=1e-12, abs=1e-308)
    rate = 1 - math.tanh(math.asinh(other))
    assert of_parameter.item() == pytest.approx((rate - distance.item()) / 2, rel=1e-12)
