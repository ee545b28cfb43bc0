from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.columns import SEGMENTS, bar_lengths, draw_past, segments_of
from gpumem_exporter.core.ledger import CATEGORIES
from tests.support.top_documents import GIB

_SIZES = st.integers(min_value=-(1 << 40), max_value=1 << 50)
_NOW = 10_030.0
_TOTAL = 80 * GIB


def test_every_category_is_in_exactly_one_segment() -> None:
    assert sorted(category for segment in SEGMENTS for category in segment.categories) == sorted(CATEGORIES)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(CATEGORIES, _SIZES)), st.integers(1, 80))
def test_the_bar_is_filled_and_each_segment_is_within_one_character_of_its_share(
    ledger: dict[str, int], width: int
) -> None:
    sizes = [max(0, sum(ledger.get(name, 0) for name in segment.categories)) for segment in SEGMENTS]
    lengths = bar_lengths(ledger, width)
    if sum(sizes) == 0:
        assert lengths == (0,) * len(SEGMENTS)
        return
    assert sum(lengths) == width
    for size, length in zip(sizes, lengths, strict=True):
        assert abs(length - size * width / sum(sizes)) < 1


def test_a_cache_of_which_nothing_is_known_is_not_called_fragmented() -> None:
    unknown, known = {"torch_fragmented": 5}, {"torch_fragmented": 5, "torch_reclaimable": 0}
    names = [segment.name for segment in segments_of([unknown, {"free": 1}])]
    assert "fragmented" not in names
    assert "cache, may be released" in names
    assert segments_of([unknown, known]) == segments_of([known]) == segments_of([]) == SEGMENTS


def test_a_negative_segment_has_no_characters() -> None:
    assert bar_lengths({"torch_allocated": 50, "unattributed": -3, "free": 50}, 10) == (5, 0, 0, 0, 5)


def _past(*points: tuple[float, float], width: int = 15, now: float = _NOW) -> str:
    """Draw points, given as seconds ago and part of the total."""
    return draw_past([(_NOW - ago, int(part * _TOTAL)) for ago, part in points], now, _TOTAL, width).plain


def test_the_height_of_a_block_is_the_part_in_use() -> None:
    parts = (0.0, 0.01, 0.19, 0.25, 0.375, 0.5, 0.625, 0.75, 0.88, 0.95, 1.0)
    points = [(40.0 * (len(parts) - index), part) for index, part in enumerate(parts)]
    assert _past(*points).strip() == "▁▁▂▂▃▄▅▆▇██"


def test_a_block_shows_the_highest_use_of_its_time() -> None:
    assert _past((1, 0.1), (10, 1.0), (20, 0.1)) == " " * 14 + "█"


def test_missing_points_are_blank_and_old_ones_are_not_shown() -> None:
    assert _past((700, 1.0), (585, 0.5), (1, 0.5)) == "▄" + " " * 13 + "▄"
    assert _past() == " " * 15
    assert draw_past([(_NOW, GIB)], _NOW, None, 15).plain == ""


def test_time_moves_the_line_to_the_left_unchanged() -> None:
    points = [(float(ago), ago % 97 / 97) for ago in range(0, 600, 2)]
    before = _past(*points)
    for part in range(1, 15):
        assert _past(*points, now=_NOW + 40 * part).rstrip() == before[part:]


def test_a_nearly_full_device_has_the_color_of_scarce_memory() -> None:
    for part, style in ((0.96, "bold red"), (0.92, "bold yellow"), (0.5, "dim")):
        drawn = draw_past([(_NOW, int(part * _TOTAL))], _NOW, _TOTAL, 15)
        assert {str(span.style) for span in drawn.spans} == {style}
