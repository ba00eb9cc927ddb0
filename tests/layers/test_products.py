"""Layers of products: on their factors, the hyperbolic layers where there is one factor, float32 like float64."""

from __future__ import annotations

import copy
import math

import geoopt
import pytest
import torch

from holonomy.layers import HTC, HypSoftmaxAttention, ProductAttention, ProductLinear
from holonomy.manifolds import Lorentz, Product, Sphere

F64 = torch.float64


def product(dtype: torch.dtype = F64) -> Product:
    curved = Lorentz(-0.4, learnable=True, dtype=dtype), Sphere(1.7, learnable=True, dtype=dtype)
    return Product((curved[0], 7), (curved[1], 6), (geoopt.Euclidean(ndim=1), 4))


def points(space: Product, *shape: int, scale: float = 1.0, dtype: torch.dtype = F64) -> torch.Tensor:
    return space.lift(scale * torch.randn(*shape, sum(space.sizes), dtype=dtype)).detach()


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 100.0])
def test_results_lie_on_their_factors(scale: float, dtype: torch.dtype) -> None:
    space = product(dtype)
    x = points(space, 2, 5, scale=scale, dtype=dtype).requires_grad_()
    for layer in (ProductLinear(space, dtype=dtype), ProductAttention(space, 2, dtype=dtype)):
        result = layer(x)
        assert space.check_point_on_manifold(result)
        for grad in torch.autograd.grad(result.sin().sum(), [x, *layer.parameters()], allow_unused=True):
            assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("kind", "scale"), [(torch.float32, 1e18), (torch.float32, 1e30), (torch.float16, 1e4)])
def test_squared_distances_beyond_the_dtype_leave_gradients(kind: torch.dtype, scale: float, *, same: bool) -> None:
    """Weights of factors had none: zero, of logits that are held, times an infinite square."""
    space = Product((geoopt.Euclidean(ndim=1), 4), (Lorentz(-0.4, learnable=True), 5))
    layer = ProductAttention(space, 2, dtype=kind)
    drawn = torch.randn(6, 8, dtype=kind) * scale
    x = space.lift(drawn[:1].expand(6, -1) if same else drawn).detach().requires_grad_()
    result = layer(x)
    assert result.isfinite().all()
    for name, parameter in layer.named_parameters():
        (grad,) = torch.autograd.grad(result.sin().sum(), parameter, retain_graph=True)
        assert grad.isfinite().all() or (kind == torch.float16 and name == "value.weight")  # which is that long


def test_float16_chooses_as_float32_where_its_squares_end() -> None:
    space = Product((geoopt.Euclidean(ndim=1), 4))
    half = ProductAttention(space, 1, dtype=torch.float16)
    x = (300 * torch.randn(7, 4)).half()
    single = copy.deepcopy(half).float()(x.float())
    torch.testing.assert_close(half(x).float(), single, rtol=0.02, atol=2.0)


@pytest.mark.parametrize("kappas", [(-1.0, -0.3), (-0.4, -2.0)])
def test_between_hyperbolic_factors_it_is_htc(kappas: tuple[float, float]) -> None:
    before, after = (Lorentz(kappa, dtype=F64) for kappa in kappas)
    theirs = HTC(5, 3, before, after, dtype=F64)
    torch.nn.init.normal_(theirs.weight)
    ours = ProductLinear(Product((before, 6)), Product((after, 4)), dtype=F64)
    ours.weight.data, ours.bias.data = theirs.weight.data, theirs.bias.data * math.sqrt(-kappas[0])
    x = points(ours.manifold_in, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_on_one_hyperbolic_factor_is_that_of_hyperbolic_space(heads: int) -> None:
    manifold = Lorentz(-1.0, dtype=F64)
    theirs = HypSoftmaxAttention(6, heads, manifold, dtype=F64)
    ours = ProductAttention(Product((manifold, 7)), heads, dtype=F64)
    for name in ("query", "key", "value"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict(), strict=False)
    x, mask = points(ours.manifold, 2, 5), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    pairs = torch.rand(5, 5) < 0.3
    for attn_mask in (None, pairs, torch.randn(5, 5, dtype=F64)):
        torch.testing.assert_close(ours(x, mask, attn_mask=attn_mask), theirs(x, mask, attn_mask=attn_mask))


def test_a_weight_of_a_factor_decides_how_much_it_counts() -> None:
    """With no weight on the sphere, what lies there moves no weight of the pairs."""
    space = product()
    layer = ProductAttention(space, 1, dtype=F64)
    x = points(space, 5)
    turned = x.clone()
    turned[:, 7:13] = points(space, 5)[:, 7:13]
    for part in (layer.query, layer.key, layer.value):  # each factor of the result from its own alone
        allowed = torch.block_diag(torch.ones(6, 7), torch.ones(6, 6), torch.ones(4, 4))
        part.weight.data *= allowed
    there = slice(13, 17)
    assert not torch.allclose(layer(x)[:, there], layer(turned)[:, there], rtol=1e-3)
    layer.log_weight.data[:, 1] = -100.0
    torch.testing.assert_close(layer(x)[:, there], layer(turned)[:, there])


def test_a_head_that_may_attend_to_none_gives_its_origin() -> None:
    space = product()
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[2] = True
    layer, x = ProductAttention(space, 1, dtype=F64), points(space, 4)
    torch.testing.assert_close(layer(x, attn_mask=hidden)[2], space.lift(torch.zeros(16, dtype=F64)))


def test_float32_keeps_its_digits_between_near_points() -> None:
    space = product(torch.float32)
    layer = ProductAttention(space, 2)
    wide, wide_space = copy.deepcopy(layer).double(), copy.deepcopy(space).double()
    x = space.lift(torch.ones(16) + 1e-3 * torch.randn(6, 16))
    torch.testing.assert_close(layer(x).double(), wide(x.double()), rtol=1e-5, atol=1e-6)
    near, exact = space.cdist(x, x).double(), wide_space.cdist(x.double(), x.double())
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=1e-9)


@pytest.mark.usefixtures("without_shape_checks")
def test_heads_that_cannot_share_a_factor_get_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"manifold.sizes must be a multiple of heads, got 6 and 4"):
        ProductAttention(product(), 4)
    with pytest.raises(ValueError, match="must be at least 2 for a Sphere"):
        ProductAttention(Product((Sphere(), 4)), 4)
    with pytest.raises(TypeError, match=r"manifold must be a holonomy\.manifolds\.Product"):
        ProductAttention(Lorentz(), 2)  # pyright: ignore[reportArgumentType]
