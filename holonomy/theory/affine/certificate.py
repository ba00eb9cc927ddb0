r"""Certified nodes: how far features may move before the prediction of a node can change.

A Hypformer is followed through a ball of features by affine forms (:mod:`holonomy.theory.affine.arithmetic.forms`),
layer by layer, to lower bounds of the target's logit minus each other. Where all are positive, no features in the ball
change the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.models import Hypformer
from holonomy.structures import Graph
from holonomy.theory.affine.arguments import classes, enclosed, listed, numbered, threatened
from holonomy.theory.affine.arithmetic.ellipsoids import Threat
from holonomy.theory.affine.search import holds, largest_radii

Progress = Callable[[int, int], None]

# Problems side by side: they share what a call costs by itself, which is that of twenty problems.
_BATCH = 64
# Where all nodes move, what all but the node that is asked do is the same for all that are asked at one radius.
_SHARED = 16


@dataclass(frozen=True)
class NodeCertificate:
    """What holds for every perturbation of features up to a radius.

    >>> certificate = NodeCertificate(0, 0, 0.1, 1, torch.tensor([0.5, torch.inf]), *2 * (torch.zeros(2),), {})
    >>> certificate.holds
    True
    """

    node: int  #: whose features move; where those of all do, the same as ``victim``
    victim: int  #: whose prediction is followed
    radius: float  #: of the ball
    target: int  #: the class that is to stay
    #: lower bounds of the target's logit minus each other ``(classes,)``; infinite at the target
    margins: Float[Tensor, " classes"]
    affine: Float[Tensor, " classes"]  #: the same without the cap, minus infinity where it has no bound
    cap: Float[Tensor, " classes"]  #: the same with nothing known of the transformer but its last normalisation
    #: how much the remainders of each layer take from the least margin of ``affine``; ``"input"`` is the linear part,
    #: ``"second order"`` what is quadratic
    layers: dict[str, float]
    threat: Threat = "node"  #: what moves, as :func:`certify_node` takes it

    @property
    def holds(self) -> bool:
        """Whether the prediction is proved to stay."""
        return bool((self.margins > 0).all())

    def __str__(self) -> str:
        """A table with one line a layer."""
        verdict = "certified" if self.holds else "not certified"
        together = {"frobenius": "all nodes move together", "each": "each node moves"}
        moves = together.get(self.threat, f"node {self.node} moves")
        lines = [
            f"{moves} by {self.radius:g} at most, node {self.victim} in class {self.target}: {verdict}",
            f"least margin {self.margins.amin():.4g}, without cap {self.affine.amin():.4g}, cap {self.cap.amin():.4g}",
        ]
        lines += [f"  {name:28}{value:12.4g}" for name, value in self.layers.items()]
        return "\n".join(lines)


def certify_node(
    model: Hypformer,
    x: Float[Tensor, "nodes dim"],
    edge_index: Int[Tensor, "2 edges"] | Graph | None,
    node: int,
    radius: float,
    *,
    victim: int | None = None,
    target: int | None = None,
    threat: str = "node",
) -> NodeCertificate:
    r"""Bound the logits of a node while features move by at most a radius.

    **Statement.** For every change :math:`\Delta` of the features ``x`` in the ball of the threat, the logits of
    ``victim`` satisfy :math:`\ell_{target} - \ell_k \ge` ``margins[k]``. The ball is, r being ``radius``:

    =============== ====================================================================
    ``threat``      changes
    =============== ====================================================================
    ``"node"``      :math:`|\Delta_{node}|_2 \le r`, all other features stay
    ``"frobenius"`` :math:`|\Delta|_F \le r`, the features of all nodes together
    ``"each"``      :math:`|\Delta_j|_2 \le r` for every node j
    =============== ====================================================================

    It is one of the function that the weights define, in evaluation. Rounding of the bound's own float64 arithmetic is
    counted in it; the sums over the other tokens, which do not move, are taken as float64 computes them. A model that
    runs in float32 differs from that function by its rounding, which is not bounded here: ask for margins above it. It
    draws points nearer that are very far out: where features reach a rapidity of 60, only the cap and the graph encoder
    are known of it. Points that ``"lorentz_squared"`` compares must lie within rapidity 7 there, which is not checked.

    Covered: linear attention with any power and average, softmax attention with any similarity, any heads and number of
    blocks, ReLU, layer, RMS and batch normalisation, all decoders, and no graph encoder or any that is made of linear
    maps and ReLU, as GCN and Propagation are.

    Args:
        model: in evaluation.
        x: node features ``(n, in_features)``, dense or sparse.
        edge_index: ``(2, m)`` or a :class:`~holonomy.structures.Graph`; ``None`` without a graph encoder.
        node: whose features move.
        radius: of the ball, in units of the features.
        victim: whose prediction is followed; ``node`` if left out.
        target: the class that is to stay; the predicted one if left out.
        threat: what moves.

    Returns:
        The certificate.

    Raises:
        NotCoveredError: if a module of the model is not covered; the message names it. Changes of edges are not.
        TypeError: if an argument is of another type than it says.
        ValueError: if a node, the target, the radius or the threat is out of range, or if there is a ``victim`` where
            all nodes move.

    >>> from holonomy.models import Hypformer
    >>> _ = torch.manual_seed(0)
    >>> model = Hypformer(3, 8, 2, layers=1, graph_encoder=None).eval()
    >>> certificate = certify_node(model, torch.randn(5, 3), None, 0, 0.001)
    >>> certificate.holds, list(certificate.layers)[:3]
    (True, ['input', 'second order', 'embedding'])
    """
    enclosure, moves = enclosed(model, x, edge_index), threatened(threat)
    node = numbered("node", node, len(x), "nodes")
    if victim is not None and threat != "node":
        raise ValueError(f"victim must be left out where all nodes move: give it as node, got {victim}.")
    victim = node if victim is None else numbered("victim", victim, len(x), "nodes")
    checks.nonnegative("radius", radius)
    target = int(enclosure.logits[victim].argmax()) if target is None else target
    numbered("target", target, enclosure.logits.shape[1], "classes")
    found = enclosure.margins(
        torch.tensor([node]), torch.tensor([victim]), enclosure.x.new_tensor([radius]), torch.tensor([target]), moves
    )
    layers = {name: value.item() for name, value in found.layers.items()}
    return NodeCertificate(node, victim, radius, target, found.best[0], found.affine[0], found.cap[0], layers, moves)


def certified_radius(
    model: Hypformer,
    x: Float[Tensor, "nodes dim"],
    edge_index: Int[Tensor, "2 edges"] | Graph | None,
    nodes: Int[Tensor, " victims"] | Bool[Tensor, " nodes"] | Sequence[int],
    *,
    target: Int[Tensor, " victims"] | None = None,
    threat: str = "node",
    limit: float = 100.0,
    cap: bool = True,
    progress: Progress | None = None,
) -> Float[Tensor, " victims"]:
    """Find, for each node, a radius within which features do not change its prediction.

    Each radius returned was certified itself, as by :func:`certify_node`; the search only decides which ones are tried.

    Args:
        model: in evaluation, see :func:`certify_node`.
        x: node features ``(n, in_features)``.
        edge_index: ``(2, m)`` or a graph.
        nodes: whose predictions are followed: their numbers, or a mask ``(n,)`` such as ``test_mask``.
        target: the classes that are to stay; the predicted ones if left out.
        threat: what moves: the features of each node ``nodes`` itself, or of all, see :func:`certify_node`.
        limit: the largest radius that is tried.
        cap: whether the cap by the last normalisation may be used.
        progress: called with the number of nodes done and of all.

    Returns:
        Radii in units of the features; zero where none was certified.

    Raises:
        NotCoveredError: if a module of the model or the threat is not covered.
        TypeError: if an argument is of another type than it says.
        ValueError: if a node, target, limit or threat is out of range.

    >>> from holonomy.models import Hypformer
    >>> _ = torch.manual_seed(0)
    >>> model = Hypformer(3, 8, 2, layers=1, graph_encoder=None).eval()
    >>> bool((certified_radius(model, torch.randn(5, 3), None, torch.arange(2)) > 0.01).all())
    True
    """
    enclosure, moves = enclosed(model, x, edge_index), threatened(threat)
    checks.in_range("limit", limit, 0.0, torch.inf)
    checks.flags(cap=cap)
    nodes = listed(nodes, len(x))
    kept = enclosure.logits[nodes].argmax(-1) if target is None else classes("target", target, nodes, enclosure)
    found = [
        largest_radii(enclosure, nodes[part], kept[part], limit, moves, cap=cap)
        for part in _batches(len(nodes), 1 if enclosure.one_by_one(moves) else _BATCH, progress)
    ]
    return torch.cat(found) if found else enclosure.x.new_zeros(0)


def certified_accuracy(
    model: Hypformer,
    x: Float[Tensor, "nodes dim"],
    edge_index: Int[Tensor, "2 edges"] | Graph | None,
    nodes: Int[Tensor, " victims"] | Bool[Tensor, " nodes"] | Sequence[int],
    labels: Int[Tensor, " victims"],
    radii: Float[Tensor, " radii"] | Sequence[float],
    *,
    threat: str = "node",
    progress: Progress | None = None,
) -> Float[Tensor, " radii"]:
    """The share of ``nodes`` that are classified as labelled, whatever features do within each of the ``radii``.

    ``model``, ``x``, ``edge_index``, ``nodes``, ``threat``, ``progress`` and errors are those of
    :func:`certified_radius`; ``labels`` are the classes of the nodes. There is one share for each radius, and it never
    increases with the radius.

    >>> from holonomy.models import Hypformer
    >>> _ = torch.manual_seed(0)
    >>> model, x = Hypformer(3, 8, 2, layers=1, graph_encoder=None).eval(), torch.randn(5, 3)
    >>> labels = model(x).argmax(-1)
    >>> certified_accuracy(model, x, None, torch.arange(5), labels, [0.0, 1e6])[:1]
    tensor([1.], dtype=torch.float64)
    """
    enclosure, moves = enclosed(model, x, edge_index), threatened(threat)
    nodes = listed(nodes, len(x))
    if not len(nodes):
        raise ValueError("nodes must be one at least, got none.")
    labels = classes("labels", labels, nodes, enclosure)
    if not isinstance(radii, Tensor):
        radii = enclosure.x.new_tensor(checks.sequence("radii", radii, "numbers", int | float))
    checks.floating("radii", radii)
    if radii.ndim != 1 or not len(radii) or not (radii >= 0).all():
        raise ValueError(f"radii must be numbers from 0 on, one at least, got {radii.tolist()}.")
    held, order = torch.zeros(len(nodes), len(radii), dtype=torch.bool), radii.argsort(descending=True)
    size = _BATCH if not enclosure.one_by_one(moves) else 1 if moves == "node" else _SHARED
    for part in _batches(len(nodes), size, progress):
        going = torch.arange(len(nodes))[part]
        # What holds on a ball holds on every smaller one.
        for number, radius in enumerate(radii.cpu()[order]):
            kept = holds(enclosure, nodes[going], labels[going], radius.expand(len(going)), moves)
            held[going[kept], number:] = True
            going = going[~kept]
            if not len(going):
                break
    shares = held.double().mean(0)
    return torch.empty_like(shares).scatter(0, order, shares)


def _batches(count: int, size: int, progress: Progress | None) -> Iterator[slice]:
    """So many nodes in batches, and word of each batch that is done."""
    for start in range(0, count, size):
        yield slice(start, start + size)
        if progress is not None:
            progress(min(start + size, count), count)
