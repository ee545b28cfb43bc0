from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.columns import draw_strip, lengths
from gpumem_exporter.cli.top.detail import timeline
from tests.support.builders.live_documents import GIB, history


def _device(total: int, free: int, *jobs: tuple[str, int | None, int | None]) -> dict[str, Any]:
    strip = [
        {"name": name, "color": "green", "used_bytes": used, "idle_cache_bytes": idle} for name, used, idle in jobs
    ]
    return {"memory": {"total_bytes": total, "free_bytes": free}, "strip": strip, "error": "", "dim": False}


@given(st.lists(st.integers(0, 1 << 50), max_size=12), st.integers(1, 80))
def test_the_lengths_add_up_and_each_is_within_one_character_of_its_share(sizes: list[int], width: int) -> None:
    found = lengths(sizes, width)
    total = sum(sizes)
    assert sum(found) == (width if total else 0)
    for size, length in zip(sizes, found, strict=True):
        assert abs(length - (size * width / total if total else 0)) <= 1


@pytest.mark.parametrize(
    ("device", "drawn"),
    [
        (
            _device(80, 20, ("llm-pretrain", 40, 10), ("xylem", 10, None)),
            "llm-pretrain" + "█" * 18 + "▒" * 10 + "xylem" + "█" * 5 + "░" * 10 + "·" * 20,
        ),
        (_device(40, 20, ("notebook", 20, 17)), "notebook" + "▒" * 12 + "·" * 20),
        (_device(40, 0, ("abc", 4, 0), ("a-long-name", 8, 0), ("漢字", 28, 0)), "████a-long-…漢字" + "█" * 24),
    ],
)
def test_a_strip_has_each_job_its_idle_cache_the_rest_and_what_is_free(device: dict[str, Any], drawn: str) -> None:
    assert draw_strip(device, device["memory"]["total_bytes"]).plain == drawn


def _plot(*points: int | None, series: bool = True) -> list[str]:
    """Return the lines of a history of 600 s in 78 columns, which have 60 bars."""
    past = history("a", points=[0] * len(points))
    for name in ("used", "allocated"):
        past["series"][0][name] = {"max": list(points)}
    return [line.plain for line in timeline(past if series else {**past, "series": []}, 78)]


def test_the_timeline_has_a_line_for_each_size_on_one_scale_and_the_times() -> None:
    used, allocated, idle, times = _plot(*[60 * GIB] * 300, *[30 * GIB] * 300)
    assert used == f"Used       {'█' * 30}{'▄' * 30}  60.0G"
    assert allocated == used.replace("Used     ", "Allocated")
    assert idle == f"Idle cache {'▂' * 30}{'▁' * 30}   8.0G"
    assert (times.split(), len(times)) == (["03:32", "03:42"], 71)


def test_a_part_without_a_reading_is_blank_and_its_neighbors_are_not() -> None:
    used = _plot(*[60 * GIB] * 200, *[None] * 200, *[60 * GIB] * 200)[0]
    assert used == f"Used       {'█' * 20}{' ' * 20}{'█' * 20}  60.0G"
    assert _plot(series=False)[0].split() == ["Used", "-"]
