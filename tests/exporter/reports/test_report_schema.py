from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_client.wire.protocol import (
    MAX_COMPONENTS,
    MAX_INTEGER,
    MAX_LABEL_LENGTH,
    MAX_TEXT_LENGTH,
    CommandResult,
    DeviceResult,
    DeviceSample,
    EngineState,
    OutOfMemory,
    Report,
    to_wire,
)
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.reports.report_schema import MAX_DEVICES, MAX_OBJECTS, ReportReader, shortened
from tests.support.builders.builders import UUIDS, report, sample

READER = ReportReader()
Change = Callable[[dict[str, Any]], Any]


def wire() -> dict[str, Any]:
    devices = (sample(UUIDS[0], 10, 5, 5), sample(UUIDS[1], 1))
    results = (CommandResult("a", "done", devices=(DeviceResult(UUIDS[0]),)),)
    return to_wire(report(devices=devices, results=results))


def refused(change: Change) -> ProblemError:
    document = wire()
    change(document)
    with pytest.raises(ProblemError) as caught:
        READER.read(json.dumps(document).encode())
    return caught.value


def largest(number: int | None, text: str) -> Report:
    """Return a report with this number and this text wherever a reporter may send them."""
    sizes = {text: number or 0}
    computed = ("allocated_bytes", "reclaimable_bytes", "idle_cache_bytes", "planned_reserved_peak_bytes")
    numbers = [each.name for each in dataclasses.fields(DeviceSample) if each.type == "int | None"]
    one = DeviceSample(
        uuid="u" * 96,  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
        **{name: number for name in numbers if name not in computed},
        phase_peak_bytes=sizes,
        component_bytes=sizes,
        component_unmapped_bytes=sizes,
        kv_cache_bytes=sizes,
    )
    freed = DeviceResult(one.uuid, freed_bytes=None if number is None else -number)
    names = ("workload", "rank", "command", "torch_version", "allocator_settings", "client_version")
    return report(
        2**31 - 1,
        sequence=number or 0,
        devices=(one,),
        pinned_host_bytes=number,
        step=number,
        step_seconds=number and 0.5,
        results=(CommandResult("id", "done", text, devices=(freed,)),),
        ooms=(OutOfMemory(one.uuid, 1, step=number, phase=text, sample=one),),
        actions=(text,),
        engine=EngineState("vllm", text, text, "serving"),
        start_time_ticks=number or 0,
        **dict.fromkeys(names, text),
    )


@pytest.mark.parametrize("number", [None, 0, MAX_INTEGER])
@pytest.mark.parametrize("text", ["", "\0 \n\U0001f4a3", "x" * MAX_TEXT_LENGTH])
def test_every_report_that_a_reporter_can_send_is_read_unchanged(number: int | None, text: str) -> None:
    sent = largest(number, text)
    assert READER.read(json.dumps(to_wire(sent)).encode()) == sent


def kept(engine: EngineState | None = None, **values: Any) -> tuple[EngineState | None, DeviceSample]:
    """Return the engine and the sample that the exporter keeps of a report with these values."""
    one = dataclasses.replace(sample(UUIDS[0], 100), **values)
    known = shortened(READER.read(json.dumps(to_wire(report(devices=(one,), engine=engine))).encode()))
    return known.engine, known.devices[0]


def test_states_and_names_of_a_newer_engine_are_left_out() -> None:
    engine, one = kept(
        EngineState("vllm", "1", "m" * 200, "hibernating"),
        component_bytes={"w" * 200: 1, **{f"part {number}": 1 for number in range(30)}},
        kv_cache_bytes={"used": 3, "borrowed": 4, "free": 5},
    )
    assert engine == EngineState("vllm", "1", "m" * MAX_LABEL_LENGTH, "")
    assert one.kv_cache_bytes == {"used": 3, "free": 5}
    assert len(one.component_bytes) == MAX_COMPONENTS
    assert max(map(len, one.component_bytes)) == MAX_LABEL_LENGTH


@pytest.mark.parametrize(
    ("values", "unknown"),
    [
        ({"component_bytes": {"weights": 60, "kv_cache": 41}}, "component_bytes"),
        ({"component_unmapped_bytes": {"weights": 11}, "unmapped_bytes": 10}, "component_unmapped_bytes"),
        ({"component_bytes": {"kv_cache": 40}, "kv_cache_bytes": {"used": 20, "free": 21}}, "kv_cache_bytes"),
        ({"kv_cache_bytes": {"used": 101}}, "kv_cache_bytes"),
        ({"component_bytes": {"kv_cache": 40}, "kv_cache_bytes": {"used": 20, "free": 20}}, ""),
        ({"component_unmapped_bytes": {"weights": 11}, "unmapped_bytes": 11}, ""),
    ],
)
def test_values_of_an_engine_that_contradict_others_are_unknown_and_the_report_is_kept(
    values: dict[str, Any], unknown: str
) -> None:
    engine = EngineState("vllm", "1", "m", "serving", 1.0)
    known, one = kept(engine, **values)
    assert known == engine
    assert {name: getattr(one, name) for name in values} == {**values, **({unknown: {}} if unknown else {})}
    assert one.allocated_bytes == 100
    # The components of a training may be older than the sample.
    assert kept(component_bytes={"gradients": 200})[1].component_bytes == {"gradients": 200}


def test_fields_of_a_newer_reporter_are_ignored() -> None:
    document = wire()
    document["novel"] = {"deep": [1]}
    document["process"]["novel"] = 1
    document["devices"][0]["novel_bytes"] = -1
    assert READER.read(json.dumps(document).encode()) == READER.read(json.dumps(wire()).encode())


def test_an_older_reporter_may_omit_fields_with_a_default() -> None:
    names = ("pid", "start_time_ticks", "pid_namespace", "session", "session_started_seconds")
    document: dict[str, Any] = {"process": {name: wire()["process"][name] for name in names}, "sequence": 1}
    document["process"]["ray_job_id"] = "ffffffff"
    read = READER.read(json.dumps(document).encode())
    assert read.process.ray_job_id == "", "Ray's nil id is no job"
    assert read.devices == ()
    assert read.step is None
    assert read.process.workload == ""


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=-1)),
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=2**63)),
        ("devices.0.active_bytes", lambda d: d["devices"][0].update(active_bytes=True)),
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=21)),
        (
            "devices.0.idle_cache_bytes",
            lambda d: d["devices"][0].update(reclaimable_bytes=8, idle_cache_bytes=9),
        ),
        ("devices.1.uuid", lambda d: d["devices"][1].update(uuid=UUIDS[0])),
        ("devices.0.phase_peak_bytes.forward", lambda d: d["devices"][0].update(phase_peak_bytes={"forward": -1})),
        ("devices.0.component_bytes", lambda d: d["devices"][0].update(component_bytes={str(i): 1 for i in range(65)})),
        ("devices", lambda d: d.update(devices=[{"uuid": str(i)} for i in range(MAX_DEVICES + 1)])),
        ("devices.0.planned_reserved_peak_bytes", lambda d: d["devices"][0].update(planned_reserved_peak_bytes=0)),
        ("process.workload", lambda d: d["process"].update(workload="x" * 10_000)),
        ("process.pid", lambda d: d["process"].update(pid=0)),
        ("process.session_started_seconds", lambda d: d["process"].update(session_started_seconds=float("nan"))),
        ("sample_age_seconds", lambda d: d.update(sample_age_seconds=-0.1)),
        ("hold_seconds", lambda d: d.update(hold_seconds="1")),
        ("results.0.devices.0.freed_bytes", lambda d: d["results"][0]["devices"][0].update(freed_bytes=2**63)),
    ],
)
def test_an_impossible_value_is_rejected_with_the_name_of_its_field(field: str, change: Change) -> None:
    problem = refused(change)
    assert problem.status == 422
    assert [error.field for error in problem.errors] == [field]
    assert problem.detail.startswith(f"{field}: ")
    assert len(problem.detail) < 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(devices=[None] * 150_000),
        lambda document: document.update(ooms=[None] * 150_000),
        lambda document: document["devices"][0].update(phase_peak_bytes={f"phase {i}": "x" for i in range(40_000)}),
    ],
)
def test_a_long_invalid_report_has_one_error_for_each_collection(change: Change) -> None:
    assert len(refused(change).errors) == 1


def test_a_report_with_too_many_objects_is_rejected_before_it_is_read() -> None:
    with pytest.raises(ProblemError, match=str(MAX_OBJECTS)):
        READER.read(b'{"process":' + b'{},"process":' * MAX_OBJECTS + b"{}}")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"process": "\\ud800"}', b"{}{}"])
def test_a_body_that_is_not_a_report_is_rejected(body: bytes) -> None:
    with pytest.raises(ProblemError) as caught:
        READER.read(body)
    assert caught.value.status == 422
