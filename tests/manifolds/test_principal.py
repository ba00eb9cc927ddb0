"""Principal directions: a plane is shown as it is, wherever it lies, and the longest directions are kept."""

from __future__ import annotations

import math

import pytest
import torch

from holonomy.manifolds import Lorentz, tangent_pca

D = torch.float64
KAPPAS = (-0.25, -1.0, -4.0)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Points under an isometry: a boost of rapidity 1.5 along the first axis, then an orthogonal matrix."""
    boost = torch.eye(x.shape[-1], dtype=D)
    boost[0, 0] = boost[1, 1] = math.cosh(1.5)
    boost[0, 1] = boost[1, 0] = math.sinh(1.5)
    turn = torch.eye(x.shape[-1], dtype=D)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(x.shape[-1] - 1, x.shape[-1] - 1, dtype=D))[0]
    return x @ boost @ turn


@pytest.mark.parametrize("kappa", KAPPAS)
def test_a_plane_keeps_its_distances_and_an_isometry_changes_nothing(kappa):
    torch.manual_seed(0)
    m = Lorentz(kappa, dtype=D)
    plane = m.lift(torch.nn.functional.pad(torch.randn(2, 9, 2, dtype=D), (0, 3)))
    shown = tangent_pca(moved(plane), m)
    assert shown.shape == (2, 9, 3)
    torch.testing.assert_close(m.cdist(shown, shown), m.cdist(plane, plane))
    x = m.lift(torch.randn(9, 5, dtype=D))
    for dim in (1, 2, 4):
        torch.testing.assert_close(tangent_pca(moved(x), m, dim), tangent_pca(x, m, dim))


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_longest_directions_are_kept_in_order(kappa):
    m, lengths = Lorentz(kappa, dtype=D), torch.tensor([1.0, 3.0, 2.0], dtype=D)
    tangent = torch.nn.functional.pad(torch.cat([torch.diag(lengths), -torch.diag(lengths)]), (1, 0))
    found = m.logmap0(tangent_pca(m.expmap0(tangent), m))[:, 1:].abs()
    torch.testing.assert_close(found, torch.tensor([[0, 0], [3, 0], [0, 2]], dtype=D).repeat(2, 1), atol=1e-9, rtol=0)


def test_few_points_and_few_coordinates_have_zeros():
    m = Lorentz(-1.0)
    assert torch.equal(tangent_pca(m.lift(torch.randn(1, 4)), m)[:, 1:], torch.zeros(1, 2))
    assert tangent_pca(m.lift(torch.zeros(0, 4)), m).shape == (0, 3)
    line = m.lift(torch.tensor([[-3.0], [0.0], [5.0]]))
    shown = tangent_pca(line, m, 3)
    assert not shown[:, 2:].any()
    torch.testing.assert_close(m.cdist(shown, shown), m.cdist(line, line))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_float32(half):
    m = Lorentz(-1.0)
    x = m.lift(torch.tensor([[2.0, 0.0], [-1.0, 0.5], [-1.0, -0.5]], dtype=half))
    shown = tangent_pca(x, m)
    assert shown.dtype == half
    torch.testing.assert_close(shown.float().abs(), tangent_pca(x.float(), m).abs(), atol=0.05, rtol=0.05)


def test_distances_from_the_mean_of_far_points_are_kept():
    """In float32, of a cross with ends at distance 60."""
    m = Lorentz(-1.0)
    ends = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    ends = 60 * ends / ends.norm(dim=1, keepdim=True)
    x = m.expmap0(torch.nn.functional.pad(torch.cat([ends, -ends]), (1, 0))).requires_grad_()
    shown = tangent_pca(x, m)
    torch.testing.assert_close(m.dist0(shown), torch.full((4,), 60.0))
    shown[:, 1:].abs().log1p().sum().backward()
    assert x.grad.isfinite().all()
