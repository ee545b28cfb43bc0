from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest

from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.readings import DeviceReading, NodeReading
from gpumem_exporter.core.samples import LastOom, ProcessKey, ReportingProcess, SilentReporter, Snapshot, StartingEngine
from gpumem_exporter.main import main
from gpumem_exporter.page.findings import Finding, Since, find
from gpumem_exporter.page.growth import GrowingPart, Growth
from gpumem_exporter.page.jobs import jobs_of
from tests.support.builders.builders import MIB, UUIDS, Clock, device, node, report, reporting, sample

GIB = 1024 * MIB


def of(pid: int, workload: str, allocated: int = GIB, idle: int = 0, fragmented: int = 0) -> ReportingProcess:
    one = dataclasses.replace(sample(UUIDS[0], allocated, idle, fragmented), idle_cache_bytes=idle)
    process = reporting(pid, devices=(one,), workload=workload, session=f"session-{pid}")
    return dataclasses.replace(process, key=ProcessKey(1, pid, 1001, HERE))


def reading(*processes: ReportingProcess, free: int = 40 * GIB) -> NodeReading:
    total = 80 * GIB
    shares = {process.key.pid: process.report.devices[0].reserved_bytes or 0 for process in processes}
    used = total - free
    return node(device(total=total, used=used, processes={**shares, 99: used - sum(shares.values())}))


def findings(*processes: ReportingProcess, free: int = 40 * GIB, **changes: Any) -> dict[str, Finding]:
    shown = Snapshot(1000.0, changes.pop("node", reading(*processes, free=free)), processes, **_of_snapshot(changes))
    found = find(shown, jobs_of(shown), node_ledgers(shown), **changes)
    assert len({finding.id for finding in found}) == len(found)
    return {finding.kind: finding for finding in found}


def _of_snapshot(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: changes.pop(name) for name in ("ooms", "silent", "starting") if name in changes}


def oom(**changes: Any) -> LastOom:
    error = LastOom("0", UUIDS[0], "1", "train", "", "session-1", 1, 990.0, 1.0, requested_bytes=GIB, owner="uid:1001")
    return dataclasses.replace(error, device_free_bytes=5, **changes)


def test_a_full_device_is_no_fault_and_idle_cache_that_no_other_job_could_use_neither() -> None:
    assert findings(of(1, "train", 79 * GIB), free=0) == {}
    alone = node(device(total=80 * GIB, used=79 * GIB, processes={1: 79 * GIB}))
    assert findings(of(1, "train", 69 * GIB, 10 * GIB), node=alone) == {}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "warning"),
        ({"ended_process": True}, "critical"),
        ({"happened_seconds": 100.0}, None),
        ({"happened_seconds": 100.0, "ended_process": True}, "critical"),
    ],
)
def test_an_out_of_memory_error_is_critical_only_if_it_ended_its_process(
    changes: dict[str, Any], severity: str | None
) -> None:
    found = findings(of(1, "train"), ooms=(oom(**changes),)).get("oom")
    assert (found.severity if found else None) == severity
    if found is not None:
        assert found.job is not None
        assert found.gpu == "0"


def test_an_error_is_named_after_its_own_process_also_without_a_workload() -> None:
    processes = (of(7, ""), of(8, ""))
    found = findings(*processes, ooms=(oom(pid="7", workload="", session="session-7"),))["oom"]
    assert found.job is not None
    assert [process.pid for process in found.job.processes] == [7]
    assert "continues" in found.sentence
    ended = findings(*processes, ooms=(oom(pid="9", workload="", session="session-9"),))["oom"]
    assert ended.job is None
    assert ended.sentence.startswith("pid 9 requested")
    assert "continues" not in ended.sentence
    another_user = findings(*processes, ooms=(oom(pid="7", workload="", session="session-7", owner="uid:1002"),))["oom"]
    assert another_user.job is None, "a session is a claim"


def test_the_errors_of_a_job_on_a_device_are_one_finding() -> None:
    crashes = [
        oom(pid=str(pid), session=f"session-{pid}", ended_process=pid < 8, happened_seconds=980.0 + pid)
        for pid in range(5, 10)
    ]
    elsewhere = oom(pid="5", uuid=UUIDS[1], gpu="1")
    shown = dataclasses.replace(Snapshot(1000.0, node(), ()), ooms=(*crashes, elsewhere))
    found = [each for each in find(shown, jobs_of(shown), node_ledgers(shown)) if each.kind == "oom"]
    assert [(each.severity, each.gpu, each.since_seconds) for each in found] == [
        ("critical", "0", 987.0),
        ("warning", "1", 990.0),
    ]
    assert " 5 of its processes" in found[0].sentence


@pytest.mark.parametrize(
    ("growing", "sentence"),
    [
        ({1: (10, 7200.0)}, "leak rank 1 grows by 10.0 GiB an hour."),
        ({1: (10, 1800.0)}, "leak rank 1 grows by 10.0 GiB an hour; it will be out of memory in 30 min."),
        ({1: (10, 0.0)}, "leak rank 1 grows by 10.0 GiB an hour; it has no memory left."),
        ({1: (10, None)}, "leak rank 1 grows by 10.0 GiB an hour."),
        (
            {1: (10, 7200.0), 2: (4, 600.0)},
            "leak grows by up to 10.0 GiB an hour in 2 of 3 processes; it will be out of memory in 10 min.",
        ),
    ],
)
def test_the_fastest_process_speaks_for_its_job(growing: dict[int, tuple[int, float | None]], sentence: str) -> None:
    ranks = tuple(
        dataclasses.replace(each, report=report(pid, devices=each.report.devices, workload="leak", rank=str(pid)))
        for pid in (1, 2, 3)
        for each in [of(pid, "leak")]
    )
    (job,) = [each for each in jobs_of(Snapshot(1.0, reading(*ranks), ranks)) if each.workload]
    parts = [
        GrowingPart(part, Growth(rate * GIB, 500.0), left)
        for part in job.parts
        if isinstance(pid := part.process.pid, int) and pid in growing
        for rate, left in [growing[pid]]
    ]
    found = findings(*ranks, growing={job.id: parts})["growth"]
    assert (found.severity, found.since_seconds, found.sentence) == ("warning", 500.0, sentence)


def failed(pid: int, workload: str) -> LastOom:
    return oom(pid=str(pid), session=f"session-{pid}", workload=workload, happened_seconds=9_900.0)


def idle(process: ReportingProcess, since: float | None) -> ReportingProcess:
    return dataclasses.replace(process, last_active_seconds=since)


@pytest.mark.parametrize(
    ("since", "size", "ooms", "severity"),
    [
        (10_000.0 - 9 * 3600, 4 * GIB, (), "info"),
        (10_000.0 - 3600, 4 * GIB, (), "info"),
        (10_000.0 - 3590, 4 * GIB, (), None),  # an epoch ends, an evaluation waits
        (10_000.0 - 9 * 3600, GIB // 2, (), None),
        (None, 4 * GIB, (), None),  # unknown
        (10_000.0 - 9 * 3600, 4 * GIB, (failed(7, "b"),), "warning"),
        (10_000.0 - 9 * 3600, 4 * GIB, (failed(1, "a"),), "info"),
    ],
)
def test_a_job_that_holds_memory_without_any_activity_is_named(
    since: float | None, size: int, ooms: tuple[LastOom, ...], severity: str | None
) -> None:
    processes = (idle(of(1, "a", size), since), idle(of(7, "b"), 10_000.0))
    shown = Snapshot(10_000.0, reading(*processes), processes, ooms=ooms)
    found = {each.kind: each for each in find(shown, jobs_of(shown), node_ledgers(shown))}.get("inactive")
    assert (found.severity if found else None) == severity
    if found is not None and since == 10_000.0 - 9 * 3600:
        lacking = ", where another job ran out of memory" if severity == "warning" else ""
        assert found.sentence == f"a has held 4.0 GiB for 9 h without any activity{lacking}."
        assert found.since_seconds == since


def test_a_job_is_active_while_one_of_its_processes_is_or_may_be() -> None:
    for other in (9_000.0, None):
        ranks = (idle(of(1, "a", 4 * GIB), 100.0), idle(of(2, "a", 4 * GIB), other))
        shown = Snapshot(10_000.0, reading(*ranks), ranks)
        assert "inactive" not in {each.kind for each in find(shown, jobs_of(shown), node_ledgers(shown))}


def test_a_warning_has_only_the_idle_cache_that_others_lack() -> None:
    one, train = of(1, "notebook", idle=5 * GIB), of(2, "train")
    alone = dataclasses.replace(sample(UUIDS[1], GIB, 30 * GIB), idle_cache_bytes=30 * GIB)
    both = (dataclasses.replace(one.report.devices[0], uuid=UUIDS[0]), alone)
    one = dataclasses.replace(one, report=dataclasses.replace(one.report, devices=both))
    sizes: dict[int, int | None] = {1: 6 * GIB, 2: GIB, 99: 72 * GIB}
    devices = (
        device(uuid=UUIDS[0], total=80 * GIB, used=79 * GIB, processes=sizes),
        device(uuid=UUIDS[1], gpu="1", total=80 * GIB, used=31 * GIB, processes={1: 31 * GIB}),
    )
    found = findings(one, train, node=node(*devices))["idle_cache"]
    assert (found.severity, found.idle_cache_bytes) == ("warning", 5 * GIB)


@pytest.mark.parametrize(
    ("idle", "free", "ooms", "severity"),
    [
        (10 * GIB, 40 * GIB, (), None),
        (20 * GIB, 40 * GIB, (), "info"),
        (10 * GIB, GIB, (), "warning"),
        (10 * GIB, 40 * GIB, (oom(workload="other", session="ended"),), "warning"),
        (10 * GIB, 40 * GIB, (oom(workload="notebook"),), None),
        (1 * GIB, GIB, (), None),
    ],
)
def test_idle_cache_that_others_lack_is_a_warning(
    idle: int, free: int, ooms: tuple[LastOom, ...], severity: str | None
) -> None:
    found = findings(of(1, "notebook", idle=idle), of(2, "train"), free=free, ooms=ooms).get("idle_cache")
    assert (found.severity if found else None) == severity
    if found is not None:
        assert found.idle_cache_bytes == idle
        assert found.job is not None
        assert found.job.workload == "notebook"


def test_engines_of_two_jobs_that_start_on_one_device_are_a_warning() -> None:
    jobs = of(1, "chat"), of(2, "embed"), of(3, "embed")
    first, second, third = (StartingEngine(UUIDS[0], "0", pid, "VLLM::EngineCore", 2000.0) for pid in (1, 2, 3))
    assert "starting_together" not in findings(*jobs, starting=(second, third)), "two processes of one engine"
    elsewhere = dataclasses.replace(second, uuid=UUIDS[1], gpu="1")
    assert "starting_together" not in findings(*jobs, starting=(first, elsewhere))
    found = findings(*jobs, starting=(first, second, third))["starting_together"]
    assert (found.severity, found.gpu) == ("warning", "0")
    assert "chat" in found.sentence
    assert "embed" in found.sentence


def test_lost_devices_failed_checks_silent_reporters_and_starting_engines() -> None:
    lost = node(DeviceReading(gpu="0", uuid=UUIDS[0], error="Xid 79"))
    assert findings(node=lost)["device_lost"].severity == "critical"
    checks = [
        {"part": "nvml", "status": "degraded", "detail": "no driver"},
        {"part": "events", "status": "degraded", "detail": "disk full"},
        {"part": "devices", "status": "degraded", "detail": "1 of 8"},
    ]
    found = findings(node=lost, failed_checks=checks)
    severities = {kind: finding.severity for kind, finding in found.items()}
    assert severities == {"driver": "critical", "check": "warning", "device_lost": "critical"}
    no_device = findings(node=node(), failed_checks=checks[-1:])
    assert [no_device["check"].severity, "1 of 8" in no_device["check"].sentence] == ["warning", True]
    silent = SilentReporter(ProcessKey(1, 2, 1001, HERE), 2, 1000, "train", "1", 1.0, 1.0)
    assert findings(silent=(silent,))["silent"].severity == "warning"
    engine = StartingEngine(UUIDS[0], "0", 1, "VLLM::EngineCore", 900.0)
    assert findings(of(1, "engine"), starting=(engine,))["starting"].severity == "info"


def test_fragmented_and_unattributed_memory() -> None:
    assert findings(of(1, "train", fragmented=9 * GIB))["fragmented"].severity == "warning"
    assert findings(of(1, "train", fragmented=7 * GIB)) == {}
    unexplained = node(device(total=80 * GIB, used=40 * GIB, processes={99: 20 * GIB}))
    assert findings(node=unexplained)["unattributed"].severity == "warning"


def test_the_next_commands_of_findings_exist(capfd: pytest.CaptureFixture[str]) -> None:
    process = of(1, "w", 40 * GIB, 30 * GIB)
    (job, *_) = jobs_of(Snapshot(1.0, reading(process), (process,)))
    found = findings(
        *(process, of(2, "v")),
        free=0,
        ooms=(oom(ended_process=True),),
        failed_checks=[{"part": "events", "status": "degraded", "detail": "disk full"}],
        growing={job.id: [GrowingPart(job.parts[0], Growth(GIB, 500.0), None)]},
    ).values()
    commands = [shlex.split(each.next.partition(": gpumem-exporter ")[2]) for each in found]
    assert {words[0] for words in commands if words} == {"clear", "doctor", "events", "profile"}
    for words in filter(None, commands):
        assert main([*words, "--url", "http://127.0.0.1:1"]) == 1, words  # 2 is wrong usage
        assert "127.0.0.1:1" in "".join(capfd.readouterr()), words


def test_a_finding_keeps_its_start_and_must_last_if_it_changes_with_each_step() -> None:
    clock = Clock(100.0)
    since = Since(clock)
    lost = Finding("a", "device_lost", "critical", "", "")
    fragmented = Finding("b", "fragmented", "warning", "", "")
    assert since.lasting([fragmented, lost]) == [dataclasses.replace(lost, since_seconds=100.0)]
    for _ in range(5):
        clock.now += 3.0
        shown = since.lasting([fragmented, lost])
    assert [finding.id for finding in shown] == ["a", "b"]
    assert {finding.since_seconds for finding in shown} == {100.0}
    clock.now += 60.0
    assert since.lasting([lost]) == [dataclasses.replace(lost, since_seconds=160.0 + 15.0)]


def test_a_severity_rises_at_once_and_falls_after_a_minute() -> None:
    clock = Clock(100.0)
    since = Since(clock)
    shown = []
    for severity in ("info", "warning", "info", *16 * ["info"], "warning", "info"):
        (finding,) = since.lasting([Finding("a", "idle_cache", severity, "", "")])
        shown.append(finding.severity)
        clock.now += 4.0
    assert shown == ["info", *15 * ["warning"], *3 * ["info"], "warning", "warning"]


def test_the_most_severe_and_then_the_oldest_finding_is_first() -> None:
    since = Since(Clock(100.0))
    known = [
        Finding("note", "starting", "info", "", "", since_seconds=1.0),
        Finding("new", "oom", "critical", "", "", since_seconds=90.0),
        Finding("old", "oom", "critical", "", "", since_seconds=10.0),
    ]
    assert [finding.id for finding in since.lasting(known)] == ["old", "new", "note"]
