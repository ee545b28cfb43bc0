"""What a check found, and how one check fails without costing the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["FAIL", "PASS", "WARN", "Finding", "collect", "counted", "verdict_of"]

PASS = "PASS"  # noqa: S105 - a verdict
WARN = "WARN"
FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    check: str
    verdict: str
    """`PASS`, `WARN` (works, but not all of it) or `FAIL`."""
    detail: str
    mend: str = ""
    """What to do about it; empty where there is nothing to do."""


def collect(check: str, look: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Run one check; whatever it trips over becomes its own finding."""
    try:
        return tuple(look())
    except Exception as error:  # noqa: BLE001 - each check fails alone, and an odd node is what this is run on
        return (Finding(check, WARN, f"could not be looked at: {str(error) or type(error).__name__}"),)


def counted(number: int | str, one: str, more: str) -> str:
    """How many of something, in words: `1 device`, `2 devices`."""
    return f"{number} {one if number == 1 else more}"


def verdict_of(findings: Sequence[Finding]) -> str:
    """The worst of them."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)
