from __future__ import annotations

import pytest

from gpumem_exporter.actions.policy.values import read_quantity, shown_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4GiB", "bytes", 4 << 30),
        ("1.5 MiB", "bytes", 3 << 19),
        ("8e9", "bytes", 8e9),
        ("2GB", "bytes", 2e9),
        ("5%", "ratio", 0.05),
        ("5 %", "ratio", 0.05),
        ("0.3", "ratio", 0.3),
        ("90s", "seconds", 90),
        ("5m", "seconds", 300),
        ("1.5h", "seconds", 5400),
        ("1d", "seconds", 86400),
    ],
)
def test_a_quantity_is_read_with_its_unit(text: str, unit: str, value: float) -> None:
    assert read_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("", "bytes"),
        ("4 gib", "bytes"),
        ("-1", "bytes"),
        ("nan", "bytes"),
        ("1e400", "bytes"),
        ("4GiB or so", "bytes"),
        ("1.01", "ratio"),
        ("5m", "ratio"),
        ("5 min", "seconds"),
        ("４", "seconds"),
    ],
)
def test_an_invalid_quantity_is_an_error_with_what_is_accepted(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=r"^(bytes|a ratio|a time), such as "):
        read_quantity(text, unit)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0, "bytes", "0 bytes"),
        (64 << 20, "bytes", "64.0 MiB"),
        (int(4.24 * 2**30), "bytes", "4.2 GiB"),
        (0.0312, "ratio", "3.12 %"),
        (61.4, "seconds", "61 s"),
        (0.25, "seconds", "0.25 s"),
    ],
)
def test_a_quantity_is_shown_with_its_unit(value: float, unit: str, shown: str) -> None:
    assert shown_quantity(value, unit) == shown
