"""HOT's theorems in both readings, and what operations are counted."""

from __future__ import annotations

import itertools

import pytest
import torch

from holonomy.layers import EquivariantLinear, HigherOrderEncoderLayer, set_partitions
from holonomy.layers.equivariant.basis.partitions import canonical
from holonomy.theory.claims.statements import higher_order
from holonomy.theory.claims.statements.higher_order import CLAIMS
from holonomy.theory.claims.verdict import Draws
from holonomy.theory.expressivity.higher_order import (
    attend_ones,
    chorded_cycle,
    class_sizes,
    degree,
    message_passing,
    operations,
    uniform_attention,
)

DOUBLE = {"dtype": torch.float64}


@pytest.mark.parametrize(("order", "order_out"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_class_sizes_by_listing(order, order_out):
    nodes, sizes = 5, class_sizes(order, order_out, 5)
    for number, partition in enumerate(set_partitions(order + order_out)):
        output = partition[order:]
        found = [
            i
            for i in itertools.product(range(nodes), repeat=order)
            if canonical((*output, *i)) == canonical((*output, *partition[:order]))
        ]
        assert sizes[number] == len(found)


def test_attention_of_ones_is_the_linear_map():
    generator = torch.Generator().manual_seed(0)
    value, out = (torch.randn(2, 15, *size, generator=generator, **DOUBLE) for size in ((3, 4), (4, 2)))
    layer = EquivariantLinear(2, 2, 3, 2, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.weight.copy_((value @ out).sum(0))
    x = torch.randn(4, 4, 3, generator=generator, **DOUBLE)
    torch.testing.assert_close(attend_ones(x, 2, 2, value, out), layer(x))


def test_normalised_attention_fits_one_number_of_nodes():
    layer = EquivariantLinear(1, 1, 2, 2, bias=False, **DOUBLE)
    attention = uniform_attention(layer, 4)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), **DOUBLE)
    torch.testing.assert_close(attention(x[:4]), layer(x[:4]))
    # At n = 6 the class of the others gives a mean times 3 instead of a sum of 5.
    others = x.sum(0) - x
    torch.testing.assert_close(attention(x) - layer(x), others @ layer.weight[1] * (3 / 5 - 1))


def test_messages_are_summed_over_neighbours():
    edge_index = chorded_cycle()
    x = torch.arange(7.0, **DOUBLE)[:, None]  # the last one has no neighbour
    e = torch.arange(14.0, **DOUBLE)[:, None]
    found = message_passing(x, edge_index, e, lambda m: torch.stack([m[:, 0] * m[:, 1], m[:, 2]], 1))
    wanted = torch.zeros(7, 2, **DOUBLE)
    for number, (v, u) in enumerate(edge_index.T.tolist()):
        wanted[v] += torch.tensor([v * u, number], **DOUBLE)
    torch.testing.assert_close(found, wanted)


def test_operations_of_known_computations():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert operations(lambda: a @ b) == 2 * 3 * 4 * 5
    assert operations(lambda: a.T) == 0
    assert operations(lambda: a + a) == 3 * 12
    assert degree(lambda n: operations(lambda: torch.ones(n, n) @ torch.ones(n, n)), 4, 4) == 3


def test_kernel_attention_grows_slower_than_softmax():
    def exponent(layer):
        return degree(lambda n: operations(lambda: layer(torch.ones(n, n, 4))), 3, 5)

    softmax, performer = (HigherOrderEncoderLayer(2, 2, 4, 1, 4, kernel=kernel) for kernel in ("softmax", "performer"))
    assert (exponent(performer), exponent(softmax)) == (2, 4)


def test_a_hidden_factor_of_n_is_noticed(monkeypatch):
    """A power of n with a small coefficient does not show in a slope at small sizes; in differences it does."""
    counted = higher_order.degree

    def more(count, least, most):
        return counted(lambda n: count(n) + n * (n - 1) * (n - 2), least, most)

    monkeypatch.setattr(higher_order, "degree", more)
    (claim,) = (claim for claim in CLAIMS if claim.name == "hot.property_2")
    assert claim.measure(Draws(0))[0].holds is False


COUNTED = [claim for claim in CLAIMS if "property" in claim.name]


@pytest.mark.parametrize("claim", COUNTED, ids=lambda claim: claim.name)
def test_counts_grow_as_printed(claim):
    verdict, _ = claim.measure(Draws(0, budget=0.5))
    assert verdict.holds is True


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c not in COUNTED], ids=lambda claim: claim.name)
def test_verdicts_are_as_expected_in_both_dtypes(claim, dtype):
    verdict, _ = claim.measure(Draws(3, dtype=dtype, budget=0.3))
    assert verdict.holds is claim.expected
