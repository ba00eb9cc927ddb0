"""Residual and layer or RMS normalisation in one formula: the numbers of one after the other, at any radius."""

from __future__ import annotations

import pytest
import torch
from mpmath import mp, mpf, sqrt

from holonomy.layers import HypLayerNorm, HypResidual, HypRMSNorm
from holonomy.layers.hyperbolic import norms
from holonomy.layers.hyperbolic.midpoint import add_and_norm
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz import lifted
from tests.reference import manifold as oracle

D = torch.float64
DIM = 16


kinds = pytest.mark.parametrize("kind", [HypLayerNorm, HypRMSNorm])


def both(kappa=-0.7, *, kind=HypLayerNorm, dtype=D, epsilon=1.0, eps=1e-5, affine=True):
    """A residual connection and what normalises it, with parameters that float32 holds."""
    torch.manual_seed(0)
    one, two = (Lorentz(k, learnable=True) for k in (kappa, -1.5))
    norm = kind(DIM, one, two, eps=eps, elementwise_affine=affine)
    for parameter in norm.function.parameters():
        torch.nn.init.normal_(parameter)
    return HypResidual(one, epsilon=epsilon).to(dtype), norm.to(dtype)


def pairs(kappa, rapidity):
    """Rows of x and y: any, close, coincident, parallel and antipodal; numbers that float32 holds."""
    u, v = torch.nn.functional.normalize(torch.randn(2, 8, DIM, dtype=D), dim=-1)
    size = torch.tensor(rapidity, dtype=D).sinh() / (-kappa) ** 0.5
    x, y = torch.cat([u, u, u, u, u]), torch.cat([v, u + 1e-3 * v, u, 0.5 * u, -u])
    return tuple(Lorentz(kappa).lift((z * size).float()).double() for z in (x, y))


def results(function, residual, norm, points, dtype):
    """The result, then the gradients of space parts, and of parameters and curvatures; in float64."""
    spaces = [p[:, 1:].to(dtype).detach().requires_grad_() for p in points]
    leaves = [*spaces, *residual.parameters(), *norm.parameters()]
    out = function(residual, norm, *(residual.manifold_in.lift(p) for p in spaces))
    draw = torch.Generator().manual_seed(1)
    found = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=draw, dtype=D).to(dtype))
    assert all(g.isfinite().all() for g in (out, *found))
    return [z.detach().double() for z in (out, *found)]


def one_after_the_other(residual, norm, x, y):
    return norm(residual(x, y))


def apart(ours, theirs):
    """The largest relative error of a row."""
    gap, size = (torch.atleast_2d(z).norm(dim=-1) for z in (ours - theirs, theirs))
    return (gap / size.clamp(min=1e-300)).max().item()


@pytest.fixture(params=[1, 10**9], ids=["chunked", "reference"])
def form(request, monkeypatch):
    """Chunks of rows with a gradient written by hand, however few, and the reference."""
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", request.param)
    monkeypatch.setattr(lifted, "_CHUNK", 2**10)


def what_rounding_changes(residual, norm, points, exact):
    """Of each result the change where every coordinate of the midpoint moves by up to an ulp: the most of four."""
    draw = torch.Generator().manual_seed(2)

    def rounded(residual, norm, x, y):
        middle = residual(x, y)
        ulps = (2 * torch.rand(middle.shape, generator=draw, dtype=D) - 1) * torch.finfo(D).eps
        return norm(middle * (1 + ulps))

    changed = (results(rounded, residual, norm, points, D) for _ in range(4))
    return [max(each) for each in zip(*(map(apart, found, exact) for found in changed), strict=True)]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("epsilon", [1.0, 0.3])
@pytest.mark.parametrize("rapidity", [0.0, 1e-3, 1.0, 5.0, 10.0, 20.0, 40.0])
@kinds
def test_it_is_the_norm_of_the_midpoint(kind, rapidity, epsilon):
    """To rounding in float64; float32 to 2e-6 of that, gradients of curvatures, sums that cancel, to 1e-4."""
    residual, norm = both(kind=kind, epsilon=epsilon)
    points = pairs(-0.7, rapidity)
    exact = results(add_and_norm, residual, norm, points, D)
    expected = results(one_after_the_other, residual, norm, points, D)
    # The two forms round the midpoint differently, by a few ulps. Gradients of antipodal points stretch an ulp to
    # 1e-12, by how much depends on the draw; the rest keeps 14 digits. So each is held to eight times what it changes
    # by for one ulp of the midpoint, and to eight ulps of its own where the midpoint is exact.
    limits = what_rounding_changes(residual, norm, points, expected)
    assert max(limits) < 1e-11  # a looser limit would show nothing
    for place, (ours, theirs, limit) in enumerate(zip(exact, expected, limits, strict=True)):
        assert apart(ours, theirs) < 8 * (limit + torch.finfo(D).eps), place
    single = both(kind=kind, epsilon=epsilon, dtype=torch.float32)
    rounded = results(add_and_norm, *single, points, torch.float32)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert apart(ours, theirs) < (2e-6 if ours.ndim > 1 or ours.numel() > 1 else 1e-4)


def normalised(x, y, weight, eps, gain, shift, last, kappa, *, centered=True):
    """``gain * LN(midpoint of x and weight * y) + shift``, lifted, in mpmath; RMS where not centered."""
    middle = oracle.centroid(x, y, [mpf(1), mpf(weight)], kappa)[1:]
    mean = mp.fsum(middle) / len(middle) if centered else 0
    centred = [value - mean for value in middle]
    root = sqrt(oracle.dot(centred, centred) / len(middle) + eps)
    return oracle.lift([g * c / root + s for g, c, s in zip(gain, centred, shift, strict=True)], last)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("epsilon", [1.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "rapidity"), [*((HypLayerNorm, rapidity) for rapidity in (1.0, 20.0, 40.0)), (HypRMSNorm, 20.0)]
)
def test_gradients_far_out_against_the_oracle(dtype, kind, rapidity, epsilon):
    """Of points anywhere, close, coincident, parallel and antipodal: float64 to 1e-14, float32 to 1e-6."""
    points, limit = pairs(-0.7, rapidity), {D: 1e-14, torch.float32: 1e-6}[dtype]
    residual, norm = both(kind=kind, epsilon=epsilon, dtype=dtype)
    gain, shift, _, last, eps = norms.affine_of(norm, points[0].to(dtype))
    centered = kind is HypLayerNorm
    others = (epsilon, mpf(eps), *(oracle.exact(z.tolist()) for z in (gain, shift)), mpf(last.item()))
    out, *found = results(add_and_norm, residual, norm, points, dtype)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=D).to(dtype)
    kappa = mpf(residual.manifold_out.curvature.item())
    for row in range(0, 40, 8):
        x, y = (oracle.exact(z[row, 1:].tolist()) for z in points)
        with oracle.working(x, y, kappa=kappa):
            slopes = oracle.jacobian(
                lambda x, y, kappa: normalised(x, y, *others, kappa, centered=centered), [x, y], kappa
            )
            weigh = oracle.exact(weights[row].tolist())
            for ours, columns in zip(found[:2], slopes, strict=False):
                want = torch.tensor([float(oracle.dot(weigh, column)) for column in columns], dtype=D)
                assert apart(ours[row], want) < limit, row


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("eps", [1e-5, 1e-10])
@kinds
def test_the_largest_points_and_constant_rows_give_finite_results(kind, dtype, eps):
    residual, norm = both(kind=kind, dtype=dtype, eps=eps)
    largest = torch.finfo(dtype).max / DIM
    for size in (0.0, 1e-20, 1.0, 1e18, 1e30, largest):
        rows = torch.stack([torch.full((DIM,), 1.0), torch.linspace(-1, 1, DIM), torch.eye(DIM)[0]]).to(dtype)
        x = Lorentz(-0.7, dtype=dtype).lift(rows * size)
        out, *_ = results(add_and_norm, residual, norm, (x, x), dtype)
        if size == largest:
            how = torch.nn.functional.layer_norm if kind is HypLayerNorm else torch.nn.functional.rms_norm
            expected = how(rows[1:], (DIM,))
            gain, shift, *_ = norms.affine_of(norm, x)
            torch.testing.assert_close(out[1:, 1:].to(dtype), expected * gain + shift, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("form")
@kinds
def test_gradients_by_finite_differences_twice(kind):
    residual, norm = both(kind=kind)
    points = [p[:6].detach().requires_grad_() for p in pairs(-0.7, 1.0)]
    assert torch.autograd.gradcheck(lambda x, y: add_and_norm(residual, norm, x, y), points, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, y: add_and_norm(residual, norm, x, y), points, fast_mode=True)


def test_other_manifolds_and_a_large_eps_take_one_after_the_other():
    x, y = pairs(-0.7, 5.0)
    for residual, norm in (
        both(eps=1.0),
        both(affine=False),
        (
            HypResidual(Lorentz(-0.7, dtype=D), Lorentz(-2.0, dtype=D)),
            HypLayerNorm(DIM, Lorentz(-2.0, dtype=D), dtype=D),
        ),
    ):
        torch.testing.assert_close(add_and_norm(residual, norm, x, y), norm(residual(x, y)), rtol=1e-10, atol=1e-10)


def test_half_precision_stays_half_precision_in_chunks(monkeypatch):
    """Computed in float32, and rounded at the end."""
    monkeypatch.setattr(lifted, "_FEWEST_ROWS", 1)
    residual, norm = both(-0.7, dtype=torch.float32)
    x, y = pairs(-0.7, 1.0)
    wide = add_and_norm(residual, norm, x.float(), y.float())
    narrow = add_and_norm(residual, norm, x.bfloat16(), y.bfloat16())
    assert narrow.dtype == torch.bfloat16
    # Rows of points that meet have no such digits.
    torch.testing.assert_close(narrow[:8].float(), wide[:8], rtol=0.1, atol=0.1)
