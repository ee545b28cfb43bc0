from __future__ import annotations

from gpumem_exporter.cli.top.device_lines import sparkline
from tests.support.top_documents import GIB

_NOW = 10_030.0
_TOTAL = 80 * GIB


def _drawn(*points: tuple[float, float], width: int = 15, now: float = _NOW) -> str:
    """Draw points, given as seconds ago and part of the total."""
    return sparkline([(_NOW - ago, int(part * _TOTAL)) for ago, part in points], _TOTAL, width, now).plain


def test_the_height_of_a_block_is_the_part_in_use() -> None:
    parts = (0.0, 0.01, 0.19, 0.25, 0.375, 0.5, 0.625, 0.75, 0.88, 0.95, 1.0)
    points = [(40.0 * (len(parts) - index), part) for index, part in enumerate(parts)]
    assert _drawn(*points).strip() == "▁▁▂▂▃▄▅▆▇██"


def test_a_block_shows_the_highest_use_of_its_time() -> None:
    assert _drawn((1, 0.1), (10, 1.0), (20, 0.1)) == " " * 14 + "█"


def test_missing_points_are_blank_and_old_ones_are_not_shown() -> None:
    assert _drawn((700, 1.0), (585, 0.5), (1, 0.5)) == "▄" + " " * 13 + "▄"
    assert _drawn() == " " * 15
    assert sparkline([(_NOW, GIB)], None, 15, _NOW).plain == " " * 15


def test_time_moves_the_line_to_the_left_unchanged() -> None:
    points = [(float(ago), ago % 97 / 97) for ago in range(0, 600, 2)]
    before = _drawn(*points)
    for part in range(1, 15):
        assert _drawn(*points, now=_NOW + 40 * part).rstrip() == before[part:]


def test_a_nearly_full_device_has_the_color_of_scarce_memory() -> None:
    for part, style in ((0.96, "bold red"), (0.92, "bold yellow"), (0.5, "dim")):
        drawn = sparkline([(_NOW, int(part * _TOTAL))], _TOTAL, 15, _NOW)
        assert {str(span.style) for span in drawn.spans} == {style}
