"""The checks of `doctor`: of this machine, and of the exporter that answers. A check yields its findings.

Other folders import: `exporter`, `machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Run one check. An exception becomes a finding."""
    try:
        return tuple(check())
    except Exception as error:  # noqa: BLE001 - each check fails alone, also on a broken node
        return (Finding(name, WARN, f"the check failed: {str(error) or type(error).__name__}"),)
