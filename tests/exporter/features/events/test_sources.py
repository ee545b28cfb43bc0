"""The events of reports, readings and actions."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.audit import Audit, action_event
from gpumem_exporter.core.readings import DeviceReading, NodeReading, ProcessFacts
from gpumem_exporter.features.events.event_entries import event_document
from gpumem_exporter.features.events.event_recorder import MAX_STARTS_PER_MINUTE, Size
from gpumem_exporter.features.oom.oom_events import MAX_OF_OWNER_PER_MINUTE
from tests.support.builders.builders import MIB, UUIDS, device, node, sample
from tests.support.builders.recorder_bench import RecorderBench as Bench
from tests.support.builders.recorder_bench import oom


def test_an_error_becomes_an_event_with_allocator_values_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.reading(device(UUIDS[0], gpu="3"))
    at_that_moment = dataclasses.replace(sample(UUIDS[0], 8 * MIB, 4 * MIB, 2 * MIB), requested_bytes=7 * MIB)
    sizes = {"requested_bytes": 9, "device_free_bytes": 5, "limit_bytes": 50}
    values: dict[str, Any] = {**sizes, "step": 4, "phase": "backward"}
    with caplog.at_level(logging.WARNING):
        bench.report(7, oom(1, age_seconds=2.5, sample=at_that_moment, **values), host_pid=4711, rank="2")
    event = bench.log.events[-1]
    assert (event.type, event.time_unix_seconds) == ("oom", bench.unix - 2.5)
    assert (event.gpu, event.uuid, event.pid, event.workload, event.rank) == ("3", UUIDS[0], 4711, "train", "2")
    detail = dict(event.detail)
    allocator = detail.pop("allocator")
    assert detail == {"number": 1, "device": None, **values}
    fragmented = {"reclaimable_bytes": 4 * MIB, "fragmented_bytes": 2 * MIB}
    assert {**allocator, **fragmented, "requested_bytes": 7 * MIB, "reserved_bytes": 14 * MIB} == allocator
    (line,) = caplog.records
    fields = line.fields  # type: ignore[attr-defined]
    assert {**fields, **values, **fragmented, "workload": "train", "rank": "2", "gpu": "3"} == fields


def test_an_error_of_any_age_has_a_time_that_can_be_shown() -> None:
    bench = Bench()
    bench.report(7, oom(1, age_seconds=float(2**63 - 1)))
    assert event_document([bench.log.events[-1]])["time"] == "1970-01-01T00:00:00.000Z"


def test_a_repeated_error_is_one_event_and_acknowledged_after_its_commit(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    first = bench.report(7, oom(1), oom(2), sequence=1)
    again = bench.report(7, oom(1), oom(2), sequence=2)
    assert first is not None
    assert again is first
    more = bench.report(7, oom(2), oom(3), sequence=3)
    assert more is not first
    late = bench.report(7, oom(1), oom(2), sequence=2)
    assert late is more
    for future in bench.log.futures:
        future.set_result(True)
    assert bench.report(7, oom(3), sequence=4) is None
    ooms = [event for event in bench.log.events if event.type == "oom"]
    assert [event.detail["number"] for event in ooms] == [1, 2, 3]
    assert len({event.subject for event in ooms}) == 3
    assert len(caplog.records) == 3


def test_a_user_has_a_limited_number_of_errors_and_starts_in_a_minute() -> None:
    bench = Bench()
    for pid in range(MAX_STARTS_PER_MINUTE + 20):
        ooms = [oom(number) for number in range(50)] if pid < 30 else ()
        bench.report(10 + pid, *ooms, owner_uid=1001, session=f"of-{pid}")
    bench.report(7, oom(1), owner_uid=1002, session="of-another")
    assert len(bench.log.of("process_started")) == MAX_STARTS_PER_MINUTE + 1
    assert len(bench.log.of("oom")) == MAX_OF_OWNER_PER_MINUTE + 1
    assert {event.owner for event in bench.log.events} == {"uid:1001", "uid:1002"}
    assert bench.log.events[-1].pid == "7@1:1002"
    for process in bench.store.snapshot(bench.now).processes:
        bench.forget(process, "exited")
    assert len(bench.log.of("process_ended")) == MAX_STARTS_PER_MINUTE + 1
    assert sum(bench.log.left_out) == 30 * 50 - MAX_OF_OWNER_PER_MINUTE + 2 * 20


def test_a_process_starts_with_its_first_report_and_ends_with_its_last_values() -> None:
    bench = Bench()
    facts = ProcessFacts(4711, 1000, command="python train.py", user="ada", k8s_pod="llm-0")
    devices = (sample(UUIDS[0], 8 * MIB, 4 * MIB, 2 * MIB), sample(UUIDS[1], MIB))
    bench.report(7, host_pid=4711, devices=devices, command="train.py")
    bench.wait(0.5)
    bench.reading(
        device(UUIDS[0], gpu="0", processes={4711: 30 * MIB, 1: 9}),
        device(UUIDS[1], gpu="1", processes={4711: None}),
        facts={4711: facts},
    )
    bench.wait(1)
    bench.reading(device(UUIDS[0], gpu="0", processes={}), device(UUIDS[1], gpu="1", processes={}))
    bench.report(7, host_pid=4711, sequence=2, final=True)  # the final report has no samples
    bench.forget(bench.process(), "its reporter stopped")
    started, ended = [event for event in bench.log.events if event.type.startswith("process_")]
    assert (started.type, started.pid, started.time_unix_seconds) == ("process_started", 4711, 1.7e9)
    assert (ended.type, ended.pid, ended.time_unix_seconds) == ("process_ended", 4711, 1.7e9 + 1.5)
    assert started.subject == ended.subject != ""
    told = {"reason": "its reporter stopped", "command": "python train.py", "user": "ada", "k8s_pod": "llm-0"}
    assert {**ended.detail, **told} == ended.detail
    first, second = ended.detail["devices"]
    used = {"gpu": "0", "uuid": UUIDS[0], "used_bytes": 30 * MIB, "non_torch_bytes": 30 * MIB - 14 * MIB}
    sampled = {"allocated_bytes": 8 * MIB, "reclaimable_bytes": 4 * MIB, "fragmented_bytes": 2 * MIB}
    assert {**first, **used, **sampled} == first
    unknown = {"gpu": "1", "used_bytes": None, "non_torch_bytes": None, "allocated_bytes": MIB}
    assert {**second, **unknown} == second


def test_a_process_that_leaves_its_devices_one_by_one_has_the_last_values_of_each() -> None:
    bench = Bench()
    devices = (device(UUIDS[0], processes={7: 30 * MIB}), device(UUIDS[1], processes={7: 20 * MIB}))
    bench.reading(*devices, facts={7: ProcessFacts(7, 1000, user="ada")})
    bench.report(7, host_pid=7, devices=(sample(UUIDS[0], MIB), sample(UUIDS[1], MIB)))
    bench.wait(1)
    bench.reading(device(UUIDS[0], processes={}), device(UUIDS[1], processes={7: 10 * MIB}))
    bench.wait(1)
    bench.reading(device(UUIDS[0], processes={}), device(UUIDS[1], processes={7: None}))
    bench.forget(bench.process(), "exited")
    ended = bench.log.events[-1].detail
    assert [row["used_bytes"] for row in ended["devices"]] == [30 * MIB, 10 * MIB]
    assert ended["user"] == "ada"


def test_a_process_without_used_bytes_has_what_the_host_shows() -> None:
    bench = Bench()
    bench.report(7, host_pid=7, devices=(sample(UUIDS[0], MIB),))
    bench.reading(device(UUIDS[0], processes={7: None}), facts={7: ProcessFacts(7, 1000, user="ada")})
    bench.forget(bench.process(), "exited")
    ended = bench.log.events[-1].detail
    assert (ended["user"], ended["devices"][0]["used_bytes"]) == ("ada", None)


def test_driver_values_much_older_than_the_last_report_are_left_out() -> None:
    bench = Bench()
    bench.report(7, host_pid=7, devices=(sample(UUIDS[0], MIB),))
    bench.reading(device(UUIDS[0], processes={7: 30 * MIB}))
    bench.wait(60)
    bench.reading(device(UUIDS[0], processes={}))
    bench.report(7, host_pid=7, devices=(sample(UUIDS[0], MIB),), sequence=2)
    bench.forget(bench.process(), "exited")
    (row,) = bench.log.events[-1].detail["devices"]
    assert (row["used_bytes"], row["non_torch_bytes"], row["allocated_bytes"]) == (None, None, MIB)


def test_a_silent_process_has_not_ended_until_it_exits() -> None:
    bench = Bench()
    bench.report()
    process = bench.process()
    bench.wait(16)
    bench.sweep()
    assert bench.store.snapshot(bench.now).silent
    bench.report(sequence=2)
    bench.wait(16)
    bench.sweep()
    assert bench.types() == ["process_started"]
    bench.forget(process, "the process has exited")
    assert bench.types() == ["process_started", "process_ended"]


def test_a_process_that_lost_its_place_among_the_silent_ones_has_ended() -> None:
    bench = Bench()
    for pid in range(bench.store.max_processes):
        bench.report(10 + pid, session=f"of-{pid}")
    bench.wait(16)
    bench.sweep()
    assert bench.log.of("process_ended") == []
    bench.report(9, session="one more")
    bench.wait(16)
    bench.sweep()
    (ended,) = bench.log.of("process_ended")
    assert "15 s" in ended.detail["reason"]


@pytest.mark.parametrize("ticks", [1000, 2000], ids=["the same process", "another process with its pid"])
def test_a_reporter_that_replaces_another_ends_it(ticks: int) -> None:
    bench = Bench()
    bench.report(workload="old")
    bench.report(workload="new", session="second", session_started_seconds=2.0, start_time_ticks=ticks)
    _, ended, started = bench.log.events
    assert (ended.type, ended.workload) == ("process_ended", "old")
    assert (started.type, started.workload) == ("process_started", "new")
    assert "another reporter" in ended.detail["reason"]


def lost(gpu: int = 0, **changes: Any) -> DeviceReading:
    return DeviceReading(gpu=str(gpu), uuid=UUIDS[gpu], error="GPU is lost", **changes)


WELL, ILL, ONE = node(device(), device(UUIDS[1], gpu="1")), node(device(), lost(1)), node(device())
UNKNOWN = node(DeviceReading(gpu="0", uuid="", error="no handle"))
LOST, RETURNED = ("device_lost", "1", ""), ("device_returned", "1", "")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (WELL, WELL, []),
        (WELL, ILL, [LOST]),
        (ILL, ILL, []),
        (ILL, WELL, [RETURNED]),
        (WELL, ONE, []),  # removed
        # The first reading creates events only for changes to stored states.
        (None, ILL, [("device_returned", "0", "device_lost"), LOST]),
        (None, UNKNOWN, []),
        # It may have been lost before this run of the exporter.
        (UNKNOWN, ONE, [("device_returned", "0", "device_lost")]),
    ],
)
def test_a_device_that_stops_answering_is_lost_and_returns_when_it_answers(
    before: NodeReading | None, after: NodeReading, expected: list[tuple[str, str, str]]
) -> None:
    bench = Bench()
    if before is not None:
        bench.recorder.take_reading(before)
        bench.log.events.clear()
    bench.recorder.take_reading(after)
    events = bench.log.events
    assert [(event.type, event.gpu, event.only_after) for event in events] == expected
    assert [event.detail["error"] for event in events if event.type == "device_lost"] == ["GPU is lost"] * (
        LOST in expected
    )


def test_an_unavailable_driver_is_not_the_loss_of_a_device() -> None:
    bench = Bench()
    bench.reading(device())
    bench.reading(up=False)
    bench.reading(device())
    assert [event.type for event in bench.log.events if not event.only_after] == []


def test_a_mig_device_is_lost_after_two_failures_with_one_event() -> None:
    bench = Bench()
    bench.reading(device(UUIDS[1], gpu="0:0"))
    bench.log.events.clear()
    part = lost(1, parent_uuid=UUIDS[0])
    bench.reading(part)
    assert bench.types() == []
    bench.reading(part)
    bench.reading(part)
    assert bench.types() == ["device_lost"]


def test_a_finished_action_has_an_event_with_its_results_but_a_dry_run_has_none() -> None:
    results = (
        ActionResult(4711, "llm", "0", "0", UUIDS[0], "done", freed_bytes=5),
        ActionResult(4711, "llm", "0", "1", UUIDS[1], "done", freed_bytes=6),
    )
    request = ActionRequest("empty_cache", Target(pid=4711), reason="room")
    action = Action("id", request, "done", "alice", 1.0, results=results)
    bench = Bench()
    journal: Any = bench.log
    audit = Audit(journal, durable=False, wall_clock=lambda: bench.unix, count=lambda _: None, poll_soon=lambda: None)
    audit.finished(dataclasses.replace(action, request=dataclasses.replace(request, dry_run=True)))
    assert bench.types() == []
    audit.finished(action)
    (event,) = bench.log.events
    assert (event.gpu, event.uuid, event.pid, event.workload, event.rank) == (None, None, 4711, "llm", "0")
    detail = event.detail
    assert (detail["id"], detail["requested_by"], detail["target"]) == ("id", "alice", {"pid": 4711})
    assert detail["freed_bytes"] == 11
    assert [result["freed_bytes"] for result in detail["results"]] == [5, 6]
    many = tuple(dataclasses.replace(results[0], pid=pid) for pid in range(1, 600))
    large = action_event(dataclasses.replace(action, results=many), 2.0)
    assert (len(large.detail["results"]), large.detail["results_left_out"]) == (599, 0)
    assert (large.pid, large.gpu) == (None, "0")


def test_a_mean_counts_time_without_long_gaps_and_a_peak_outlives_a_reset() -> None:
    size = Size()
    assert (size.last, size.highest, size.mean) == (None, None, None)
    for value, seconds, mean in (
        (400, 10.0, 400),
        (400, 10.0, 400),  # the same reading again
        (200, 20.0, 300),
        (None, 30.0, 300),
        (200, 50.0, (300 * 10 + 200 * 30) // 40),
        (1000, 5000.0, (300 * 10 + 200 * 30) // 40),
        (100, 5010.0, (300 * 10 + 200 * 30 + 550 * 10) // 50),
    ):
        size.add(value, seconds, 60.0)
        assert size.mean == mean
    assert (size.last, size.highest) == (100, 1000)


def test_the_end_of_a_process_has_means_over_rare_polls_and_the_highest_of_all_peaks() -> None:
    bench = Bench(reading_expiry_seconds=360.0)  # the driver is polled every two minutes
    first, last = (
        dataclasses.replace(sample(UUIDS[0], MIB), reserved_peak_bytes=peak, idle_cache_bytes=idle)
        for peak, idle in ((500, None), (100, 40))
    )
    bench.report(7, host_pid=7, devices=(first,))
    for minute in range(0, 100, 2):
        bench.reading(device(UUIDS[0], processes={7: MIB if minute < 98 else 11 * MIB}))
        bench.wait(120.0)
    bench.report(7, host_pid=7, devices=(last,), sequence=2)
    bench.forget(bench.process(), "exited")
    (row,) = bench.log.events[-1].detail["devices"]
    assert (row["used_peak_bytes"], row["used_mean_bytes"]) == (11 * MIB, MIB + round(5 * MIB / 49))
    assert (row["reserved_peak_bytes"], row["reserved_highest_bytes"], row["idle_cache_mean_bytes"]) == (100, 500, 40)


def test_a_process_that_reports_again_has_started_when_it_reports_again() -> None:
    bench = Bench()
    facts = ProcessFacts(4711, 1000, started_seconds=bench.now - 3600)
    listed = device(UUIDS[0], gpu="0", processes={4711: 9})
    bench.reading(listed, facts={4711: facts}, taken_unix_seconds=bench.unix)
    bench.report(7, host_pid=4711)
    bench.forget(bench.process(), "no report for 15 s")
    bench.wait(60.0)
    bench.reading(listed, facts={4711: facts}, taken_unix_seconds=bench.unix)
    bench.report(7, host_pid=4711, sequence=2)
    bench.wait(60.0)
    bench.report(7, host_pid=4711, sequence=1, session="exec", session_started_seconds=2.0)
    events = bench.log.of("process_started", "process_ended")
    seen = [(event.type.removeprefix("process_"), bench.unix - event.time_unix_seconds) for event in events]
    assert seen == [("started", 3720.0), ("ended", 120.0), ("started", 60.0), ("ended", 0.0), ("started", 0.0)]
