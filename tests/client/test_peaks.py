from __future__ import annotations

from typing import Any

from gpumem_client.phases.peaks import PeakWatch


def state(allocated_peak: int, reserved_peak: int = 100, **other: int) -> dict[str, Any]:
    peaks = {"allocated_bytes": allocated_peak, "reserved_bytes": reserved_peak, **other}
    return {name: {"peak": peak, "current": 0} for name, peak in peaks.items()}


def test_any_falling_peak_is_a_reset_even_if_others_have_risen_again() -> None:
    watch = PeakWatch()
    watch.note(0, state(50, 100, segment=8))
    watch.note(0, state(60, 100, segment=3))
    assert watch.resets(0) == 1


def test_a_reset_by_the_reporter_is_counted_once() -> None:
    watch = PeakWatch()
    watch.note(0, state(50))
    watch.reset(0)
    watch.note(0, state(10))
    watch.reset(0)
    watch.note(0, state(10))
    assert watch.resets(0) == 2


def test_a_missing_statistic_is_no_reset() -> None:
    watch = PeakWatch()
    watch.note(0, state(50, active_bytes=50))
    watch.note(0, state(50))
    watch.note(0, {})
    watch.note(0, state(50, active_bytes=50))
    assert watch.resets(0) == 0
