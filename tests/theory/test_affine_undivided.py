"""Margins times a positive number: L17.4, and ReLUs bounded on the side that counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from holonomy.theory.affine.arithmetic.backward import from_below
from holonomy.theory.affine.arithmetic.entrywise import positive_power
from holonomy.theory.affine.arithmetic.forms import Form, Noise, join
from holonomy.theory.affine.arithmetic.quadratics import Quadratic
from holonomy.theory.affine.arithmetic.squares import bounds, products, quadratic_of
from holonomy.theory.affine.undivided import OneProduct

pytestmark = pytest.mark.usefixtures("without_shape_checks")


def points(generator: torch.Generator, count: int, size: int) -> Tensor:
    """Points of the unit ball, most of them on its sphere."""
    d = normalize(torch.randn(count, size, generator=generator).double(), dim=-1)
    return d * (2 * torch.rand(count, 1, generator=generator)).clamp(max=1)


def values(found: Quadratic, d: Tensor) -> Tensor:
    """Lower bounds at points, ``(point, row)``."""
    return found.center - found.loss + d @ found.gradient.mT + torch.einsum("pi,rij,pj->pr", d, found.matrix, d)


def drawn(generator: torch.Generator, rows: int, size: int) -> Quadratic:
    """Functions that bend a little, and their losses."""
    center, gradient, matrix = (
        torch.randn(rows, *more, generator=generator).double() for more in ((), (size,), (size, size))
    )  # fmt: skip
    loss = torch.rand(rows, generator=generator).double() / 4
    return Quadratic(center, gradient, 0.2 * (matrix + matrix.mT), loss)


@pytest.mark.parametrize("wrong", [None, "least", "side", "start"])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_a_product_with_what_is_known_from_below_keeps_its_side(sign: float, wrong: str | None) -> None:
    """Values that are positive, negative or both, times numbers between two forms, at every noise; L17.4."""
    generator = torch.Generator().manual_seed(3)
    low, broken = torch.inf, False
    for _ in range(60):
        noise = Noise.of(1, 3, torch.zeros(1).double(), squares=True)
        start = noise.new(2, ball=False)

        def form(entries: int, size: float, noise: Noise = noise) -> Form:
            columns = size * torch.randn(1, entries, noise.size, generator=generator).double()
            return Form(noise, torch.zeros(1, entries).double(), columns, torch.zeros(1, entries).double())

        below, apart = form(1, 0.06), form(1, 0.01)
        above = below.plus(apart, Form(noise, -bounds(apart)[0], apart.columns[..., :0], apart.box))
        product = form(4, 0.5)
        value = drawn(generator, 4, 3)
        value = replace(value, center=value.center + 8 * sign)
        least = 1 + bounds(below)[0][0] + 0.5 * (wrong == "least")
        rises = (above, below) if wrong == "side" else (below, above)
        one = OneProduct(product, rises, least, [])
        every = torch.arange(len(value.center))
        # Values that are said to be larger than they are.
        known = replace(value, loss=value.loss - 1) if wrong == "start" else value
        eta = one.eta(torch.full((len(every),), 0.7).double(), every, known)
        d = points(generator, 2000, 3)
        e = torch.rand(2000, 2, generator=generator).double().mul(2).sub(1).sign()
        both = torch.cat([d, products(d, d), e], -1)[:, : noise.size]
        assert start + 2 == noise.size
        moved, floor, ceiling = (
            part.center + both @ part.columns[0].mT for part in (product, below, above)
        )  # fmt: skip
        there = values(value, d)
        truth = 0.7 * moved + torch.minimum((1 + floor) * there, (1 + ceiling) * there)
        off = truth - values(eta, d)
        broken = broken or bool((off < -1e-12).any())
        low = min(low, off.amin().item())
    assert broken is (wrong is not None)
    assert wrong is not None or low < 0.3


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("squares", [False, True])
def test_relus_are_below_what_they_give_and_lose_less_than_their_symbols(*, squares: bool, wrong: bool) -> None:
    """Two layers of them, with noise between; a line on the other side is noticed."""
    generator = torch.Generator().manual_seed(5)
    gains = list[Tensor]()
    broken = False
    for _ in range(30):
        noise = Noise.of(1, 3, torch.zeros(1).double(), squares=squares)
        start = noise.new(1, ball=False)
        weights = [torch.randn(*shape, generator=generator).double() for shape in ((5, 3), (4, 6), (3, 9))]
        columns = torch.zeros(1, 5, noise.size).double()
        columns[0, :, :3], columns[0, :, start] = weights[0], 0.1 * torch.randn(5, generator=generator)
        zero, given = torch.zeros(1, 5).double(), torch.randn(1, 5, generator=generator).double() / 2
        first = positive_power(Form(noise, given, columns, zero), 1.0)
        moved = Form(noise, zero[:, :1], columns[:, :1], zero[:, :1])
        second = positive_power(join(first, moved).linear(weights[1]), 1.0)
        found = join(first, second).linear(weights[2])
        d, e = points(generator, 3000, 3), torch.randint(0, 2, (3000, 1), generator=generator).double() * 2 - 1
        change = d @ weights[0].mT + e * columns[0, :, start]
        one = torch.relu(given + change)
        two = torch.relu(torch.cat([one, change[:, :1]], -1) @ weights[1].mT)
        truth = torch.cat([one, two], -1) @ weights[2].mT
        kinks = [kink.some(0) for kink in noise.kinks]
        if wrong:
            kinks = [replace(kink, center=-kink.center) for kink in kinks]
        plain, where = quadratic_of(found)[0].least()
        better = from_below(found, kinks, where[:, None])
        broken = broken or bool((truth < values(better, d) - 1e-12).any())
        gains.append(better.least()[0] - plain)
    assert broken is wrong
    assert wrong or torch.cat(gains).mean() > 0.1 * (1 if squares else 2)
