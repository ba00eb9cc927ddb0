"""What certificates of nodes are asked with: a model, nodes, a threat."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy.layers import HypMLR, HypPrototypes
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer
from holonomy.ops.propagation import check_graph
from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.ellipsoids import THREATS, Threat
from holonomy.theory.affine.branch import refuse_output
from holonomy.theory.affine.enclosure import Enclosure
from holonomy.theory.affine.points import root
from holonomy.theory.attention.projections import NotCoveredError
from holonomy.theory.certificates.regions import copied, refuse_other_curvature


def of_nodes(model: Hypformer, x: Tensor, edge_index: Tensor | Graph | None) -> None:
    """Refuse what is no model with a row for each node, and what is no graph."""
    if not isinstance(model, Hypformer):  # pyright: ignore[reportUnnecessaryIsInstance]
        wrappers = "of an AveragedModel its .module, of a compiled one its ._orig_mod"
        raise NotCoveredError(f"model must be a Hypformer ({wrappers}), got {type(model).__name__}.")
    if model.level == "graph":
        raise NotCoveredError("model must have a row for each node, got level='graph'.")
    _refuse_other_points(model)
    checks.nodes(x)
    narrow = {each.dtype for each in (x, *model.parameters()) if each.dtype in {torch.float16, torch.bfloat16}}
    if narrow:
        raise NotCoveredError(f"model and x must be of float32 or float64, got {narrow.pop()}.")
    if edge_index is not None:
        check_graph(x, edge_index)


@torch.no_grad()
def _refuse_other_points(model: Hypformer) -> None:
    """Refuse what reads the result of both branches as points of another curvature, or points as tangent vectors."""
    unit, decoder = root(model.manifold_out).item(), cast("object", model.decoder)
    if isinstance(decoder, nn.Linear if model.decodes_points else HypMLR | HypPrototypes):
        taken = "points" if model.decodes_points else "tangent vectors"
        raise NotCoveredError(f"decoder must take {taken}, as the model was made to, got {type(decoder).__name__}.")
    if isinstance(model.encoder, HypformerEncoder):
        refuse_output(model.encoder.drop)
        for end in (model.encoder.drop.manifold_in, model.encoder.drop.manifold_out):
            refuse_other_curvature(root(end).item(), unit, "manifold_out")
    if isinstance(decoder, HypMLR | HypPrototypes):
        refuse_other_curvature(unit, root(decoder.manifold).item(), "decoder")


def enclosed(
    model: Hypformer, x: Tensor, edge_index: Tensor | Graph | None, *, differentiable: bool = False
) -> Enclosure:
    """The model at an input, if it is one of nodes; on the processor, wherever they lie."""
    of_nodes(model, x, edge_index)
    if any(each.device.type != "cpu" for each in model.parameters()):
        model = copied(model).cpu()
    edge_index = None if edge_index is None else edge_index.to("cpu")
    return Enclosure(model, x.cpu(), edge_index, differentiable=differentiable)


def threatened(threat: str) -> Threat:
    """The threat, if it is covered."""
    if threat == "edges":
        raise NotCoveredError(f"threat must be one of {', '.join(THREATS)}: changes of edges are not covered.")
    checks.one_of("threat", threat, THREATS)
    return cast("Threat", threat)


def numbered(name: str, value: int, count: int, what: str) -> int:
    """A node or class of so many."""
    if checks.nonnegative_int(name, value) >= count:
        raise ValueError(f"{name} must lie in [0, {what} = {count}), got {value}.")
    return value


def listed(nodes: Tensor | Sequence[int], count: int) -> Tensor:
    """Nodes of so many, as a tensor; those of a mask in their order."""
    if not isinstance(nodes, Tensor):
        entries = checks.sequence("nodes", nodes, "integers", Integral | np.bool_)
        truths = bool(entries) and all(isinstance(each, bool | np.bool_) for each in entries)
        nodes = torch.tensor(entries, dtype=torch.bool if truths else torch.int64)
    if nodes.dtype == torch.bool:
        checks.shaped("nodes", nodes, (count,), "(n,) = ")
        nodes = nodes.nonzero()[:, 0]
    nodes = nodes.cpu()
    checks.codes("nodes", nodes, count, "n")
    if nodes.ndim != 1:
        raise ValueError(f"nodes must have one axis, got shape {tuple(nodes.shape)}.")
    return nodes.long()


def classes(name: str, target: Tensor, nodes: Tensor, enclosure: Enclosure) -> Tensor:
    """A class of each node."""
    checks.codes(name, target, enclosure.logits.shape[1], "classes")
    checks.shaped(name, target, nodes.shape, "(nodes,) = ")
    return target.long().cpu()
