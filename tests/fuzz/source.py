"""Choices that make a call: drawn at random, written down, played again, and made simpler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
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


def simplest(choices: list[int], fails: Callable[[list[int]], bool], seconds: float = 10.0) -> list[int]:
    """Make choices simpler one by one, as long as what they make still fails."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for place in range(len(choices)):
            for smaller in sorted({0, choices[place] // 2, choices[place] - 1}):
                if not 0 <= smaller < choices[place]:
                    continue
                if time.monotonic() > end:
                    return choices
                tried = [*choices[:place], smaller, *choices[place + 1 :]]
                if fails(tried):
                    choices, changed = tried, True
                    break
    return choices
