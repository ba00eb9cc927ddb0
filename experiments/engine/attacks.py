"""Attacks on one node: its logits by its own features, and the smallest change found that moves its class.

The logits of many changes cost about what one forward pass does, as what the other nodes give is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from holonomy import numerics
from holonomy.layers import HypLinearAttention
from holonomy.layers.hyperbolic.encoder import HypformerEncoder
from holonomy.layers.hyperbolic.refinement import change_curvature
from holonomy.models import HypformerBlock
from holonomy.ops.linear_attention.reference import power_features
from holonomy.theory.affine.attention.linear import crowd_of
from holonomy.theory.affine.enclosure import Enclosure
from holonomy.theory.affine.encoders.graph import Convolved, GraphBranch, Propagated

Logits = Callable[[Tensor], Tensor]


def own_logits(enclosure: Enclosure, node: int) -> Logits:
    """A node's logits as a function of many changes ``(change, feature)`` of its features, through the model's layers.

    Only attention is summed anew, as all other tokens stay; so thousands of changes cost what one forward pass does.
    """
    model, x = enclosure.model, enclosure.x
    encoder = cast("HypformerEncoder", model.encoder)
    block = cast("HypformerBlock", encoder.blocks[0])
    attention = cast("HypLinearAttention", block.attention)
    crowd = crowd_of(attention, block.position(enclosure.points).detach(), torch.tensor([node]))
    manifold = model.manifold_out

    def attend(point: Tensor) -> Tensor:
        query, key, value = (
            power_features(part.space(point).unflatten(-1, (attention.heads, -1)), attention.power)
            for part in (attention.query, attention.key, attention.value)
        )
        value = value * (-attention.log_scale).exp()
        overlap = (query * key).sum(-1, keepdim=True)
        top = torch.einsum("nhk,hkv->nhv", query, crowd.products[0]) + overlap * value
        weight = torch.einsum("nhk,hk->nh", query, crowd.keys[0])[..., None] + overlap
        average = top * numerics.safe_div(torch.ones_like(weight), weight)
        space = average.flatten(1) + attention.residual(value.flatten(1))
        return change_curvature(space, attention.manifold_hidden, attention.manifold_out)

    def logits(change: Tensor) -> Tensor:
        point = block.position(encoder.points(x[node] + change))
        point = block.norm_attention(block.residual(point, block.drop(attend(point))))
        point = encoder.drop(block.norm_feedforward(block.residual(point, block.feedforward(point))))
        mixed = manifold.space(manifold.logmap0(point))
        if enclosure.graph is not None:
            mixed = torch.lerp(mixed, _graph(enclosure.graph, node, change), model.graph_weight)
        return model.decoder(
            model.manifold_out.expmap0(torch.nn.functional.pad(mixed, (1, 0))) if model.decodes_points else mixed
        )

    return logits


def followed_logits(enclosure: Enclosure, node: int) -> Logits:
    """The same for any model, where all other tokens are as if the node did not move."""
    model, x = enclosure.model, enclosure.x
    encoder, manifold = cast("HypformerEncoder", model.encoder), model.manifold_out
    blocks = [cast("HypformerBlock", block) for block in encoder.blocks]
    places, points = list[Tensor](), enclosure.points
    with torch.no_grad():
        for block in blocks:
            places.append(block.position(points))
            points = block(points)

    def logits(change: Tensor) -> Tensor:
        point = encoder.points(x[node] + change)
        for block, still in zip(blocks, places, strict=True):
            own = block.position(point)[:, None]
            memory = torch.where((torch.arange(len(x)) == node)[:, None], own, still)
            found = block.drop(block.attention(own, memory=memory))
            own = block.norm_attention(block.residual(own, found))
            point = block.norm_feedforward(block.residual(own, block.feedforward(own)))[:, 0]
        mixed = manifold.space(manifold.logmap0(encoder.drop(point)))
        if enclosure.graph is not None:
            mixed = torch.lerp(mixed, _graph(enclosure.graph, node, change), model.graph_weight)
        return model.decoder(
            manifold.expmap0(torch.nn.functional.pad(mixed, (1, 0))) if model.decodes_points else mixed
        )

    return logits


def whole_logits(enclosure: Enclosure, node: int) -> Logits:
    """A node's logits as a function of changes of all features, ``(change, nodes * feature)``: one pass for each."""
    x = enclosure.x

    def logits(change: Tensor) -> Tensor:
        return torch.stack([enclosure.model(x + one.view_as(x), enclosure.edge_index)[node] for one in change])

    return logits


def _graph(branch: GraphBranch, node: int, change: Tensor) -> Tensor:
    """What the graph encoder gives the node."""
    if isinstance(branch, Propagated):
        one = torch.tensor([node])
        return branch.result[node] + branch.share(one, one) * (branch.mlp(branch.x[node] + change) - branch.start[node])
    convolved = cast("Convolved", branch)
    hidden, steps = change[:, None], convolved.steps(node, node) or []
    for i, (layer, step) in enumerate(zip(convolved.layers, steps, strict=True)):
        new = (step.shares @ hidden) @ layer.weight.T
        if layer.skip is not None:
            new = new.index_add(1, step.stays, hidden[:, step.places] @ layer.skip.T)
        before = layer.before[step.rows]
        hidden = new if i == len(steps) - 1 else torch.relu(before + new) - torch.relu(before)
    return convolved.layers[-1].before[node] + hidden[:, 0]


def smallest_attack(
    logits: Logits, dim: int, target: int, steps: int, generator: torch.Generator, lines: int = 200
) -> Tensor:
    """The smallest change found that leaves the class: random lines, and minimal-norm descent."""
    best = torch.full((dim,), torch.inf).double()
    drawn = random_directions(lines, dim, generator)
    for scale in torch.logspace(-3, 1.5, 40).tolist():
        with torch.no_grad():
            wrong = logits(drawn * scale).argmax(-1) != target
        if bool(wrong.any()):
            best = scale * drawn[wrong][0]
            break
    change = random_directions(6, dim, generator) * torch.tensor([1e-6, *[0.05] * 5]).double()[:, None]
    length = torch.full((6,), torch.inf, dtype=torch.float64)
    held = length.clone()
    for step in range(steps):
        share = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
        change = change.detach().requires_grad_()
        gap = largest_gap(logits(change), target)
        (grad,) = torch.autograd.grad(gap.sum(), change)
        with torch.no_grad():
            size, slope = change.norm(dim=-1), grad.norm(dim=-1).clamp(min=1e-12)
            wrong = gap > 0
            held = torch.where(wrong, torch.minimum(held, size), held)
            shortest = torch.where(wrong, size, torch.inf).argmin()
            if bool(wrong[shortest]) and size[shortest] < best.norm():
                best = change.detach()[shortest].clone()
            grown = torch.where(torch.isinf(held), size + gap.abs() / slope, length * (1 + 0.05 * share))
            length = torch.where(wrong, torch.minimum(length, size) * (1 - 0.05 * share), grown)
            change = change + (0.3 * share + 0.003) * length.clamp(max=3.0)[:, None] * grad / slope[:, None]
            change = change * (length / change.norm(dim=-1).clamp(min=1e-12)).clamp(max=1.0)[:, None]
    return best


def random_directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Vectors of length one, ``(count, dim)``."""
    drawn = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def largest_gap(scores: Tensor, target: int) -> Tensor:
    """How far the largest other logit is above that of the target, for each row."""
    own = torch.nn.functional.one_hot(torch.tensor(target), scores.shape[1]).bool()
    return scores.masked_fill(own, -torch.inf).amax(-1) - scores[:, target]
