"""The door that the models of graphs share: ``x, edge_index, edge_attr, batch`` as PyTorch Geometric holds them."""

from __future__ import annotations

import pytest
import torch

from holonomy.models import (
    ChromaticGraphTransformer,
    HigherOrderTransformer,
    HypTokenGT,
    InvariantGraphNetwork,
    TokenGT,
)

SIZES = {"edge_features": 2, "dtype": torch.float64}
MODELS = {
    "TokenGT": lambda: TokenGT(3, 8, 2, heads=2, **SIZES),
    "TokenGT, performer": lambda: TokenGT(3, 8, 2, heads=2, attention="performer", **SIZES),
    "HypTokenGT": lambda: HypTokenGT(3, 8, 2, heads=2, **SIZES),
    "HypTokenGT, softmax": lambda: HypTokenGT(3, 8, 2, heads=2, attention="softmax", **SIZES),
    "HOT": lambda: HigherOrderTransformer(3, 8, 2, heads=2, **SIZES),
    "HOT, coupled": lambda: HigherOrderTransformer(3, 8, 2, heads=2, kernel="performer", **SIZES),
    "HOT, decoupled": lambda: HigherOrderTransformer(3, 8, 2, heads=2, kernel="performer", sums="decoupled", **SIZES),
    "IGN": lambda: InvariantGraphNetwork(3, 8, 2, **SIZES),
    "IGN, counts": lambda: InvariantGraphNetwork(3, 8, 2, normalise="counts", **SIZES),
    "CGT": lambda: ChromaticGraphTransformer(3, 8, 2, heads=2, **SIZES),
    "CGT, mono": lambda: ChromaticGraphTransformer(3, 8, 2, heads=2, mode="mono", share_edges=True, **SIZES),
}
TOKENS = [name for name in MODELS if "Token" in name]


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def graph():
    """Nodes of two graphs mixed, an isolated node, a self-loop; the number 1 is an empty graph."""
    edge_index = torch.tensor([[0, 3, 1, 4, 4, 5], [3, 0, 4, 1, 4, 1]])
    return torch.randn(6, 3, dtype=torch.float64), edge_index, torch.randn(6, 2, dtype=torch.float64)


BATCH = torch.tensor([0, 2, 0, 0, 2, 2])


@pytest.mark.parametrize("name", MODELS)
def test_indices_of_32_bits_are_indices(name):
    model, (x, edge_index, attr) = made(name), graph()
    expected = model(x, edge_index, attr, BATCH)
    torch.testing.assert_close(model(x, edge_index.int(), attr, BATCH.int()), expected)


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_graph_has_a_finite_row(name):
    model, (x, edge_index, attr) = made(name), graph()
    result = model(x, edge_index, attr, BATCH)
    assert result.shape == (3, 2)
    assert result.isfinite().all()
    without = model(x, edge_index, attr, BATCH // 2)
    torch.testing.assert_close(result[[0, 2]], without)


@pytest.mark.parametrize("name", [*TOKENS, "CGT", "CGT, mono"])
def test_a_batch_of_no_graphs_has_no_rows(name):
    model, (x, edge_index, attr) = made(name), graph()
    assert model(x[:0], edge_index[:, :0], attr[:0], BATCH[:0]).shape == (0, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("without_shape_checks")
def test_shapes_that_do_not_fit_get_one_sentence(name):
    model, (x, edge_index, attr) = made(name), graph()
    for given, sentence in (
        ((x[:, 0], edge_index, attr), r"^x must have shape \(nodes, features\), got \(6,\)\.$"),
        ((x, edge_index[:, :5].T, attr[:5]), r"^edge_index must have shape \(2, edges\), got \(5, 2\)\.$"),
        ((x, edge_index[0], attr), r"^edge_index must have shape \(2, edges\), got \(6,\)\.$"),
        ((x, edge_index, attr[:, 0]), r"^edge_attr must .*, got \(6,\)\.$"),
        ((x, edge_index, attr[:4]), r"^edge_attr must .*, got \(4, 2\)\.$"),
        ((x, edge_index, attr, BATCH[:4]), r"^batch must have shape \(.* = 6,\), got \(4,\)\.$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(*given)


@pytest.mark.usefixtures("without_shape_checks")
def test_types_and_rows_of_pairs_have_their_numbers():
    x, edge_index, _ = graph()
    model = ChromaticGraphTransformer(3, 8, 2, edge_types=4, limit=2, dtype=torch.float64)
    distances = torch.zeros(36, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^edge_attr must have shape \(edges = 6,\) for types of edges, got \(6, 1\)"):
        model(x, edge_index, torch.zeros(6, 1, dtype=torch.int64), distances=distances)
    with pytest.raises(ValueError, match=r"^rows must be one for each of the 36 pairs, got \[35\]"):
        model(x, edge_index, torch.zeros(6, dtype=torch.int64), distances=distances[1:])
