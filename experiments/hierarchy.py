"""Embed a hierarchy in hyperbolic space by Riemannian optimization.

Every node is a point, learned by ``LorentzEmbedding`` and ``RiemannianAdam`` alone, so that its ancestors lie
nearer to it than any other node (Nickel and Kiela 2017; 2018). For each pair (u, v) of the transitive closure,
child first, the loss is

    -log( exp(-d(u,v)/T) / (exp(-d(u,v)/T) + sum over negatives w of exp(-d(u,w)/T)) ),

where negatives are nodes that are not ancestors of u: all of them (the default for small sets; whole rows of the
distance matrix), or a sample for each pair. T is 1 in the papers; on a manifold of curvature kappa it is the same
number as a curvature of T^2 kappa. It grows here during the first part of the run (mammals: from 0.1 to 0.3): points
find their order within a fraction of the radius of curvature, where the barriers between them are low, before the
space opens; at a constant T = 1 the mammals stay near a MAP of 0.66. Every baseline gets the same schedule.

Measured is the reconstruction, as in the papers: of all nodes ranked by their distance from u, the mean rank of
its ancestors, other ancestors not counted, and the mean over u of the average precision. ``--known 0.4`` learns from
the parents and two fifths of the other ancestors, and ranks those held out, each among the nodes that are no ancestors
of u: mean reciprocal rank and hits among the first ten. A ranking says nothing about geometry without its controls:

    learned-bias    hyperbolic distance, plus a number b_v of each node v that is ranked
    euclidean-bias  flat distance plus b_v, as MuRE scores (Balazevic et al. 2019)
    dot             minus the dot product, plus b_v
    edges           no map: v is the farther away the more known pairs lead to it

The first three have a coordinate less, so that all have equally many numbers a node.

    python -m experiments.hierarchy
    python -m experiments.hierarchy --data ../shared/data --dataset mammals --baseline all --dims 2 5 10
    python -m experiments.hierarchy --nodes 600 --known 0.4 --models learned euclidean euclidean-bias edges
    python -m experiments.hierarchy --data ../shared/data --dataset nouns --dims 10 --negatives 20 --sparse
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime as dt
import io
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import geoopt
import matplotlib as mpl
import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.data import datasets
from experiments.engine import options, plots, runs
from experiments.engine.options import RefusedError
from holonomy.manifolds import Lorentz, LorentzEmbedding
from holonomy.optim import RiemannianAdam

DATASETS = ("tree", "mammals", "nouns")
MODELS = ("learned", "fixed", "geoopt-learned", "geoopt-fixed", "euclidean", "learned-bias", "euclidean-bias", "dot")
TITLES = {
    "learned": "hyperbolic, learned curvature",
    "fixed": "hyperbolic, curvature -1",
    "geoopt-learned": "Geoopt, learned k",
    "geoopt-fixed": "Geoopt, k = 1",
    "euclidean": "Euclidean",
    "learned-bias": "hyperbolic, a bias a node",
    "euclidean-bias": "Euclidean, a bias a node",
    "dot": "dot product, a bias a node",
    "edges": "along the known edges",
}


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A directed acyclic graph of names.

    Attributes:
        name: of the set.
        direct: edges (2, m), child then parent.
        names: of the n nodes.
        closure: all pairs (2, p) of a node and an ancestor, ordered by node, then ancestor.
        ancestors: (n, most) ancestors of each node, -1 beyond their number.
        keys: of each pair of the closure, n times the node plus the ancestor: ascending, to be searched.
    """

    name: str
    direct: Tensor
    names: Sequence[str]
    closure: Tensor = dataclasses.field(init=False)
    ancestors: Tensor = dataclasses.field(init=False)
    keys: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        n = len(self.names)
        if self.direct.dim() != 2 or self.direct.shape[0] != 2 or self.direct.numel() == 0:
            raise RefusedError(f"{self.name}: direct must have shape (2, m), m > 0, got {tuple(self.direct.shape)}")
        if int(self.direct.min()) < 0 or int(self.direct.max()) >= n:
            raise RefusedError(f"{self.name}: direct must hold node numbers from 0 to {n - 1}")
        _hold(self, transitive_closure(self.direct, n))

    def restricted(self, kept: Tensor) -> Hierarchy:
        """Return the hierarchy of which only some pairs of the closure are known, (p,)."""
        out = copy.copy(self)
        _hold(out, self.closure[:, kept])
        return out

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    def descendants(self) -> Tensor:
        """Return how many descendants each node has, (n,)."""
        return torch.bincount(self.closure[1], minlength=self.num_nodes)

    def related(self, child: Tensor, other: Tensor) -> Tensor:
        """Tell where ``other`` is ``child`` itself or an ancestor of it; shapes broadcast."""
        asked = child * self.num_nodes + other
        found = torch.searchsorted(self.keys, asked).clamp(max=len(self.keys) - 1)
        return (self.keys[found] == asked) | (child == other)


def _hold(hierarchy: Hierarchy, pairs: Tensor) -> None:
    n = hierarchy.num_nodes
    counts = torch.bincount(pairs[0], minlength=n)
    place = torch.arange(pairs.shape[1]) - (counts.cumsum(0) - counts)[pairs[0]]
    table = torch.full((n, int(counts.max())), -1)
    table[pairs[0], place] = pairs[1]
    object.__setattr__(hierarchy, "closure", pairs)
    object.__setattr__(hierarchy, "ancestors", table)
    object.__setattr__(hierarchy, "keys", pairs[0] * n + pairs[1])


def transitive_closure(direct: Tensor, n: int) -> Tensor:
    """Return all pairs (2, p) joined by a path along ``direct`` (2, m), sorted; self-loops are dropped.

    Raises:
        ValueError: if there is a cycle.
    """
    child, parent = (row[direct[0] != direct[1]].numpy() for row in direct)
    step = scipy.sparse.csr_array((np.ones(len(child), dtype=np.int64), (child, parent)), shape=(n, n))
    reach, before = step, -1
    while reach.nnz != before:
        before = reach.nnz
        reach = reach + reach @ step + step
        reach.data[:] = 1
        if reach.diagonal().any():
            raise RefusedError("direct must have no cycle: some node is its own ancestor")
    found = reach.tocoo()
    order = np.lexsort((found.col, found.row))
    return torch.from_numpy(np.stack([found.row[order], found.col[order]]).astype(np.int64))


def random_tree(nodes: int = 300, *, children: int = 6, seed: int = 0) -> Hierarchy:
    """Return a tree in which every node draws 1 to ``children`` children, until it is full; node 0 is the root."""
    if nodes < 2:
        raise RefusedError(f"nodes must be at least 2, got {nodes}")
    rng = np.random.default_rng(seed)
    parent = [-1]
    owner = 0
    while len(parent) < nodes:
        parent += [owner] * min(int(rng.integers(1, children + 1)), nodes - len(parent))
        owner += 1
    direct = torch.tensor([list(range(1, nodes)), parent[1:]])
    names = ["root"]
    for node in range(1, nodes):
        born = sum(1 for other in range(parent[node] + 1, node) if parent[other] == parent[node]) + 1
        above = "" if parent[node] == 0 else names[parent[node]] + "."
        names.append(f"{above}{born}")
    return Hierarchy("tree", direct, names)


@dataclasses.dataclass(frozen=True)
class Links:
    """What is known of a hierarchy, and pairs (2, p) that are not: to choose by, and to measure."""

    known: Hierarchy
    val: Tensor
    test: Tensor


def held_out(hierarchy: Hierarchy, share: float, seed: int = 0) -> Links:
    """Keep the parents and a share of the other ancestors; a quarter of the rest chooses settings."""
    n, pairs = hierarchy.num_nodes, hierarchy.closure
    far = ~torch.isin(pairs[0] * n + pairs[1], hierarchy.direct[0] * n + hierarchy.direct[1])
    drawn = torch.rand(pairs.shape[1], generator=torch.Generator().manual_seed(seed))
    hidden = far & (drawn >= share)
    val = hidden & (drawn < share + (1 - share) / 4)
    if not bool(val.any()) or not bool((hidden & ~val).any()):
        raise RefusedError(f"--known {share:g} leaves no pairs to choose by or to measure: give a smaller share")
    return Links(hierarchy.restricted(~hidden), pairs[:, val], pairs[:, hidden & ~val])


def load(name: str, folder: Path | None = None, *, nodes: int = 300) -> Hierarchy:
    """Load a hierarchy by name: the generated tree of so many nodes, or a WordNet file of the folder.

    Raises:
        FileNotFoundError: if the folder or the file is not there.
        ValueError: if the file is not what it should be.
    """
    if name == "tree":
        return random_tree(nodes)
    if folder is None:
        raise FileNotFoundError(f"{name} is read from wordnet_{name}.npz: say where it lies with --data FOLDER")
    path = Path(folder) / f"wordnet_{name}.npz"
    raw = datasets.read_npz(path, {"direct": "i2", "name": "t1"})
    shown = [text.split("#")[0].replace("_", " ") for text in raw["name"].tolist()]
    return Hierarchy(name, torch.from_numpy(raw["direct"].astype(np.int64)), shown)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is.

    Attributes:
        dim: dimension of the space.
        epochs: passes over the pairs.
        lr: learning rate, which falls linearly to zero.
        curvature_share: of the learning rate, what a learned curvature gets: at the full rate it runs away from the
            start in an epoch, before the points have an order.
        burn_in: first epochs, at a tenth of the learning rate.
        batch: nodes in a batch where all negatives take part, pairs where they are sampled.
        negatives: negatives drawn for each pair; 0 takes all.
        std: spread of the initial points.
        temperature: T at the start and after its growth.
        growth: share of the epochs in which T grows, geometrically.
        evaluate_every: epochs between two measurements; the last epoch is always measured.
        sample: nodes whose ancestors are ranked, drawn once from a seed of their own; 0 ranks all.
        sparse: move only the points that a batch names; the moments of the others wait.
    """

    dim: int = 5
    epochs: int = 60
    lr: float = 0.1
    curvature_share: float = 0.02
    burn_in: int = 0
    batch: int = 64
    negatives: int = 0
    std: float = 0.01
    temperature: tuple[float, float] = (0.1, 0.3)
    growth: float = 0.6
    evaluate_every: int = 10
    sample: int = 0
    sparse: bool = False

    def rate(self, epoch: int) -> float:
        """Learning rate of an epoch, from 1."""
        return self.lr * (0.1 if epoch <= self.burn_in else 1.0) * (1 - (epoch - 1) / self.epochs)

    def heat(self, epoch: int) -> float:
        """Temperature T of an epoch, from 1."""
        first, last = self.temperature
        share = min(1.0, (epoch - 1) / max(self.growth * self.epochs, 1.0))
        return first * (last / first) ** share


# What differs from the settings above, by set. In two dimensions there is little room in which to pass another
# point: larger steps and a hotter end helped.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tree": {"lr": 0.3, "batch": 32, "temperature": (0.3, 1.0)},
    "mammals": {},
    # Larger steps make a learned curvature run away: at a rate of 1 it is -140 after four epochs.
    "nouns": {
        "epochs": 20,
        "lr": 0.3,
        "burn_in": 1,
        "batch": 2048,
        "negatives": 50,
        "temperature": (1.0, 1.0),
        "evaluate_every": 1,
        "sample": 500,
    },
}


class Space(Protocol):
    """Learned points of any geometry."""

    def pairwise(self, rows: Tensor) -> Tensor:
        """Distances (b, n) of some points from all points."""
        ...

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Distances (b, k) of points (b,) from the points (b, k) listed for each."""
        ...

    def curvature(self) -> float:
        """Sectional curvature now."""
        ...


class Hyperbolic(nn.Module):
    """``LorentzEmbedding``, and distances of its manifold."""

    def __init__(self, n: int, settings: Settings, *, learnable: bool) -> None:
        super().__init__()
        manifold = Lorentz(-1.0, learnable=learnable)
        self.points = LorentzEmbedding(n, settings.dim, manifold, std=settings.std, sparse=settings.sparse)

    def pairwise(self, rows: Tensor) -> Tensor:
        """Distances (b, n)."""
        return self.points.manifold.cdist(self.points(rows), self.points())

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Distances (b, k)."""
        # Looked up together: gradients of a table that is read twice have to be merged.
        points = self.points(torch.cat([rows, others.flatten()]))
        ours, theirs = points.split([len(rows), others.numel()])
        return self.points.manifold.dist(ours[:, None], theirs.unflatten(0, others.shape))

    def curvature(self) -> float:
        """Curvature now."""
        return float(self.points.manifold.curvature.detach())


class GeooptPoints(nn.Module):
    """The same with what Geoopt has: its Lorentz manifold, its distance, its ManifoldParameter."""

    def __init__(self, n: int, settings: Settings, *, learnable: bool) -> None:
        super().__init__()
        # Geoopt's own random points do not have the spread they are asked for: ours, so that both start equal.
        start = Lorentz(-1.0).random(n, settings.dim + 1, std=settings.std)
        self.manifold: Any = geoopt.Lorentz(k=1.0, learnable=learnable)
        parameter: Any = geoopt.ManifoldParameter
        self.points = parameter(torch.Tensor(start.data), manifold=self.manifold)

    def pairwise(self, rows: Tensor) -> Tensor:
        """Distances (b, n)."""
        return self.manifold.dist(self.points[rows][:, None], self.points[None])

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Distances (b, k)."""
        return self.manifold.dist(self.points[rows][:, None], self.points[others])

    def curvature(self) -> float:
        """Curvature now."""
        return -1 / float(self.manifold.k.detach())


class EuclideanPoints(nn.Module):
    """Points of flat space."""

    def __init__(self, n: int, settings: Settings) -> None:
        super().__init__()
        self.points = nn.Parameter(settings.std * torch.randn(n, settings.dim))

    def pairwise(self, rows: Tensor) -> Tensor:
        """Distances (b, n)."""
        return torch.cdist(self.points[rows], self.points)

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Distances (b, k)."""
        return torch.linalg.vector_norm(self.points[rows][:, None] - self.points[others], dim=-1)

    def curvature(self) -> float:
        """Curvature: none."""
        return 0.0


class DotProducts(nn.Module):
    """Vectors that are the nearer the larger their product is."""

    def __init__(self, n: int, settings: Settings) -> None:
        super().__init__()
        self.points = nn.Parameter(settings.std * torch.randn(n, settings.dim))

    def pairwise(self, rows: Tensor) -> Tensor:
        """Minus the products (b, n)."""
        return -self.points[rows] @ self.points.T

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Minus the products (b, k)."""
        return -(self.points[rows][:, None] * self.points[others]).sum(-1)

    def curvature(self) -> float:
        """Curvature: none."""
        return 0.0


class Biased(nn.Module):
    """A space whose distances have a number of the node that is ranked added."""

    def __init__(self, inner: Any, n: int) -> None:
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.zeros(n, 1))

    def pairwise(self, rows: Tensor) -> Tensor:
        """Scores (b, n)."""
        return self.inner.pairwise(rows) + self.bias.T

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Scores (b, k)."""
        return self.inner.listed(rows, others) + self.bias[others, 0]

    def curvature(self) -> float:
        """Curvature of the space."""
        return self.inner.curvature()


class KnownEdges:
    """No map: the number of steps along known pairs, and infinity where they do not lead.

    Numbers are kept of pairs that are joined alone: a table of all pairs of nouns takes 50 GiB.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        n, (child, parent) = hierarchy.num_nodes, hierarchy.closure.numpy()
        step = scipy.sparse.csr_array((np.ones(len(child), bool), (child, parent)), shape=(n, n))
        # The number of nodes on the way, its ends too: sparse arrays hold no zeros.
        last = scipy.sparse.csr_array(scipy.sparse.eye_array(n, dtype=bool))
        self.passed = last.astype(np.int32)
        while last.nnz:
            last = (last @ step) > (self.passed > 0)
            self.passed = self.passed + (self.passed.max() + 1) * last.astype(np.int32)

    def pairwise(self, rows: Tensor) -> Tensor:
        """Steps (b, n)."""
        return _steps(self.passed[rows.numpy()])

    def listed(self, rows: Tensor, others: Tensor) -> Tensor:
        """Steps (b, k)."""
        # Copies: scipy sets flags of what it is given, which numpy refuses for memory of torch.
        return _steps(self.passed[rows.numpy().copy()[:, None], others.numpy().copy()])

    def curvature(self) -> float:
        """Curvature: none."""
        return 0.0


def _steps(passed: Any) -> Tensor:
    nodes = torch.from_numpy(passed.toarray()).double()
    return torch.where(nodes > 0, nodes - 1, torch.inf)


def build(model: str, n: int, settings: Settings, device: str = "cpu") -> tuple[Any, Optimizer]:
    """Return a space of ``n`` points and its optimizer."""
    if model.endswith("-bias") or model == "dot":
        smaller = dataclasses.replace(settings, dim=settings.dim - 1)
        inner = DotProducts(n, smaller) if model == "dot" else build(model.removesuffix("-bias"), n, smaller)[0]
        space = Biased(inner, n).to(device)
        return space, RiemannianAdam(parameter_groups(space, settings), lr=settings.lr)
    learnable = model.endswith("learned")
    if model == "euclidean":
        space = EuclideanPoints(n, settings).to(device)
        return space, torch.optim.Adam(space.parameters(), lr=settings.lr)
    if model.startswith("geoopt"):
        space = GeooptPoints(n, settings, learnable=learnable).to(device)
        # Where its k learns, Geoopt's points leave the manifold at once unless they are projected at every step.
        steady = 1 if learnable else None
        return space, geoopt.optim.RiemannianAdam(parameter_groups(space, settings), lr=settings.lr, stabilize=steady)
    space = Hyperbolic(n, settings, learnable=learnable).to(device)
    return space, RiemannianAdam(parameter_groups(space, settings), lr=settings.lr)


def parameter_groups(space: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Points at the full learning rate; a learned curvature, which moves all of them at once, at a share of it."""
    free = [p for p in space.parameters() if p.requires_grad]
    groups = [([p for p in free if p.dim() > 1], 1.0), ([p for p in free if p.dim() <= 1], settings.curvature_share)]
    return [{"params": params, "share": share} for params, share in groups if params]


def loss_of_rows(space: Space, hierarchy: Hierarchy, rows: Tensor, heat: float) -> Tensor:
    """Mean loss over the pairs of some nodes, against every node that is not an ancestor."""
    energy = -space.pairwise(rows) / heat
    listed = hierarchy.ancestors[rows]
    real = listed >= 0
    itself = rows[:, None]
    inside = torch.where(real, listed, itself)
    barred = energy.scatter(1, torch.cat([inside, itself], 1), float("-inf"))
    negatives = torch.logsumexp(barred, 1, keepdim=True)
    positives = energy.gather(1, inside)
    return (torch.logaddexp(positives, negatives) - positives)[real].sum() / max(1, int(real.sum()))


def loss_of_pairs(space: Space, hierarchy: Hierarchy, pairs: Tensor, negatives: int, heat: float) -> Tensor:
    """Mean loss over pairs (2, b), each against its own sample of nodes; ancestors drawn are left out."""
    child, ancestor = pairs
    drawn = torch.randint(hierarchy.num_nodes, (len(child), negatives)).to(child.device)
    energy = -space.listed(child, torch.cat([ancestor[:, None], drawn], 1)) / heat
    barred = hierarchy.related(child[:, None], drawn)
    barred = torch.cat([torch.zeros_like(barred[:, :1]), barred], 1)
    total = torch.logsumexp(energy.masked_fill(barred, float("-inf")), 1)
    return (total - energy[:, 0]).mean()


def reconstruction(distances: Tensor, nodes: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """Rank ancestors among all nodes by distance; a tie with a node that is none counts against the ancestor.

    Args:
        distances: (b, n), of ``nodes`` from all nodes.
        nodes: (b,), each with at least one ancestor.
        ancestors: (b, most), -1 beyond their number.

    Returns:
        The rank of each ancestor among the nodes that are none, itself included, flat; and the average
        precision of each node, (b,).
    """
    real, itself = ancestors >= 0, nodes[:, None]
    inside = torch.where(real, ancestors, itself)
    near = distances.gather(1, inside).masked_fill(~real, float("inf")).sort(1).values
    wrong = distances.scatter(1, torch.cat([inside, itself], 1), float("inf")).sort(1).values
    before = torch.searchsorted(wrong, near.contiguous(), right=True)
    place = torch.arange(1, near.shape[1] + 1, device=near.device)
    counts = real.sum(1, keepdim=True)
    real = place <= counts
    precision = torch.where(real, place / (place + before), 0.0).sum(1) / counts[:, 0]
    return (before + 1)[real], precision


@torch.no_grad()
def measure(space: Space, hierarchy: Hierarchy, sample: int = 0) -> dict[str, float]:
    """Return mean rank and MAP of the reconstruction, of all nodes or of a fixed sample of them."""
    nodes = (hierarchy.ancestors[:, 0] >= 0).nonzero().flatten()
    if 0 < sample < len(nodes):
        nodes = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))[:sample]]
    # Blocks of about two million distances: memory stays bounded whatever the number of nodes.
    block = max(1, 2_000_000 // hierarchy.num_nodes)
    parts = [reconstruction(space.pairwise(rows), rows, hierarchy.ancestors[rows]) for rows in nodes.split(block)]
    ranks, precision = (torch.cat(part) for part in zip(*parts, strict=True))
    return {"mean_rank": float(ranks.double().mean()), "map": float(precision.double().mean())}


@torch.no_grad()
def measure_links(space: Space, hierarchy: Hierarchy, pairs: Tensor) -> dict[str, float]:
    """Rank each ancestor among the nodes that are none: mean reciprocal rank and share of the first ten."""
    ranks: list[Tensor] = []
    for child, ancestor in zip(*(row.split(max(1, 2_000_000 // hierarchy.num_nodes)) for row in pairs), strict=True):
        scores, itself = space.pairwise(child), child[:, None]
        listed = hierarchy.ancestors[child]
        inside = torch.cat([torch.where(listed >= 0, listed, itself), itself], 1)
        wrong = scores.scatter(1, inside, float("inf"))
        asked = scores.gather(1, ancestor[:, None])
        others = torch.ones_like(wrong, dtype=torch.bool).scatter(1, inside, value=False)
        ranks.append(1 + ((wrong <= asked) & others).sum(1))
    found = torch.cat(ranks).double()
    return {"mrr": float(found.reciprocal().mean()), "hits10": float((found <= 10).double().mean())}


def fit(
    model: str,
    settings: Settings,
    hierarchy: Hierarchy,
    seed: int,
    run: runs.Run | None = None,
    *,
    key: str = "run",
    label: str = "",
    stream: TextIO | None = None,
    checkpoint_every: int = 10,
    device: str = "cpu",
    links: Links | None = None,
) -> dict[str, Any]:
    """Train one model with one seed, and measure it after the last epoch.

    Args:
        model: one of ``MODELS``.
        settings: what the run is.
        hierarchy: what is embedded.
        seed: of the initial points, the order of the batches and the negatives.
        run: where checkpoints and the points go, or None.
        key: name of this part of the run.
        label: beginning of the progress line.
        stream: where progress goes, or None.
        checkpoint_every: epochs between checkpoints.
        device: where it is trained.
        links: what is known of it, and what is held out; all is known if None.

    Returns:
        What JSON holds of it.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    runs.seed_everything(seed)
    whole = runs.moved(hierarchy, device)
    links = runs.moved(links, device)
    hierarchy = whole if links is None else links.known
    space, optimizer = build(model, hierarchy.num_nodes, settings, device)
    total = hierarchy.closure.shape[1] if settings.negatives else hierarchy.num_nodes
    processor = time.process_time()

    def step(epoch: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(epoch) * group.get("share", 1.0)
        batches = torch.randperm(total).to(device).split(settings.batch)
        line = runs.progress(f"{label}  epoch {epoch}", len(batches), stream, unit="batch", delay=10.0, leave=False)
        summed = 0.0
        for batch in batches:
            optimizer.zero_grad()
            if settings.negatives:
                pairs = hierarchy.closure[:, batch]
                loss = loss_of_pairs(space, hierarchy, pairs, settings.negatives, settings.heat(epoch))
            else:
                loss = loss_of_rows(space, hierarchy, batch, settings.heat(epoch))
            loss.backward()
            optimizer.step()
            summed += loss.item() * len(batch)
            line.update()
        line.close()
        return summed / total

    def evaluate(epoch: int) -> runs.Record:
        record = {"epoch": float(epoch), "curvature": space.curvature()}
        if epoch % settings.evaluate_every == 0 or epoch in {1, settings.epochs}:
            record |= {"measured_at": float(epoch)} | measure(space, hierarchy, settings.sample)
        if links is not None and epoch == settings.epochs:
            record |= measured_links(space, whole, links)
        return record

    # Watched is the epoch itself: the last one is kept, and nothing is chosen by the score.
    trained = runs.train(
        space,
        optimizer,
        step,
        evaluate,
        epochs=settings.epochs,
        watch="epoch",
        run=run,
        key=key,
        show=("loss", "map", "mean_rank"),
        label=label,
        stream=stream,
        checkpoint_every=checkpoint_every,
    )
    if run is not None:
        run.write_state(f"part-{key}.model.pt", space.state_dict())
    return {
        "seed": seed,
        "map": trained.best["map"],
        "mean_rank": trained.best["mean_rank"],
        "curvature": trained.best["curvature"],
        "loss": trained.best["loss"],
        **{name: trained.best[name] for name in LINK_SCORES if name in trained.best},
        "epochs": trained.epochs,
        "seconds": round(trained.seconds, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "history": trained.history,
    }


LINK_SCORES = ("val_mrr", "mrr", "hits10")


def measured_links(space: Space, hierarchy: Hierarchy, links: Links) -> dict[str, float]:
    """The ranks of what is held out; of the pairs to choose by the mean reciprocal rank."""
    val = measure_links(space, hierarchy, links.val)["mrr"]
    return {"val_mrr": val, **measure_links(space, hierarchy, links.test)}


def along_edges(hierarchy: Hierarchy, links: Links | None, sample: int = 0) -> dict[str, Any]:
    """The row of the answer that follows the known pairs: nothing is trained."""
    known = hierarchy if links is None else links.known
    space = KnownEdges(known)
    record = measure(space, known, sample) | ({} if links is None else measured_links(space, hierarchy, links))
    return {"model": "edges", "settings": {"dim": 0}, "summary": summary_of([record]), "seeds": [record]}


def summary_of(records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and deviation of every score that was measured."""
    names = [name for name in ("map", "mean_rank", *LINK_SCORES) if name in records[0]]
    return {name: runs.summary([record[name] for record in records]) for name in names}


def cell(
    model: str,
    settings: Settings,
    hierarchy: Hierarchy,
    seeds: Sequence[int],
    run: runs.Run,
    *,
    stream: TextIO | None = None,
    checkpoint_every: int = 10,
    device: str = "cpu",
    links: Links | None = None,
) -> dict[str, Any]:
    """Run a model in one dimension over several seeds; a seed that is finished in the run is not run again."""
    records: list[dict[str, Any]] = []
    for seed in seeds:
        key = f"seed-{seed}"

        def compute(seed: int = seed, key: str = key) -> dict[str, Any]:
            label = f"{hierarchy.name}  {TITLES[model]}  dim {settings.dim}  seed {seed}"
            common: dict[str, Any] = {"key": key, "label": label, "stream": stream, "device": device, "links": links}
            try:
                return fit(model, settings, hierarchy, seed, run, checkpoint_every=checkpoint_every, **common)
            except FloatingPointError as error:
                # A baseline that breaks is a result, with its last measured scores; our own must not.
                if not model.startswith("geoopt"):
                    raise
                history = (run.read_state(f"part-{key}.checkpoint.pt") or {"history": {}})["history"]
                last = {
                    "map": history.get("map", [0.0])[-1],
                    "mean_rank": history.get("mean_rank", [float(hierarchy.num_nodes)])[-1],
                }
                return {"seed": seed, "failed": str(error), "measured_at": history.get("measured_at", [0.0])[-1]} | last

        records.append(run.part(key, compute))
    results = {
        "model": model,
        "settings": dataclasses.asdict(settings),
        "summary": summary_of(records),
        "seeds": records,
    }
    run.write_json("results.json", results)
    return results


def branches(hierarchy: Hierarchy, groups: int = 6) -> tuple[Tensor, list[str]]:
    """Label each node by its branch: the largest ones below the nodes that hold more than half of everything."""
    n, sizes = hierarchy.num_nodes, hierarchy.descendants()
    wide = sizes > n // 2
    tops = hierarchy.direct[0][wide[hierarchy.direct[1]] & ~wide[hierarchy.direct[0]]].unique()
    tops = tops[sizes[tops].argsort(descending=True, stable=True)][:groups]
    labels = torch.full((n,), len(tops))
    for place in reversed(range(len(tops))):
        labels[hierarchy.closure[0][hierarchy.closure[1] == tops[place]]] = place
        labels[tops[place]] = place
    return labels, [hierarchy.names[int(top)] for top in tops] + ["others"]


def draw_disk(
    points: Tensor, manifold: Lorentz, hierarchy: Hierarchy, path: Path, *, title: str, texts: int = 22
) -> Path:
    """Draw the hierarchy on the Poincare disk: geodesics to the parents, branches by colour, names of the largest."""
    xy, share = plots.principal_disk(points, manifold)
    labels, names = branches(hierarchy)
    sizes = hierarchy.descendants()
    colours = [*plots.PALETTE[: len(names) - 1], "#999999"]
    with mpl.rc_context(plots.STYLE):
        figure, (axes,) = plots.figure_of(11.5, 9.6)
        axes.grid(visible=False)
        axes.set_axis_off()
        axes.set(xlim=(-1.03, 1.03), ylim=(-1.03, 1.03), aspect="equal")
        axes.add_patch(Circle((0, 0), 1, facecolor="#FAFAFA", edgecolor="#555555", linewidth=1.5))
        child, parent = hierarchy.direct
        lines = plots.geodesics(xy[child], xy[parent])
        shade = [colours[label] for label in labels[child].tolist()]
        axes.add_collection(LineCollection(list(lines.numpy()), colors=shade, linewidths=0.6, alpha=0.45, zorder=1))
        dots = 9 + 12 * (1 + sizes).double().log()
        axes.scatter(
            *xy.T, s=dots, c=[colours[label] for label in labels.tolist()], linewidths=0.4, edgecolors="white", zorder=2
        )
        _write_names(axes, xy, sizes, hierarchy.names, texts)
        handles = [
            Line2D([], [], linestyle="", marker="o", color=colour, markersize=11, label=name)
            for colour, name in zip(colours, names, strict=True)
        ]
        figure.legend(handles=handles, loc="outside right center", frameon=False, title="branch", fontsize=15)
        axes.set_title(title)
        caption = f"Poincaré disk, seen from the centroid; names: the {texts} nodes with most descendants"
        if points.shape[-1] > 3:
            caption += f"; two of {points.shape[-1] - 1} directions, {share:.0%} of the squared length"
        figure.supxlabel(caption, fontsize=12, color="#444444")
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100)
    # A thousand translucent arcs compress badly: a palette makes the file four times smaller.
    with Image.open(drawn) as image:
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
    return runs.write_atomically(path, lambda stream: small.save(stream, format="png", optimize=True))


def _write_names(axes: Axes, xy: Tensor, sizes: Tensor, names: Sequence[str], texts: int) -> None:
    """Write names where they cover no other name: the nearest free place around the node, joined to it by a line."""
    taken: list[tuple[float, float, float, float]] = []
    for rank, node in enumerate(map(int, sizes.argsort(descending=True, stable=True)[:texts])):
        x, y = xy[node].tolist()
        at, box = (x, y), (x, x, y, y)
        points = 15 if rank < 6 else 12
        # Measured widths of the default font: a disk of radius 1 is 428 pixels wide at 100 dots to the inch.
        half = (0.00098 if rank < 6 else 0.00094) * points * len(names[node]) + 0.012
        height = 0.0021 * points + 0.004
        for turn in range(400):
            reach = 0.05 + 0.006 * (turn // 2)
            angle = 2.399963 * turn
            at = (x + 1.6 * reach * np.cos(angle), y + reach * np.sin(angle))
            box = (at[0] - half, at[0] + half, at[1] - height, at[1] + height)
            outside = max(abs(box[0]), abs(box[1])) > 1.02 or max(abs(box[2]), abs(box[3])) > 1.02
            crossed = any(box[0] < b[1] and b[0] < box[1] and box[2] < b[3] and b[2] < box[3] for b in taken)
            if not outside and not crossed:
                break
        taken.append(box)
        axes.annotate(
            names[node],
            (x, y),
            xytext=at,
            ha="center",
            va="center",
            fontsize=points,
            fontweight="bold" if rank < 6 else "normal",
            arrowprops={"arrowstyle": "-", "color": "#333333", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2},
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
            zorder=5,
        )


def draw_comparison(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw MAP and MRR of what was held out over the dimension: a line for each model, bars of a deviation."""
    shown = {"map": "MAP of the reconstruction", "mrr": "MRR of held-out ancestors"}
    shown = {name: label for name, label in shown.items() if name in rows[0]["summary"]}
    dims = sorted({row["settings"]["dim"] for row in rows if row["settings"]["dim"]})
    with mpl.rc_context(plots.STYLE):
        figure, panels = plots.figure_of(4.5 + 6 * len(shown), 5.6, len(shown))
        for axes, (score, label) in zip(panels, shown.items(), strict=True):
            for place, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
                mine = [row for row in rows if row["model"] == model]
                look: dict[str, Any] = {"color": plots.PALETTE[place % 8], "label": TITLES[model]}
                values = [row["summary"][score] for row in mine]
                if model == "edges":
                    axes.axhline(values[0]["mean"], linestyle="--", **look)
                    continue
                axes.errorbar(
                    [row["settings"]["dim"] for row in mine],
                    [value["mean"] for value in values],
                    yerr=[value["std"] for value in values],
                    marker=plots.MARKERS[place % 8],
                    markersize=9,
                    capsize=5,
                    **look,
                )
            axes.set(xlabel="numbers a node", ylabel=label, ylim=(0, 1.02), xscale="log")
            axes.set_xticks(dims, [str(dim) for dim in dims])
            axes.minorticks_off()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(title)
        return plots.save(figure, path)


def report(content: Mapping[str, Any]) -> str:
    """Write the table as text."""
    lines = [
        f"{content['dataset']}: {content['nodes']} nodes, {content['pairs']} pairs of the closure",
        f"{'':31s}{'dim':>4s}{'MAP':>16s}{'mean rank':>18s}{'curvature':>11s}{'s/seed':>8s}"
        + (f"{'held-out MRR':>17s}{'hits@10':>9s}" if "mrr" in content["rows"][0]["summary"] else ""),
    ]
    for row in content["rows"]:
        score, rank, seeds = row["summary"]["map"], row["summary"]["mean_rank"], row["seeds"]
        curvature, seconds = (
            f"{np.mean(known):.{digits}f}" if (known := [record[key] for record in seeds if key in record]) else ""
            for key, digits in (("curvature", 3), ("seconds", 1))
        )
        broken = sum("failed" in record for record in seeds)
        held = row["summary"]
        shown = (
            f"{held['mrr']['mean']:10.3f} ± {held['mrr']['std']:.3f}{held['hits10']['mean']:9.3f}"
            if "mrr" in held
            else ""
        )
        lines.append(
            f"{TITLES[row['model']]:31s}{row['settings']['dim']:4d}{score['mean']:9.4f} ± {score['std']:.3f}"
            f"{rank['mean']:10.2f} ± {rank['std']:5.2f}{curvature:>11s}{seconds:>8s}"
            + shown
            + (f"  {broken} of {len(seeds)} broke (nan); scores from the last checkpoint" if broken else "")
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    out = options.parser("experiments.hierarchy", __doc__ or "")
    add = out.add_argument
    add("--dataset", choices=DATASETS, default="tree", help="what to embed (default tree, generated)")
    add("--data", type=Path, metavar="FOLDER", help="folder of the npz files")
    add("--nodes", type=int, default=300, metavar="N", help="size of the generated tree (default 300)")
    add("--dims", type=int, nargs="+", metavar="D", help="dimensions (default 5; 2 for the generated tree)")
    add("--fixed-curvature", action="store_true", help="hold the curvature at -1")
    add(
        "--baseline",
        choices=["geoopt", "euclidean", "all"],
        help="run this instead; all: both curvatures, both of Geoopt's and Euclidean space, in one table",
    )
    choices = [*MODELS, "edges"]
    add("--models", nargs="+", choices=choices, metavar="MODEL", help=f"run these instead, of {', '.join(choices)}")
    add(
        "--known",
        type=options.number,
        metavar="X",
        help="share of the ancestors beyond parents to learn from (default all)",
    )
    add("--seeds", type=int, default=1, metavar="N", help="run seeds 0 .. N-1 (default 1)")
    add(
        "--lrs",
        type=options.number,
        nargs="+",
        metavar="X",
        help="several learning rates: the best MAP of seed 0 is taken",
    )
    options.add_folder(out, "runs/hierarchy-DATASET-MODEL", checkpoint_every=None)
    add("--json", type=Path, metavar="FILE", help="at the end also write the table there, without the histories")
    add("--checkpoint-every", type=int, metavar="K", help="epochs between checkpoints (default 10; nouns 1)")
    options.add_machine(out)
    add("--pictures", action=argparse.BooleanOptionalAction, default=True, help="save pictures with the run")
    add("--quiet", action="store_true", help="no progress lines")
    differ = "; ".join(
        f"{name}: {', '.join(f'{k} {v}' for k, v in row.items())}" for name, row in DEFAULTS.items() if row
    )
    group = out.add_argument_group("settings", f"defaults that differ from those below are, for the {differ}")
    for field in dataclasses.fields(Settings):
        if field.name in {"dim", "temperature", "sparse"}:
            continue
        kind = type(field.default)
        flag, text = f"--{field.name.replace('_', '-')}", f"default {field.default}"
        group.add_argument(flag, type=options.number if kind is float else kind, metavar="X", help=text)
    about = "move only the points that a batch names, of hyperbolic models with sampled negatives"
    group.add_argument("--sparse", action="store_true", default=None, help=about)
    group.add_argument(
        "--temperature",
        type=options.number,
        nargs=2,
        metavar=("T0", "T1"),
        help=f"default {' '.join(map(str, Settings().temperature))}",
    )
    return out


def settings_for(arguments: argparse.Namespace, dim: int) -> Settings:
    """Return the settings that the command line gives, on top of those of the set."""
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(Settings)}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "temperature" in chosen:
        chosen["temperature"] = tuple(chosen["temperature"])
    chosen = DEFAULTS[arguments.dataset] | chosen | {"dim": dim}
    settings = Settings(**chosen)
    positive = {"dims": dim, "epochs": settings.epochs, "batch": settings.batch, "lr": settings.lr}
    positive |= {"std": settings.std, "temperature": min(settings.temperature)}
    positive |= {"evaluate-every": settings.evaluate_every, "lrs": min(arguments.lrs or [settings.lr])}
    for name, value in positive.items():
        if not value > 0:
            raise RefusedError(f"--{name} must be positive, got {value}")
    if settings.sparse and not settings.negatives:
        raise RefusedError("--sparse needs --negatives: without a sample every batch names all points")
    for name in ("negatives", "burn_in", "sample", "growth", "curvature_share"):
        if getattr(settings, name) < 0:
            raise RefusedError(f"--{name.replace('_', '-')} must not be negative, got {getattr(settings, name)}")
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if training failed, 2 if what was asked cannot be done."""
    return runs.start("experiments.hierarchy", parser(), _main, argv)


def _main(arguments: argparse.Namespace, command: str) -> int:
    options.at_least_one(arguments, "seeds", "checkpoint_every")
    runs.use_machine(arguments.threads, arguments.device)
    _check_words(arguments)
    stream = None if arguments.quiet else sys.stderr
    runs.check_result(arguments.json, overwrite=arguments.overwrite)
    hierarchy = load(arguments.dataset, arguments.data, nodes=arguments.nodes)
    curvature = "fixed" if arguments.fixed_curvature else "learned"
    single = {None: curvature, "geoopt": f"geoopt-{curvature}", "euclidean": "euclidean"}
    models = arguments.models or (MODELS if arguments.baseline == "all" else [single[arguments.baseline]])
    named = "all" if arguments.baseline == "all" else "-".join(models)
    dims = arguments.dims or [2 if arguments.dataset == "tree" else 5]
    settings_of = {dim: settings_for(arguments, dim) for dim in dims}
    identity = {"dataset": hierarchy.name, "nodes": hierarchy.num_nodes, "known": arguments.known}
    links = None if arguments.known is None else held_out(hierarchy, arguments.known)
    _check_bias(models, dims)
    others = [model for model in models if not model.startswith(("learned", "fixed"))]
    if arguments.sparse and others:
        raise RefusedError(f"--sparse is for the hyperbolic models of this library, got {others[0]}")
    base = runs.Run(
        arguments.out or Path("runs") / f"hierarchy-{arguments.dataset}-{named}",
        identity,
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )

    def part(name: str, model: str, settings: Settings) -> runs.Run:
        return base.child(name, identity | {"model": model, "settings": dataclasses.asdict(settings)})

    common: dict[str, Any] = {
        "stream": stream,
        "device": arguments.device,
        "links": links,
        "checkpoint_every": arguments.checkpoint_every or (1 if arguments.dataset == "nouns" else 10),
    }
    chooser = "map" if links is None else "val_mrr"
    content: dict[str, Any] = {
        "dataset": hierarchy.name,
        "nodes": hierarchy.num_nodes,
        "pairs": hierarchy.closure.shape[1],
        "command": command,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "versions": runs.versions(),
        "known": arguments.known,
        "rule": f"measured after the last epoch; of several learning rates the one with the best {chooser} of seed 0",
        "rows": [],
    }
    if "edges" in models:
        content["rows"].append(along_edges(hierarchy, links, settings_of[dims[0]].sample))
        base.write_json("table.json", content)
    models = [model for model in models if model != "edges"]
    for dim, settings in settings_of.items():
        for model in models:
            name, searched, chosen = f"{model}-{dim}", {}, settings
            for lr in arguments.lrs or ():
                tried = dataclasses.replace(settings, lr=lr)
                row = cell(model, tried, hierarchy, [0], part(f"{name}-lr-{options.word(lr)}", model, tried), **common)
                searched[options.word(lr)] = row["summary"][chooser]["mean"]
            if searched:
                best = max(searched, key=searched.__getitem__)
                # In the folder of its search, where seed 0 is finished.
                chosen, name = dataclasses.replace(settings, lr=float(best)), f"{name}-lr-{best}"
            run = part(name, model, chosen)
            row = cell(model, chosen, hierarchy, range(arguments.seeds), run, **common)
            content["rows"].append(row | ({"search": searched} if searched else {}))
            if arguments.pictures and model in {"learned", "fixed"} and hierarchy.num_nodes <= 5000:
                _draw(row, hierarchy, run)
            base.write_json("table.json", _without_histories(content))
    if arguments.pictures and len(content["rows"]) > 1:
        draw_comparison(content["rows"], base.own("table.png"), title=f"{hierarchy.name}, {hierarchy.num_nodes} nodes")
    base.finish()
    # Last: a run that is killed before can be resumed with the same words.
    if arguments.json:
        runs.write_json(arguments.json, _without_histories(content))
    print(report(content))
    print(f"numbers{' and pictures' if arguments.pictures else ''} in {base.folder}")
    return 0


def _check_words(arguments: argparse.Namespace) -> None:
    if arguments.lrs and arguments.lr is not None:
        raise RefusedError("--lrs says which learning rates: leave --lr out")
    if arguments.models and (arguments.baseline or arguments.fixed_curvature):
        raise RefusedError("--models says which: leave --baseline and --fixed-curvature out")


def _check_bias(models: Sequence[str], dims: Sequence[int]) -> None:
    biased = [model for model in models if model == "dot" or model.endswith("-bias")]
    if biased and min(dims) < 2:
        raise RefusedError(
            f"--dims must be at least 2 for {biased[0]}, one of whose numbers is the bias, got {min(dims)}"
        )


def _without_histories(content: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        row | {"seeds": [{key: v for key, v in record.items() if key != "history"} for record in row["seeds"]]}
        for row in content["rows"]
    ]
    return dict(content) | {"rows": rows}


def _draw(row: Mapping[str, Any], hierarchy: Hierarchy, run: runs.Run) -> None:
    """Draw the first seed on the disk, and MAP and curvature over the epochs."""
    settings = Settings(**row["settings"])
    record = row["seeds"][0]
    space = Hyperbolic(hierarchy.num_nodes, settings, learnable=row["model"] == "learned")
    space.load_state_dict(runs.read_state(run.path(f"part-seed-{record['seed']}.model.pt")))
    title = (
        f"{hierarchy.name} in {settings.dim} dimensions: MAP {record['map']:.3f}, mean rank {record['mean_rank']:.1f}"
    )
    with torch.no_grad():
        draw_disk(space.points(), space.points.manifold, hierarchy, run.own("disk.png"), title=title)
    with mpl.rc_context(plots.STYLE):
        figure, (left, middle, right) = plots.figure_of(15, 4.6, panels=3)
        for seed, one in enumerate(row["seeds"]):
            history: dict[str, list[float]] = one["history"]
            look: dict[str, Any] = {"alpha": 1.0 if seed == 0 else 0.35}
            left.plot(history["epoch"], history["loss"], color=plots.PALETTE[0], **look)
            middle.plot(history["measured_at"], history["map"], color=plots.PALETTE[2], marker="o", **look)
            right.plot(history["epoch"], history["curvature"], color=plots.PALETTE[5], **look)
        left.set(xlabel="epoch", ylabel="training loss")
        middle.set(xlabel="epoch", ylabel="MAP", ylim=(0, 1))
        right.set(xlabel="epoch", ylabel=r"curvature $\kappa$")
        figure.suptitle(f"{hierarchy.name}, {TITLES[row['model']]}, dimension {settings.dim}", fontsize=18)
        plots.save(figure, run.own("training.png"))


if __name__ == "__main__":
    sys.exit(main())
