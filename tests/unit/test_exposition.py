"""The metrics page: what stands on it, in which order, and that nothing ever makes it wrong or takes it away."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from gpumem_exporter.collectors.collector import GpumemCollector
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import (
    DeviceMemory,
    DeviceReading,
    LastOom,
    NodeReading,
    ProcessFacts,
    ProcessKey,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
    Snapshot,
)
from gpumem_exporter.protocol import DeviceSample, ProcessIdentity, Report

MIB = 2**20
UUID = "GPU-0"


def exposition(own: CollectorRegistry | None = None, **options: int) -> Exposition:
    """A page whose clock stands still, so that two pages of one snapshot are equal."""
    return Exposition(own or CollectorRegistry(), version="1", source="nvml", clock=lambda: 0.0, **options)


def page(snapshot: Snapshot) -> list[str]:
    return exposition().render(snapshot, openmetrics=False).decode().splitlines()


def lines(snapshot: Snapshot, *starts: str) -> list[str]:
    """The page's lines of the named families."""
    return [line for line in page(snapshot) if line.startswith(tuple(f"{start}{{" for start in starts))]


def node(*devices: DeviceReading, facts: Mapping[int, ProcessFacts] | None = None, up: bool = True) -> NodeReading:
    return NodeReading(
        taken_seconds=9.0,
        taken_unix_seconds=1e9,
        duration_seconds=0.5,
        up=up,
        driver_version="570.1",
        devices=devices,
        facts=facts or {},
    )


def device(gpu: str = "0", uuid: str = UUID, processes: Mapping[int, int | None] | None = None) -> DeviceReading:
    return DeviceReading(
        gpu=gpu,
        uuid=uuid,
        memory=DeviceMemory(1000 * MIB, 500 * MIB, 490 * MIB, 10 * MIB),
        processes=tuple(ProcessMemory(pid, used) for pid, used in (processes or {}).items()),
    )


def process(
    pid: int = 7,
    *samples: DeviceSample,
    host_pid: int | None = 70,
    namespace: int = 1,
    received: float = 5.0,
    workload: str = "w",
    rank: str = "0",
    start_time_ticks: int = 3,
    pinned: int | None = None,
    step: int | None = None,
) -> ReportingProcess:
    identity = ProcessIdentity(
        pid, start_time_ticks, namespace, "s", 0.0, workload, rank, command="python own.py", torch_version="2.15"
    )
    report = Report(identity, sequence=1, devices=samples, pinned_host_bytes=pinned, step=step)
    return ReportingProcess(ProcessKey(namespace, pid), host_pid, report, received, 1e9 + received)


def silent(pid: int = 7, *, host_pid: int | None = 70, namespace: int = 1, workload: str = "w") -> SilentReporter:
    return SilentReporter(ProcessKey(namespace, pid), host_pid, 3, workload, "0", 1e9)


def snapshot(
    *processes: ReportingProcess, on: NodeReading | None = None, quiet: tuple[SilentReporter, ...] = ()
) -> Snapshot:
    return Snapshot(10.0, on, processes, quiet)


SAMPLE = DeviceSample(UUID, allocated_bytes=60, reserved_bytes=100, reclaimable_bytes=30, ooms=2)


# --- random nodes: few pids, namespaces and devices, so that they clash

_bytes = st.none() | st.integers(0, 2**63 - 1)
_count = st.none() | st.integers(0, 2**53)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ['\\"', "\n", "a\\n", '},{="', "é"]
)
_uuid = st.sampled_from(["GPU-0", "GPU-1", "MIG-2"])
_samples = st.builds(
    DeviceSample,
    uuid=_uuid,
    allocated_bytes=_bytes,
    reserved_bytes=_bytes,
    active_bytes=_bytes,
    inactive_split_bytes=_bytes,
    requested_bytes=_bytes,
    allocated_peak_bytes=_bytes,
    reserved_peak_bytes=_bytes,
    private_pools_bytes=_bytes,
    reclaimable_bytes=_bytes,
    alloc_retries=_count,
    ooms=_count,
    segments_allocated=_count,
    segments_freed=_count,
    cache_flushes=_count,
    planned_reserved_peak_bytes=_bytes,
    phase_peak_bytes=st.dictionaries(_text, st.integers(0, 2**40), max_size=2),
    component_bytes=st.dictionaries(_text, st.integers(0, 2**40), max_size=2),
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


@st.composite
def _reporting(draw: st.DrawFn) -> ReportingProcess:
    identity = draw(_identity)
    report = Report(
        identity,
        sequence=1,
        devices=tuple(draw(st.lists(_samples, max_size=3))),
        pinned_host_bytes=draw(_bytes),
        step=draw(_count),
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
    processes=st.none() | st.lists(st.builds(ProcessMemory, _pid, _bytes), max_size=4).map(tuple),
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
    devices=st.lists(_device, max_size=4).map(tuple),
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
    requested_bytes=_bytes,
    device_free_bytes=_bytes,
    limit_bytes=_bytes,
    allocated_bytes=_bytes,
    reserved_bytes=_bytes,
    reclaimable_bytes=_bytes,
    fragmented_bytes=_bytes,
)
_snapshots = st.builds(
    Snapshot,
    taken_seconds=st.just(10.0),
    node=st.none() | _node,
    processes=st.lists(_reporting(), max_size=4).map(tuple),
    silent=st.lists(_silent, max_size=3).map(tuple),
    ooms=st.lists(_oom, max_size=3, unique_by=lambda oom: (oom.uuid, oom.pid)).map(tuple),
)

Read = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(families: Iterator[object]) -> tuple[dict[str, tuple[str, str]], Read]:
    """Type and help of each family, and each sample; a doubled sample is an error."""
    kinds: dict[str, tuple[str, str]] = {}
    samples: Read = {}
    for family in families:
        kinds[family.name] = (family.type, family.documentation)  # type: ignore[attr-defined]
        for sample in family.samples:  # type: ignore[attr-defined]
            identity = (sample.name, frozenset(sample.labels.items()))
            assert identity not in samples, f"doubled: {identity}"
            samples[identity] = float(sample.value)
    return kinds, samples


@given(_snapshots)
@settings(deadline=None)
def test_both_formats_are_read_back_as_exactly_the_samples_of_the_collector(known: Snapshot) -> None:
    expected = read(iter(GpumemCollector(lambda: known, version="1", source="nvml", clock=lambda: 0.0).collect()))
    writer = exposition()

    text = writer.render(known, openmetrics=False).decode()
    openmetrics = writer.render(known, openmetrics=True).decode()

    kinds, samples = expected
    own = {("gpumem_scrape_collector_success", "own"): 1.0, ("gpumem_scrape_collector_duration_seconds", "own"): 0.0}
    samples |= {(name, frozenset({("collector", label)})): value for (name, label), value in own.items()}
    assert read(parse_text(text)) == (kinds, samples)
    assert read(parse_openmetrics(openmetrics)) == (kinds, samples)


@given(st.lists(st.tuples(_snapshots, st.sets(st.integers(0, 3)), st.booleans()), min_size=2, max_size=4))
@settings(deadline=None)
def test_a_page_is_the_same_whatever_was_prepared_and_shown_before(
    history: list[tuple[Snapshot, set[int], bool]],
) -> None:
    writer = exposition()
    for known, prepared, with_node in history:
        for i, reporter in enumerate(known.processes):
            if i in prepared:
                writer.prepare(reporter, known.node if with_node else None)

        shown = writer.render(known, openmetrics=True)

        assert shown == exposition().render(known, openmetrics=True)


@given(_snapshots)
@settings(deadline=None)
def test_a_pid_has_one_info_series_whoever_carries_it(known: Snapshot) -> None:
    text = exposition().render(known, openmetrics=False).decode()

    pids = [
        sample.labels["pid"]
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "gpumem_process_info"
    ]

    assert len(pids) == len(set(pids))


@given(_snapshots)
@settings(deadline=None)
def test_lines_of_a_family_stand_together_below_one_header(known: Snapshot) -> None:
    text = exposition().render(known, openmetrics=False).decode()

    # A family is one run of lines: its name comes up once when neighbours are merged.
    names = [line.split("{")[0].split(" ")[0] for line in text.split("\n") if line and not line.startswith("#")]
    runs = [name for name, _ in itertools.groupby(names)]
    assert len(runs) == len(set(runs))
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# TYPE ")] == runs
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# HELP ")] == runs


# --- what is shown


def test_every_device_shows_its_memory_in_integers() -> None:
    assert lines(snapshot(on=node(device())), "gpumem_device_memory_total_bytes", "gpumem_device_up") == [
        'gpumem_device_up{gpu="0",uuid="GPU-0"} 1',
        f'gpumem_device_memory_total_bytes{{gpu="0",uuid="GPU-0"}} {1000 * MIB}',
    ]


def test_a_lost_device_says_that_it_is_down_and_shows_no_figure() -> None:
    lost = DeviceReading("1", "GPU-1", name="H100", error="fell off the bus")

    shown = [line for line in page(snapshot(on=node(device(), lost))) if 'uuid="GPU-1"' in line]

    assert [line.split(" ")[-1] for line in shown] == ["1", "0"]
    assert [line.split("{")[0] for line in shown] == ["gpumem_device_info", "gpumem_device_up"]


def test_devices_stand_by_number_and_a_mig_device_after_its_parent() -> None:
    gpus = ["10", "2", "0:11", "0:2", "0", ""]

    shown = lines(snapshot(on=node(*(device(gpu, f"GPU-{gpu}") for gpu in gpus))), "gpumem_device_up")

    assert [line.split('"')[1] for line in shown] == ["", "0", "0:2", "0:11", "2", "10"]


def test_processes_stand_by_number() -> None:
    known = snapshot(*(process(pid, SAMPLE, host_pid=pid) for pid in (100, 9, 20)))

    assert [line.split('"')[5] for line in lines(known, "gpumem_torch_ooms_total")] == ["9", "20", "100"]


def test_the_ledger_adds_up_on_the_page_and_leaves_out_what_is_not_known() -> None:
    reporter = process(7, replace(SAMPLE, reserved_bytes=100), host_pid=70)
    shown = lines(snapshot(reporter, on=node(device(processes={70: 400, 71: 50}))), "gpumem_ledger_bytes")
    assert sum(int(line.split(" ")[-1]) for line in shown) == 1000 * MIB
    assert len(shown) == 8

    old_driver = replace(device(), memory=DeviceMemory(1000, 600, 400, None), processes=None)
    shown = lines(snapshot(on=node(old_driver)), "gpumem_ledger_bytes")
    assert sum(int(line.split(" ")[-1]) for line in shown) == 1000
    assert not any(name in line for line in shown for name in ("driver_reserved", "other_processes", "non_torch"))


def test_ratios_are_of_the_reserved_bytes() -> None:
    shown = lines(
        snapshot(process(7, SAMPLE)),
        "gpumem_torch_slack_ratio",
        "gpumem_torch_fragmentation_ratio",
        "gpumem_torch_fragmented_bytes",
    )

    assert [line.split("{")[0] + line.split("}")[1] for line in shown] == [
        "gpumem_torch_fragmented_bytes 10",
        "gpumem_torch_slack_ratio 0.4",
        "gpumem_torch_fragmentation_ratio 0.1",
    ]


@pytest.mark.parametrize("reserved", [0, None])
def test_ratios_are_absent_while_nothing_is_reserved(reserved: int | None) -> None:
    sample = DeviceSample(UUID, allocated_bytes=0, reserved_bytes=reserved, reclaimable_bytes=0)

    assert lines(snapshot(process(7, sample)), "gpumem_torch_slack_ratio", "gpumem_torch_fragmentation_ratio") == []


def test_what_a_reporter_does_not_know_has_no_series() -> None:
    shown = [line.split("{")[0] for line in page(snapshot(process(7, DeviceSample(UUID, reserved_bytes=5))))]

    assert [name for name in shown if name.startswith("gpumem_torch_")] == ["gpumem_torch_reserved_bytes"]


def test_pinned_memory_is_the_process_and_on_no_device() -> None:
    known = snapshot(process(7, SAMPLE, replace(SAMPLE, uuid="GPU-1"), pinned=5))

    assert lines(known, "gpumem_torch_pinned_host_bytes") == [
        'gpumem_torch_pinned_host_bytes{pid="70",workload="w",rank="0"} 5'
    ]


def test_a_phase_and_a_component_of_one_name_are_kept_apart() -> None:
    sample = DeviceSample(UUID, phase_peak_bytes={"other": 1}, component_bytes={"other": 2})
    writer = exposition()
    for reporter in (process(7, sample), process(7, replace(sample, phase_peak_bytes={"other": 3}))):
        writer.prepare(reporter, None)

        shown = writer.render(snapshot(reporter), openmetrics=False).decode()

        assert 'rank="0",component="other"} 2\n' in shown
        assert f'rank="0",phase="other"}} {reporter.report.devices[0].phase_peak_bytes["other"]}\n' in shown


def test_non_torch_is_what_the_driver_says_less_what_torch_reserved_and_signed() -> None:
    known = snapshot(
        process(7, SAMPLE, host_pid=70), process(8, SAMPLE, host_pid=80), on=node(device(processes={70: 150, 80: 60}))
    )

    shown = lines(known, "gpumem_torch_non_torch_bytes")

    assert [line.split(" ")[-1] for line in shown] == ["50", "-40"]


def test_non_torch_is_absent_where_the_driver_or_the_report_lacks_the_figure() -> None:
    unknown = snapshot(
        process(7, SAMPLE, host_pid=70),
        process(8, replace(SAMPLE, reserved_bytes=None), host_pid=80),
        process(9, SAMPLE, host_pid=90),
        process(10, SAMPLE, host_pid=None),
        on=node(device(processes={70: None, 80: 60, 10: 999})),
    )

    assert lines(unknown, "gpumem_torch_non_torch_bytes") == []


def test_a_process_that_the_driver_lists_twice_counts_once() -> None:
    listed = replace(device(), processes=(ProcessMemory(70, None), ProcessMemory(70, 50), ProcessMemory(70, 50)))

    assert lines(snapshot(on=node(listed)), "gpumem_process_memory_used_bytes") == [
        'gpumem_process_memory_used_bytes{gpu="0",uuid="GPU-0",pid="70"} 50'
    ]


@pytest.mark.parametrize("reading", [None, node(device(processes={70: 50}), up=False)])
def test_without_the_driver_torch_series_stay_with_no_index_and_the_rest_goes(reading: NodeReading | None) -> None:
    known = snapshot(process(7, SAMPLE), on=reading)

    assert lines(known, "gpumem_torch_ooms_total") == [
        'gpumem_torch_ooms_total{gpu="",uuid="GPU-0",pid="70",workload="w",rank="0"} 2'
    ]
    assert "gpumem_nvml_up 0" in page(known)
    (info,) = lines(known, "gpumem_process_info")
    assert 'pid="70",workload="w",rank="0",command="python own.py"' in info, "what it says of itself is still true"
    gone = ("gpumem_device_", "gpumem_ledger_", "gpumem_process_memory_", "gpumem_torch_non_torch_")
    assert [line for line in page(known) if line.startswith(gone)] == []


def test_the_last_poll_is_dated_and_timed_until_it_is_too_old() -> None:
    assert "gpumem_poll_duration_seconds 0.5" in page(snapshot(on=node()))
    assert "gpumem_poll_timestamp_seconds 1000000000.0" in page(snapshot(on=node()))
    assert not [line for line in page(snapshot()) if "gpumem_poll_" in line]


def test_a_silent_reporter_is_down_and_has_no_torch_series() -> None:
    known = snapshot(process(7, SAMPLE), quiet=(silent(8, host_pid=80),))

    assert lines(known, "gpumem_reporter_up", "gpumem_reporter_last_report_timestamp_seconds") == [
        'gpumem_reporter_up{pid="70",workload="w",rank="0"} 1',
        'gpumem_reporter_up{pid="80",workload="w",rank="0"} 0',
        'gpumem_reporter_last_report_timestamp_seconds{pid="70",workload="w",rank="0"} 1000000005.0',
        'gpumem_reporter_last_report_timestamp_seconds{pid="80",workload="w",rank="0"} 1000000000.0',
    ]
    assert not [line for line in page(known) if line.startswith("gpumem_torch_") and 'pid="80"' in line]


# --- who is who


def info(known: Snapshot) -> dict[str, dict[str, str]]:
    """The labels of each pid's info series."""
    return {
        sample.labels["pid"]: dict(sample.labels)
        for family in parse_text("\n".join(page(known)))
        for sample in family.samples
        if sample.name == "gpumem_process_info"
    }


def test_processes_are_described_by_the_host_where_it_knows_them_and_by_themselves_where_not() -> None:
    known = snapshot(
        process(7, SAMPLE, host_pid=70),
        process(8, SAMPLE, host_pid=80),
        process(9, SAMPLE, host_pid=None),
        on=node(
            device(processes={70: 1, 75: 1}),
            facts={
                70: ProcessFacts(70, 3, "python host.py", "alice", k8s_pod="pod-a"),
                75: ProcessFacts(75, 3, "nvidia-smi", "root"),
            },
        ),
        quiet=(silent(6, host_pid=60, workload="quiet"),),
    )

    shown = info(known)

    assert list(shown) == ["9", "60", "70", "75", "80"]
    assert {pid: labels["command"] for pid, labels in shown.items()} == {
        "9": "python own.py",
        "60": "",
        "70": "python host.py",
        "75": "nvidia-smi",
        "80": "python own.py",
    }
    assert shown["70"]["user"] == "alice"
    assert shown["70"]["k8s_pod"] == "pod-a"
    assert shown["70"]["torch_version"] == "2.15"
    assert [pid for pid, labels in shown.items() if labels["reporting"] == "true"] == ["9", "70", "80"]
    assert shown["60"]["workload"] == "quiet"
    assert shown["75"]["workload"] == ""


def test_what_the_host_says_of_another_process_with_the_same_pid_is_not_shown() -> None:
    earlier = {70: ProcessFacts(70, 2, "somebody else", "mallory")}
    known = snapshot(process(7, SAMPLE, host_pid=70), on=node(device(processes={70: 999}), facts=earlier))

    assert info(known)["70"]["command"] == "python own.py"
    assert info(known)["70"]["user"] == ""
    assert lines(known, "gpumem_torch_allocated_bytes")
    assert lines(known, "gpumem_torch_non_torch_bytes") == [], "the driver's figure is of the process before"


def test_nothing_of_a_reporter_is_shown_once_its_pid_has_another_process() -> None:
    later = {70: ProcessFacts(70, 10_000_000, "somebody else", "mallory")}
    known = snapshot(process(7, SAMPLE, host_pid=70), on=node(device(processes={70: 999}), facts=later))

    assert info(known)["70"]["command"] == "somebody else"
    assert (info(known)["70"]["workload"], info(known)["70"]["reporting"]) == ("", "false")
    assert lines(known, "gpumem_torch_") == []
    assert any("other_processes" in line and line.endswith(" 999") for line in lines(known, "gpumem_ledger_bytes"))


def test_processes_of_one_own_pid_in_two_namespaces_are_both_shown_under_names_of_their_own() -> None:
    known = snapshot(
        process(1, SAMPLE, host_pid=None, namespace=11),
        process(1, SAMPLE, host_pid=None, namespace=12),
        process(2, SAMPLE, host_pid=None, namespace=12),
    )

    assert [line.split('"')[5] for line in lines(known, "gpumem_torch_ooms_total")] == ["1@11", "1@12", "2"]


def test_an_own_pid_never_passes_for_a_pid_of_the_driver() -> None:
    reporter = process(70, SAMPLE, host_pid=None, namespace=11)

    known = snapshot(reporter, on=node(device(processes={70: 500})))

    assert [line.split('"')[5] for line in lines(known, "gpumem_torch_ooms_total")] == ["70@11"]
    assert info(known)["70"]["reporting"] == "false"
    assert info(known)["70@11"]["reporting"] == "true"


def test_of_two_reporters_with_one_host_pid_the_one_that_reported_last_is_shown() -> None:
    known = snapshot(
        process(1, SAMPLE, host_pid=70, namespace=11, received=6.0, workload="new"),
        process(1, SAMPLE, host_pid=70, namespace=12, received=5.0, workload="old"),
        quiet=(silent(1, host_pid=70, namespace=13, workload="older"),),
    )

    assert [line.split('"')[7] for line in lines(known, "gpumem_torch_ooms_total")] == ["new"]
    assert [line.split('"')[3] for line in lines(known, "gpumem_reporter_up")] == ["new"]


# --- what was prepared

Change = Callable[[ReportingProcess, NodeReading], tuple[ReportingProcess, NodeReading]]


def test_a_prepared_process_is_written_when_its_report_comes_and_only_joined_at_the_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reporter, reading = process(7, SAMPLE), node(device(processes={70: 150}))
    writer = exposition()
    writer.prepare(reporter, reading)
    expected = page(snapshot(reporter, on=reading))

    def write_again(*_: object) -> None:
        raise AssertionError("written at the scrape")

    monkeypatch.setattr("gpumem_exporter.collectors.prepared.report_samples", write_again)

    assert writer.render(snapshot(reporter, on=reading), openmetrics=False).decode().splitlines() == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda reporter, reading: (process(7, replace(SAMPLE, ooms=3)), reading),
        lambda reporter, reading: (replace(reporter, host_pid=71), reading),
        lambda reporter, reading: (replace(reporter, host_pid=None), reading),
        lambda reporter, reading: (process(7, SAMPLE, workload="v"), reading),
        lambda reporter, reading: (process(7, SAMPLE, rank="1"), reading),
        lambda reporter, reading: (process(7, SAMPLE, step=4), reading),
        lambda reporter, reading: (process(7, SAMPLE, pinned=4), reading),
        lambda reporter, reading: (reporter, node(device("5"))),
        lambda reporter, reading: (reporter, node(device(), up=False)),
    ],
    ids=["figures", "host pid", "no host pid", "workload", "rank", "step", "pinned", "index", "driver gone"],
)
@pytest.mark.parametrize("prepared_again", [True, False])
def test_prepared_lines_are_not_shown_once_anything_in_them_has_changed(change: Change, prepared_again: bool) -> None:
    reporter, reading = process(7, SAMPLE), node(device())
    writer = exposition()
    writer.prepare(reporter, reading)
    before = writer.render(snapshot(reporter, on=reading), openmetrics=False)
    reporter, reading = change(reporter, reading)
    if prepared_again:
        writer.prepare(reporter, reading)

    after = writer.render(snapshot(reporter, on=reading), openmetrics=False)

    assert after == exposition().render(snapshot(reporter, on=reading), openmetrics=False)
    assert after != before


def test_lines_and_labels_of_a_process_that_has_gone_are_forgotten() -> None:
    writer = exposition()
    everybody = [process(pid, SAMPLE, host_pid=pid) for pid in range(1, 50)]
    reading = node(device(processes=dict.fromkeys(range(1, 50), 200)))
    for reporter in everybody:
        writer.prepare(reporter, reading)
    writer.render(snapshot(*everybody, on=reading), openmetrics=False)

    writer.render(snapshot(everybody[0], on=node(device())), openmetrics=False)

    assert len(writer._prepared) == 1
    fresh = exposition()
    fresh.render(snapshot(everybody[0], on=node(device())), openmetrics=False)
    assert len(writer._writer) <= 2 * len(fresh._writer)


def test_reports_without_any_scrape_do_not_pile_up_and_the_page_is_whole_all_the_same() -> None:
    writer = exposition(max_prepared_processes=3)
    everybody = [process(pid, SAMPLE, host_pid=pid) for pid in range(1, 11)]
    for reporter in everybody:
        writer.prepare(reporter, None)
    assert len(writer._prepared) == 3

    assert writer.render(snapshot(*everybody), openmetrics=False).decode().splitlines() == page(snapshot(*everybody))
    assert len(writer._prepared) == 3


# --- the formats


def test_counters_are_named_as_each_format_has_it() -> None:
    writer = exposition()
    text = writer.render(snapshot(process(7, SAMPLE)), openmetrics=False).decode()
    openmetrics = writer.render(snapshot(process(7, SAMPLE)), openmetrics=True).decode()

    assert "# TYPE gpumem_torch_ooms_total counter\ngpumem_torch_ooms_total{" in text
    assert "# TYPE gpumem_torch_ooms counter\ngpumem_torch_ooms_total{" in openmetrics


@pytest.mark.parametrize("openmetrics", [True, False])
def test_the_own_registry_follows_without_created_series_and_the_page_ends_once(openmetrics: bool) -> None:
    own = CollectorRegistry()
    Instruments(own).count_report("accepted")

    text = exposition(own).render(snapshot(), openmetrics=openmetrics).decode()

    assert 'gpumem_reports_total{outcome="accepted"} 1.0\n' in text
    assert "_created" not in text
    assert text.count("# EOF") == int(openmetrics)
    assert text.endswith("# EOF\n") == openmetrics


def test_a_counter_of_the_own_registry_that_is_called_created_stays() -> None:
    own = CollectorRegistry()
    Counter("files_created", "Files.", registry=own).inc()

    assert "files_created_total 1.0\n" in exposition(own).render(snapshot(), openmetrics=False).decode()


def test_label_values_are_escaped() -> None:
    shown = lines(snapshot(process(7, SAMPLE, workload='a\\b"c\nd')), "gpumem_reporter_up")

    assert shown == [r'gpumem_reporter_up{pid="70",workload="a\\b\"c\nd",rank="0"} 1']


def test_bytes_that_are_no_utf8_cost_neither_page_anything_but_themselves() -> None:
    known = snapshot(process(7, SAMPLE, workload=b"w\xff".decode("utf-8", "surrogateescape")))
    embedded = CollectorRegistry()
    embedded.register(GpumemCollector(lambda: known, version="1", source="nvml"))

    assert len(lines(known, "gpumem_torch_ooms_total")) == 1
    assert 'workload="w?"' in "".join(lines(known, "gpumem_torch_ooms_total"))
    assert 'workload="w?"' in generate_latest(embedded).decode()


# --- one failure never costs the page


class _Broken:
    """Facts of a process that cannot be told."""

    start_time_ticks = 0

    def __getattr__(self, name: str) -> str:
        raise RuntimeError("broken")


def test_a_subject_that_fails_is_left_out_and_told_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    writer = exposition()
    sound = snapshot(process(7, SAMPLE), on=node(device(processes={70: 50})))
    broken = replace(sound, node=replace(sound.node, facts={70: _Broken()}))  # type: ignore[type-var, dict-item]
    whole = writer.render(sound, openmetrics=False).decode().splitlines()

    with caplog.at_level(logging.ERROR):
        partly = writer.render(broken, openmetrics=False).decode().splitlines()
        writer.render(broken, openmetrics=False)

    told = "gpumem_scrape_collector_success{collector="
    kept = [line for line in whole if "gpumem_process_" not in line and not line.startswith(told)]
    assert [line for line in partly if not line.startswith(told)] == kept
    assert len(kept) < len(whole)
    assert 'gpumem_scrape_collector_success{collector="process"} 0' in partly
    assert 'gpumem_scrape_collector_success{collector="torch"} 1' in partly
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert writer.render(sound, openmetrics=False).decode().splitlines() == whole


class _Raising(Collector):
    def collect(self) -> Iterator[object]:
        raise RuntimeError("broken")


@pytest.mark.parametrize("openmetrics", [True, False])
def test_an_own_registry_that_fails_costs_its_own_series_only(openmetrics: bool) -> None:
    own = CollectorRegistry()
    own.register(_Raising())

    text = exposition(own).render(snapshot(process(7, SAMPLE)), openmetrics=openmetrics).decode()

    assert 'gpumem_scrape_collector_success{collector="own"} 0\n' in text
    assert 'gpumem_reporter_up{pid="70",workload="w",rank="0"} 1\n' in text
    assert text.endswith("# EOF\n") == openmetrics


def test_each_part_of_the_page_tells_how_long_it_took() -> None:
    ticks = itertools.count()
    writer = Exposition(CollectorRegistry(), version="1", source="nvml", clock=lambda: next(ticks) * 0.25)

    text = writer.render(snapshot(), openmetrics=False).decode()

    assert 'gpumem_scrape_collector_duration_seconds{collector="device"} 0.25\n' in text


# --- embedded in another's registry


def test_an_embedder_gets_every_series_once_beside_the_instruments() -> None:
    known = snapshot(process(7, SAMPLE), on=node(device(processes={70: 150})))
    registry = CollectorRegistry()
    Instruments(registry)
    registry.register(GpumemCollector(lambda: known, version="1", source="nvml"))

    _, samples = read(parse_text(generate_latest(registry).decode()))

    assert samples["gpumem_nvml_up", frozenset()] == 1


def test_a_registry_refuses_a_second_collector_of_the_same_names() -> None:
    registry = CollectorRegistry()
    registry.register(GpumemCollector(snapshot, version="1", source="nvml"))

    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(GpumemCollector(snapshot, version="1", source="nvml"))


def test_collecting_does_not_raise_when_there_is_no_snapshot_to_be_had(caplog: pytest.LogCaptureFixture) -> None:
    def unavailable() -> Snapshot:
        raise RuntimeError("stopped")

    families = list(GpumemCollector(unavailable, version="1", source="nvml").collect())

    success = next(family for family in families if family.name == "gpumem_scrape_collector_success")
    assert [(sample.labels, sample.value) for sample in success.samples] == [({"collector": "view"}, 0)]
    assert len(caplog.records) == 1
