"""Projections read from layers mean what the layers compute; what they cannot mean is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from torch import nn

from holonomy.layers import SimplicialAttention
from holonomy.theory.attention.lipschitz import lipschitz_bound
from holonomy.theory.attention.local import local_lipschitz
from holonomy.theory.attention.measured import jacobian_norm
from holonomy.theory.attention.projections import NotCoveredError, Projections, as_function, attend, projections
from holonomy.theory.attention.rank_collapse import collapse_bound, measure_collapse
from tests.theory.strategies import SEEDS, drawn


def by_loops(x, layer, mask=None):
    """Attention from its definition, one number at a time."""
    n, order = x.shape[0], layer.order
    heads = []
    for h in range(layer.keys.shape[1]):
        k = [x @ layer.keys[m, h] + (0 if layer.key_bias is None else layer.key_bias[m, h]) for m in range(order + 1)]
        v = [x @ layer.values[m, h] + (0 if layer.value_bias is None else layer.value_bias[m, h]) for m in range(order)]
        rows = []
        for i in range(n):
            weight, total = 0.0, torch.zeros_like(v[0][0])
            for tuple_ in itertools.product(range(n), repeat=order):
                if mask is not None and not mask[(i, *tuple_)]:
                    continue
                if layer.causal and max(tuple_) > i:
                    continue
                vectors = [k[0][i], *[k[m + 1][j] for m, j in enumerate(tuple_)]]
                if layer.form == "product":
                    logit = torch.stack(vectors).prod(0).sum()
                else:
                    size = order + 1
                    chunks = range(len(vectors[0]) // size)
                    logit = sum(
                        torch.linalg.det(torch.stack([u[c * size : (c + 1) * size] for u in vectors])) for c in chunks
                    )
                a = torch.exp(layer.scale * logit)
                weight = weight + a
                total = total + a * torch.stack([v[m][j] for m, j in enumerate(tuple_)]).prod(0)
            rows.append(total / weight if weight != 0 else total)
        heads.append(torch.stack(rows))
    y = torch.cat(heads, 1)
    y = y if layer.out is None else y @ layer.out
    y = y if layer.out_bias is None else y + layer.out_bias
    return x + y if layer.skip else y


@given(SEEDS)
def test_attend_is_the_definition(seed):
    layer, x, mask = drawn(seed)
    torch.testing.assert_close(attend(x, layer), by_loops(x, layer))
    torch.testing.assert_close(attend(x, layer, mask), by_loops(x, layer, mask))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_determinant_form_and_causality(order):
    keys, values = torch.randn(order + 1, 2, 3, 7).double(), torch.randn(order, 2, 3, 2).double()
    layer = Projections(keys, values, form="determinant", causal=True)
    x = torch.randn(3, 3).double()
    torch.testing.assert_close(attend(x, layer), by_loops(x, layer))


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(bias):
    layer = nn.MultiheadAttention(6, 3, bias=bias).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, 6).double()
    torch.testing.assert_close(attend(x, projections(layer)), layer(x, x, x)[0])
    torch.testing.assert_close(as_function(layer)(x), layer(x, x, x)[0])


@pytest.mark.parametrize("form", ["product", "determinant"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_simplicial_attention(form, causal, order):
    layer = SimplicialAttention(8, 2, order=order, form=form, causal=causal).double()
    x = torch.randn(4, 8).double()
    torch.testing.assert_close(attend(x, projections(layer)), layer(x))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("order", "window"), [(1, 2), (2, (1, 3)), (3, 2)])
def test_windows_are_masks(causal, order, window):
    """L+ and the local certificate hold under any mask; the forms of rank collapse refuse windows."""
    layer = SimplicialAttention(8, 2, order=order, causal=causal, window=window).double()
    x = torch.nn.functional.normalize(torch.randn(4, 8).double(), dim=1)
    read = projections(layer)
    torch.testing.assert_close(attend(x, read), layer(x))
    found = jacobian_norm(as_function(layer), x)[0]
    assert found <= local_lipschitz(layer, x) <= lipschitz_bound(layer, 1.0, tokens=4)
    with pytest.raises(NotCoveredError):
        collapse_bound([layer], x)
    with pytest.raises(NotCoveredError):
        lipschitz_bound(
            Projections(read.keys, read.values, window=read.window), 1.0, tokens=4, theorem="Simplicial 3.7"
        )
    with pytest.raises(ValueError, match="window must have a number for each"):
        Projections(read.keys, read.values, window=(1,) * (order + 1))


class Own(nn.Module):
    def projections(self):
        return {"keys": torch.ones(2, 1, 3, 2), "values": torch.ones(1, 1, 3, 3), "skip": True}


def test_a_module_of_ones_own():
    read = projections(Own())
    assert read.skip
    assert read.scale == 2**-0.5


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(2, 2),
        nn.MultiheadAttention(4, 2, dropout=0.5),
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.MultiheadAttention(4, 2, add_zero_attn=True),
        nn.MultiheadAttention(4, 2, kdim=3, vdim=3),
        SimplicialAttention(8, 2, order=2, lower_orders=True),
        SimplicialAttention(8, 2, order=1, rope=True),
        type("Doubled", (nn.MultiheadAttention,), {"forward": lambda self, *tokens: 2 * tokens[0]})(4, 2),
        type("Doubled", (SimplicialAttention,), {"forward": lambda self, x: 2 * x})(8, 2),
    ],
)
def test_what_is_not_covered_is_refused(layer):
    with pytest.raises(NotCoveredError):
        projections(layer)
    with pytest.raises(NotCoveredError):
        as_function(layer, torch.ones(2, 2, dtype=torch.bool))


def test_queries_without_simplexes_get_zero():
    layer = Projections(torch.ones(3, 1, 1, 1), torch.ones(2, 1, 1, 1))
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    assert attend(torch.ones(2, 1), layer, mask).tolist() == [[0.0], [0.0]]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="values must be"):
        Projections(torch.ones(3, 1, 2, 2), torch.ones(3, 1, 2, 2))
    with pytest.raises(ValueError, match="mask must have"):
        attend(torch.ones(2, 1), Projections(torch.ones(3, 1, 1, 1), torch.ones(2, 1, 1, 1)), torch.ones(2, 2).bool())
    with pytest.raises(ValueError, match=r"^scale must lie in"):
        Projections(torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1, 1), scale=-1.0)
    for bound in (local_lipschitz, lambda layer, x: collapse_bound([layer], x)):
        with pytest.raises(ValueError, match=r"^x must have one token at least"):
            bound(nn.MultiheadAttention(4, 2), torch.zeros(0, 4))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.ones(1, 2, 3, 4), "values": torch.ones(0, 2, 3, 5)}, r"^keys must be \(N\+1, .* N at least 1"),
        ({"keys": torch.ones(2, 3, 4)}, r"^keys must be \(N\+1, heads, d, d_h\), N at least 1, got \(2, 3, 4\)"),
        ({"out": torch.ones(20, 3)}, r"^out must be \(heads \* d_v = 10, d_out\), got \(20, 3\)"),
        ({"key_bias": torch.ones(2, 2, 1)}, r"^key_bias must have shape .*\(2, 2, 4\), got \(2, 2, 1\)"),
        ({"value_bias": torch.ones(1, 1, 1)}, r"^value_bias must have shape .*\(1, 2, 5\), got \(1, 1, 1\)"),
        ({"out_bias": torch.ones(1)}, r"^out_bias must have shape .*\(10,\), got \(1,\)"),
        ({"skip": True}, r"^skip must be False where d_out = 10 is not d = 3"),
        ({"form": "determinants"}, r"^form must be one of 'product', 'determinant', got 'determinants'"),
        ({"window": (0,)}, r"^window must be a positive integer, got 0"),
        ({"scale": math.inf}, r"^scale must be finite, got inf"),
    ],
)
def test_a_layer_that_would_compute_something_else_is_refused(change, message):
    """Biases that broadcast are longer than their norm, and a form that is none was taken for the determinant."""
    with pytest.raises(ValueError, match=message):
        Projections(**{"keys": torch.ones(2, 2, 3, 4), "values": torch.ones(1, 2, 3, 5), **change})


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("change", [{"keys": torch.ones(2, 2, 3, 4).int()}, {"causal": 1}])
def test_kinds_of_a_layer_are_checked(change):
    with pytest.raises(TypeError, match=f"^{next(iter(change))} must be"):
        Projections(**{"keys": torch.ones(2, 2, 3, 4), "values": torch.ones(1, 2, 3, 5), **change})


def test_layers_of_a_stack_fit_each_other():
    layer = Projections(torch.ones(2, 2, 3, 4), torch.ones(1, 2, 3, 5))
    x = torch.ones(2, 3)
    for bound in (
        lambda layers: collapse_bound(layers, x),
        lambda layers: measure_collapse(layers, x),
        lambda layers: lipschitz_bound(layers, 1.0, tokens=2),
        lambda layers: lipschitz_bound(layers, tokens=2),
        lambda layers: local_lipschitz(layers, x),
    ):
        bound([layer])
        with pytest.raises(ValueError, match=r"^layers must take .*, got 10 and a layer 1 that takes 3"):
            bound([layer, layer])


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("order", [1, 2])
def test_biases_of_maps_that_were_put_in_place_are_read(part, order):
    torch.manual_seed(0)
    layer, x = SimplicialAttention(4, 2, order=order).double(), torch.randn(4, 4).double()
    old = getattr(layer, part)
    setattr(layer, part, nn.Linear(old.in_features, old.out_features).double())
    nn.init.normal_(getattr(layer, part).bias, 0.0, 3.0)
    torch.testing.assert_close(attend(x, projections(layer)), layer(x))
    setattr(layer, part, nn.Sequential(old))
    with pytest.raises(NotCoveredError, match="layer must be a Linear, got Sequential"):
        projections(layer)


@pytest.mark.usefixtures("without_shape_checks")
def test_a_mask_that_is_not_boolean_is_refused():
    """Of one that is added to logits, zeros count; they were taken for simplexes that do not."""
    layer, mask = nn.MultiheadAttention(4, 2), torch.zeros(3, 3)
    x = torch.randn(3, 4)
    bounds = (
        (lipschitz_bound, 1.0),
        (local_lipschitz, x),
        (lambda layer, x, mask: collapse_bound([layer], x, mask=mask), x),
    )
    for bound, of in bounds:
        with pytest.raises(TypeError, match=r"^mask must be boolean, True at simplexes that count"):
            bound(layer, of, mask=mask)
