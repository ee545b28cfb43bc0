"""The search for the largest number that fits, where each try is dear."""

from __future__ import annotations

__all__ = ["Bisection"]


class Bisection:
    """Which number to try next: doubling what fits, halving what does not, then the middle.

    Args:
        start: the first one.
        maximum: the largest one.
    """

    def __init__(self, start: int, maximum: int) -> None:
        self.fits = 0
        self._fails = maximum + 1
        self._start, self._maximum = start, maximum

    def next(self) -> int | None:
        """The number to try; None when the largest that fits is known."""
        if self._fails - self.fits <= 1:
            return None
        if self._fails > self._maximum:  # nothing has failed yet
            return min(2 * self.fits, self._maximum) if self.fits else self._start
        return (self.fits + self._fails) // 2

    def tell(self, number: int, *, fits: bool) -> None:
        """What became of it."""
        if fits:
            self.fits = number
        else:
            self._fails = number
