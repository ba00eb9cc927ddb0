r"""Claims of TokenGT: Lemma 1, Theorems 1 and 2, with constructed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from holonomy.layers import EquivariantLinear, bell, orthogonal_identifiers
from holonomy.theory.claims.pictures import Picture, Trials
from holonomy.theory.claims.verdict import Claims, Draws, Trial, filled, rounding
from holonomy.theory.expressivity.tokens_basis import (
    basis_approximation_error,
    basis_attention,
    basis_tensors,
    layer_by_heads,
)

CLAIMS = Claims()  #: claims of the family ``tokens``

# Nodes at which all rows of all heads are computed: n^2k weights each.
_NODES = {1: (1, 2, 5, 16), 2: (2, 4, 6), 3: (2, 3)}
# The heads that are drawn: order, nodes, scale.
_SEEN = ((2, 4, 3.0), (2, 4, 30.0))
_SCALES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def _scales(draws: Draws) -> tuple[float, ...]:
    return _SCALES if draws.budget >= 1 else (3.0, 30.0)


def _identifiers(draws: Draws, nodes: int, dim: int) -> Tensor:
    drawn = orthogonal_identifiers(nodes, dim, generator=draws.generator, dtype=draws.dtype)
    return drawn.to(draws.device)


@CLAIMS.add(
    "tokens.lemma_1",
    "TokenGT Lemma 1",
    axis="a",
    note="half the l1 distance of a row; with one type, k = 1, the gap is 1 where the printed eps is 0",
)
def _basis(draws: Draws) -> Iterator[Trial]:
    """bell(2k) heads are the basis tensors up to ((n^k - c)/c) exp(-a min(1, eps)/sqrt(d_H)) a row, k = 1, 2, 3."""
    for order, sizes in _NODES.items():
        for nodes in sizes:
            for a in _scales(draws):
                p = _identifiers(draws, nodes, nodes + draws.integer(0, 2))
                found = basis_approximation_error(order, nodes, a, identifiers=p)
                at = {"a": a, "n": float(nodes), "k": float(order)}
                # A logit is off by its rounding, and a weight by that of its logit.
                floor = rounding(draws.dtype) * (1 + found.logit)
                seen = {"heads": basis_attention(order, a, p)[0]} if (order, nodes, a) in _SEEN else {}
                yield Trial(found.measured, found.bound, floor=floor, at=at, seen=seen)


def _layer(draws: Draws, order: int, features: int, out: int) -> EquivariantLinear:
    layer = EquivariantLinear(order, order, features, out, **draws.factory_kwargs)
    return filled(layer, weight=draws.normal(*layer.weight.shape), bias=draws.normal(bell(order), out))


def _size(values: Tensor) -> float:
    return values.norm(dim=-1).amax().item()


@CLAIMS.add(
    "tokens.theorem_1", "TokenGT Theorem 1", axis="a", note="the feed-forward map of the proof is taken exactly"
)
def _layers(draws: Draws) -> Iterator[Trial]:
    """bell(2k) heads with class sizes and biases are the equivariant linear layer, to the bound of Lemma 1."""
    for order, sizes in _NODES.items():
        for nodes in sizes[:3]:
            for a in _scales(draws):
                x = draws.normal(*[nodes] * order, 3)
                layer = _layer(draws, order, 3, 2)
                heads = layer_by_heads(layer, x, a, identifiers=_identifiers(draws, nodes, nodes))
                with torch.no_grad():
                    off = _size(heads.output - layer(x))
                at = {"a": a, "n": float(nodes), "k": float(order)}
                floor = rounding(draws.dtype) * (1 + a * order) * nodes**order * (1 + _size(heads.output))
                yield Trial(off, heads.bound, floor=floor, at=at)


def _steepness(layer: EquivariantLinear, nodes: int) -> float:
    """A Lipschitz constant in the largest norm of an entry."""
    count = basis_tensors(layer.order_in, nodes, device=layer.weight.device).sum(-1).to(layer.weight.dtype)
    return (torch.linalg.matrix_norm(layer.weight.detach(), 2) @ count).amax().item()


@CLAIMS.add("tokens.theorem_2", "TokenGT Theorem 2", axis="a")
def _networks(draws: Draws) -> Iterator[Trial]:
    """Layers of heads and sum-pooling are a k-IGN, to what Lipschitz constants make of the bound."""
    # Two layers with ReLU between, and the invariant map: errors grow by Lipschitz constants.
    for order, nodes in ((1, 4), (2, 3), (2, 4), (3, 2)):
        for a in _scales(draws)[1:]:
            first, second = _layer(draws, order, 2, 3), _layer(draws, order, 3, 3)
            readout = EquivariantLinear(order, 0, 3, 1, **draws.factory_kwargs)
            with torch.no_grad():
                readout.weight.copy_(draws.normal(bell(order), 3, 1))
                x, p = draws.normal(*[nodes] * order, 2), _identifiers(draws, nodes, nodes)
                one = layer_by_heads(first, x, a, identifiers=p)
                two = layer_by_heads(second, one.output.relu(), a, identifiers=p)
                exact = readout(second(first(x).relu()))
                off = _size(readout(two.output) - exact)
            tokens = nodes**order * torch.linalg.matrix_norm(readout.weight.detach(), 2).amax().item()
            bound = tokens * (two.bound + _steepness(second, nodes) * one.bound)
            floor = (
                rounding(draws.dtype) * (1 + a * order) * tokens * _steepness(second, nodes) * (1 + _size(one.output))
            )
            yield Trial(off, bound, floor=floor, at={"a": a, "n": float(nodes), "k": float(order)})


def _mosaic(matrices: Tensor) -> Any:
    """The 15 matrices in three rows of five, white lines between them."""
    framed = torch.nn.functional.pad(matrices.cpu().double(), (0, 1, 0, 1), value=torch.nan)
    size = framed.shape[-1]
    return framed.reshape(3, 5, size, size).transpose(1, 2).reshape(3 * size, 5 * size)[:-1, :-1].tolist()


def _heads(axes: Sequence[Any], trials: Trials) -> None:
    shown = [t for t in trials["tokens.lemma_1"] if t.seen]
    basis = basis_tensors(2, 4).double()
    images = [(f"heads, a = {t.at['a']:g}", t.seen["heads"]) for t in shown]
    images.append(("basis tensors", basis / basis.sum(-1, keepdim=True).clamp_min(1)))
    for plot, (title, matrices) in zip(axes, images, strict=False):
        plot.imshow(_mosaic(matrices), vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
        plot.set(title=title, xticks=[], yticks=[])
    plot = axes[-1]
    for place, order in enumerate((1.0, 2.0, 3.0)):
        largest = max(t.at["n"] for t in trials["tokens.lemma_1"] if t.at["k"] == order)
        mine = [t for t in trials["tokens.lemma_1"] if t.at["k"] == order and t.at["n"] == largest]
        scales = [t.at["a"] for t in mine]
        plot.plot(scales, [max(t.measured, t.floor) for t in mine], "o-", color=f"C{place}", label=f"k = {order:g}")
        plot.plot(scales, [t.bound for t in mine], "--", color=f"C{place}")
    plot.set(xscale="log", yscale="log", xlabel="scale a", title="outside the class", ylim=(0.1**15, 10))
    plot.legend(fontsize="small")


PICTURES: tuple[Picture, ...] = (
    Picture(
        "Attention heads and basis tensors",
        "Lemma 1 for pairs of four nodes: the 15 constructed heads at two scales beside the basis tensors, rows "
        "normalised; the weight outside the class, down to rounding, and its bound (dashed).",
        ("tokens.lemma_1",),
        _heads,
        4,
    ),
)
"""The picture of Lemma 1."""
