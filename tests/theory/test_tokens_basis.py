"""Constructed heads against basis tensors, with the rows counted by hand and the layers that they should equal."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holonomy.layers import EquivariantLinear, bell, orthogonal_identifiers, set_partitions
from holonomy.layers.equivariant.basis.partitions import canonical
from holonomy.theory import basis_approximation_error
from holonomy.theory.claims.statements.tokens import CLAIMS
from holonomy.theory.claims.verdict import Draws
from holonomy.theory.expressivity.tokens_basis import (
    basis_attention,
    basis_tensors,
    head_gap,
    layer_by_heads,
    type_identifiers,
)


@pytest.mark.parametrize(("order", "nodes"), [(1, 3), (2, 3), (3, 2)])
def test_basis_tensors_are_the_classes_of_pairs(order, nodes):
    basis = basis_tensors(order, nodes)
    tuples = list(itertools.product(range(nodes), repeat=order))
    for (row, i), (column, j) in itertools.product(enumerate(tuples), repeat=2):
        number = set_partitions(2 * order).index(canonical((*j, *i)))
        assert basis[:, row, column].nonzero().flatten().tolist() == [number]


@settings(max_examples=10)
@given(order=st.integers(1, 2), nodes=st.integers(2, 4), more=st.integers(0, 2), a=st.floats(1.0, 60.0))
def test_the_bound_holds_and_the_scale_reaches_it(order, nodes, more, a):
    p = orthogonal_identifiers(nodes, nodes + more, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = basis_approximation_error(order, nodes, a, identifiers=p)
    assert found.measured <= found.bound * (1 + 1e-9) + 1e-12
    assert found.bound <= nodes**order * math.exp(-a * head_gap(order, nodes + more))


def test_the_first_order_in_closed_form():
    """softmax(a I / sqrt(d_H)): (n - 1) e^-g of weight outside, over 1 + (n - 1) e^-g."""
    a, nodes = 12.0, 5
    attention, _ = basis_attention(1, a, torch.eye(nodes, dtype=torch.float64))
    rest = (nodes - 1) * math.exp(-a / math.sqrt(nodes + 4))
    assert 1 - attention[0, 0, 0].item() == pytest.approx(rest / (1 + rest))


@pytest.mark.parametrize("order", [2, 3])
def test_types_are_apart_by_epsilon(order):
    types = type_identifiers(order, dtype=torch.float64)
    product = types @ types.T
    apart = product[~torch.eye(bell(order), dtype=torch.bool)].max().item()
    assert 1 - apart == pytest.approx(1 - math.cos(2 * math.pi / bell(order)))


@pytest.mark.parametrize(("order", "nodes"), [(1, 4), (2, 4), (3, 2)])
def test_heads_are_the_layer(order, nodes):
    generator = torch.Generator().manual_seed(order)
    layer = EquivariantLinear(order, order, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.normal_(generator=generator)
    x = torch.randn(*[nodes] * order, 3, dtype=torch.float64, generator=generator)
    p = orthogonal_identifiers(nodes, nodes, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(layer_by_heads(layer, x, 400.0, identifiers=p).output, layer(x), rtol=1e-9, atol=1e-8)
    assert (layer_by_heads(layer, x, 1.0, identifiers=p).output - layer(x)).abs().max() > 0.01


def test_in_float32_only_exact_products_keep_ties():
    drawn = orthogonal_identifiers(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    assert basis_approximation_error(2, 4, 1e6, identifiers=drawn).measured > 1e-3
    assert basis_approximation_error(2, 4, 1e6, dtype=torch.float32).measured == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a must be positive"):
        basis_approximation_error(1, 3, 0.0)
    with pytest.raises(ValueError, match="identifiers must be"):
        basis_approximation_error(1, 3, 1.0, identifiers=torch.eye(2))
    with pytest.raises(ValueError, match="layer must map order k"):
        layer_by_heads(EquivariantLinear(1, 2, 2, 2), torch.ones(3, 2), 1.0)


@pytest.mark.usefixtures("without_shape_checks")
def test_a_layer_by_heads_checks_its_arguments():
    layer, x = EquivariantLinear(1, 1, 2, 2), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"^a must be positive and finite, got -1"):
        layer_by_heads(layer, x, -1.0)
    with pytest.raises(ValueError, match=r"^identifiers must have orthonormal rows, got products that are off by 3"):
        layer_by_heads(layer, x, 1.0, identifiers=torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"^x must have shape \(n, d = 2\) without a batch, got \(1, 3, 2\)"):
        layer_by_heads(layer, x[None], 1.0)
    with pytest.raises(ValueError, match=r"^x must have shape \(n, n, d = 2\) without a batch, got \(3, 4, 2\)"):
        layer_by_heads(EquivariantLinear(2, 2, 2, 2), torch.ones(3, 4, 2), 1.0)
    with pytest.raises(ValueError, match=r"^order of the layer must be a positive integer, got 0"):
        layer_by_heads(EquivariantLinear(0, 0, 2, 2), torch.ones(2), 1.0)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("identifiers", [torch.eye(2).long(), [[1.0, 0.0], [0.0, 1.0]]])
def test_identifiers_are_floating_tensors(identifiers):
    with pytest.raises(TypeError, match=r"^identifiers must be a (floating-point )?tensor"):
        basis_approximation_error(1, 2, 1.0, identifiers=identifiers)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_verdicts_are_as_expected_in_both_dtypes(claim, dtype):
    verdict, _ = claim.measure(Draws(3, dtype=dtype, budget=0.5))
    assert verdict.holds is not False
    assert verdict.holds is True or dtype is torch.float32  # there the network is below rounding


@pytest.mark.parametrize("identifiers", [torch.ones(3, 3), 0.1 * torch.eye(3)])
def test_identifiers_that_are_not_orthonormal_are_refused(identifiers):
    """The error was 50,000 times the bound."""
    with pytest.raises(ValueError, match=r"^identifiers must have orthonormal rows"):
        basis_approximation_error(2, 3, 50.0, identifiers=identifiers.double())
