"""Graph encoders of one's own, made of linear maps and ReLU, by a tensor that stands for a ball of features."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from holonomy.layers import GCN, Propagation
from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, with_first
from holonomy.theory.affine.arithmetic.forms import ROUNDING, UNIT, Form, Noise, constant
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.encoders.graph import Convolved, GraphBranch, Propagated
from holonomy.theory.affine.encoders.rules import called
from holonomy.theory.affine.encoders.tracing import Ball, Traced, traced
from holonomy.theory.affine.encoders.whole_graph import enclose_all
from holonomy.theory.attention.projections import NotCoveredError


class TracedBranch(GraphBranch):
    """Any encoder of linear maps and ReLU at one input."""

    def __init__(self, encoder: nn.Module, x: Tensor, edge_index: Tensor | Graph) -> None:
        if torch.is_grad_enabled():
            raise NotCoveredError(
                f"graph_encoder must be a GCN or a Propagation where bounds are differentiated, got {type(encoder)}."
            )
        self.encoder, self.x, self.edge_index = encoder, x, edge_index
        self.result, self.reads = encoder(x, edge_index), list[Tensor]()
        # What is not covered is refused before the work.
        found = self.followed(x.new_zeros(0, len(x[:1]), x.shape[1]), torch.arange(len(x[:1])), self.reads)
        if (found.center - self.result).norm() > UNIT**0.5 * self.result.norm():
            raise NotCoveredError("graph_encoder must give the same result whenever it is called, got two results.")

    def followed(
        self, columns: Tensor, nodes: Tensor, reads: list[Tensor] | None = None, *, each: bool = True
    ) -> Traced:
        """What becomes of columns of nodes, which are in order."""
        ball = Ball(len(columns), len(nodes), each)
        size = columns.abs().sum(0)
        bounds = torch.stack([ROUNDING * size, self.x[nodes].abs() + 2 * size])
        point = traced(ball, self.x, columns, bounds, nodes * len(nodes) + torch.arange(len(nodes)))
        point.reads, point.shared = reads, True
        return called(self.encoder, point, self.edge_index)

    @cached_property
    def movers(self) -> Traced:
        """Which nodes move which rows."""
        count, features = self.x.shape
        return self.followed(self.x.new_zeros(0, count, features), torch.arange(count))

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """One problem after the other."""
        each: list[tuple[Tensor, Tensor, Tensor]] = []
        for node, asked, columns in zip(moving, victim, basis.mT * radius[:, None, None], strict=True):
            found = self.followed(columns[:, None], node[None])
            _, moved, box = found.of(int(asked))
            each.append((found.center[asked], moved.sum(1).mT, box))
        center, columns, box = map(torch.stack, zip(*each, strict=True))
        self.last = Form(noise, center, columns, box)
        return self.last

    def below(self, problem: int, rows: Tensor, bad: Tensor) -> Quadratic:
        """The bound of the enclosure: nothing better is known."""
        del bad
        center, columns, box = (part[problem] for part in (self.last.center, self.last.columns, self.last.box))
        unit = ROUNDING * rows.shape[-1]
        loss = rows.abs() @ (box * (1 + unit) + unit * (center.abs() + columns.abs().sum(-1)))
        return Quadratic.linear(rows @ center, rows @ columns, loss)


@enclose_all.register
def _(branch: TracedBranch, noise: Noise, victim: int, basis: Tensor, radius: float, threat: Threat) -> Form:
    nodes, each = branch.movers.of(victim)[0], threat == "each"
    columns = (basis.mT * radius)[:, None].expand(-1, len(nodes), -1)
    found = branch.followed(columns, nodes, each=each)
    some, moved, box = found.of(victim)
    images = moved.new_zeros(len(branch.x), *moved.shape[2:], len(moved)).index_copy(
        0, nodes[some], moved.permute(1, 2, 0)
    )
    return with_first(constant(noise, found.center[victim][None]), images[None], threat).with_box(box[None])


def graph_branch(encoder: nn.Module, x: Tensor, edge_index: Tensor | Graph) -> GraphBranch:
    """Prepare a graph encoder at an input."""
    if isinstance(encoder, GCN):
        return Convolved(encoder, x, edge_index)
    if isinstance(encoder, Propagation):
        return Propagated(encoder, x, edge_index)
    return TracedBranch(encoder, x, edge_index)
