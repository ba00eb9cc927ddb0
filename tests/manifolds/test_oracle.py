"""Every function of the manifold, and every gradient of it, against the oracle.

Points from the origin to distance 30 and to the largest that the dtype holds, pairs from coincident
to 60 apart, nearly coincident far out, antipodal, along axes (where cancellation is exact) and in
random directions. ``python -m tests.manifolds.accuracy_table`` prints the worst of all of it.
"""

from __future__ import annotations

import pytest
import torch

from holonomy.manifolds import Lorentz
from tests.manifolds import accuracy

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-8}


def judge(found: list[accuracy.Error], dtype: torch.dtype) -> None:
    """Fail with the worst offenders by name."""
    assert found
    wrong = sorted((e for e in found if not e.error <= LIMITS[dtype]), key=lambda e: -e.error)
    listing = "\n".join(f"{e.error:.1e}  {e.quantity}  {e.row}" for e in wrong[:12])
    assert not wrong, f"{len(wrong)} of {len(found)} beyond {LIMITS[dtype]:g}:\n{listing}"


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
@pytest.mark.parametrize("name", accuracy.OPERATIONS)
def test_function(name: str, kappa: float, dtype: torch.dtype) -> None:
    thin = 67 if dtype == torch.float32 else 211
    judge(list(accuracy.errors(name, kappa, dtype, thin=thin)), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_cdist(kappa: float, dtype: torch.dtype) -> None:
    judge(list(accuracy.cdist_errors(kappa, dtype)), dtype)


@pytest.mark.parametrize("kappa", accuracy.KAPPAS)
def test_centroid(kappa: float, dtype: torch.dtype) -> None:
    judge(list(accuracy.centroid_errors(kappa, dtype)), dtype)


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
