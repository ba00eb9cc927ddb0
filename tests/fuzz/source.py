"""Choices that make a call: drawn at random, written down, played again, and made simpler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["Source", "simplest"]

Option = TypeVar("Option")


class Source:
    """Choices that are played as given, then drawn from a seed; without a seed, the simplest ones.

    Attributes:
        choices: what was chosen so far.
    """

    def __init__(self, played: Sequence[int] = (), seed: str | None = None) -> None:
        self._played = played
        self._random = None if seed is None else random.Random(seed)
        self.choices: list[int] = []

    def below(self, count: int) -> int:
        """Choose a number in [0, count), of which zero is the simplest."""
        place = len(self.choices)
        if place < len(self._played):
            chosen = min(self._played[place], count - 1)
        else:
            chosen = int(self._random.random() * count) if self._random else 0
        self.choices.append(chosen)
        return chosen

    def pick(self, options: Sequence[Option]) -> Option:
        """Choose one of several, of which the first is the simplest."""
        return options[self.below(len(options))]

    def rarely(self, one_in: int) -> bool:
        """Choose the less simple of two, once in so many times."""
        return self.below(one_in) == one_in - 1 > 0


def _simpler(choices: list[int], place: int) -> Iterator[list[int]]:
    """Without one of the choices, so that later ones take its place, or with a smaller one."""
    before, chosen, after = choices[:place], choices[place : place + 1], choices[place + 1 :]
    if after:
        yield [*before, *after]
    for smaller in sorted({0, *(x // 2 for x in chosen), *(x - 1 for x in chosen)}):
        if 0 <= smaller < max(chosen, default=0):
            yield [*before, smaller, *after]


def simplest(choices: list[int], fails: Callable[[list[int]], bool], seconds: float = 10.0) -> list[int]:
    """Make choices simpler or leave them out, one by one, as long as what they make still fails."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for place in range(len(choices)):
            for tried in _simpler(choices, place):
                if time.monotonic() > end:
                    return choices
                if fails(tried):
                    choices, changed = tried, True
                    break
    return choices
