"""Products of two coordinates of the perturbation: exact, in fifty digits, and certificates are larger with them."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from mpmath import mp, mpf

from holonomy.models import Hypformer
from holonomy.theory.affine import enclosure
from holonomy.theory.affine.arithmetic import entrywise, products, squares
from holonomy.theory.affine.arithmetic.forms import Form, Noise
from holonomy.theory.affine.enclosure import Enclosure
from tests.reference import quadratic_forms

pytestmark = pytest.mark.usefixtures("without_shape_checks")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_columns_and_matrices_are_those_of_the_reference(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    one, other, d = torch.randn(3, size, generator=generator, dtype=torch.float64)
    columns = squares.products(one, other)
    product = (one @ d).item() * (other @ d).item()
    at = torch.tensor(quadratic_forms.squares(d.tolist()), dtype=torch.float64)
    assert (columns @ at).item() == pytest.approx(product, rel=1e-13)
    assert at.norm().item() == pytest.approx((d @ d).item(), rel=1e-13)
    matrix = squares.symmetric(columns, size)
    assert quadratic_forms.value(matrix.tolist(), d.tolist()) == pytest.approx(product, rel=1e-13)
    assert (matrix == matrix.mT).all()


def moved(generator: torch.Generator, entries: int, *, squared: bool = True) -> Form:
    """A form of numbers of many sizes whose noise is the perturbation and its squares."""
    noise = Noise.of(1, 3, torch.zeros(1).double(), squares=True)
    size = 10 ** (6 * torch.rand(1, entries, 1, generator=generator, dtype=torch.float64) - 3)
    columns = torch.randn(1, entries, noise.size, generator=generator, dtype=torch.float64) * size
    columns[..., 3:] *= squared
    center = torch.randn(1, entries, generator=generator, dtype=torch.float64) * size[..., 0]
    return Form(noise, center, columns, torch.zeros_like(center))


def in_digits(form: Form, noise: list[mpf]) -> list[mpf]:
    """Entries of a form at noise in many digits; later groups and the box are left out."""
    rows = [[mpf(value) for value in row[: len(noise)]] for row in form.columns[0].tolist()]
    sums = [mpmath.fsum(a * b for a, b in zip(row, noise, strict=False)) for row in rows]
    return [mpf(center) + part for center, part in zip(form.center[0].tolist(), sums, strict=True)]


OPERATIONS: dict[str, tuple[Callable[[Form], Form], Callable[[list[mpf]], list[mpf]]]] = {
    "scale": (lambda y: products.scale(y[:1], y[1:]), lambda y: [y[0] * each for each in y[1:]]),
    "inner": (lambda y: products.inner(y[:2], y[2:]), lambda y: [y[0] * y[2] + y[1] * y[3]]),
    "squared length": (products.squared_length, lambda y: [mpmath.fsum(each**2 for each in y)]),
    "relu squared": (
        lambda y: entrywise.positive_power(y, 2.0), lambda y: [max(each, mpf(0)) ** 2 for each in y]
    ),
}  # fmt: skip


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_quadratic_is_exact_to_the_last_digit(name: str, *, squared: bool) -> None:
    """Of forms without squares a product leaves rounding alone; of those with squares what is in its new groups."""
    enclose, truth = OPERATIONS[name]
    generator = torch.Generator().manual_seed(11)
    with mp.workdps(50):
        for _ in range(20):
            given = moved(generator, 4, squared=squared)
            found = enclose(given)
            room = found.remainders()[0].tolist()
            drawn = [mpf(value) for value in torch.randn(3, generator=generator).tolist()]
            d = [value / mpmath.norm(drawn) for value in drawn]
            noise = [*d, *(d[i] * d[j] * (1 if i == j else mpmath.sqrt(2)) for i in range(3) for j in range(i, 3))]
            pairs = zip(truth(in_digits(given, noise)), in_digits(found, noise), room, strict=True)
            assert all(abs(a - b) <= left for a, b, left in pairs)
            if not squared and name != "relu squared":
                size = found.center.abs().amax() + found.columns.abs().amax()
                assert max(room) <= 1e-11 * size


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_bounds_of_entries_are_attained(factor: float) -> None:
    generator = torch.Generator().manual_seed(2)
    form = moved(generator, 6)
    low, high = squares.bounds(form)
    d = torch.nn.functional.normalize(torch.randn(20000, 3, generator=generator).double(), dim=-1)
    d = torch.cat([d, d * torch.rand(20000, 1, generator=generator)])
    values = form.center + torch.cat([d, squares.products(d, d)], -1) @ form.columns[0].T
    middle, half = (low + high) / 2, factor * (high - low) / 2
    inside = (values >= middle - half) & (values <= middle + half)
    assert bool(inside.all()) is (factor == 1.0)
    radius = form.gradient.norm(dim=-1)
    shift, rest = squares.rest_of(form)
    assert ((low >= form.center + shift - radius - rest) & (high <= form.center + shift + radius + rest)).all()


@pytest.mark.parametrize("interval", [0.0, 0.2])
def test_a_relu_is_on_both_sides_of_its_parabola(interval: float) -> None:
    """Where nothing but the perturbation moves, its remainder is a quarter of that of the chord, and attained."""
    noise = Noise.of(1, 1, torch.zeros(1).double(), squares=True)
    noise.new(1, ball=False)
    zero, columns = torch.zeros(1, 1).double(), torch.tensor([[[1.0, 0.0, interval]]]).double()
    found = entrywise.positive_power(Form(noise, zero, columns, zero), 1.0)
    grid = torch.linspace(-1, 1, 401).double()
    at = torch.cartesian_prod(grid, grid)
    d, w = at.T
    left = torch.relu(d + interval * w) - found.center[0] - torch.stack([d, d * d, w], -1) @ found.columns[0, 0, :3]
    half = (found.columns[0, 0, -1] + found.box[0, 0]).item()
    assert left.abs().max() <= half
    if not interval:
        assert half == pytest.approx(1 / 16, rel=1e-6)
        assert left.abs().max() > 0.99 * half


@pytest.mark.parametrize("graph_encoder", [None, "gcn"])
@torch.no_grad()
def test_certificates_are_larger_with_squares(graph_encoder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ring = torch.stack([torch.arange(12), torch.arange(12).roll(1)])
    edges = torch.cat([ring, ring.flip(0)], 1)
    model = Hypformer(4, 8, 3, layers=1, graph_encoder=graph_encoder).eval()
    x, nodes = torch.randn(12, 4), torch.arange(12)
    found = []
    for most in (16, 0):
        monkeypatch.setattr(enclosure, "_MOST_SQUARED", most)
        asked = Enclosure(model, x, edges)
        target, radius = asked.logits.argmax(-1), torch.full((12,), 0.1).double()
        found.append(asked.margins(nodes, nodes, radius, target).affine)
    gain = (found[0] - found[1])[torch.isfinite(found[0]) & torch.isfinite(found[1])]
    assert gain.median() > 1e-3
