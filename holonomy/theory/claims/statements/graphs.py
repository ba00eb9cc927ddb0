"""Claims on graphs and forms: Simplicial sections 2.4 and 3.1, appendices F.1 and F.2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from holonomy.theory.attention.determinants import determinant_logits, mixture_of_orders, rotate_chunks, rotation
from holonomy.theory.attention.projections import Projections, attend
from holonomy.theory.claims.molecules import draw_molecules, shares_of
from holonomy.theory.claims.verdict import Claims, Draws, Trial, apart
from holonomy.theory.graphs.curvature import FORMANS, Forman, curvature_shares, incidence
from holonomy.theory.graphs.topology import chung_bound, radius_and_diameter, spectral_diameter_bound

_SECTION = "Simplicial section 2.4"

CLAIMS = Claims()  #: claims of the families ``topology``, ``curvature``, ``determinant`` and ``lower_orders``


def _graphs(draws: Draws) -> Iterator[Tensor]:
    """Connected graphs: a random tree, and some more edges."""
    for _ in draws.rounds(60):
        nodes = draws.integer(2, 30)
        adjacency = torch.zeros(nodes, nodes, **draws.factory_kwargs)
        for node in range(1, nodes):
            other = draws.integer(max(0, node - draws.integer(1, nodes)), node - 1)
            adjacency[node, other] = adjacency[other, node] = 1
        more = torch.rand(nodes, nodes, generator=draws.generator) < draws.uniform(0.0, 0.3) ** 2
        adjacency = torch.maximum(adjacency, (more | more.T).to(adjacency))
        yield adjacency - torch.diag(adjacency.diagonal())


@CLAIMS.add("topology.radius", "Simplicial section 3.1", axis="n")
def _radius(draws: Draws) -> Iterator[Trial]:
    """Of a graph, rad <= diam <= 2 rad."""
    for adjacency in _graphs(draws):
        radius, diameter = radius_and_diameter(adjacency)
        at = {"n": float(adjacency.shape[0])}
        yield Trial(radius, diameter, at=at)
        yield Trial(diameter, 2 * radius, at=at)


def _one_edge(draws: Draws) -> Iterator[Trial]:
    """The largest share of the bound that is known: lambda_2 is 2."""
    pair = torch.ones(2, 2, **draws.factory_kwargs).fill_diagonal_(0)
    yield Trial(1.0, spectral_diameter_bound(pair, "normalised"), at={"n": 2.0}, known=1 / (48 * math.log(2)))


def _spectral(draws: Draws, laplacian: Literal["combinatorial", "normalised"]) -> Iterator[Trial]:
    for adjacency in _graphs(draws):
        diameter = radius_and_diameter(adjacency)[1]
        yield Trial(diameter, spectral_diameter_bound(adjacency, laplacian), at={"n": float(adjacency.shape[0])})
    # Of complete graphs all eigenvalues but one are n, or n / (n - 1): no matrix of 700 rows is needed.
    second = 700.0 if laplacian == "combinatorial" else 700 / 699
    yield Trial(1.0, 96 * math.log(700) / second, at={"n": 700.0}, note="the complete graph of 700 nodes")


for laplacian in ("combinatorial", "normalised"):
    CLAIMS.add(
        f"topology.{laplacian}",
        "Simplicial section 3.1",
        statement=f"diam <= 96 log n / lambda_2 of the {laplacian} Laplacian",
        expected=laplacian == "normalised",
        axis="n",
        sharpest=_one_edge if laplacian == "normalised" else None,
        laplacian=laplacian,
    )(_spectral)


@CLAIMS.add("topology.chung", "Chung, Faber, Manteuffel", axis="n")
def _chung(draws: Draws) -> Iterator[Trial]:
    """Of n nodes, diam <= floor(arcosh(n-1) / arcosh((l_n + l_2) / (l_n - l_2))) + 1."""
    for adjacency in _graphs(draws):
        diameter = radius_and_diameter(adjacency)[1]
        yield Trial(diameter, chung_bound(adjacency), at={"n": float(adjacency.shape[0])})


_shares_once = cache(shares_of)


def _judged_on(draws: Draws) -> str:
    """What the claims on curvature are judged on."""
    if draws.molecules is None:
        return f"{len(draws.rounds(100))} generated molecules"
    return f"{len(draws.molecules):,} molecules of QM9"


def _curvature(draws: Draws, form: Forman, of: Literal["mean", "least"]) -> Iterator[Trial]:
    """Share of molecules whose line graph has the smaller curvature, against the share that the paper leaves."""
    if draws.molecules is None:
        shares = shares_of(draw_molecules(draws, 100), form, draws.dtype, draws.device)
    else:
        shares = _shares_once(draws.molecules, form, draws.dtype, draws.device)
    strict, weak = (shares.mean, shares.mean_weak) if of == "mean" else (shares.least, shares.least_weak)
    note = f"larger in {strict:.4%}, larger or equal in {weak:.4%} of {_judged_on(draws)}"
    yield Trial(1 - weak, 0.0 if of == "mean" else 0.05, note=note)


for form in FORMANS:
    for of, share in (("mean", "all"), ("least", "95%")):
        CLAIMS.add(
            f"curvature.{of}_{form}",
            "Simplicial appendix F.2",
            statement=f"The {of} {form} curvature of the line graph is larger or equal in {share} of the molecules",
            expected=form != "plain",
            judged_on=_judged_on,
            form=form,
            of=of,
        )(_curvature)


_EQUAL: dict[Forman, tuple[str, tuple[tuple[int, int], ...]]] = {
    "augmented": ("a ring of five atoms without hydrogens", ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0))),
    "balanced": ("water", ((0, 1), (0, 2))),
}


def _strictly(draws: Draws, form: Forman) -> Iterator[Trial]:
    """Molecules of QM9 whose line graph has the same mean: the share that has not the larger one, against none."""
    name, bonds = _EQUAL[form]
    graph = incidence(torch.tensor(bonds).T, 1 + max(map(max, bonds)), draws.dtype).to(draws.device)
    yield Trial(1 - curvature_shares(graph[None], form).mean, 0.0, note=f"{name}: both means are equal")


for form in _EQUAL:
    CLAIMS.add(
        f"curvature.mean_{form}_strictly",
        "Simplicial appendix F.2",
        statement=f"The mean {form} curvature of the line graph is larger in all molecules of QM9",
        expected=False,
        form=form,
    )(_strictly)


def _keys(draws: Draws, order: int, features: int) -> Tensor:
    return draws.normal(order + 1, 4, features)


def _difference(a: Tensor, b: Tensor, order: int, *, size: float = 1.0, note: str = "") -> Trial:
    """Two tensors that should be equal up to rounding, of numbers of that size."""
    return Trial(*apart(a, b, size), at={"N": float(order)}, note=note)


def _hadamard(keys: Tensor) -> float:
    """What a sum of determinants can be at most, and its rounding is relative to: the product of the rows' lengths."""
    return keys.norm(dim=-1).amax(-1).prod().item()


def _turn(draws: Draws, order: int) -> Tensor:
    return rotation(order + 1, generator=draws.generator).to(draws.device, draws.dtype)


@CLAIMS.add(
    "determinant.rotation",
    _SECTION,
    "equal",
    statement="Logits do not change under SO(N+1) in each chunk",
    reflect=False,
)
@CLAIMS.add("determinant.reflection", _SECTION, "equal", statement="A reflection changes their sign", reflect=True)
def _rotation(draws: Draws, *, reflect: bool) -> Iterator[Trial]:
    for order in (1, 2, 3):
        for _ in draws.rounds(10):
            keys, turn = _keys(draws, order, 2 * (order + 1) + draws.integer(0, order)), _turn(draws, order)
            if reflect:
                turn = torch.cat([-turn[:1], turn[1:]])
            once = torch.ones(keys.shape[1], device=keys.device)
            turned = torch.stack([rotate_chunks(key, turn, once) for key in keys])
            sign = -1 if reflect else 1
            yield _difference(sign * determinant_logits(turned), determinant_logits(keys), order, size=_hadamard(keys))


@CLAIMS.add(
    "determinant.shift",
    _SECTION,
    "equal",
    statement="Powers of one rotation: logits depend on differences of positions",
    planes=False,
)
@CLAIMS.add(
    "determinant.pairs",
    _SECTION,
    statement="So they do when pairs of channels turn, N = 2",
    expected=False,
    planes=True,
)
def _shift(draws: Draws, *, planes: bool) -> Iterator[Trial]:
    for order in (2,) if planes else (1, 2, 3):
        for _ in draws.rounds(10):
            keys, turn = _keys(draws, order, 2 * (order + 1)), _turn(draws, order)
            position = torch.arange(keys.shape[1], device=keys.device, dtype=draws.dtype)
            # The usual pairs run on through the channels, across the borders of chunks.
            if planes:
                pair = _turn(draws, 1)
                turn = torch.block_diag(*[pair] * (order + 1))
            logits = [
                determinant_logits(torch.stack([rotate_chunks(key, turn, position + by) for key in keys]))
                for by in (0, 7)
            ]
            note = "N = 2, one angle for every pair of channels" if planes else ""
            yield _difference(logits[0], logits[1], order, size=_hadamard(keys), note=note)


@CLAIMS.add("determinant.equal", _SECTION, "equal")
def _equal_arguments(draws: Draws) -> Iterator[Trial]:
    """Equal arguments give 0; N = 1 is antisymmetric."""
    for order in (1, 2, 3):
        key = draws.normal(1, order + 1)
        logits = determinant_logits(key.expand(order + 1, 1, -1))
        yield _difference(logits, torch.zeros_like(logits), order, size=_hadamard(key[None]) ** (order + 1))
    keys = _keys(draws, 1, 6)
    forward, back = determinant_logits(keys), determinant_logits(keys.flip(0)).T
    yield _difference(forward, -back, 1)


@CLAIMS.add("determinant.chunks", _SECTION, expected=False)
def _chunks(draws: Draws) -> Iterator[Trial]:
    """floor(d/N) chunks of N + 1 channels fit in d."""
    for order in (1, 2, 3):
        for _ in draws.rounds(5):
            features = draws.integer(order + 1, 64)
            note = f"d = {features}, N = {order}: floor(d/N) chunks of N + 1 channels"
            yield Trial(float(features // order * (order + 1)), float(features), at={"N": float(order)}, note=note)


@CLAIMS.add("lower_orders.exact", "Simplicial appendix F.1", "equal")
def _lower_exact(draws: Draws) -> Iterator[Trial]:
    """N + 1 with one key and value all ones is N."""
    for order in (1, 2):
        for _ in draws.rounds(10):
            x, scale = draws.normal(4, 3), draws.logarithmic(0.1, 1.0)
            keys, values = draws.normal(order + 1, 1, 3, 3), draws.normal(order, 1, 3, 3)
            lower = attend(x, Projections(keys, values, scale=scale))
            ones = torch.ones(1, 1, 3, **draws.factory_kwargs)
            higher = Projections(
                torch.cat([keys, torch.zeros_like(keys[:1])]),
                torch.cat([values, torch.zeros_like(values[:1])]),
                key_bias=torch.cat([torch.zeros_like(ones).expand(order + 1, 1, 3), ones]),
                value_bias=torch.cat([torch.zeros_like(ones).expand(order, 1, 3), ones]),
                scale=scale,
            )
            yield _difference(attend(x, higher), lower, order)


@CLAIMS.add("lower_orders.mixture", "Simplicial appendix F.1", "equal", rounds=10)
def _mixture(draws: Draws, _: int) -> Iterator[Trial]:
    """Appended rows of ones mix both orders by their masses."""
    both = mixture_of_orders(draws.normal(3, 4, 3), draws.normal(2, 4, 3), draws.logarithmic(0.1, 1.0))
    yield _difference(*both, 2)
