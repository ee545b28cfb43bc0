"""The page of `tests.gpu.report` shows where an emulated node and a real device agree, and where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.claims.place import Place
from tests.claims.values import Claim, NotAvailableError, Values, equal, measured
from tests.gpu.report import Report

UUID = "GPU-0123abcd-1111-2222-3333-444455556666"


class Sides:
    """Two places in which nothing runs, and the report of claims with fixed results."""

    def __init__(self, folder: Path) -> None:
        self.places = {"emulated": Place(folder), "real": Place(folder)}
        self.path = folder / "out" / "report.md"
        self.report = Report(self.path, {"GPU": "model"}, self.places, [UUID])

    def measure(self, emulated: Any, real: Any, name: str = "a claim") -> str:
        """Measure a claim with a result for each place, an exception or values; return the file."""

        def measured_in(place: Place) -> Values:
            result = emulated if place is self.places["emulated"] else real
            if isinstance(result, BaseException):
                raise result
            return result if isinstance(result, dict) else {"freed": result}

        self.report.measure([Claim(name, measured_in)])
        return self.path.read_text()


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def rows(text: str, heading: str) -> list[str]:
    """Return the rows of a section's table."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def test_values_agree_that_each_side_expects(sides: Sides) -> None:
    text = sides.measure(equal(5, 5, per_device=True), equal(1234567.0, 1234567, per_device=True))
    assert rows(text, "Agreements") == ["| a claim | freed | 5 | 1,234,567 |"]
    assert sides.report.agrees


@pytest.mark.parametrize(
    ("emulated", "real", "cells"),
    [
        (equal(5, 5), equal(6, 6), "5 | 6"),
        (measured(None), measured(0), "absent | 0"),
        (equal(5, 4), equal(5, 4), "5 instead of 4 | 5 instead of 4"),
        (equal(4, 4), equal(5, 4, per_device=True), "4 | 5 instead of 4"),
        (equal(4, 4), {}, "4 | –"),
    ],
    ids=["two values", "absent in one", "not the expected value", "not the device's value", "not measured in one"],
)
def test_values_disagree(sides: Sides, emulated: Any, real: Any, cells: str) -> None:
    assert rows(sides.measure(emulated, real), "Disagreements") == [f"| a claim | freed | {cells} |"]
    assert not sides.report.agrees


def test_a_claim_that_raises_disagrees_and_the_next_one_runs(sides: Sides) -> None:
    sides.measure(equal(7, 7), RuntimeError(f"CUDA error: out of | memory {UUID}"), "first")
    text = sides.measure(equal(1, 1), equal(1, 1), "second")
    assert not sides.report.agrees
    hidden = "GPU-00000000-0000-0000-0000-000000000000"
    (failed,) = rows(text, "Disagreements")
    assert failed == f"| first | the claim | measured | RuntimeError: CUDA error: out of \\| memory {hidden} |"
    assert rows(text, "Not compared") == ["| first | freed | 7 | – |"]
    assert rows(text, "Agreements") == ["| second | freed | 1 | 1 |"]


def test_a_claim_that_is_not_available_is_not_compared(sides: Sides) -> None:
    text = sides.measure(equal(1, 1), NotAvailableError("torch before 2.7"))
    assert rows(text, "Not compared") == [
        "| a claim | the claim | measured | torch before 2.7 |",
        "| a claim | freed | 1 | – |",
    ]
    assert sides.report.agrees
