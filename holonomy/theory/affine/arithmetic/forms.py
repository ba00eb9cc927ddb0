r"""Affine forms whose noise lives in balls and intervals, many side by side: linear maps, sums, bounds.

A form encloses a vector of :math:`R^k` that depends on unknowns ("noise"):

.. math:: y \in c + \sum_g A_g e_g + [-b, b], \qquad |e_g|_2 \le 1 \text{ or } |e_g|_\infty \le 1 .

The first group is the perturbation over its radius; the others are remainders of nonlinear operations, or *tied*:
further coordinates of the perturbation, which fill one ball with the first. Groups are shared: two forms that hold the
same group move together, and their sum adds columns with sign. The interval :math:`[-b, b]`, the *box*, is a remainder
that nobody tracks; rounding goes there.

Forms are batched over problems: axes ``(problem, entry)`` of the centre, ``(problem, entry, column)`` of the columns.
Groups are numbered in the order in which they are made, and a form that is older than a group has no columns of it.

**Rounding.** Everything is float64. A product of n terms is off by at most :math:`(n + 2) u` of the sum of the absolute
terms (Higham 2002, section 3.1), u the spacing at one; :meth:`Form.linear` adds this to the box. The other operations
do the same with :data:`ROUNDING` of what they add, and sums of boxes are rounded up. So an enclosure holds for real
arithmetic on the weights and constants that it is given; library functions (``exp``, ``asinh``) are taken to be right
to :data:`ROUNDING`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from holonomy import numerics
from holonomy._shapes import Bool, Float, Int

UNIT = torch.finfo(torch.float64).eps
# Relative; more than a short chain of float64 operations and one library function lose.
ROUNDING = 64 * UNIT


@dataclass(frozen=True)
class Group:
    """Columns ``start`` to ``stop``: a vector in the unit ball, or numbers in [-1, 1]; who made them.

    The first group and those that are tied to it are in one ball. A group of ``squares`` holds the products of the
    coordinates of the first, see :mod:`~holonomy.theory.affine.arithmetic.squares`.
    """

    start: int
    stop: int
    ball: bool
    owner: str
    tied: bool = False
    squares: bool = False


@dataclass
class Noise:
    """The groups of one computation, and the problems in which an operation found no finite bound.

    ``steepest`` is the most that a denominator moves relative to its centre. Where all tokens move, ``tokens`` says
    whose perturbation the first group is, and ``frame`` is what of the others' the tied groups are: orthonormal rows.
    ``kinks`` are the ReLUs so far.
    """

    groups: list[Group]
    failed: Bool[Tensor, " problem"]
    owner: str = "input"
    tokens: Int[Tensor, " problem"] | None = None
    frame: Float[Tensor, "row others"] | None = None
    steepest: Float[Tensor, " problem"] = field(init=False)
    kinks: list[Kink] = field(init=False)

    def __post_init__(self) -> None:
        """No denominator and no ReLU is known yet."""
        self.kinks = []
        self.steepest = torch.zeros_like(self.failed, dtype=torch.float64)

    @classmethod
    def of(cls, problems: int, dim: int, like: Tensor, *, squares: bool = False) -> Noise:
        """Noise with the first group alone, or with its squares."""
        groups = [Group(0, dim, ball=True, owner="input", tied=True)]
        if squares:
            stop = dim + dim * (dim + 1) // 2
            groups.append(Group(dim, stop, ball=True, owner="second order", squares=True))
        return cls(groups, like.new_zeros(problems, dtype=torch.bool))

    @property
    def squares(self) -> list[Group]:
        """The group of squares, if there is one: always the second."""
        return [group for group in self.groups[1:2] if group.squares]

    @property
    def size(self) -> int:
        """The number of columns so far."""
        return self.groups[-1].stop

    def new(self, size: int, *, ball: bool, tied: bool = False) -> int:
        """Make a group; its first column."""
        start = self.size
        self.groups.append(Group(start, start + size, ball, self.owner, tied))
        return start

    def fail(self, where: Bool[Tensor, " problem"]) -> None:
        """Note problems in which there is no bound; their forms hold arbitrary numbers from here on."""
        self.failed = self.failed | where


@dataclass(frozen=True)
class Form:
    """Enclosures of vectors, one a problem."""

    noise: Noise
    center: Float[Tensor, "problem entry"]
    columns: Float[Tensor, "problem entry column"]
    box: Float[Tensor, "problem entry"]

    def __getitem__(self, entries: slice) -> Form:
        """Some entries."""
        return Form(self.noise, self.center[:, entries], self.columns[:, entries], self.box[:, entries])

    def some(self, problem: int, entries: Tensor | slice = slice(None)) -> Form:
        """Some entries of one problem."""
        parts = (part[problem, entries][None] for part in (self.center, self.columns, self.box))
        return Form(self.noise, *parts)

    @property
    def gradient(self) -> Float[Tensor, "problem entry first"]:
        """The columns of the first group and of those that are tied to it; none of a constant."""
        tied = [group for group in self.noise.groups if group.tied]
        if len(tied) == 1 or not self.columns.shape[-1]:
            return self.columns[..., : tied[0].stop]
        wide = _padded(self.columns, max(tied[-1].stop, self.columns.shape[-1]))
        return torch.cat([wide[..., group.start : group.stop] for group in tied], -1)

    def parts(self) -> list[tuple[Group, Float[Tensor, "problem entry column"]]]:
        """The groups that the form has columns of, but those of the gradient, and these columns."""
        # All are cut at once: on the way back each slice would make a table of all columns.
        groups = [group for group in self.noise.groups if group.stop <= self.columns.shape[-1]]
        cut = self.columns.split([group.stop - group.start for group in groups], -1)
        return [(group, part) for group, part in zip(groups, cut, strict=True) if not group.tied]

    def linear(self, weight: Float[Tensor, "..."], bias: Tensor | float = 0.0) -> Form:
        r""":math:`W y + b`, exact but for rounding; one W ``(out, in)`` or one a problem ``(problem, out, in)``."""
        size = weight.abs()
        terms = weight.shape[-1] + 2
        mass = self.center.abs() + self.mass()
        moved = (size @ mass[..., None]).squeeze(-1)
        loss = (moved + abs(bias)) * (terms * UNIT)
        center = (weight @ self.center[..., None]).squeeze(-1) + bias
        box = (size @ self.box[..., None]).squeeze(-1) * (1 + terms * UNIT)
        return Form(self.noise, center, weight @ self.columns, box + loss)

    def __mul__(self, factor: Tensor | float) -> Form:
        """Multiply by known numbers, one for each entry or for all, ``(problem, entry)`` or less."""
        factor = torch.as_tensor(factor, dtype=self.center.dtype)
        center, size = self.center * factor, factor.abs()
        columns = self.columns * (factor[..., None] if factor.ndim else factor)
        return Form(self.noise, center, columns, self.box * size + UNIT * (center.abs() + size * self.mass()))

    def plus(self, *others: Form) -> Form:
        """The sum with others: columns of one group are added."""
        forms = (self, *others)
        wide = _wide(forms)
        center = sum((form.center for form in others), self.center)
        box = sum((form.box for form in others), self.box)
        loss = sum((form.center.abs() + form.mass() for form in others), self.center.abs() + self.mass())
        return Form(self.noise, center, sum(wide[1:], wide[0]), box + loss * (len(forms) * UNIT))

    def __add__(self, other: Form) -> Form:
        """The sum of two."""
        return self.plus(other)

    def __sub__(self, other: Form) -> Form:
        """The difference of two."""
        return self.plus(other * -1.0)

    def with_box(self, box: Float[Tensor, "problem entry"]) -> Form:
        """The form with a larger box."""
        return replace(self, box=(self.box + box) * (1 + ROUNDING))

    def apart(self, center: Tensor, radius: Tensor) -> Form:
        """The form plus intervals about ``center`` ``(problem, entry)``: one new symbol for each entry."""
        wide = self.with_group(torch.diag_embed(radius).expand(*self.center.shape, -1), ball=False)
        rounding = ROUNDING * (self.center.abs() + center.abs() + radius)
        return replace(wide, center=self.center + center).with_box(rounding)

    def with_ball(self, matrix: Float[Tensor, "problem entry column"]) -> Form:
        """The form plus the image of a new unit ball."""
        return self.with_group(matrix, ball=True)

    def with_group(self, matrix: Float[Tensor, "problem entry column"], *, ball: bool) -> Form:
        """The form plus the image of a new group: of a unit ball, or of an interval for each column."""
        start = self.noise.new(matrix.shape[-1], ball=ball)
        missing = self.columns.new_zeros(()).expand(*self.columns.shape[:-1], start - self.columns.shape[-1])
        return replace(self, columns=torch.cat([self.columns, missing, matrix], -1))

    def spread(self) -> Float[Tensor, "problem entry"]:
        r"""How far each entry is from its centre at most: :math:`\sum_g |A_g|_{row} + b`, attained but by squares."""
        total = self.remainders() + self.gradient.norm(dim=-1)
        for group in self.noise.squares:
            total = total + self.columns[..., group.start : group.stop].norm(dim=-1)
        return total * (1 + ROUNDING)

    def remainders(self) -> Float[Tensor, "problem entry"]:
        """How far each entry is moved at most by all groups but the gradient and the squares."""
        balls, intervals = self._parts(squares=False)
        total = self.box + intervals
        for part in balls:
            total = total + part.norm(dim=-1).sum(0)
        return total * (1 + ROUNDING)

    def reach(self, *, rest: bool = False) -> Float[Tensor, " problem"]:
        r"""How far the vector is from its centre at most, in l2.

        The sum over balls of :math:`|A_g|_2`, and for all interval columns B together the length of the row sums
        :math:`\sum_j |b_{kj}|`, which is at most :math:`\sum_j |b_j|`. ``rest`` leaves the gradient out.
        """
        balls, intervals = self._parts(squares=True)
        total = self.box.norm(dim=-1) + intervals.norm(dim=-1)
        if not rest and self.columns.shape[-1]:
            total = total + largest_singular_value(self.gradient)
        for part in balls:
            total = total + largest_singular_value(part).sum(0)
        return total * (1 + ROUNDING)

    def _parts(self, *, squares: bool) -> tuple[list[Tensor], Float[Tensor, "problem entry"]]:
        """The columns of balls but the gradient, those of one width together, axes (ball, problem, entry, column)."""
        # Then the sums of absolute interval columns. ``squares`` counts the squares as a ball. Each is one operation on
        # many groups, of which there are about a hundred: intervals that lie side by side are cut out as one.
        groups = [group for group in self.noise.groups if group.stop <= self.columns.shape[-1]]
        runs = [list(run) for _, run in groupby(groups, lambda group: group if group.ball else None)]
        cut = self.columns.split([run[-1].stop - run[0].start for run in runs], -1)
        balls, intervals = dict[int, list[Tensor]](), torch.zeros_like(self.box)
        for (first, *_), part in zip(runs, cut, strict=True):
            if not first.ball:
                intervals = intervals + part.abs().sum(-1)
            elif not first.tied and (squares or not first.squares):
                balls.setdefault(part.shape[-1], []).append(part)
        return [torch.stack(parts) for parts in balls.values()], intervals

    def mass(self) -> Float[Tensor, "problem entry"]:
        """At least the sum of all absolute columns, and the box: by Cauchy-Schwarz, as a norm is faster to compute."""
        return self.columns.norm(dim=-1) * math.sqrt(self.columns.shape[-1]) * (1 + ROUNDING) + self.box


@dataclass(frozen=True)
class Kink:
    """ReLUs of a form y: slope y + bend x^2 + middle, and half times symbols, whose columns begin at ``start``.

    x is what the perturbation gives to first order, and y - x is within ``rest`` of ``center``.
    """

    form: Form
    start: int
    slope: Float[Tensor, "problem entry"]
    bend: Float[Tensor, "problem entry"]
    middle: Float[Tensor, "problem entry"]
    half: Float[Tensor, "problem entry"]
    center: Float[Tensor, "problem entry"]
    rest: Float[Tensor, "problem entry"]

    def some(self, problem: int) -> Kink:
        """Those of one problem."""
        parts = (self.slope, self.bend, self.middle, self.half, self.center, self.rest)
        return Kink(self.form.some(problem), self.start, *(part[problem][None] for part in parts))


def constant(noise: Noise, value: Float[Tensor, "problem entry"]) -> Form:
    """A vector that nothing moves."""
    return Form(noise, value, value.new_zeros(*value.shape, 0), torch.zeros_like(value))


def join(*forms: Form) -> Form:
    """The entries of all, one after the other."""
    center, box = torch.cat([form.center for form in forms], -1), torch.cat([form.box for form in forms], -1)
    return Form(forms[0].noise, center, torch.cat(_wide(forms), -2), box)


def select(where: Bool[Tensor, " problem"], one: Form, other: Form) -> Form:
    """In each problem, one of two enclosures of one thing."""
    columns, others = _wide((one, other))
    pick = where[:, None]
    center, box = torch.where(pick, one.center, other.center), torch.where(pick, one.box, other.box)
    return Form(one.noise, center, torch.where(pick[..., None], columns, others), box)


def largest_singular_value(matrix: Float[Tensor, "*problem entry column"]) -> Float[Tensor, "*problem"]:
    """The spectral norm, from the smaller Gram matrix."""
    matrix = matrix if matrix.shape[-1] <= matrix.shape[-2] else matrix.mT
    if min(matrix.shape[-2:]) <= 1:
        return matrix.norm(dim=(-2, -1))
    gram = matrix.mT @ matrix
    # The eigenvalues are off by rounding of the largest.
    top = eigenvalues(gram)[..., -1].clamp(min=0)
    return numerics.root(top + ROUNDING * gram.diagonal(dim1=-2, dim2=-1).sum(-1))


def eigenvalues(matrix: Float[Tensor, "*problem entry entry"]) -> Float[Tensor, "*problem entry"]:
    """Those of symmetric matrices, in ascending order; nan where a matrix is not finite."""
    finite = torch.isfinite(matrix.sum((-2, -1)))
    found = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrix, 0.0))
    return torch.where(finite[..., None], found, torch.nan)


def _padded(columns: Tensor, size: int) -> Tensor:
    missing = size - columns.shape[-1]
    return columns if missing == 0 else torch.nn.functional.pad(columns, (0, missing))


def _wide(forms: tuple[Form, ...] | list[Form]) -> list[Tensor]:
    size = max(form.columns.shape[-1] for form in forms)
    return [_padded(form.columns, size) for form in forms]
