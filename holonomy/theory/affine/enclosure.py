"""A whole Hypformer on a ball of features, module by module, to the margins of a node's logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from holonomy import checks
from holonomy._shapes import Float, Int
from holonomy.layers import HypLinearAttention
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.models import Hypformer, HypformerBlock
from holonomy.structures import Graph
from holonomy.theory.affine.arithmetic.ellipsoids import Threat, TokenForms, merged, tokens_of
from holonomy.theory.affine.arithmetic.forms import Form, Noise, constant
from holonomy.theory.affine.arithmetic.margins import Margins, bounded
from holonomy.theory.affine.arithmetic.ratios import Ratio
from holonomy.theory.affine.attention.linear import attended, crowd_of
from holonomy.theory.affine.attention.mixing import Around, chunks
from holonomy.theory.affine.blocks import around_of, streamed
from holonomy.theory.affine.branch import decoded, fed, logarithm, positioned, refuse_decoder, refuse_jumps
from holonomy.theory.affine.cap import farthest
from holonomy.theory.affine.encoders.traced import graph_branch
from holonomy.theory.affine.encoders.whole_graph import enclose_all
from holonomy.theory.affine.mixtures import Mixtures
from holonomy.theory.affine.points import Scaled, affine_of, exponential, lifted, refined, root, settled, unscaled
from holonomy.theory.attention.projections import as_stated
from holonomy.theory.certificates.regions import refuse_training, widened

# The most features whose products are kept (L16).
_MOST_SQUARED = 16
# From rapidity 80 on layers in float32 draw points nearer; what is left is for the weights before them.
_FARTHEST_IN_FLOAT32 = 60.0
# What the transformer is bounded by.
Known = Literal["all", "first order", "cap"]


class Enclosure:
    """A model at one input, in float64, with all that does not depend on the moving node computed once."""

    def __init__(
        self,
        model: Hypformer,
        x: Float[Tensor, "nodes dim"],
        edge_index: Tensor | Graph | None,
        *,
        differentiable: bool = False,
    ) -> None:
        with torch.set_grad_enabled(differentiable):
            self._prepare(model, x, edge_index)
        self.differentiable = differentiable

    def _prepare(self, model: Hypformer, x: Tensor, edge_index: Tensor | Graph | None) -> None:
        as_stated(model, Hypformer)
        refuse_training(model, "model")
        refuse_decoder(model.decoder)
        narrow = any(tensor.dtype == torch.float32 for tensor in (x, *model.parameters()))
        self.farthest = _FARTHEST_IN_FLOAT32 if narrow else torch.inf
        self.model = cast("Hypformer", widened(model))
        self.x = (x if x.layout == torch.strided else x.to_dense()).detach().double()
        checks.finite("x", self.x)
        self.edge_index = edge_index
        # Whether what follows a moving token may be taken from a bound on a larger ball, which is most of the time.
        self.reuse = False
        # What is around a token: under which threat, if only one moves which, on a ball of what radius.
        self._known: tuple[tuple[str, int, float], list[Around]] = ("", -1, 0.0), []
        self.logits = self.model(self.x, edge_index)
        checks.finite("model(x)", self.logits)
        self.graph = None
        reads = [self.x[:0]]
        encoder = self.model.encoder
        if encoder is not None:
            refuse_jumps(encoder)
            reads.append(affine_of(encoder.embedding)[0][:, 1:])
            self.points = encoder.points(self.x)
            self.rapidity = self.x.norm(dim=-1) * root(encoder.embedding.manifold_in)
        if self.model.graph_encoder is not None:
            if edge_index is None:
                raise ValueError("edge_index must be given, for the model has a graph encoder; got None.")
            self.graph = graph_branch(self.model.graph_encoder, self.x, edge_index)
            reads += self.graph.reads
        # To first order a bound does not change with a span of what is read: no gradient goes through it.
        rows = torch.cat(reads).detach()
        # Motion across all that is read changes only |x|, which L3 covers.
        self.span = torch.linalg.qr(rows.T).Q if len(rows) + 1 < rows.shape[1] else None

    def _basis(self, x: Tensor) -> Tensor:
        """Orthonormal columns that span what is read of each node's perturbation, and the node's own features."""
        if self.span is None:
            return torch.eye(x.shape[1]).double().expand(len(x), -1, -1)
        rest = x - (x @ self.span) @ self.span.T
        rest = rest - (rest @ self.span) @ self.span.T
        size = rest.norm(dim=-1, keepdim=True)
        rest = rest / torch.where(size > 0, size, 1.0)
        return torch.cat([self.span.expand(len(x), -1, -1), rest[..., None]], -1)

    def margins(
        self,
        moving: Int[Tensor, " problem"],
        victim: Int[Tensor, " problem"],
        radius: Float[Tensor, " problem"],
        target: Int[Tensor, " problem"],
        threat: Threat = "node",
        *,
        enough: float = torch.inf,
        known: Known = "all",
    ) -> Margins:
        """Bound the margins of each victim while its moving node, or all nodes, keep within the radius.

        Where all are above ``enough`` no better bounds are looked for. ``known`` is what the transformer is bounded by:
        its enclosure and the cap, the enclosure without products of two features, or the cap alone.
        """
        with torch.set_grad_enabled(self.differentiable):
            if len(moving) > 1 and self.one_by_one(threat):
                each = zip(*(part.split(1) for part in (moving, victim, radius, target)), strict=True)
                return Margins.together(
                    [self.margins(a, b, r, k, threat, enough=enough, known=known) for a, b, r, k in each]
                )
            basis = self._basis(self.x[moving])
            noise = Noise.of(
                len(moving), basis.shape[-1], self.x, squares=known != "first order" and self._squares(threat)
            )
            if threat != "node":
                noise.tokens = victim
            space: Ratio | None = None
            if self.model.encoder is not None and known != "cap":
                space = self._transformer(self.model.encoder, noise, moving, victim, basis, radius, threat)
            noise.owner = "graph encoder"
            parts: list[Form] = []
            if self.graph is not None:
                share = 1.0 if self.model.encoder is None else self.model.graph_weight
                if threat == "node":
                    found = self.graph.enclose(noise, moving, victim, basis, radius)
                else:
                    found = enclose_all(self.graph, noise, int(victim), basis[0], radius.item(), threat)
                parts.append(found * share)
            if self.model.encoder is None:
                found = self._differences(parts[0], target)
                bound = bounded(found, target)
                return Margins.of(found, bound, bound, bound)
            noise.owner = "decoder"
            if isinstance(self.model.decoder, nn.Linear):
                zero = constant(noise, self.points.new_zeros(len(moving), self.model.decoder.in_features))
                graph = self._differences(zero.plus(*parts), target)
                searched = threat == "node" and not self.differentiable
                mixtures = Mixtures.of(self.model, self.graph, space, graph, (victim, target))
                return mixtures.margins(enough if searched else None)
            return self._decoded(noise, space, parts, target)

    def one_by_one(self, threat: Threat) -> bool:
        """Whether more tokens than the moving one are followed, which are a batch by themselves."""
        encoder = self.model.encoder
        if encoder is None:
            return threat != "node"
        first = cast("HypformerBlock", encoder.blocks[0])
        return threat != "node" or len(encoder.blocks) > 1 or not isinstance(first.attention, HypLinearAttention)

    def _squares(self, threat: Threat) -> bool:
        """Whether to keep what is quadratic in the perturbation."""
        few = self.span is None and self.x.shape[1] <= _MOST_SQUARED
        return few and threat == "node" and not self.one_by_one(threat) and not self.differentiable

    def _decoded(self, noise: Noise, space: Ratio | None, parts: list[Form], target: Tensor) -> Margins:
        """A decoder that is not linear, with the enclosure and with a ball in its place."""
        size = self.points.shape[1] - 1
        if space is None:
            noise.fail(torch.ones_like(noise.failed))
            transformer = constant(noise, self.x.new_zeros(len(target), size))
        else:
            transformer = logarithm(space.form(), self.model.manifold_out) * self._share
        found = self._differences(transformer.plus(*parts), target)
        affine = bounded(found, target, noise.failed)
        ball = (
            self._share
            * farthest(cast("HypformerEncoder", self.model.encoder))
            * torch.eye(size).double().expand(len(target), -1, -1)
        )
        anything = constant(noise, torch.zeros_like(transformer.center)).with_ball(ball)
        cap = bounded(self._differences(anything.plus(*parts), target), target)
        return Margins.of(found, affine, cap, torch.maximum(affine, cap))

    @property
    def _share(self) -> float:
        """The transformer's share in the tangent space."""
        return 1.0 if self.graph is None else 1 - self.model.graph_weight

    def _differences(self, tangent: Form, target: Tensor) -> Form:
        """The target's logit minus each."""
        logits = decoded(self.model.decoder, tangent, self.model.manifold_out)
        eye = torch.eye(logits.center.shape[-1]).double()
        return logits.linear(eye[target][:, None] - eye)

    def _transformer(
        self,
        encoder: HypformerEncoder,
        noise: Noise,
        moving: Tensor,
        victim: Tensor,
        basis: Tensor,
        radius: Tensor,
        threat: Threat,
    ) -> Ratio:
        """The space part of the victim's point."""
        itself = torch.equal(moving, victim)
        if not itself and bool((moving == victim).any()):
            raise ValueError("moving must be the victims themselves, or none of them.")
        noise.owner = "embedding"
        point = self._embedded(encoder, noise, moving, basis, radius)
        layer = cast("HypformerBlock", encoder.blocks[0])
        if self.one_by_one(threat):
            around = self._around(encoder, moving, basis, radius, threat)
            space = streamed(encoder, int(moving), point, int(victim), threat, around)
        else:
            noise.owner = "block0.position"
            point = positioned(layer.position, point)
            noise.owner = "block0.attention"
            places = layer.position(self.points)
            attention = cast("HypLinearAttention", layer.attention)
            crowd = crowd_of(attention, places, moving)
            stays = unscaled(constant(noise, places[victim, 1:]), layer.manifold_in)
            query = point if itself else stays
            space = fed(layer, "block0", query, attended(attention, query, point, crowd))
        # Not before: a norm between blocks forgives what the moving token fails in, and the others may be far out, too.
        noise.fail((self.rapidity.amax() > self.farthest).expand(len(moving)))
        noise.owner = "logarithm"
        return replace(space, over=refined(encoder.drop, space.over))

    def _around(
        self, encoder: HypformerEncoder, moving: Tensor, basis: Tensor, radius: Tensor, threat: Threat
    ) -> list[Around]:
        """What is around a token in the blocks where that is known, and in the first."""
        node, size, first = int(moving) if threat == "node" else -1, radius.item(), basis.shape[-1]
        (before, known, ball), around = self._known
        # Before the first attention no other token moves, whichever does. Where all do, it matters not which is asked.
        if before != threat or (threat != "node" and ball != size):
            tokens = self._tokens(encoder, first, radius, threat)
            around, ball = [around_of(cast("HypformerBlock", encoder.blocks[0]), tokens)], 0.0
            if not self.differentiable:
                self._known = (threat, -1, size), around
        if threat != "node":
            return around
        if not self.reuse:
            return around[:1]
        # From a bound on a ball of at most twice the radius.
        if node != known or not ball / 2 <= size <= ball:
            around, wider = around[:1], 1.25 * radius
            point = self._embedded(encoder, Noise.of(1, first, self.x), moving, basis, wider)
            streamed(encoder, node, point, node, "node", around)
            ball = wider.item()
            self._known = ("node", node, ball), around
        return [each.within(size / ball) for each in around]

    def _embedded(
        self, encoder: HypformerEncoder, noise: Noise, nodes: Tensor, basis: Tensor, radius: Tensor
    ) -> Scaled:
        """Points before the first block, of features that move."""
        x = self.x[nodes]
        noise.fail(self.rapidity[nodes] + radius * root(encoder.embedding.manifold_in) > self.farthest)
        weight, _ = affine_of(encoder.embedding)
        moved = (weight[:, 1:] @ basis) * radius[:, None, None]
        along = (basis.mT @ x[..., None]).squeeze(-1) * radius[:, None]
        space, scaling, floor = exponential(encoder.embedding, noise, x, moved, along, radius)
        manifold = cast("HypformerBlock", encoder.blocks[0]).manifold_in
        return lifted(refined(encoder.refine, space), scaling, floor, manifold)

    def _tokens(self, encoder: HypformerEncoder, first: int, radius: Tensor, threat: Threat) -> TokenForms:
        """All tokens before the first block, as if the one that is followed were one of the others."""
        manifold = cast("HypformerBlock", encoder.blocks[0]).manifold_in
        space = self.points[:, 1:]
        if threat == "node":
            size = space.shape[1]
            return TokenForms(space, torch.arange(0), space.new_zeros(0, size, first), space.new_zeros(0, size, size))
        parts = []
        for some in chunks(len(self.x)):
            basis = self._basis(self.x[some])
            noise = Noise.of(len(some), basis.shape[-1], self.x)
            each = self._embedded(encoder, noise, some, basis, radius.expand(len(some)))
            parts.append(merged(settled(each, manifold).space))
        return tokens_of(parts)
