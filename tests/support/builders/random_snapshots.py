"""Hypothesis strategies for snapshots of random nodes with conflicting pids, namespaces and devices."""

from __future__ import annotations

import dataclasses
from itertools import starmap

from hypothesis import strategies as st

from gpumem_client.wire.protocol import (
    ENGINE_STATES,
    KV_CACHE_STATES,
    DeviceSample,
    EngineState,
    ProcessIdentity,
    Report,
)
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.core.samples import (
    KV_PEAK_WINDOWS,
    KvCachePeak,
    LastOom,
    ProcessKey,
    ReportingProcess,
    SilentReporter,
    Snapshot,
)

_bytes = st.none() | st.integers(0, 2**53)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ['\\"', "\n", "a\\n", '},{="', "é"]
)
_uuid = st.sampled_from(["GPU-0", "GPU-1", "MIG-2"])
_samples = st.builds(
    DeviceSample,
    uuid=_uuid,
    phase_peak_bytes=st.dictionaries(_text, st.integers(0, 2**40), max_size=2),
    component_bytes=st.dictionaries(_text, st.integers(0, 2**40), max_size=2),
    component_unmapped_bytes=st.dictionaries(_text, st.integers(0, 2**40), max_size=2),
    kv_cache_bytes=st.dictionaries(st.sampled_from(KV_CACHE_STATES), st.integers(0, 2**40)),
    **{
        field.name: _bytes
        for field in dataclasses.fields(DeviceSample)
        if field.name not in ("uuid", "phase_peak_bytes", "component_bytes", "peak_resets")
        and field.name not in ("component_unmapped_bytes", "kv_cache_bytes")
    },
)
_pid = st.integers(1, 3)
_identity = st.builds(
    ProcessIdentity,
    pid=_pid,
    start_time_ticks=st.integers(1, 2),
    pid_namespace=st.integers(0, 2),
    session=st.just("s"),
    session_started_seconds=st.just(0.0),
    workload=_text,
    rank=_text,
    command=_text,
    torch_version=_text,
    allocator_settings=_text,
)
_engine = st.builds(
    EngineState,
    name=st.sampled_from(["vllm", "sglang", "other"]) | _text,
    version=_text,
    model=_text,
    state=st.sampled_from(["", *ENGINE_STATES]),
    idle_seconds=st.none() | st.floats(0, 100),
)


@st.composite
def _reporting(draw: st.DrawFn) -> ReportingProcess:
    identity = draw(_identity)
    report = Report(
        identity,
        sequence=1,
        devices=tuple(draw(st.lists(_samples, max_size=3, unique_by=lambda sample: sample.uuid))),
        pinned_host_bytes=draw(_bytes),
        step=draw(_bytes),
        engine=draw(st.none() | _engine),
    )
    key = ProcessKey(identity.pid_namespace, identity.pid)
    received = draw(st.floats(0, 10))
    return ReportingProcess(key, draw(st.none() | _pid), report, received, 1e9 + received)


_memory = st.builds(
    DeviceMemory, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.none() | st.integers(0, 2**30)
)
_device = st.builds(
    DeviceReading,
    gpu=st.sampled_from(["0", "1", "10", "0:1", ""]),
    uuid=_uuid,
    name=_text,
    mig_profile=_text,
    memory=st.none() | _memory,
    processes=st.none()
    | st.dictionaries(_pid, _bytes, max_size=3).map(lambda used: tuple(starmap(ProcessMemory, used.items()))),
    utilization_ratio=st.none() | st.floats(0, 1),
    error=st.sampled_from(["", "lost"]),
)
_facts = st.dictionaries(
    _pid, st.builds(ProcessFacts, pid=_pid, start_time_ticks=st.integers(1, 2), command=_text, user=_text), max_size=3
)
_node = st.builds(
    NodeReading,
    taken_seconds=st.just(1.0),
    taken_unix_seconds=st.floats(1e9, 2e9),
    duration_seconds=st.floats(0, 10),
    up=st.booleans(),
    driver_version=_text,
    devices=st.lists(_device, max_size=4, unique_by=lambda device: device.uuid).map(tuple),
    facts=_facts,
)
_silent = st.builds(
    SilentReporter,
    key=st.builds(ProcessKey, st.integers(0, 2), _pid),
    host_pid=st.none() | _pid,
    start_time_ticks=st.integers(1, 2),
    workload=_text,
    rank=_text,
    last_report_unix_seconds=st.floats(1e9, 2e9),
)
_oom = st.builds(
    LastOom,
    gpu=st.sampled_from(["0", "0:1", ""]),
    uuid=_uuid,
    pid=st.sampled_from(["1", "2", "2@1"]),
    workload=_text,
    rank=_text,
    session=st.just("s"),
    number=st.just(1),
    happened_seconds=st.just(1.0),
    happened_unix_seconds=st.floats(1e9, 2e9),
    **{field.name: _bytes for field in dataclasses.fields(LastOom) if field.name.endswith("_bytes")},
)
SNAPSHOTS = st.builds(
    Snapshot,
    taken_seconds=st.just(10.0),
    node=st.none() | _node,
    processes=st.lists(_reporting(), max_size=4).map(tuple),
    silent=st.lists(_silent, max_size=3).map(tuple),
    ooms=st.lists(_oom, max_size=3, unique_by=lambda oom: (oom.uuid, oom.pid)).map(tuple),
    kv_cache_peaks=st.dictionaries(
        st.tuples(_pid.map(str), _uuid),
        st.dictionaries(
            st.sampled_from(list(KV_PEAK_WINDOWS)),
            st.builds(KvCachePeak, st.integers(0, 2**40), st.integers(0, 86400)),
        ),
        max_size=3,
    ),
)
