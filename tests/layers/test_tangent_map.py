"""TangentLinear in one formula: the numbers and gradients of its definition, in float64, at every radius."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from holonomy.layers import TangentLinear
from holonomy.manifolds import Lorentz
from holonomy.ops.lorentz import lifted, tangent_map

NAMES = ("y", "x", *(name for name, _ in TangentLinear(1, 1, Lorentz(), Lorentz()).named_parameters()))


def problem(rapidity: float, kappas: tuple[float, float], *, length: float = 1.0, rows: int = 7):
    """A layer of odd sizes, and points of which one is the origin and one near it."""
    torch.manual_seed(0)
    source, target = (Lorentz(kappa, learnable=True) for kappa in kappas)
    layer = TangentLinear(5, 3, source, target)
    with torch.no_grad():
        layer.linear.weight.mul_(length / torch.linalg.matrix_norm(layer.linear.weight, 2))
    u = torch.nn.functional.normalize(torch.randn(rows, 5), dim=-1) * math.sinh(rapidity) / math.sqrt(-kappas[0])
    u[0], u[1] = 0.0, 1e-6 * u[1]
    return layer, u


def results(layer: TangentLinear, space: torch.Tensor) -> list[torch.Tensor]:
    space = space.detach().requires_grad_()
    y = layer(layer.manifold_in.lift(space))
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    leaves = [space, *layer.parameters()]
    return [z.detach().double() for z in (y, *torch.autograd.grad(y, leaves, cotangent))]


@pytest.mark.parametrize("chunk", [2**22, 2**6])
@pytest.mark.parametrize("kappas", [(-1.0, -1.0), (-4.0, -0.3)])
@pytest.mark.parametrize("rapidity", [1e-3, 1.0, 5.0, 13.0, 20.0, 60.0])
def test_float32_agrees_with_the_definition_in_float64(rapidity, kappas, chunk, monkeypatch):
    """Row by row; the last rapidities are those of rows that leave the formula.

    Gradients of curvatures are sums over all rows with terms that cancel, and processors differ in how they add.
    """
    monkeypatch.setattr(lifted, "_CHUNK", chunk)
    layer, space = problem(rapidity, kappas, length=min(1.5, 80.0 / rapidity))
    ours = results(layer, space)
    monkeypatch.setattr(tangent_map, "use_rowwise", lambda *_: False)
    theirs = results(layer.double(), space.double())
    for name, mine, exact in zip(NAMES, ours, theirs, strict=True):
        gap = ((mine - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()
        assert gap < (1e-5 if "curvature" in name else 5e-6), (name, gap)


def test_it_is_computed_in_one_formula():
    layer, space = problem(1.0, (-1.0, -1.0))
    x = layer.manifold_in.lift(space).detach()
    for given in (x, nn.Parameter(x)):
        assert "TangentMap" in str(layer(given).grad_fn.next_functions)


@pytest.mark.usefixtures("without_shape_checks")
def test_learned_points_are_traced_where_their_values_are_not_read():
    layer, space = problem(1.0, (-1.0, -1.0))

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.points = layer, nn.Parameter(layer.manifold_in.lift(space).detach())

        def forward(self, shift):
            return self.layer(self.points) + shift

    module, shift = Learned(), torch.zeros(())
    expected = module(shift)
    (theirs,) = torch.autograd.grad(expected.sin().sum(), [module.points])
    values = dict(module.named_parameters())
    for traced in (
        torch.compile(module, backend="aot_eager", fullgraph=True),
        torch.export.export(module, (shift,)).module(),
        partial(torch.func.functional_call, module, values),
    ):
        torch.testing.assert_close(traced(shift), expected)
    grads = torch.func.grad(lambda values: torch.func.functional_call(module, values, shift).sin().sum())(values)
    torch.testing.assert_close(grads["points"], theirs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(x) for name, x in values.items()}
        assert isinstance(fakes["points"], nn.Parameter)
        assert torch.func.functional_call(module, fakes, shift).shape == expected.shape


def test_hooks_and_other_classes_of_the_linear_map_are_called():
    layer, space = problem(1.0, (-1.0, -1.0))
    x, seen = layer.manifold_in.lift(space), []
    expected = layer(x)
    layer.linear.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), expected)
    assert seen


def test_a_row_of_nan_spoils_no_other():
    layer, space = problem(1.0, (-1.0, -1.0))
    expected = layer(layer.manifold_in.lift(space))
    x = torch.cat([layer.manifold_in.lift(space), torch.full((1, 6), torch.nan)])
    torch.testing.assert_close(layer(x)[:-1], expected)


def test_gradients_at_the_end_of_the_range_are_finite():
    """As layers behind give them, whose own gradients saturate."""
    layer, space = problem(3.0, (-1.0, -1.0), rows=50)
    x = layer.manifold_in.lift(space).requires_grad_()
    y = layer(x)
    for grad in torch.autograd.grad(y, [x, *layer.parameters()], torch.full_like(y, 3e38)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-6, 1e-9])
def test_points_near_the_origin_hardly_pull_curvatures(size):
    """Both maps are the identity there but for the cube of the size, and only times have more to do with curvature."""
    layer, space = problem(1.0, (-4.0, -0.3))
    layer.linear.bias = None
    found = []
    for dtype in (torch.float32, torch.float64):
        layer = layer.to(dtype)
        y = layer(layer.manifold_in.lift(size * space.to(dtype)))[..., 1:].sum()
        curvatures = [p for name, p in layer.named_parameters() if "curvature" in name]
        found.append(torch.stack(torch.autograd.grad(y, curvatures)).double())
    torch.testing.assert_close(found[0] / size**3, found[1] / size**3, rtol=1e-3, atol=0.0)
