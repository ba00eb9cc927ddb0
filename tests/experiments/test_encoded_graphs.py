"""Encoded graphs: a batch holds the encodings of its graphs, models have one size, padding costs little."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from experiments.data.encoded_graphs import (
    Settings,
    answers,
    arguments,
    ask,
    batches,
    chromatic,
    encoded,
    largest,
    message_passing,
    read_by,
    settle,
)
from experiments.data.graph_sets import random_molecules
from holonomy.layers import random_walk_encoding, ring_membership, shortest_path_encoding

SETTINGS = Settings(hidden=16, heads=4, layers=2, steps=5, walk_features=3, budget=0)


def test_a_batch_holds_the_encodings_of_its_graphs() -> None:
    graphs = random_molecules(6, seed=3)
    whole = encoded(graphs, steps=4, limit=3, largest_ring=8)
    chosen = torch.tensor([4, 0, 4])
    rows = whole.rows(chosen, ["walks", "distances", "related"])
    start = 0
    for number in chosen.tolist():
        alone = graphs.take(torch.tensor([number]))
        n = len(alone.x)
        part = {name: value[start : start + n * n] for name, value in rows.items()}
        walks = random_walk_encoding(alone.edge_index, n, 4)
        assert torch.equal(part["walks"], walks.flatten(0, 1))
        assert torch.equal(part["distances"], shortest_path_encoding(alone.edge_index, n, 3).flatten())
        assert torch.equal(part["related"], ring_membership(alone.edge_index, n, 8).flatten())
        before = int(graphs.nodes[:number].sum())
        assert torch.equal(whole.returns[before : before + n], torch.stack([walks[i, i] for i in range(n)]))
        start += n * n
    assert start == len(rows["walks"])


@pytest.mark.parametrize("options", [{}, {"steps": 0}, {"steps": 0, "limit": 3}, {"substructures": "product"}])
def test_a_model_is_given_what_it_reads(options: dict[str, int | str]) -> None:
    torch.manual_seed(0)
    graphs = encoded(random_molecules(5, seed=1), steps=5, limit=3, largest_ring=8)
    network = chromatic(graphs, 1, SETTINGS, **options).eval()
    wanted = {"walks": options.get("steps", 5), "distances": "limit" in options, "related": "substructures" in options}
    assert read_by(network) == [name for name, value in wanted.items() if value]
    inputs, y = arguments(network, graphs, torch.tensor([1, 3]))
    assert set(inputs) == {"x", "edge_index", "edge_attr", "batch", *read_by(network)}
    # Nodes keep their own walks in every case: as an encoding, or as features.
    assert inputs["x"].shape[1] == (4 if wanted["walks"] else 4 + 5)
    assert torch.equal(inputs["edge_attr"], graphs.graphs.take(torch.tensor([1, 3])).edge_attr.argmax(dim=1))
    assert torch.equal(y, graphs.graphs.y[[1, 3]])


@pytest.mark.parametrize("kind", ["csa", "gin", "gcn"])
def test_answers_come_with_their_truth_and_do_not_see_other_graphs(kind: str) -> None:
    torch.manual_seed(0)
    graphs = encoded(random_molecules(7, seed=2), steps=5)
    made = chromatic(graphs, 1, SETTINGS) if kind == "csa" else message_passing(kind, graphs, 1, SETTINGS)
    chosen = torch.tensor([5, 0, 2, 6])
    with torch.no_grad():
        said, y = answers(made.eval(), graphs, chosen, size=3)
        alone = [ask(made, graphs, one[None]) for one in chosen]
    by_size = graphs.graphs.nodes[chosen].argsort(stable=True).tolist()
    assert torch.allclose(said, torch.cat([alone[place][0] for place in by_size]), atol=1e-5)
    assert torch.equal(y, torch.cat([alone[place][1] for place in by_size]))


def test_every_training_graph_is_in_one_batch_and_padding_is_small() -> None:
    torch.manual_seed(0)
    graphs = encoded(random_molecules(300, seed=0))
    train = torch.arange(300).flip(0)[:250]
    cut = batches(graphs, train, 16)
    assert torch.equal(torch.cat(cut).sort().values, torch.arange(250))
    sizes = [graphs.graphs.nodes[train[some]] for some in cut]
    work = sum(int(len(some) * some.max() ** 2) for some in sizes)
    assert work <= 1.05 * int(graphs.graphs.nodes[train].square().sum())


def test_an_atom_alone_is_no_batch() -> None:
    """Its batch norm would have nothing to divide by; methane is one among large molecules."""
    large = random_molecules(3, seed=0)
    methane = dataclasses.replace(
        large,
        x=torch.cat([large.x, large.x[:1]]),
        nodes=torch.cat([large.nodes, torch.tensor([1])]),
        edges=torch.cat([large.edges, torch.tensor([0])]),
        y=torch.cat([large.y, large.y[:1]]),
    )
    cut = batches(encoded(methane, steps=2), torch.arange(4), 1)
    assert torch.equal(torch.cat(cut).sort().values, torch.arange(4))
    assert all(methane.nodes[some].sum() > 1 for some in cut)


def test_a_budget_is_met_from_below_and_zero_leaves_the_width() -> None:
    graphs = encoded(random_molecules(2, seed=0), steps=5)
    assert message_passing("gin", graphs, 1, SETTINGS).entry.out_features == 16
    for budget in (5000, 100000):
        settings = dataclasses.replace(SETTINGS, budget=budget)
        for network in (chromatic(graphs, 1, settings), message_passing("gcn", graphs, 1, settings)):
            assert 0.95 * budget <= sum(parameter.numel() for parameter in network.parameters()) <= budget
    with pytest.raises(ValueError, match="--budget must be at least 20 for the smallest model, got 10"):
        largest(lambda n: torch.nn.Linear(n, 4), 10, 4)
    assert largest(lambda n: torch.nn.Linear(n, 4), 41, 4) == 9


@pytest.mark.parametrize("kind", ["csa", "gin"])
def test_settled_norms_hold_the_statistics_of_the_weights_as_they_are(kind: str) -> None:
    torch.manual_seed(0)
    graphs = encoded(random_molecules(8, seed=2), steps=5)
    settings = dataclasses.replace(SETTINGS, attention_dropout=0.5)
    network = (chromatic(graphs, 1, settings) if kind == "csa" else message_passing(kind, graphs, 1, settings)).eval()
    everyone = torch.arange(8)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    for norm in norms:
        torch.nn.init.normal_(norm.running_mean, std=100)
    with torch.no_grad():
        settle(network, graphs, everyone, size=8)
    assert not any(module.training for module in network.modules())
    assert {norm.momentum for norm in norms} == {0.1}
    with torch.no_grad():
        said = ask(network, graphs, everyone)[0]
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.train()
        # The same but for the unbiased variance.
        assert torch.allclose(ask(network, graphs, everyone)[0], said, rtol=0.05, atol=0.02)
