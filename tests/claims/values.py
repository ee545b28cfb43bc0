"""The values that a claim measures, and the value that each must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.claims.place import Place

Scalar = int | float | bool | str | None


class NotAvailableError(Exception):
    """The claim cannot be tested here; the text says why."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a claim, in bytes unless its name says otherwise.

    Attributes:
        value: the measured value; None if it is absent.
        expected: the value that the process, the driver or arithmetic requires.
        per_device: whether the value differs between devices; otherwise an emulated node must have the real one's.
    """

    value: Scalar
    expected: Scalar
    per_device: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the value is not the expected one."""
        return self.value != self.expected


Values = Mapping[str, Value]


def equal(value: Scalar, expected: Scalar, *, per_device: bool = False) -> Value:
    """Return a value that must equal the value of an independent source."""
    return Value(value, expected, per_device)


def measured(value: Scalar, *, per_device: bool = False) -> Value:
    """Return a value without an independent source; the caller compares it."""
    return Value(value, value, per_device)


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that is true wherever PyTorch runs with an exporter.

    Attributes:
        name: a sentence.
        measure: measures it in a place; raises NotAvailableError if that is not possible there.
    """

    name: str
    measure: Callable[[Place], Values]


class SameNumber:
    """One number from several sources, measured in several rounds; the first source is the expected value."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._differences: list[str] = []
        self._rounds = 0
        self._nonzero_rounds = 0

    def add(self, sources: Mapping[str, float | None]) -> int:
        """Add a round; None differs from every number. Returns the expected value."""
        self._rounds += 1
        expected, *_ = sources.values()
        assert expected is not None
        for name, number in sources.items():
            self._sums[name] = self._sums.get(name, 0) + int(number or 0)
            if number != expected:
                self._differences.append(f"{name} in round {self._rounds}: {number}, not {expected}")
        self._nonzero_rounds += expected > 0
        return int(expected)

    def values(self, *, at_least: int = 1) -> Values:
        """Return the sum of each source over all rounds, and the rounds in which sources differ.

        Fails if the number was above zero in fewer than `at_least` rounds: nothing was tested.
        """
        assert self._nonzero_rounds >= at_least, f"above zero in {self._nonzero_rounds} of {self._rounds} rounds only"
        expected = next(iter(self._sums.values()))
        sums = {name: equal(number, expected) for name, number in self._sums.items()}
        return {**sums, "differences": equal("; ".join(self._differences), "")}


def require(values: Values) -> None:
    """Assert that each value is the expected one."""
    assert values
    wrong = [f"{name} is {v.value!r}, not {v.expected!r}" for name, v in values.items() if v.wrong]
    assert not wrong, "\n".join(wrong)
