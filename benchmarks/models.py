"""Hypformer end to end, an epoch at the sizes of cora and pubmed; and what ``torch.compile`` gains for every model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import geoopt
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from benchmarks.case import Case, Contenders, Figure, Line, Step, stepped
from benchmarks.plain import hyperbolic as plain
from experiments.data.datasets import NodeData
from experiments.node_classification import build, optimizer_for, settings_for
from holonomy import models
from holonomy.layers import orthogonal_identifiers, random_walk_encoding
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer

__all__ = ["CASES"]

# Nodes: dataset, features, entries of the features, edges one way, classes.
LIKE = {2708: ("cora", 1433, 49_216, 5278, 7), 19_717: ("pubmed", 500, 988_031, 44_324, 3)}
WIDTH, HEADS = 64, 4


def graph_of(nodes: int, device: torch.device) -> tuple[NodeData, str]:
    """A random graph with the sizes of a citation network, its bag-of-words features sparse."""
    name, columns, entries, edges, classes = LIKE[nodes]
    draw = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(most, (entries,), generator=draw) for most in (nodes, columns)])
    size = (nodes, columns)
    features = torch.sparse_coo_tensor(places, torch.rand(entries, generator=draw) / 20, size, check_invariants=True)
    one_way = torch.randint(nodes, (2, edges), generator=draw)
    lists = torch.randperm(nodes, generator=draw).to(device)
    data = NodeData(
        name=name,
        x=features.coalesce().to_sparse_csr().to(device),
        edge_index=torch.cat([one_way, one_way.flip(0)], 1).to(device),
        y=torch.randint(classes, (nodes,), generator=draw).to(device),
        train=lists[: 20 * classes],
        val=lists[-1500:-1000],
        test=lists[-1000:],
        num_classes=classes,
    )
    return data, name


class AsReleased(Hypformer):
    """The transformer by the released modules' arithmetic, on dense features."""

    @staticmethod
    def _encoded(encoder: HypformerEncoder, x: Tensor, batch: Tensor | None, group: object = None) -> Tensor:
        del batch, group
        return plain.encoder(encoder, x.to_dense())


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data: NodeData) -> Step:
    """A training step and an evaluation; the logits that were trained on are returned."""

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        nn.functional.cross_entropy(logits[data.train], data.y[data.train]).backward()
        optimizer.step()
        with torch.no_grad():
            model(data.x, data.edge_index)
        return [logits.detach()]

    return step


def epochs(nodes: int, device: torch.device) -> Contenders:
    data, name = graph_of(nodes, device)
    # Nothing is dropped, so that results can be compared.
    still = {"dropout": 0.0, "output_dropout": 0.0, "graph_dropout": 0.0}
    settings = {model: replace(settings_for(name, model), **still) for model in ("hypformer", "euclidean")}
    made: dict[str, nn.Module] = {}
    for contender, model in (
        ("ours", "hypformer"),
        ("Euclidean twin", "euclidean"),
        ("plain composition", "hypformer"),
    ):
        torch.manual_seed(0)
        made[contender] = build(model, settings[model], data).to(device)
    made["plain composition"].__class__ = AsReleased
    optimizers = {contender: optimizer_for(made[contender], settings["hypformer"]) for contender in ("ours",)}
    optimizers["Euclidean twin"] = torch.optim.Adam(made["Euclidean twin"].parameters(), lr=0.01, fused=True)
    optimizers["plain composition"] = geoopt.optim.RiemannianAdam(made["plain composition"].parameters(), lr=0.01)
    return {contender: epoch(model, optimizers[contender], data) for contender, model in made.items()}


class Called(NamedTuple):
    """A model, what of it is called, and with what."""

    model: nn.Module
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    options: Mapping[str, Tensor] = MappingProxyType({})


def ring(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features of nodes, and edges in both directions round a ring with chords."""
    i = torch.arange(nodes, device=device)
    one_way = torch.cat([torch.stack([i, (i + step) % nodes]) for step in (1, 7)], 1)
    return torch.randn(nodes, WIDTH, device=device), torch.cat([one_way, one_way.flip(0)], 1)


def hypformer(nodes: int, device: torch.device) -> Called:
    model = models.Hypformer(WIDTH, WIDTH, 8, heads=HEADS, graph_encoder=None, device=device)
    return Called(model, model, (torch.randn(nodes, WIDTH, device=device) / 8,))


def bucket(count: int) -> int:
    """The size that sequences and graphs of so many tokens are padded to."""
    return -(-count // 16) * 16


def simplicial(tokens: int, device: torch.device) -> Called:
    model = models.SimplicialTransformer(WIDTH, HEADS, device=device)
    padding = (torch.arange(bucket(tokens), device=device) >= tokens).expand(4, -1)
    src = torch.randn(4, bucket(tokens), WIDTH, device=device)
    return Called(model, model, (src,), {"src_key_padding_mask": padding})


def tokengt(nodes: int, device: torch.device, *, kind: Callable[..., nn.Module]) -> Called:
    model = kind(WIDTH, WIDTH, 1, layers=2, heads=HEADS, identifier_dim=16, device=device)
    identifiers = orthogonal_identifiers(nodes, 16, generator=torch.Generator().manual_seed(0)).to(device)
    return Called(model, model, ring(nodes, device), {"identifiers": identifiers})


def chromatic(nodes: int, device: torch.device) -> Called:
    model = models.ChromaticGraphTransformer(WIDTH, WIDTH, 1, layers=2, heads=HEADS, steps=4, device=device)
    x, edge_index = ring(nodes, device)
    walks = random_walk_encoding(edge_index, nodes, 4).flatten(0, 1)
    return Called(model, model, (x, edge_index), {"walks": walks})


def dense(nodes: int, device: torch.device, *, kind: Callable[..., nn.Module]) -> Called:
    """Two padded graphs as tensors of pairs: hyperedges that are listed have sizes that depend on numbers."""
    model, room = kind(WIDTH, 16, 1, orders=(2, 2, 0), device=device), bucket(nodes)
    at_nodes = (torch.arange(room, device=device) < nodes).expand(2, -1)
    return Called(model, model.tensor, (torch.randn(2, room, room, WIDTH, device=device), at_nodes))


def compiled(count: int, device: torch.device, *, problem: Callable[[int, torch.device], Called]) -> Contenders:
    """Forward and backward, as it is and compiled without a graph break."""
    torch.manual_seed(0)
    model, function, inputs, options = problem(count, device)
    model.eval()  # in training some flip identifiers or drop entries
    learned = [p for p in model.parameters() if p.requires_grad]
    torch.compiler.reset()
    both = {"eager": function, "compiled": torch.compile(function, fullgraph=True)}
    return {name: stepped(lambda f=f: f(*inputs, **options), learned) for name, f in both.items()}


def compilations(count: int, device: torch.device, *, problem: Callable[[int, torch.device], Called]) -> float:
    """Compilations for two sizes after two others, all in the bucket of ``count`` where the model pads."""
    counter = CompileCounter()
    torch.manual_seed(0)
    first = problem(count, device)
    torch.compiler.reset()
    function = torch.compile(first.function, fullgraph=True, backend=counter)
    for place, size in enumerate((count, count - 7, count - 3, count - 11)):
        if place == 2:
            before = counter.frame_count
        given = problem(size, device)
        function(*given.inputs, **given.options)
    return float(counter.frame_count - before)


def compile_case(name: str, count: int, unit: str, problem: Callable[[int, torch.device], Called]) -> Case:
    return Case(
        name=f"compile-{name}",
        title=f"torch.compile(fullgraph=True) of {name}, width {WIDTH}, forward and backward",
        unit=unit,
        sizes=(count,),
        contenders=partial(compiled, problem=problem),
        lines=(
            Line("eager", "compiled", note="the gain"),
            Line("compiled", "eager", of="memory"),
            Figure(
                "compilations for a third and fourth size of a bucket",
                partial(compilations, problem=problem),
                {count: "<= 0"},
            ),
        ),
        equal=(("eager", "compiled"),),
    )


CASES = (
    Case(
        name="epoch",
        title="Hypformer of the node classification example, an epoch (step and evaluation), cora's and pubmed's sizes",
        unit="nodes",
        sizes=tuple(LIKE),
        contenders=epochs,
        lines=(
            Line("ours", "Euclidean twin"),
            Line("plain composition", "ours"),
            Line("ours", "Euclidean twin", of="memory"),
            Line("ours", "plain composition", of="memory"),
        ),
        equal=(("ours", "plain composition"),),
        small=2708,
    ),
    compile_case("Hypformer", 4096, "nodes", hypformer),
    compile_case("SimplicialTransformer", 48, "tokens", simplicial),
    compile_case("TokenGT", 64, "nodes", partial(tokengt, kind=models.TokenGT)),
    compile_case("HypTokenGT", 64, "nodes", partial(tokengt, kind=models.HypTokenGT)),
    compile_case("ChromaticGraphTransformer", 64, "nodes", chromatic),
    compile_case("HigherOrderTransformer", 32, "nodes", partial(dense, kind=models.HigherOrderTransformer)),
    compile_case("InvariantGraphNetwork", 32, "nodes", partial(dense, kind=models.InvariantGraphNetwork)),
)
