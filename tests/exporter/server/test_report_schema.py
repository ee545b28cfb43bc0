from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client.wire.protocol import (
    MAX_COMPONENTS,
    MAX_INTEGER,
    MAX_LABEL_LENGTH,
    MAX_TEXT_LENGTH,
    OUTCOMES,
    CommandResult,
    DeviceResult,
    DeviceSample,
    EngineState,
    OutOfMemory,
    ProcessIdentity,
    Report,
    to_wire,
)
from gpumem_exporter.server.api.report_schema import MAX_DEVICES, MAX_OBJECTS, ReportReader, shortened
from gpumem_exporter.server.http.problems import ProblemError
from tests.support.builders import UUIDS, report, sample

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


_BYTES = st.none() | st.integers(0, MAX_INTEGER)
_TEXT = st.text(max_size=MAX_TEXT_LENGTH).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text))
_UUIDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=96)  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_SECONDS = st.floats(0, 1e9)
_IDENTITIES = st.builds(
    ProcessIdentity,
    pid=st.integers(1, 2**31 - 1),
    start_time_ticks=st.integers(0, MAX_INTEGER),
    pid_namespace=st.integers(0, MAX_INTEGER),
    session=_TEXT.filter(bool),
    session_started_seconds=_SECONDS,
    **dict.fromkeys(("workload", "rank", "command", "torch_version", "allocator_settings", "client_version"), _TEXT),
)
_MAPPINGS = st.dictionaries(_TEXT, st.integers(0, MAX_INTEGER), max_size=3)
_SAMPLES = st.builds(
    DeviceSample,
    uuid=_UUIDS,
    phase_peak_bytes=_MAPPINGS,
    component_bytes=_MAPPINGS,
    component_unmapped_bytes=_MAPPINGS,
    kv_cache_bytes=_MAPPINGS,
    planned_reserved_peak_bytes=st.none() | st.integers(1, MAX_INTEGER),
    **{
        field.name: _BYTES
        for field in dataclasses.fields(DeviceSample)
        if field.name not in ("uuid", "allocated_bytes", "reclaimable_bytes", "idle_cache_bytes")
        and field.name not in ("planned_reserved_peak_bytes", "phase_peak_bytes", "component_bytes")
        and field.name not in ("component_unmapped_bytes", "kv_cache_bytes")
    },
)
_OOMS = st.builds(
    OutOfMemory,
    uuid=_UUIDS,
    number=st.integers(1, MAX_INTEGER),
    step=_BYTES,
    phase=_TEXT,
    sample=st.none() | _SAMPLES,
)
_RESULTS = st.builds(
    CommandResult,
    id=_TEXT.filter(bool),
    outcome=st.sampled_from(OUTCOMES),
    reason=_TEXT,
    duration_seconds=st.none() | _SECONDS,
    devices=st.lists(st.builds(DeviceResult, uuid=_UUIDS, freed_bytes=_BYTES), max_size=2).map(tuple),
)
_REPORTS = st.builds(
    Report,
    process=_IDENTITIES,
    sequence=st.integers(0, MAX_INTEGER),
    sample_age_seconds=_SECONDS,
    devices=st.lists(_SAMPLES, max_size=3, unique_by=lambda one: one.uuid).map(tuple),
    pinned_host_bytes=_BYTES,
    step=_BYTES,
    results=st.lists(_RESULTS, max_size=2).map(tuple),
    ooms=st.lists(_OOMS, max_size=2).map(tuple),
    actions=st.lists(_TEXT, max_size=3).map(tuple),
    hold_seconds=_SECONDS,
    final=st.booleans(),
)


@given(_REPORTS)
def test_every_report_that_a_reporter_can_send_is_read_unchanged(sent: Report) -> None:
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
    _, one = kept(EngineState("vllm"), **values)
    assert {name: getattr(one, name) for name in values} == {**values, **({unknown: {}} if unknown else {})}
    assert one.allocated_bytes == 100


def test_the_report_of_an_engine_that_fits_is_kept_as_it_is() -> None:
    one = dataclasses.replace(sample(UUIDS[0], 100), kv_cache_bytes={"used": 1}, component_bytes={"weights": 60})
    sent = report(devices=(one,), engine=EngineState("vllm", "1", "m", "serving", 1.0))
    assert shortened(sent) is sent


def test_the_components_of_a_training_may_be_older_than_the_sample() -> None:
    _, one = kept(component_bytes={"gradients": 200})
    assert one.component_bytes == {"gradients": 200}


def test_fields_of_a_newer_reporter_are_ignored() -> None:
    document = wire()
    document["novel"] = {"deep": [1]}
    document["process"]["novel"] = 1
    document["devices"][0]["novel_bytes"] = -1
    assert READER.read(json.dumps(document).encode()) == READER.read(json.dumps(wire()).encode())


def test_an_older_reporter_may_omit_fields_with_a_default() -> None:
    names = ("pid", "start_time_ticks", "pid_namespace", "session", "session_started_seconds")
    document = {"process": {name: wire()["process"][name] for name in names}, "sequence": 1}
    read = READER.read(json.dumps(document).encode())
    assert read.devices == ()
    assert read.step is None
    assert read.process.workload == ""


def test_the_nil_job_of_ray_that_an_older_reporter_sends_is_no_job() -> None:
    document = wire()
    document["process"]["ray_job_id"] = "ffffffff"
    assert READER.read(json.dumps(document).encode()).process.ray_job_id == ""


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=-1)),
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=2**63)),
        ("devices.0.active_bytes", lambda d: d["devices"][0].update(active_bytes="5")),
        ("devices.0.active_bytes", lambda d: d["devices"][0].update(active_bytes=True)),
        ("devices.0.allocated_bytes", lambda d: d["devices"][0].update(allocated_bytes=21)),
        ("devices.0.reclaimable_bytes", lambda d: d["devices"][0].update(reclaimable_bytes=11)),
        (
            "devices.0.idle_cache_bytes",
            lambda d: d["devices"][0].update(reclaimable_bytes=8, idle_cache_bytes=9),
        ),
        ("devices.1.uuid", lambda d: d["devices"][1].update(uuid=UUIDS[0])),
        ("devices.0.uuid", lambda d: d["devices"][0].update(uuid="")),
        ("devices.0.phase_peak_bytes.forward", lambda d: d["devices"][0].update(phase_peak_bytes={"forward": -1})),
        ("devices.0.component_bytes", lambda d: d["devices"][0].update(component_bytes={str(i): 1 for i in range(65)})),
        ("devices", lambda d: d.update(devices=[{"uuid": str(i)} for i in range(MAX_DEVICES + 1)])),
        ("devices.0.planned_reserved_peak_bytes", lambda d: d["devices"][0].update(planned_reserved_peak_bytes=0)),
        ("ooms.0.phase", lambda d: d.update(ooms=[{"uuid": UUIDS[0], "number": 1, "phase": "x" * 257}])),
        ("process.workload", lambda d: d["process"].update(workload="x" * 10_000)),
        ("process.pid", lambda d: d["process"].update(pid=0)),
        ("process.pid", lambda d: d["process"].pop("pid")),
        ("process.session", lambda d: d["process"].update(session="")),
        ("process.session_started_seconds", lambda d: d["process"].update(session_started_seconds=float("nan"))),
        ("sample_age_seconds", lambda d: d.update(sample_age_seconds=-0.1)),
        ("hold_seconds", lambda d: d.update(hold_seconds="1")),
        ("sequence", lambda d: d.pop("sequence")),
        ("step", lambda d: d.update(step=-1)),
        ("results.0.outcome", lambda d: d["results"][0].update(outcome="splendid")),
        ("results.0.devices.0.freed_bytes", lambda d: d["results"][0]["devices"][0].update(freed_bytes=2**63)),
        ("final", lambda d: d.update(final=1)),
    ],
)
def test_an_impossible_value_is_rejected_with_the_name_of_its_field(field: str, change: Change) -> None:
    problem = refused(change)
    assert problem.status == 422
    assert [error.field for error in problem.errors] == [field]
    assert problem.detail.startswith(f"{field}: ")
    assert len(problem.detail) < 1000


def test_every_invalid_field_of_the_first_invalid_device_is_reported() -> None:
    def change(document: dict[str, Any]) -> None:
        for device in document["devices"]:
            device["active_bytes"] = device["reserved_bytes"] = -1

    problem = refused(change)
    assert {error.field for error in problem.errors} == {"devices.0.active_bytes", "devices.0.reserved_bytes"}
    assert "1 more" in problem.detail


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


def test_freed_bytes_may_be_negative() -> None:
    document = wire()
    document["results"][0]["devices"][0]["freed_bytes"] = -4096
    assert READER.read(json.dumps(document).encode()).results[0].devices[0].freed_bytes == -4096


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"process": "\\ud800"}', b"{}{}"]
)
def test_a_body_that_is_not_a_report_is_rejected(body: bytes) -> None:
    with pytest.raises(ProblemError) as caught:
        READER.read(body)
    assert caught.value.status == 422
