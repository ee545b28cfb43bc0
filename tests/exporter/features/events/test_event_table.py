from __future__ import annotations

import time
from typing import Any

from gpumem_exporter.cli.render.columns import event_line
from gpumem_exporter.core.event import Event, Page
from gpumem_exporter.features.events.event_routes import events_document
from tests.support.golden import assert_golden
from tests.support.live_documents import GIB, event

_NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
_OOM = {
    "requested_bytes": 2 * GIB,
    "device_free_bytes": GIB,
    "limit_bytes": 40 * GIB,
    "allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": GIB},
}


def test_an_event_of_another_day_has_its_date_and_one_of_version_0_2_its_time_and_type() -> None:
    assert event_line(event(2, "b", _NOON - 86400), _NOON, 60).plain.split() == ["03-03", "12:00:00", "b"]
    old = {"id": 1, "type": "device_lost", "unix_seconds": _NOON, "detail": {}}
    assert event_line(old, _NOON, 80).plain.split() == ["12:00:00", "device_lost"]


def test_text_of_an_event_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\r\n\u202e[red]x[/red]\x9b"
    texts = dict.fromkeys(("error", "reason", "action", "state", "requested_by", "rule"), hostile)
    detail = {**_OOM, **texts, "freed_bytes": 0, "results": []}
    identity = dict.fromkeys(("gpu", "uuid", "workload", "rank", "pid"), hostile)
    types = ("oom", "device_lost", "process_ended", "action", hostile)
    listed = [event(number, type_, _NOON, **identity, detail=detail) for number, type_ in enumerate(types)]
    assert all(event_line(each, _NOON, 100).plain.isprintable() for each in listed)


def _day() -> list[Event]:
    """A day of a node: the ranks of a job, short jobs, an out-of-memory error, a lost device, an action, a policy."""
    midnight = _NOON - 12 * 3600
    job: dict[str, Any] = {"workload": "llm-pretrain", "owner": "uid:1001"}
    of_eval: dict[str, Any] = {"workload": "nightly-eval", "owner": "uid:1002", "detail": {"reason": "it exited"}}
    of_indexer: dict[str, Any] = {"workload": "rag-indexer", "owner": "uid:1003", "gpu": "4", "uuid": "GPU-4"}
    clear = {"action": "empty_cache", "state": "done", "freed_bytes": 9 * GIB, "reason": "room for the release run"}
    ranks = [{"pid": pid, "workload": "llm-pretrain"} for pid in range(4)]
    caller = "unix:uid=1001:pid=7"
    stopped = {"rule": "idle-notebooks", "reason": "3 clears freed nothing that lasted"}
    return [
        *(Event("process_started", midnight - 3600 + rank, pid=rank, rank=str(rank), **job) for rank in range(4)),
        *(
            Event(type_, midnight + 10_000 + 60 * run + after, pid=100 + run, **of_eval)
            for run in range(14)
            for type_, after in (("process_started", 0), ("process_ended", 20))
        ),
        Event("oom", midnight + 13_324, pid=4711, detail={**_OOM, "device_free_bytes": GIB // 2}, **of_indexer),
        Event("device_lost", midnight + 20_000, gpu="7", uuid="GPU-7", detail={"error": "GPU is lost"}),
        Event("device_returned", midnight + 20_090, gpu="7", uuid="GPU-7"),
        Event(
            "action", _NOON - 60, workload="llm-pretrain", detail={**clear, "requested_by": caller, "results": ranks}
        ),
        Event("policy_stopped", _NOON - 30, detail=stopped),
    ]


def test_the_lines_of_a_day() -> None:
    page = Page(tuple(_day()), 0, more=False)
    lines = [event_line(dict(each), _NOON, 80).plain for each in events_document(page, folded=True)["events"]]
    assert max(map(len, lines)) <= 80
    assert_golden("events.txt", "\n".join(lines) + "\n")
