"""Searches for the largest number that fits, with few tries."""

from __future__ import annotations

__all__ = ["Bisection"]


class Bisection:
    """Chooses the next number to try: doubles while numbers fit, halves while they do not, then bisects.

    Args:
        start: the first number.
        maximum: the largest number.

    Attributes:
        fits: the largest number that fits so far.
        fails: the smallest number that does not fit so far.
    """

    def __init__(self, start: int, maximum: int) -> None:
        self.fits = 0
        self.fails = maximum + 1
        self._start, self._maximum = start, maximum

    def next(self) -> int | None:
        """Return the next number; None once the largest number that fits is known."""
        if self.fails - self.fits <= 1:
            return None
        if self.fails > self._maximum:  # nothing has failed yet
            return min(2 * self.fits, self._maximum) if self.fits else self._start
        return (self.fits + self.fails) // 2

    def record(self, number: int, *, fits: bool) -> None:
        """Record whether this number fitted."""
        if fits:
            self.fits = number
        else:
            self.fails = number
