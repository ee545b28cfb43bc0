"""Figures that a claim measures, and what must hold of each: here, and between two places."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.claims.place import Place

__all__ = ["Claim", "Figure", "Figures", "NotHereError", "OneNumber", "Value", "alike", "require", "shown", "true"]

Value = int | float | bool | str | None


class _Nobody(enum.Enum):
    KNOWS = "nobody knows"


class NotHereError(Exception):
    """The claim cannot be tried here; the text says why. Neither held nor broken."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a claim; of bytes unless its name says otherwise.

    Attributes:
        value: what was seen; None where there was nothing to see.
        truth: what it must be here, by whoever knows it: the process, the driver, arithmetic.
        bound: how far it may be from the same figure of another place; None: as far as it likes.
    """

    value: Value
    truth: Value | _Nobody = _Nobody.KNOWS
    bound: float | None = None

    @property
    def known(self) -> bool:
        """Whether somebody knows what it must be here."""
        return self.truth is not _Nobody.KNOWS

    @property
    def wrong(self) -> bool:
        """Whether it is not what it must be here."""
        return self.known and self.value != self.truth

    def agrees_with(self, other: Figure) -> bool:
        """Whether the two are as near to each other as they must be."""
        if self.bound is None or self.value == other.value:
            return True
        numbers = [value for value in (self.value, other.value) if isinstance(value, (int, float))]
        return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= self.bound


Figures = Mapping[str, Figure]


def shown(value: Value) -> Figure:
    """A figure of which nothing must hold."""
    return Figure(value)


def alike(value: Value, within: float = 0) -> Figure:
    """A figure that is the same in every place, or so near."""
    return Figure(value, bound=within)


def true(value: Value, truth: Value, *, everywhere: bool = True) -> Figure:
    """A figure that must be what somebody else says of it here, and the same in every place unless told otherwise."""
    return Figure(value, truth, 0 if everywhere else None)


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that holds wherever PyTorch runs below an exporter.

    Attributes:
        name: a sentence.
        measure: measures it in a place. Raises NotHereError where that cannot be done.
        alone: whether it wants the machine for itself: no process of any place runs meanwhile.
    """

    name: str
    measure: Callable[[Place], Figures]
    alone: bool = False


class OneNumber:
    """Several words for one number, round after round; the first one's is the truth."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._apart: list[str] = []
        self._rounds = 0
        self._not_zero = 0

    def add(self, words: Mapping[str, float | None]) -> int:
        """One round. A word that is None is apart from all others. Returns the number."""
        self._rounds += 1
        truth, *_ = words.values()
        assert truth is not None
        for name, number in words.items():
            self._sums[name] = self._sums.get(name, 0) + int(number or 0)
            if number != truth:
                self._apart.append(f"{name} in round {self._rounds}: {number}, not {truth}")
        self._not_zero += truth > 0
        return int(truth)

    def figures(self, *, at_least: int = 1) -> Figures:
        """Each word's sum over all rounds, and in which they are apart.

        Raises:
            AssertionError: the number was above zero in fewer rounds than `at_least`: nothing was tried.
        """
        assert self._not_zero >= at_least, f"above zero in {self._not_zero} of {self._rounds} rounds: this was no test"
        truth = next(iter(self._sums.values()))
        sums = {name: true(number, truth) for name, number in self._sums.items()}
        rounds = {"rounds": alike(self._rounds)} if self._rounds > 1 else {}
        apart = {"apart": true("; ".join(self._apart), "nowhere")} if self._apart else {}
        return {**sums, **rounds, **apart}


def require(figures: Figures) -> None:
    """For tests: each figure is what it must be here.

    Raises:
        AssertionError: with those that are not.
    """
    assert figures
    wrong = [f"{name} is {figure.value!r}, not {figure.truth!r}" for name, figure in figures.items() if figure.wrong]
    assert not wrong, "\n".join(wrong)
