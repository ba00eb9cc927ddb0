"""Graph encoders of one's own, made of linear maps and ReLU, by a tensor that stands for a ball of features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.forms import ROUNDING, Form, Noise
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.encoders.graph import GraphBranch, graph_branch
from holonomy.theory.affine.encoders.rules import called
from holonomy.theory.affine.encoders.tracing import Traced, traced
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
        self._followed(x.new_zeros(0, x.shape[1]), 0, self.reads)  # what is not covered is refused before the work

    def _followed(self, columns: Tensor, node: int, reads: list[Tensor] | None = None) -> Traced:
        point = traced(
            self.x, columns[:, None], ROUNDING * columns.abs().sum(0)[None], torch.tensor([node]), shared=True
        )
        point.reads = reads
        return called(self.encoder, point, self.edge_index)

    def enclose(self, noise: Noise, moving: Tensor, victim: Tensor, basis: Tensor, radius: Tensor) -> Form:
        """One problem after the other."""
        each: list[tuple[Tensor, Tensor, Tensor]] = []
        for node, asked, columns in zip(moving.tolist(), victim, basis.mT * radius[:, None, None], strict=True):
            found = self._followed(columns, node)
            moves = found.rows == asked
            each.append((found.center[asked], found.columns[:, moves].sum(1).mT, found.box[moves].sum(0)))
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

    def sharpen(self, problem: int) -> None:
        """Nothing."""
        del problem


@graph_branch.register
def _(encoder: nn.Module, x: Tensor, edge_index: Tensor | Graph) -> GraphBranch:
    return TracedBranch(encoder, x, edge_index)
