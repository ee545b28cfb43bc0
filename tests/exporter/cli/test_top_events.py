from __future__ import annotations

import re
import time
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.cli.top.event_lines import event_lines, newest_first
from gpumem_exporter.cli.top.history import Events
from tests.support.top_documents import GIB, event

_NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
_OOM = {
    "requested_bytes": 2 * GIB,
    "device_free_bytes": 3 * GIB,
    "limit_bytes": 40 * GIB,
    "allocator": {"reserved_bytes": 39 * GIB, "fragmented_bytes": GIB},
}


def _page(*numbers: int, next_after: int = 0, more: bool = False) -> dict[str, Any]:
    events = [event(number, "device_lost", _NOON) for number in numbers]
    return {"events": events, "next_after": next_after or max(numbers, default=1), "more": more}


def _ids(events: Events) -> list[int] | None:
    return None if events.known is None else [known["id"] for known in events.known]


def test_events_are_read_once_and_then_new_ones_every_three_seconds() -> None:
    events = Events()
    assert (events.known, events.due(100.0)) == (None, True)
    assert "after" not in events.path
    events.take(_page(1, 2), 100.0)
    assert not events.due(102.9)
    assert events.due(103.0)
    assert events.path.endswith("&after=2")
    events.take(_page(3, more=True), 103.0)
    assert _ids(events) == [1, 2, 3]
    assert events.due(103.0), "there is more"
    events.take(_page(*range(4, 203)), 103.0)
    assert _ids(events) == list(range(103, 203))


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_refused_events_are_requested_again_after_a_minute(status: int) -> None:
    events = Events()
    events.take(_page(1), 100.0)
    events.failed(ExporterAnswerError(status, "token-needed"), 103.0)
    assert events.known is None
    assert ("token-needed" in events.refusal) is (status in (401, 403))
    assert events.refusal
    assert "after" not in events.path
    assert not events.due(162.9)
    assert events.due(163.0)
    events.take(_page(4), 163.0)
    assert (_ids(events), events.refusal) == ([4], "")


def test_known_events_survive_a_server_error() -> None:
    events = Events()
    events.take(_page(1), 100.0)
    events.failed(ExporterAnswerError(503, "disk"), 103.0)
    assert events.due(106.0)
    events.failed(ExporterUnreachableError("timed out"), 106.0)
    assert not events.due(165.9)
    assert (_ids(events), events.refusal) == ([1], "")


def _line(of: dict[str, Any], width: int = 200) -> str:
    (line,) = event_lines([of], width, _NOON)
    return " ".join(line.plain.split())


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
    without_process = event(
        1, "process_ended", _NOON, gpu=None, uuid=None, workload="", rank="", pid=None, detail={"reason": "x"}
    )
    assert re.fullmatch(r"12:00:00 \D*: x", _line(without_process))
    assert re.search(r"GPU-0\b", _line(event(1, "device_lost", _NOON, gpu=None)))
    assert "pid 1@4026531836" in _line(event(1, "process_started", _NOON, workload="", pid="1@4026531836"))


def test_another_day_is_shown() -> None:
    assert _line(event(1, "x", _NOON - 86400)).startswith("03-03 12:00:00 x")


def test_the_newest_event_is_first() -> None:
    listed = [event(1, "x", _NOON + 9), event(2, "x", _NOON), event(3, "x", _NOON)]
    assert [shown["id"] for shown in newest_first(listed)] == [1, 3, 2]


def test_an_event_that_is_not_cut_has_several_lines() -> None:
    lines = event_lines([event(1, "oom", _NOON, detail=_OOM)], 60, _NOON, wrap=True)
    assert len(lines) > 1
    assert all(line.cell_len <= 60 for line in lines)
    assert "1.0 GiB fragmented" in " ".join(" ".join(line.plain for line in lines).split())
    (cut,) = event_lines([event(1, "oom", _NOON, detail=_OOM)], 60, _NOON)
    assert cut.plain.endswith("…")


@pytest.mark.parametrize("wrap", [True, False])
def test_text_of_an_event_cannot_control_the_terminal(wrap: bool) -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\r\n\u202e[red]x[/red]\x9b"
    listed = [
        event(
            number,
            type_,
            _NOON,
            gpu=hostile,
            uuid=hostile,
            workload=hostile,
            rank=hostile,
            pid=hostile,
            detail={
                **_OOM,
                **dict.fromkeys(("error", "reason", "action", "state", "requested_by", "rule"), hostile),
                "freed_bytes": 0,
                "results": [],
                "processes": [],
            },
        )
        for number, type_ in enumerate((*("oom", "device_lost", "process_ended", "action", "action_asked"), hostile))
    ]
    assert all(line.plain.isprintable() for line in event_lines(listed, 100, _NOON, wrap=wrap))
