"""The finding of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["FAIL", "PASS", "WARN", "Finding", "collect", "verdict_of"]

PASS = "PASS"  # noqa: S105 - a verdict
WARN = "WARN"
FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`."""

    check: str
    verdict: str
    """`PASS`, `WARN` (works in part) or `FAIL`."""
    detail: str
    fix: str = ""
    """How to fix it; empty if there is nothing to fix."""


def collect(check: str, look: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Run one check. An exception becomes a finding."""
    try:
        return tuple(look())
    except Exception as error:  # noqa: BLE001 - each check fails alone, also on a broken node
        return (Finding(check, WARN, f"the check failed: {str(error) or type(error).__name__}"),)


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the worst verdict."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)
