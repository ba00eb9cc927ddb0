r"""Certificates to train with: lower bounds of margins that are differentiable in the parameters of a model.

Every operation of the enclosure is piecewise smooth in the weights: a bound has a gradient wherever the model has one,
no unit of a ReLU, no end of an interval and no choice between two enclosures changing sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holonomy import checks
from holonomy._shapes import Bool, Float, Int
from holonomy.models import Hypformer
from holonomy.structures import Graph
from holonomy.theory.affine.arguments import classes, enclosed, listed, of_nodes, threatened
from holonomy.theory.certificates.regions import copied


class _Bounds(nn.Module):
    """The bounds as what a module computes, so that its parameters can be replaced by functions of others."""

    def __init__(self, model: Hypformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Any, nodes: Tensor, radius: Tensor, target: Tensor, threat: Any) -> Tensor:
        enclosure = enclosed(self.model, x, edge_index, differentiable=True)
        target = classes("target", target, nodes, enclosure)
        return enclosure.margins(nodes, nodes, radius, target, threat).best


def margin_bounds(
    model: Hypformer,
    x: Float[Tensor, "nodes dim"],
    edge_index: Int[Tensor, "2 edges"] | Graph | None,
    nodes: Int[Tensor, " victims"] | Bool[Tensor, " nodes"] | Sequence[int],
    radius: float,
    target: Int[Tensor, " victims"],
    *,
    threat: str = "node",
) -> Float[Tensor, "victims classes"]:
    r"""Bound the margins of nodes from below, as :func:`~holonomy.theory.certify_node` does, with gradients.

    For every change in the ball, the logit of ``target[i]`` minus that of class k is at least ``result[i, k]``. The
    ``margins`` of ``certify_node(model, x, edge_index, nodes[i], radius, target=target[i])`` are mostly a bit larger:
    it also uses what has no good gradient, products of features and bounds of graph encoders from below. Minus the
    cross-entropy of the negative row, 0 at the target, bounds that of the worst change in the ball (Wong and Kolter,
    *Provable defenses via the convex outer adversarial polytope*, ICML 2018, theorem 2); a hinge on the least entry,
    :math:`\mathrm{ReLU}(g - \min_k \mathrm{result}_{ik})`, pushes certified margins to g.

    The gradient with respect to all parameters, curvatures included, is that of the bound itself. Where two enclosures
    or two classes tie it is that of one side or a mean of both.

    Args:
        model: in evaluation, see :func:`~holonomy.theory.certify_node`.
        x: node features ``(n, in_features)``.
        edge_index: ``(2, m)`` or a graph.
        nodes: whose predictions are followed: their numbers, or a mask ``(n,)``.
        radius: of the balls, in units of the features.
        target: the class of each node that is to stay: in training, its label.
        threat: what moves, see :func:`~holonomy.theory.certify_node`.

    Returns:
        Bounds in float64, on the processor: infinite at the target, minus infinity where none was found.

    Raises:
        NotCoveredError: if a module of the model or the threat is not covered.
        ValueError: if a node, target, radius or threat is out of range.

    >>> from holonomy.models import Hypformer
    >>> _ = torch.manual_seed(0)
    >>> model, x = Hypformer(3, 8, 2, layers=1, graph_encoder=None).eval(), torch.randn(5, 3)
    >>> bounds = margin_bounds(model, x, None, [0, 1], 0.1, torch.tensor([1, 0]))
    >>> torch.relu(1 - bounds).sum().backward()
    >>> all(parameter.grad is not None for parameter in model.decoder.parameters())
    True
    """
    of_nodes(model, x, edge_index)
    moves, nodes = threatened(threat), listed(nodes, len(x))
    checks.in_range("radius", radius, 0.0, torch.inf)
    bounds = _Bounds(copied(model).double().cpu())
    weights = {f"model.{name}": parameter.double().cpu() for name, parameter in model.named_parameters()}
    radii = torch.full((len(nodes),), radius, dtype=torch.float64)
    return functional_call(bounds, weights, (x, edge_index, nodes, radii, target, moves))
