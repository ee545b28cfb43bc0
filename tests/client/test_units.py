from __future__ import annotations

import pytest

from gpumem_client.wire.units import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (-(3 << 20), "-3.0 MiB"),
        (512 << 20, "512 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (85899345920, "80.0 GiB"),
        (1 << 63, "8.0 EiB"),
    ],
)
def test_bytes_have_iec_units_and_unknown_ones_are_a_dash(value: int | None, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.000017, "17 µs"),
        (0.0031, "3.1 ms"),
        (0.42, "0.4 s"),
        (12.2, "12 s"),
        (180, "3 min"),
        (7200, "2 h"),
        (172800, "2 d"),
    ],
)
def test_durations_have_the_unit_that_fits(value: float | None, text: str) -> None:
    assert human_seconds(value) == text
