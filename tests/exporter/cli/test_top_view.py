from __future__ import annotations

import pytest

from gpumem_exporter.cli.top.rows import SORTS, Row, rows_of
from gpumem_exporter.cli.top.view import View
from tests.support.top_documents import GIB, process

_PAGE = 4


def _rows(count: int = 10) -> tuple[Row, ...]:
    return rows_of({"processes": [process(pid, "0", used_bytes=(100 - pid) * GIB) for pid in range(1, count + 1)]})


def _press(view: View, keys: str | list[str], rows: tuple[Row, ...]) -> View:
    for key in keys:
        view = view.press(key, view.rows(rows), _PAGE)
    return view.settle(view.rows(rows), _PAGE)


def _chosen(view: View) -> object:
    return view.chosen and view.chosen[0]


@pytest.mark.parametrize(
    ("keys", "pid", "first"),
    [
        ([], None, 0),
        (["down"], 1, 0),
        (["j", "j", "k"], 1, 0),
        (["j"] * 6, 6, 2),
        (["page down"], 5, 1),
        (["end"], 10, 6),
        (["G", "up", "up", "up", "up"], 6, 5),
        (["G", "g"], 1, 0),
        (["G", "page up", "page up"], 2, 1),
        (["up"], 1, 0),
        (["j"] * 50, 10, 6),
        (["j", "escape"], None, 0),
        (["F"], None, 0),
    ],
)
def test_keys_select_a_row_and_keep_it_on_the_screen(keys: list[str], pid: int | None, first: int) -> None:
    view = _press(View(), keys, _rows())
    assert (_chosen(view), view.first) == (pid, first)


def test_the_same_process_stays_selected_when_the_order_changes() -> None:
    view = _press(View(), ["j", "j", "r"], _rows())
    assert _chosen(view) == 2
    assert view.rows(_rows())[view.index].pid == 2
    assert view.first <= view.index < view.first + _PAGE


def test_after_the_selected_process_exits_the_next_one_is_selected() -> None:
    rows = _rows()
    view = _press(View(), ["j", "j", "j"], rows)
    assert _chosen(view) == 3
    left = tuple(row for row in rows if row.pid != 3)
    assert _chosen(view.settle(view.rows(left), _PAGE)) == 4
    assert _chosen(view.settle(view.rows(left[:2]), _PAGE)) == 2


def test_s_cycles_through_the_orders() -> None:
    view = View()
    seen = [view.sort]
    for _ in SORTS[1:]:
        view = _press(view, "s", _rows())
        seen.append(view.sort)
    assert seen == list(SORTS)
    assert _press(view, "s", _rows()).sort == "used"
    assert _press(View(), "S", _rows()).sort == SORTS[-1]
    assert _press(View(reverse=True), "s", _rows()).reverse is False


def test_a_filter_applies_while_it_is_typed_and_escape_restores_the_old_one() -> None:
    rows = _rows()
    view = _press(View(text="old"), "/", rows)
    assert view.text == "old"
    typed = _press(view, ["erase line", "l", "x", "backspace", "l", "q", "backspace"], rows)
    assert (typed.text, len(typed.rows(rows))) == ("ll", 10)
    assert _press(typed, ["enter"], rows).text == "ll"
    assert _press(typed, ["escape"], rows).text == "old"
    kept = _press(typed, ["enter", "escape"], rows)
    assert kept.text == ""


def test_keys_are_letters_while_a_filter_is_typed() -> None:
    view = _press(View(), ["/", "s", "r", "?", "j", "down"], _rows())
    assert (view.text, view.sort, view.reverse, view.shows_help) == ("sr?j", "used", False, False)


def test_any_key_closes_the_help() -> None:
    view = _press(View(), "?", _rows())
    assert view.shows_help
    after = _press(view, "s", _rows())
    assert (after.shows_help, after.sort) == (False, "used")


def test_e_switches_between_events_and_processes() -> None:
    events = _press(View(), ["j", "e", "j", "j", "k"], _rows())
    assert (events.shows_events, events.first_line, events.lists_processes) == (True, 1, False)
    assert _chosen(events) == 1
    assert _press(events, ["s", "r", "/", "x"], _rows()) == events
    assert _press(events, ["g"], _rows()).first_line == 0
    for key in ("e", "escape"):
        back = _press(events, [key], _rows())
        assert (back.shows_events, back.first_line, _chosen(back)) == (False, 0, 1)
    assert _press(events, ["?"], _rows()).shows_help
