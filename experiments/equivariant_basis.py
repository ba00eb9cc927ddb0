r"""Learn every equivariant linear map of a graph by attention on its tokens (TokenGT table 1, figure 2).

One attention layer with a head for each of the 15 basis tensors of 2 -> 2 is trained to reproduce them, row by row
normalised, on Barabasi-Albert graphs: with and without node identifiers (random, orthogonal random, Laplacian; or one
for each token instead of each node, "first-order") and type identifiers. "sparse" tokens are nodes and edges in both
directions, "dense" ones all pairs of nodes. Rows of a tensor that are zero are to attend to an extra token, [null].
L2 is the sum of squared errors of a head's matrix, averaged over heads and graphs; lower is better.

The paper's test L2, dense and sparse (n from 10 to 20, 1152 graphs, width 1024, 15 heads of 128, 3000 steps):

                          dense    sparse
    none                  53.93     34.70
    types                 40.06     20.39
    first-order + types   32-40     16.56
    random                5.548     8.270
    orf                   5.143     7.190
    lap                   1.702     0.064
    random + types        0.234     0.875
    orf + types           0.009     0.011
    lap + types           0.005     0.019

One row of the paper cannot be had by one such layer: without types, what a query makes of keys is linear in
``[P_u, P_v]``, hence a_ij a_ji = a_ii a_jj, and no head tells nodes from edges, whatever the identifiers are. Here
"lap" stays beside "orf".

The defaults are a reduced setting: smaller graphs, a narrower layer, fewer of both graphs and steps. The paper's is

    python -m experiments.equivariant_basis --dataset sparse --least 10 --most 20 --graphs 1152 --tests 128 \
        --hidden 1024 --head-features 128 --batch 512 --epochs 1000 --lr 1e-4 \
        --weight-decay 0.01 --warmup 0.33 --dropout 0.1

and the same with ``--dataset dense --batch 256 --epochs 600``. All rows of the reduced table, and two of them:

    python -m experiments.equivariant_basis --seeds 1
    python -m experiments.equivariant_basis --seeds 1 --dataset dense --least 5 --most 8 --models types lap-types
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from experiments.engine import comparisons, plots, runs
from experiments.engine.options import RefusedError, option
from holonomy.layers import GraphTokenizer, HyperedgeTokenizer, TokenAttention, laplacian_identifiers, set_partitions
from holonomy.layers.equivariant.basis.partitions import equality_classes
from holonomy.layers.tokens.tokenizer import Tokens

HEADS = len(set_partitions(4))


class Row(NamedTuple):
    """What a token knows of its nodes and of its type."""

    title: str
    identifiers: Literal["none", "random", "orf", "lap"]
    types: bool
    first_order: bool = False


ROWS = {
    "none": Row("no identifiers", "none", types=False),
    "types": Row("types", "none", types=True),
    "random-first": Row("random (first-order) + types", "random", types=True, first_order=True),
    "orf-first": Row("orthogonal random (first-order) + types", "orf", types=True, first_order=True),
    "random": Row("random", "random", types=False),
    "orf": Row("orthogonal random", "orf", types=False),
    "lap": Row("Laplacian", "lap", types=False),
    "random-types": Row("random + types", "random", types=True),
    "orf-types": Row("orthogonal random + types", "orf", types=True),
    "lap-types": Row("Laplacian + types", "lap", types=True),
}


@dataclasses.dataclass(frozen=True)
class Settings(comparisons.Settings):
    """Hyper-parameters; one layer of 15 heads is what the question is about."""

    hidden: int = option("width of a token", default=128)
    layers: int = option("1: no other is possible", default=1)
    heads: int = option("15: no other is possible", default=HEADS)
    head_features: int = option("width of a head", default=32)
    lr: float = option("largest learning rate", default=0.007)
    clip: float = option("largest norm of the gradient", default=100.0)
    batch: int = option("graphs in a batch", default=16)
    epochs: int = option("epochs", default=100)
    least: int = option("nodes of the smallest graphs", default=6)
    most: int = option("nodes of the largest graphs", default=10)
    graphs: int = option("graphs to train on", default=128)
    tests: int = option("graphs to validate on, and as many to test on", default=32)
    random_dim: int = option("width of random and orthogonal random identifiers", default=24)
    laplacian_dim: int = option("width of Laplacian identifiers", default=20)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The tokens of a graph, nodes (v, v) and then pairs, and how any two of them are related.

    Attributes:
        nodes: n.
        pairs: (2, m) tokens that are no nodes: edges in both directions, or all pairs.
        laplacian: (n, p) node identifiers.
        classes: (n + m, n + m), the basis tensor that is one at two tokens.
    """

    nodes: int
    pairs: Tensor
    laplacian: Tensor
    classes: Tensor


@dataclasses.dataclass(frozen=True)
class Data:
    """Graphs to train on, to validate on and to test on."""

    train: list[Graph]
    validation: list[Graph]
    test: list[Graph]


def barabasi_albert(n: int, k: int, rng: np.random.Generator) -> Tensor:
    """Draw a graph: node after node joins k different earlier ones, chosen by their degrees; edges both ways."""
    ends = list(range(k))
    edges = []
    for new in range(k, n):
        # The first to come joins all; each edge then counts as a ticket for both of its ends.
        chosen: set[int] = set(range(k)) if new == k else set()
        while len(chosen) < k:
            chosen.add(ends[rng.integers(len(ends))])
        edges += [(new, old) for old in sorted(chosen)]
        ends = ([] if new == k else ends) + sorted(chosen) + [new] * k
    one_way = torch.tensor(edges).T
    return torch.cat([one_way, one_way.flip(0)], dim=1)


def graph_of(edges: Tensor, n: int, *, dense: bool, dim: int) -> Graph:
    """Return the tokens of a graph and the class of each pair of them."""
    every = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    pairs = every[:, every[0] != every[1]] if dense else edges
    tokens = torch.cat([torch.arange(n).expand(2, n), pairs], dim=1).T
    count = len(tokens)
    both = torch.cat([tokens[:, None].expand(-1, count, -1), tokens.expand(count, -1, -1)], dim=2)
    classes = equality_classes(both.reshape(-1, 4)).reshape(count, count)
    return Graph(n, pairs, laplacian_identifiers(edges, n, dim), classes.to(torch.uint8))


@functools.lru_cache(maxsize=4)
def _drawn(dataset: str, settings: Settings, seed: int) -> Data:
    rng = np.random.default_rng(seed)
    counts = (settings.graphs, settings.tests, settings.tests)
    parts = []
    for count in counts:
        sizes = [(int(rng.integers(settings.least, settings.most + 1)), int(rng.integers(2, 4))) for _ in range(count)]
        parts.append(
            [
                graph_of(barabasi_albert(n, k, rng), n, dense=dataset == "dense", dim=settings.laplacian_dim)
                for n, k in sizes
            ]
        )
    return Data(*parts)


def load(dataset: str, folder: Path | None, settings: Settings, seed: int) -> Data:
    """Draw the graphs of a seed."""
    if folder is not None:
        raise RefusedError(f"--data must be left out, the graphs are drawn, got {folder}")
    if (settings.layers, settings.heads) != (1, HEADS):
        raise RefusedError(f"--layers and --heads must be 1 and {HEADS}, got {settings.layers} and {settings.heads}")
    if not 4 <= settings.least <= settings.most:
        raise RefusedError(f"--least must lie in [4, --most = {settings.most}], got {settings.least}")
    # The learning rate and the like do not change the graphs, which take longer than an epoch.
    fixed = Settings(
        **{name: getattr(settings, name) for name in ("least", "most", "graphs", "tests", "laplacian_dim")}
    )
    return _drawn(dataset, fixed, seed)


class Basis(nn.Module):
    """Tokens of graphs, and one attention layer with a head for each basis tensor."""

    def __init__(self, row: Row, settings: Settings) -> None:
        super().__init__()
        self.row, self.dropout = row, settings.dropout
        self.dim = settings.laplacian_dim if row.identifiers == "lap" else settings.random_dim
        kind = {"none": None, "random": "near_orthogonal", "orf": "orthogonal", "lap": "laplacian"}[row.identifiers]
        self.tokenizer: HyperedgeTokenizer | GraphTokenizer
        if row.first_order:
            # Tokens as nodes of their own, which is all that one identifier a token says; the type is a feature.
            self.tokenizer = HyperedgeTokenizer(
                1, 2, settings.hidden, identifiers=kind, identifier_dim=self.dim, type_features=0
            )
        else:
            self.tokenizer = GraphTokenizer(
                0,
                settings.hidden,
                identifiers=kind,
                identifier_dim=self.dim if kind else None,
                type_features=None if row.types else 0,
            )
        self.attention = TokenAttention(settings.hidden, HEADS, head_features=settings.head_features)

    def tokens(self, graphs: Sequence[Graph]) -> Tokens:
        """Return the tokens of some graphs, [null] first."""
        device = graphs[0].pairs.device
        sizes = torch.tensor([graph.nodes for graph in graphs], device=device)
        batch = torch.repeat_interleave(sizes)
        starts = sizes.cumsum(0) - sizes
        pairs = torch.cat([graph.pairs + start for graph, start in zip(graphs, starts, strict=True)], dim=1)
        if isinstance(self.tokenizer, HyperedgeTokenizer):
            member = torch.cat([batch, batch[pairs[0]]])
            place = torch.arange(len(member), device=device)
            kind = (place >= len(batch)).long()
            given = self._random(len(member), device) if self.row.identifiers == "random" else None
            values = functional.one_hot(kind, 2).to(self.tokenizer.graph_token)
            return self.tokenizer(place[:, None], values, len(member), member, given)
        given = {
            "random": lambda: self._random(len(batch), device),
            "lap": lambda: torch.cat([graph.laplacian for graph in graphs]),
        }.get(self.row.identifiers, lambda: None)()
        return self.tokenizer(torch.zeros(len(batch), 0, device=device), pairs, batch=batch, identifiers=given)

    def forward(self, graphs: Sequence[Graph]) -> Tensor:
        """Return the attention matrices (graphs, 15, 1 + tokens, 1 + tokens)."""
        tokens = self.tokens(graphs)
        dropped = functional.dropout(tokens.values, self.dropout, self.training)
        return self.attention.weights(dropped, tokens.padding)

    def _random(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, self.dim).to(device) / self.dim**0.5


def targets(graphs: Sequence[Graph]) -> Tensor:
    """Return the normalised basis tensors (graphs, 15, tokens, 1 + tokens), [null] first; zero at padding."""
    most = max(len(graph.classes) for graph in graphs)
    out = torch.zeros(len(graphs), HEADS, most, 1 + most, device=graphs[0].pairs.device)
    for place, graph in enumerate(graphs):
        count = len(graph.classes)
        basis = functional.one_hot(graph.classes.long(), HEADS).permute(2, 0, 1).float()
        sums = basis.sum(-1, keepdim=True)
        out[place, :, :count, :1] = (sums == 0).float()
        out[place, :, :count, 1 : 1 + count] = basis / sums.clamp(min=1)
    return out


def l2(network: Basis, graphs: Sequence[Graph]) -> Tensor:
    """Squared error of the attention matrices, summed over a matrix, averaged over heads and graphs."""
    wanted = targets(graphs)
    real = wanted.sum(-1, keepdim=True)  # 1 in the rows of tokens, 0 in those of padding
    return ((network(graphs)[:, :, 1:] - wanted) * real).square().sum() / (len(graphs) * HEADS)


@torch.no_grad()
def measured(network: Basis, graphs: list[Graph], batch: int = 32) -> float:
    """L2 over graphs that do not fit into a batch; random identifiers from a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [graphs[i : i + batch] for i in range(0, len(graphs), batch)]
        return sum(float(l2(network, part)) * len(part) for part in parts) / len(graphs)


def build(model: str, settings: Settings, data: Data) -> nn.Module:
    """Make a model; the data say nothing that it needs."""
    del data
    return Basis(ROWS[model], settings)


def loss(network: nn.Module, data: Data, chosen: Tensor) -> Tensor:
    """L2 of some training graphs, with dropout and random signs."""
    return l2(network, [data.train[i] for i in chosen.tolist()])


def validate(network: nn.Module, data: Data) -> float:
    """Minus L2: larger is better."""
    return -measured(network, data.validation)


def test(network: nn.Module, data: Data) -> dict[str, float]:
    """L2 of test graphs and of as many training graphs, both without dropout."""
    return {
        "test L2": measured(network, data.test),
        "train L2": measured(network, data.train[: len(data.test)]),
    }


def draw(networks: Mapping[str, nn.Module], data: Data, run: runs.Run) -> Path:
    """Draw the attention matrices of a test graph beneath the 15 basis tensors, as figure 2 of the paper does."""
    graph = min(data.test, key=lambda one: len(one.classes))
    # The paper cuts entries at 0.01, so that small ones can be seen; for small graphs, the mean entry does it.
    limit = 1 / len(graph.classes)
    rows = {"basis tensor": targets([graph])[0, :, :, 1:]}
    for model, network in networks.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows[ROWS[model].title] = network([graph])[0, :, 1:, 1:]
    with mpl.rc_context({**plots.STYLE, "axes.grid": False}):
        figure = Figure(figsize=(16, 0.6 + 1.12 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), HEADS, squeeze=False)
        for line, (title, maps) in zip(panels, rows.items(), strict=True):
            for head, (axes, values) in enumerate(zip(line, maps, strict=True)):
                axes.imshow(
                    values.clamp(max=limit).numpy(), cmap="cividis", vmin=0, vmax=limit, interpolation="nearest"
                )
                axes.set(xticks=[], yticks=[])
                if axes is panels[0][head]:
                    letters = ["ijkl"[block] for block in set_partitions(4)[head]]
                    axes.set_title("".join(letters[:2]) + "," + "".join(letters[2:]), fontsize=12)
            line[0].set_ylabel(title.replace(" + ", "\n+ ").replace(" (", "\n("), fontsize=9, rotation=0, ha="right")
        caption = f"a test graph of {graph.nodes} nodes, {len(graph.classes)} tokens; entries cut at {limit:.2g}"
        figure.supxlabel(caption, fontsize=12, color="#444444")
        return plots.save(figure, run.own("attention.png"))


QUESTION = comparisons.Question(
    module="experiments.equivariant_basis",
    text=__doc__ or "",
    models={name: row.title for name, row in ROWS.items()},
    datasets={
        "sparse": "nodes and edges of Barabasi-Albert graphs as tokens",
        "dense": "all pairs of their nodes as tokens",
    },
    settings=Settings,
    load=load,
    size=lambda data: len(data.train),
    build=build,
    loss=loss,
    validate=validate,
    test=test,
    score=("test L2", "test L2 (lower is better)"),
    percent=False,
    draw=draw,
)

main = functools.partial(comparisons.main, QUESTION)

if __name__ == "__main__":
    sys.exit(main())
