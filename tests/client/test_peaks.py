from __future__ import annotations

from typing import Any

from gpumem_client.phases.peaks import DevicePeaks


def state(allocated_peak: int, reserved_peak: int = 100, **other: int) -> dict[str, Any]:
    peaks = {"allocated_bytes": allocated_peak, "reserved_bytes": reserved_peak, **other}
    return {name: {"peak": peak, "current": 0} for name, peak in peaks.items()}


def test_any_falling_peak_is_a_reset_even_if_others_have_risen_again() -> None:
    device = DevicePeaks()
    device.note(state(50, 100, segment=8))
    device.note(state(60, 100, segment=3))
    assert device.resets == 1


def test_a_reset_by_the_reporter_is_counted_once() -> None:
    device = DevicePeaks()
    for peak in (50, 10, 10):
        device.note(state(peak))
        device.reset()
    assert device.resets == 3


def test_a_missing_statistic_is_no_reset() -> None:
    device = DevicePeaks()
    for values in (state(50, active_bytes=50), state(50), {}, state(50, active_bytes=50)):
        device.note(values)
    assert device.resets == 0
