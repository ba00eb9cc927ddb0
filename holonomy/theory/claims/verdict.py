r"""A claim, what is measured of it, and the verdict that the measurements allow.

A claim yields *trials*, each a measured value beside a bound. A trial counts only where the claim's assumptions hold on
its input, the bound says something, and the value stands above rounding. A violation is claimed only from a measured
value that is exact or certainly too low (:attr:`Trial.kind`), a confirmation always means "on these inputs".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from holonomy import checks, numerics

Kind = Literal["exact", "lower", "upper", "equal"]
"""Whether a measured value is the quantity itself, certainly not above it, certainly not below it, or a difference of
two quantities that are equal, whose bound is rounding."""

_Layer = TypeVar("_Layer", bound=nn.Module)
_Trials = TypeVar("_Trials", bound="Callable[..., Iterable[Trial]]")


def rounding(dtype: torch.dtype) -> float:
    """Which share of the numbers that are subtracted a difference must exceed to be more than their rounding."""
    return 1000 * torch.finfo(dtype).eps


def apart(found: Tensor, wanted: Tensor, size: float = 1.0) -> tuple[float, float]:
    """The largest difference of tensors that should be equal, and the rounding of theirs, or of numbers of a size."""
    size = max(found.abs().amax().item(), wanted.abs().amax().item(), size, 1.0)
    return (found - wanted).abs().amax().item(), rounding(found.dtype) * size


@dataclass(frozen=True)
class Trial:
    r"""One measurement beside what the claim says of it: measured :math:`\le` bound.

    >>> Trial(1.0, 2.0).ratio
    0.5
    """

    measured: float  #: the value
    bound: float  #: what the claim allows; infinite or nan where it says nothing
    assumption_met: bool = True  #: whether the claim's assumptions hold on this input
    floor: float = 0.0  #: below this a measured value is rounding
    #: where on a picture's horizontal axis this trial belongs, such as ``{"n": 16}``
    at: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str = ""  #: one sentence on this input, kept where it decides the verdict
    known: float = 1.0  #: the largest ratio that is known on inputs like this one; 1 where the bound is attained
    #: tensors for a picture, of a few trials
    seen: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be compared; nan can."""
        checks.numbers(measured=self.measured, bound=self.bound, floor=self.floor, known=self.known)

    @property
    def ratio(self) -> float:
        """Measured over bound; 1 where both are zero."""
        if self.bound == 0:
            return 1.0 if self.measured == 0 else math.inf
        return self.measured / self.bound

    @property
    def counts(self) -> bool:
        """Whether it can speak for the claim."""
        return self.assumption_met and math.isfinite(self.bound) and self.measured >= self.floor

    def violates(self, kind: Kind, tolerance: float) -> bool:
        """Whether it speaks against the claim."""
        if kind == "upper" or not self.assumption_met or math.isnan(self.bound):
            return False
        slack = max(tolerance * abs(self.bound), self.floor)
        return not self.measured <= self.bound + slack  # a measured nan does


@dataclass(frozen=True)
class Verdict:
    """What was measured of one claim, and what follows.

    >>> judge("sines", "trigonometry", [Trial(2.0, 1.0)]).surprising
    True
    """

    claim: str  #: its name
    source: str  #: paper and number
    assumption_met: bool  #: whether the assumptions held on the input that decides
    measured: float  #: there, the measured value
    bound: float  #: there, what the claim allows
    ratio: float  #: measured / bound there, the largest over all trials that count
    #: ``True``, ``False``, or ``None`` where it is undecided, as no trial counts (assumptions not met, the bound says
    #: nothing, everything below the rounding floor), or the measured value is only an upper bound
    holds: bool | None
    note: str  #: why, or by which counterexample, in one sentence
    kind: Kind = "exact"  #: whether the measured value is exact, a lower or an upper bound of the quantity
    #: whether holonomy says that it holds; ``False`` where it is known to fail, ``None`` where that is open
    expected: bool | None = True
    median: float = math.nan  #: the middle ratio of the trials that count
    trials: int = 1  #: how many there were
    counted: int = 1  #: how many of them count
    seed: int = 0  #: reproduces it
    judged_on: str = ""  #: the data, where the claim is about data
    #: what the search could have seen, the largest ratio over the one that is known on such inputs. A bound times less
    #: than this would have been noticed, by a violation, or by a ratio above the known one
    sees: float = math.nan

    @property
    def surprising(self) -> bool:
        """Whether a claim that should hold is violated."""
        return self.expected is True and self.holds is False

    @property
    def sharper(self) -> bool:
        """Whether a ratio lies above the largest one known, which is news, and no violation."""
        return self.holds is True and self.sees > 1 + numerics.tolerance(torch.float32).rtol


def judge(
    claim: str,
    source: str,
    trials: Iterable[Trial],
    *,
    kind: Kind = "exact",
    expected: bool | None = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    note: str = "",
    judged_on: str = "",
) -> Verdict:
    """Let measurements decide.

    Args:
        claim: name of the claim.
        source: paper and number.
        trials: the measurements.
        kind: whether the measured values are exact, lower or upper bounds of the quantity.
        expected: what is said of the claim.
        dtype: in which was measured: float32 may exceed the truth by 1e-4, float64 by 1e-9.
        seed: reproduces the trials.
        note: the verdict's sentence, where no trial has its own.
        judged_on: the data, where the claim is about data.

    Returns:
        The verdict, on the trial of the largest ratio among those that count, or the violation if there is one.

    Raises:
        ValueError: if there are no trials.

    >>> judge("sines", "trigonometry", [Trial(math.sin(x), 1.0) for x in range(9)]).holds
    True
    """
    checks.one_of("kind", kind, get_args(Kind))
    checks.floating_dtype(dtype, needed=True)
    checks.nonnegative_int("seed", seed)
    results = checks.sequence("trials", trials, "trials", Trial)
    if not results:
        raise ValueError(f"trials must not be empty, got none for the claim {claim!r}.")
    tolerance = numerics.tolerance(dtype).rtol
    against = [trial for trial in results if trial.violates(kind, tolerance)]
    counted = [trial for trial in results if trial.counts]
    # Of nan nothing is known: it is the worst.
    decisive = max(against or counted or results[:1], key=lambda t: math.inf if math.isnan(t.ratio) else t.ratio)
    if against:
        holds, reason = False, "violated"
    elif not counted:
        holds, reason = None, _why_undecided(results)
    elif kind == "upper" and not decisive.ratio <= 1 + tolerance:
        holds, reason = None, "the measured value is an upper bound"
    else:
        holds, reason = True, ""
    return Verdict(
        claim=claim,
        source=source,
        assumption_met=decisive.assumption_met,
        measured=decisive.measured,
        bound=decisive.bound,
        ratio=decisive.ratio,
        holds=holds,
        note=decisive.note or note or reason,
        kind=kind,
        expected=expected,
        median=statistics.median(trial.ratio for trial in counted) if counted else math.nan,
        trials=len(results),
        counted=len(counted),
        seed=seed,
        judged_on=judged_on,
        sees=max((trial.ratio / trial.known for trial in counted), default=math.nan),
    )


def _why_undecided(trials: Sequence[Trial]) -> str:
    if not any(trial.assumption_met for trial in trials):
        return "the assumptions are met nowhere"
    if not any(trial.assumption_met and math.isfinite(trial.bound) for trial in trials):
        return "the bound says nothing"
    return "below the rounding floor"


@dataclass
class Draws:
    """Where a claim's trials take their random numbers, precision and number from.

    >>> Draws(seed=3).uniform(0.0, 1.0) == Draws(seed=3).uniform(0.0, 1.0)
    True
    """

    seed: int = 0  #: of the generator; every claim starts from it anew, so that one runs alone as it does among all
    device: torch.device | str = "cpu"  #: of the tensors
    dtype: torch.dtype = torch.float64  #: of the tensors
    budget: float = 1.0  #: multiplies the number of trials, 1 for the default run
    #: bonds and number of atoms of each, for the claims on data; without them they are judged on generated ones
    molecules: tuple[tuple[Tensor, int], ...] | None = None

    def __post_init__(self) -> None:
        """Seed the generator; it lives on the CPU, so that every device sees the same inputs."""
        checks.device("device", self.device)
        checks.floating_dtype(self.dtype, needed=True)
        checks.positive("budget", self.budget)
        self.generator = torch.Generator().manual_seed(checks.nonnegative_int("seed", self.seed))

    @property
    def factory_kwargs(self) -> dict[str, Any]:
        """Where tensors and layers are made, for their constructors."""
        return {"dtype": self.dtype, "device": self.device}

    def rounds(self, count: int) -> range:
        """How often to draw: ``count`` times the budget, at least once."""
        return range(max(1, math.ceil(count * self.budget)))

    def normal(self, *shape: int) -> Tensor:
        """Draw normal numbers of this dtype and device, in float64 first, so that every dtype sees the same ones."""
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between ``low`` and ``high``."""
        return low + (high - low) * torch.rand((), generator=self.generator, dtype=torch.float64).item()

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def logarithmic(self, low: float, high: float) -> float:
        """Draw a number between ``low`` and ``high``, positive both, whose logarithm is uniform."""
        return math.exp(self.uniform(math.log(low), math.log(high)))


def filled(layer: _Layer, **parameters: Tensor | float | Sequence[Any] | None) -> _Layer:
    """The layer with these numbers in its parameters, broadcast; None leaves one as it is, ``__`` stands for a dot."""
    with torch.no_grad():
        for name, numbers in parameters.items():
            if numbers is not None:
                given = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.float64)
                layer.get_parameter(name.replace("__", ".")).copy_(given)
    return layer


@contextmanager
def forked(seed: int) -> Generator[None, None, None]:
    """Let layers draw their first parameters from a seed, and give torch's generator back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, or of ours, and how to measure it.

    >>> claim = Claim("numbers.half", "arithmetic", "u <= 1", lambda draws: [Trial(draws.uniform(0.0, 1.0), 1.0)])
    >>> claim.measure(Draws())[0].holds
    True
    """

    name: str  #: family and short name, such as ``"collapse.product"``
    source: str  #: paper and number, or the certificate's letter
    statement: str  #: the claim in one line
    trials: Callable[[Draws], Iterable[Trial]]  #: draws inputs and measures
    kind: Kind = "exact"  #: whether the measured values are exact, lower or upper bounds of the quantity
    #: ``True`` it holds; ``False`` it is known to fail, and ``trials`` has a counterexample; ``None`` open
    expected: bool | None = True
    axis: str | None = None  #: the key of :attr:`Trial.at` over which a picture shows it; none if left out
    note: str = ""  #: one sentence for the verdict
    judged_on: Callable[[Draws], str] | None = None  #: names the data, where the claim is about data
    #: inputs that were found to bring the measured value nearest to the bound, beside those that are drawn; where one
    #: term of a bound matters, and where another does
    sharpest: Callable[[Draws], Iterable[Trial]] | None = None

    def measure(self, draws: Draws) -> tuple[Verdict, list[Trial]]:
        """Run the trials and judge them: the verdict, and the trials for pictures."""
        with forked(draws.seed):
            trials = [*self.trials(draws), *(self.sharpest(draws) if self.sharpest is not None else ())]
        verdict = judge(
            self.name,
            self.source,
            trials,
            kind=self.kind,
            expected=self.expected,
            dtype=draws.dtype,
            seed=draws.seed,
            note=self.note,
            judged_on="" if self.judged_on is None else self.judged_on(draws),
        )
        return verdict, trials


def _of_all_rounds(trials: Callable[..., Iterable[Trial]], count: int, draws: Draws) -> Iterator[Trial]:
    for index in draws.rounds(count):
        yield from trials(draws, index)


class Claims(list[Claim]):
    """The claims of a file, in the order of the functions that make their trials."""

    def add(
        self,
        name: str,
        source: str,
        kind: Kind = "exact",
        *,
        statement: str = "",
        expected: bool | None = True,
        axis: str | None = None,
        note: str = "",
        judged_on: Callable[[Draws], str] | None = None,
        sharpest: Callable[[Draws], Iterable[Trial]] | None = None,
        rounds: int = 0,
        **options: Any,
    ) -> Callable[[_Trials], _Trials]:
        """Add the claim whose trials the decorated function makes, of draws and these options.

        With ``rounds`` it is given the number of a round, too, and makes the trials of that one. Its docstring is the
        statement, where none is given.
        """

        def decorate(trials: _Trials) -> _Trials:
            made = partial(trials, **options) if options else trials
            if rounds:
                made = partial(_of_all_rounds, made, rounds)
            stated = statement or (trials.__doc__ or "").removesuffix(".")
            self.append(Claim(name, source, stated, made, kind, expected, axis, note, judged_on, sharpest))
            return trials

        return decorate
