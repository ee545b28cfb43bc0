from __future__ import annotations

import pytest

from gpumem_exporter.view.growth import growth

GIB = 1 << 30
STEP = 10


def points(*values: float) -> list[tuple[float, int]]:
    return [(STEP * index, round(value * GIB)) for index, value in enumerate(values)]


def line(count: int, start: float = 10.0, per_hour: float = 6.0) -> list[float]:
    return [start + per_hour * STEP * index / 3600 for index in range(count)]


def test_a_leak_grows_by_its_rate_since_the_last_restart() -> None:
    for values, since_seconds in ((line(120), 0), ([*line(60, 30.0), *line(90)], 60 * STEP)):
        found = growth(points(*values))
        assert found is not None
        assert found.bytes_per_hour == pytest.approx(6 * GIB, rel=0.05)
        assert found.since_seconds == since_seconds


@pytest.mark.parametrize(
    "values",
    [
        (),
        line(20),  # too short
        [10.0] * 200,
        [*line(30, 0.0, 120.0), *[10.0] * 170],  # a start, then a steady training
        [10.0 + 5 * (index % 7 == 0) for index in range(200)],  # steps
        [10.0 + 0.0001 * index for index in range(200)],  # noise
        line(120, 20.0, -6.0),  # shrinks
        [*[10.0] * 150, *[14.0] * 50],  # one evaluation
    ],
)
def test_what_does_not_last_is_no_growth(values: list[float]) -> None:
    assert growth(points(*values)) is None
