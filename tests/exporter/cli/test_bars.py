from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.columns import draw_strip, lengths
from gpumem_exporter.cli.top.plot import timeline
from tests.support.live_documents import GIB, NOW, history


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
        assert abs(length - (size * width / total if total else 0)) < 1


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


def _flat(*points: int | None, step: int = 1) -> dict[str, Any]:
    """The history of a job that has nothing but tensors."""
    past = history("a", step=step, points=[0] * len(points))
    values = {"used": points, "allocated": points, "idle_cache": [0] * len(points)}
    past["series"][0] |= {name: {"max": list(series)} for name, series in values.items()}
    return past


def _plot(past: dict[str, Any], width: int = 68, height: int = 6, **marks: Any) -> list[str]:
    return [line.plain for line in timeline(past, width, height, **marks)]


def test_the_timeline_has_the_highest_use_the_times_and_one_column_for_each_part() -> None:
    lines = _plot(_flat(*[60 * GIB] * 300, *[30 * GIB] * 300))
    assert lines[0].split("┤") == [" 60.0G ", "█" * 30 + " " * 30]
    assert lines[5].split("┤") == ["    0B ", "█" * 60]
    assert (lines[-1].split(), {len(line) for line in lines}) == (["03:32", "03:37", "03:42"], {68})


def test_a_part_without_a_reading_is_blank_and_its_neighbors_are_not() -> None:
    past = _flat(*[60 * GIB] * 200, *[None] * 200, *[60 * GIB] * 200)
    assert _plot(past)[0].split("┤")[1] == "█" * 20 + " " * 20 + "█" * 20
    assert set("".join(_plot({**past, "series": []})[:6])) <= {" ", "│"}


def test_the_parts_are_stacked_in_their_order_and_never_exceed_the_used_memory() -> None:
    past = _flat(*[60 * GIB] * 600)
    past["series"][0] |= {"allocated": {"max": [30 * GIB] * 600}, "idle_cache": {"max": [50 * GIB] * 600}}
    styles: Counter[str] = Counter()
    for line in timeline(past, 68, 6):
        for span in line.spans:
            if set(line.plain[span.start : span.end]) == {"█"}:
                styles[str(span.style)] += span.end - span.start
    assert styles == {"green": 180, "yellow": 180}


def test_what_happened_is_marked_at_its_time() -> None:
    marks = [(NOW - 300, "!", "red"), (NOW - 900, "c", "")]
    line = _plot(history("a"), marks=marks)[-2]
    assert line == " " * 7 + "└" + "─" * 30 + "!" + "─" * 29
