from __future__ import annotations

import re
import time
from typing import Any

import pytest

from gpumem_exporter.cli.render.event_table import event_table
from tests.support.golden import printed
from tests.support.top_documents import GIB, event

_NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
_OOM = {
    "requested_bytes": 2 * GIB,
    "device_free_bytes": 3 * GIB,
    "limit_bytes": 40 * GIB,
    "allocator": {"reserved_bytes": 39 * GIB, "fragmented_bytes": GIB},
}


def _lines(events: list[dict[str, Any]], width: int = 200, *, wrap: bool = False) -> list[str]:
    heading, *lines = printed(event_table(events, _NOON, wrap=wrap), width=width)
    assert heading == "last events"
    return lines


def _line(of: dict[str, Any]) -> str:
    (line,) = _lines([of])
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("type_", "detail", "parts"),
    [
        ("oom", _OOM, ("GPU 0", "llm rank 3 (pid 7)", "2.0 GiB", "3.0 GiB", "39.0 GiB", "40.0 GiB", "1.0 GiB")),
        ("oom", {**_OOM, "device_free_bytes": GIB, "allocator": None}, ("2.0 GiB", "1.0 GiB")),
        ("of_tomorrow", {}, ("12:00:00", "of_tomorrow", "GPU 0")),
        ("action", {"of": "another version"}, ("12:00:00", "action", "GPU 0")),
        ("oom", None, ("12:00:00", "GPU 0")),
    ],
)
def test_an_event_shows_its_device_process_and_sizes(type_: str, detail: Any, parts: tuple[str, ...]) -> None:
    line = _line(event(1, type_, _NOON, detail=detail))
    assert [part for part in parts if part not in line] == []
    sizes = [part for part in parts if part.endswith("GiB")]
    assert re.findall(r"[\d.]+ [KMG]iB", line) == sizes


def test_an_event_without_a_device_or_process_names_none() -> None:
    nowhere = dict.fromkeys(("gpu", "uuid", "pid"))
    without_process = event(1, "process_ended", _NOON, **nowhere, workload="", rank="", detail={"reason": "x"})
    assert re.fullmatch(r"12:00:00 \D*: x", _line(without_process))
    assert re.search(r"GPU-0\b", _line(event(1, "device_lost", _NOON, gpu=None)))
    assert "pid 1@4026531836" in _line(event(1, "process_started", _NOON, workload="", pid="1@4026531836"))


def test_the_newest_event_is_first_and_another_day_has_its_date() -> None:
    listed = [event(1, "a", _NOON + 9), event(2, "b", _NOON - 86400), event(3, "c", _NOON)]
    assert [re.split(" +", line)[:-2] for line in _lines(listed)] == [
        ["12:00:09", "a"],
        ["12:00:00", "c"],
        ["03-03", "12:00:00", "b"],
    ]


def test_a_long_event_is_cut_or_has_several_lines() -> None:
    lines = _lines([event(1, "oom", _NOON, detail=_OOM)], 60, wrap=True)
    assert len(lines) > 1
    assert "1.0 GiB fragmented" in " ".join(" ".join(lines).split())
    (cut,) = _lines([event(1, "oom", _NOON, detail=_OOM)], 60)
    assert cut.endswith("…")


@pytest.mark.parametrize("wrap", [True, False])
def test_text_of_an_event_cannot_control_the_terminal(wrap: bool) -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\r\n\u202e[red]x[/red]\x9b"
    detail = {
        **_OOM,
        **dict.fromkeys(("error", "reason", "action", "state", "requested_by", "rule"), hostile),
        "freed_bytes": 0,
        "results": [],
        "processes": [],
    }
    identity = dict.fromkeys(("gpu", "uuid", "workload", "rank", "pid"), hostile)
    types = ("oom", "device_lost", "process_ended", "action", "action_asked", hostile)
    listed = [event(number, type_, _NOON, **identity, detail=detail) for number, type_ in enumerate(types)]
    assert all(line.isprintable() for line in _lines(listed, 100, wrap=wrap))
