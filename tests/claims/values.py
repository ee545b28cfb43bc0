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


def same(*rounds: Mapping[str, float | None], at_least: int = 1) -> Values:
    """Return the sum over all rounds of each source of one number, and the rounds in which the sources differ.

    The first source of a round has the expected value; None differs from every number. Fails if the number is above
    zero in fewer than `at_least` rounds: nothing was tested.
    """
    expected = [next(iter(sources.values())) for sources in rounds]
    assert None not in expected
    above = sum(number != 0 for number in expected)
    assert above >= at_least, f"above zero in {above} of {len(rounds)} rounds only"
    differences = [
        f"{name} in round {number}: {value}, not {wanted}"
        for number, (sources, wanted) in enumerate(zip(rounds, expected, strict=True), start=1)
        for name, value in sources.items()
        if value != wanted
    ]
    sums = {name: sum(int(sources[name] or 0) for sources in rounds) for name in rounds[0]}
    first = next(iter(sums.values()))
    return {
        **{name: equal(number, first) for name, number in sums.items()},
        "differences": equal("; ".join(differences), ""),
    }


def require(values: Values) -> None:
    """Assert that each value is the expected one."""
    assert values
    wrong = [f"{name} is {v.value!r}, not {v.expected!r}" for name, v in values.items() if v.wrong]
    assert not wrong, "\n".join(wrong)
