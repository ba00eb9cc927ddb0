"""What certificates of nodes are asked with: a model, nodes, a threat."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor

from holonomy import checks
from holonomy.models import Hypformer
from holonomy.ops.propagation import check_graph
from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.ellipsoids import THREATS, Threat
from holonomy.theory.affine.enclosure import Enclosure
from holonomy.theory.attention.projections import NotCoveredError


def of_nodes(model: Hypformer, x: Tensor, edge_index: Tensor | Graph | None) -> None:
    """Refuse what is no model with a row for each node, and what is no graph."""
    if not isinstance(model, Hypformer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotCoveredError(f"model must be a Hypformer, got {type(model).__name__}.")
    if model.level == "graph":
        raise NotCoveredError("model must have a row for each node, got level='graph'.")
    checks.nodes(x)
    if edge_index is not None:
        check_graph(x, edge_index)


def enclosed(
    model: Hypformer, x: Tensor, edge_index: Tensor | Graph | None, *, differentiable: bool = False
) -> Enclosure:
    """The model at an input, if it is one of nodes; on the processor, wherever they lie."""
    of_nodes(model, x, edge_index)
    if any(each.device.type != "cpu" for each in model.parameters()):
        model = deepcopy(model).cpu()
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
        raise ValueError(f"{name} must be one of {count} {what}, got {value}.")
    return value


def listed(nodes: Tensor | Sequence[int], count: int) -> Tensor:
    """Nodes of so many, as a tensor."""
    if not isinstance(nodes, Tensor):
        nodes = torch.tensor(checks.sequence("nodes", nodes, "integers", int), dtype=torch.int64)
    checks.integers("nodes", nodes)
    if nodes.ndim != 1 or (len(nodes) and not 0 <= int(nodes.amin()) <= int(nodes.amax()) < count):
        raise ValueError(f"nodes must be numbers of {count} nodes, got {nodes.tolist()}.")
    return nodes.long().cpu()


def classes(name: str, target: Tensor, nodes: Tensor, enclosure: Enclosure) -> Tensor:
    """A class of each node."""
    checks.codes(name, target, enclosure.logits.shape[1], "classes")
    checks.shaped(name, target, nodes.shape, "(nodes,) = ")
    return target.long().cpu()
