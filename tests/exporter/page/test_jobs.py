"""Jobs, and the documents of devices and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pytest

from gpumem_exporter.core.caller import Caller, CallerKind
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.readings import DeviceReading, ProcessFacts
from gpumem_exporter.core.samples import JobKey, ProcessKey, ReportingProcess, SilentReporter, Snapshot
from gpumem_exporter.node.job_ids import job_id, job_of_process
from gpumem_exporter.page.documents import devices_document, processes_document
from gpumem_exporter.page.jobs import HUES, Hues, Job, job_uuids, jobs_of
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

ALICE, BOB = 1001, 1002
POD = Place(known=True, container="c" * 64)


def of(pid: int, uid: int = ALICE, place: Place = HERE, **changes: Any) -> ReportingProcess:
    """A process of a user that uses 100 MiB of device 0, 10 MiB of it as idle cache."""
    used = dataclasses.replace(sample(UUIDS[0], 80 * MIB, 20 * MIB), idle_cache_bytes=10 * MIB)
    process = reporting(pid, **{"devices": (used,), **changes})
    return dataclasses.replace(process, key=ProcessKey(1, pid, uid, place))


def snapshot(*processes: ReportingProcess, listed: dict[int, int | None] | None = None, **changes: Any) -> Snapshot:
    pids = {process.host_pid: 150 * MIB for process in processes if process.host_pid is not None}
    reading = node(device(used=4000 * MIB, processes={**pids, **(listed or {})}), device(UUIDS[1], gpu="1"))
    facts = {pid: ProcessFacts(pid, 1000, "python train.py", "alice", started_seconds=-60.0) for pid in pids}
    return Snapshot(100.0, dataclasses.replace(reading, facts=facts), processes, **changes)


def ids(jobs: Sequence[Job]) -> list[list[int | str]]:
    return [[process.pid for process in job.processes] for job in jobs]


def test_a_job_is_the_processes_of_one_workload_and_one_owner() -> None:
    jobs = jobs_of(snapshot(of(1), of(2), of(3, BOB), of(4, place=POD), of(5, workload=""), listed={6: 1 * MIB}))
    assert sorted(ids(jobs)) == [[1, 2], [3], [4], [5], [6]]
    assert len({job.id for job in jobs}) == 5
    assert jobs[0].processes[0].pid == 1, "the largest job is first"
    assert [job.workload for job in jobs if [process.pid for process in job.processes] in ([5], [6])] == [None, None]


def test_a_job_keeps_its_id_and_the_id_does_not_show_the_owner() -> None:
    known = JobKey("a/b c", "", ALICE, HERE)
    assert job_id(known) == job_id(JobKey("a/b c", "", ALICE, HERE))
    others = [known._replace(owner_uid=BOB), known._replace(workload="a/b-c"), known._replace(slurm_job_id="4711")]
    assert len({job_id(each) for each in (known, *others)}) == 4
    named = job_id(known._replace(workload="a/b c?#&%ü" * 99))
    assert quote(named) == named
    assert len(named) < 100


def test_tasks_of_an_array_with_one_name_are_several_jobs_also_when_they_are_silent() -> None:
    tasks = [of(pid, slurm_job_id=str(pid)) for pid in (103, 104)]
    silent = SilentReporter(ProcessKey(1, 105, ALICE, HERE), 105, 1000, "train", "1", 1.0, 1.0, "104")
    jobs = jobs_of(snapshot(*tasks, listed={105: 1 * MIB}, silent=(silent,)))
    assert sorted(ids(jobs)) == [[103], [104, 105]]
    assert {job_of_process(task) for task in tasks} == {job.id for job in jobs}


def test_a_silent_rank_belongs_to_its_job_and_makes_the_sums_incomplete() -> None:
    silent = SilentReporter(ProcessKey(1, 2, ALICE, HERE), 2, 1000, "train", "1", 1.0, 1.0)
    (job,) = jobs_of(snapshot(of(1), listed={2: 70 * MIB}, silent=(silent,)))
    assert [process.state for process in job.processes] == ["reporting", "silent"]
    assert job.sums["used_bytes"] == 220 * MIB
    assert job.sums["allocated_bytes"] == 80 * MIB
    assert "allocated_bytes" in job.incomplete
    assert "used_bytes" not in job.incomplete
    assert "unmapped_bytes" not in job.incomplete


@pytest.mark.parametrize("sampled", [False, True])
def test_a_device_with_only_a_context_makes_no_sum_incomplete(sampled: bool) -> None:
    """Another library may have the context. Of torch's own context, the idle cache is unknown for a minute."""
    empty = dataclasses.replace(sample(UUIDS[1], 0), reserved_bytes=0, idle_cache_bytes=None, reclaimable_bytes=None)
    process = of(1)
    if sampled:
        process = of(1, devices=(*process.report.devices, empty))
    reading = node(device(processes={1: 150 * MIB}), device(UUIDS[1], gpu="1", processes={1: 5 * MIB}))
    (job,) = jobs_of(Snapshot(100.0, reading, (process,)))
    assert (job.sums["used_bytes"], job.sums["idle_cache_bytes"]) == (155 * MIB, 10 * MIB)
    assert set(job.incomplete) <= {"non_torch_bytes"}
    # A report without a device shows nothing about torch's memory.
    (unknown,) = jobs_of(Snapshot(100.0, reading, (of(1, devices=()),)))
    assert unknown.sums["idle_cache_bytes"] is None


def test_what_no_process_knows_is_unknown() -> None:
    (job,) = jobs_of(snapshot(listed={6: None}))
    assert set(job.sums.values()) == {None}
    assert job.incomplete == []


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"step": 3, "step_seconds": 0.5}, "training"),
        ({"step": 3, "step_seconds": None}, "idle"),
        ({"engine_starting": False}, "serving"),
        ({"devices": (dataclasses.replace(sample(UUIDS[0], MIB), unmapped_bytes=5),)}, "sleeping"),
        ({}, "idle"),
    ],
)
def test_the_state_of_a_job(changes: dict[str, Any], state: str) -> None:
    (job,) = jobs_of(snapshot(of(1, **changes)))
    assert job.state(100.0, []) == state


def test_the_state_of_a_job_that_allocates_that_starts_and_that_does_not_report() -> None:
    (job,) = jobs_of(snapshot(dataclasses.replace(of(1), active_seconds=90.0)))
    assert (job.state(100.0, []), job.state(200.0, [])) == ("running", "idle")
    assert job.state(100.0, [1]) == "starting"
    (unreported,) = jobs_of(snapshot(listed={6: MIB}))
    assert unreported.state(100.0, []) == "not reporting"


def test_a_job_says_since_when_it_runs_and_what_its_last_step_was() -> None:
    stepping = dataclasses.replace(of(1, step=7, step_seconds=0.5), stepped_seconds=97.0)
    (job,) = jobs_of(snapshot(stepping, dataclasses.replace(of(2, step=6), stepped_seconds=99.0)))
    shown = snapshot(stepping)
    assert job.started_unix_seconds(shown.node) == -60.0
    assert job.steps(shown, 1000.0) == {"step": 7, "step_seconds": 0.5, "last_step_unix_seconds": 997.0}


def test_identities_of_others_are_hidden_from_a_viewer() -> None:
    viewer = Caller(CallerKind.LOOPBACK, uid=BOB)
    (job,) = jobs_of(snapshot(of(1)), viewer)
    assert job.name == "train"
    assert {job.owner[name] for name in ("user", "uid", "k8s_pod")} == {None}
    assert job.owner["owner"] == ""


def test_a_lost_device_does_not_hide_its_jobs() -> None:
    lost = DeviceReading(gpu="0", uuid=UUIDS[0], error="lost")
    (job,) = jobs_of(Snapshot(1.0, node(lost), (of(1),)))
    assert job.sums["allocated_bytes"] == 80 * MIB
    assert job.sums["used_bytes"] is None


def test_the_devices_of_a_job_are_in_the_order_of_their_indexes() -> None:
    (job,) = jobs_of(snapshot(of(1, devices=tuple(sample(uuid, MIB) for uuid in UUIDS[:5]))))
    gpus = dict(zip(UUIDS, ("10", "", "2", "0:10", "0:2"), strict=False))  # one has lost its index
    assert [gpus[uuid] for uuid in job_uuids(job, gpus)] == ["0:2", "0:10", "2", "10", ""]


def test_jobs_have_different_hues_as_long_as_there_are_hues() -> None:
    jobs = [f"job-{number}" for number in range(HUES)]
    assert sorted(Hues().of(jobs).values()) == list(range(HUES))


def test_a_job_keeps_its_hue_while_others_come_and_go_and_after_it_has_ended() -> None:
    hues = Hues()
    first = hues.of(["train", "notebook"])
    crowd = [f"job-{number}" for number in range(40)]
    assert {name: hues.of(["notebook", *crowd])[name] for name in ("notebook",)} == {"notebook": first["notebook"]}
    hues.of(crowd)
    assert {**hues.of(["train", *crowd, "notebook"]), **first} == hues.of(["notebook", *crowd, "train"])


# --- Documents

FACTS = ProcessFacts(100, 1000, command="python train.py", user="ada", container_id="c", k8s_pod="p")


def one_of_each() -> Snapshot:
    """Pid 100 reports and is listed, 200 fell silent, 300 has no reporter, 400 reports and is not listed."""
    reading = node(
        device(used=1000 * MIB, processes={100: 600 * MIB, 200: 100 * MIB, 300: 50 * MIB}),
        DeviceReading(gpu="1", uuid=UUIDS[1], error="lost"),
    )
    return Snapshot(
        taken_seconds=2.0,
        node=dataclasses.replace(reading, facts={100: FACTS}),
        processes=(
            reporting(100, devices=(sample(UUIDS[0], 100 * MIB, 50 * MIB, 10 * MIB),), step=7),
            reporting(400, host_pid=None, devices=(sample(UUIDS[1], 5),)),
        ),
        silent=(SilentReporter(ProcessKey(1, 200), 200, 5, "old", "3", 1.5, 1.5),),
    )


def by_pid(document: dict[str, Any]) -> dict[int | str, Any]:
    return {process["pid"]: process for process in document["processes"]}


def test_each_process_is_listed_once_and_unknown_values_are_null() -> None:
    processes = by_pid(processes_document(one_of_each(), "nvml"))
    states = {pid: (process["state"], process["reporting"]) for pid, process in processes.items()}
    reporting, silent, unreported = ("reporting", True), ("silent", False), ("unreported", False)
    assert states == {100: reporting, 200: silent, 300: unreported, "400@1": reporting}
    sizes = {
        pid: (one["devices"][0]["used_bytes"], one["devices"][0]["reserved_bytes"]) for pid, one in processes.items()
    }
    assert sizes == {
        100: (600 * MIB, 160 * MIB),
        200: (100 * MIB, None),
        300: (50 * MIB, None),
        "400@1": (None, 5),
    }
    assert {processes[300][name] for name in ("workload", "own_pid", "user")} == {None}
    assert processes["400@1"]["host_pid"] is None
    assert processes[200]["last_report_unix_seconds"] == 1.5
    one = {**processes[100], **processes[100]["devices"][0]}
    assert [one[name] for name in ("step", "sample_age_seconds", "gpu", "k8s_pod")] == [7, 2.0, "0", "p"]
    assert (one["non_torch_bytes"], one["fragmented_bytes"]) == (440 * MIB, 10 * MIB)
    for shown in (one_of_each(), snapshot(listed={300: MIB})):
        assert {each["idle_cache_bytes"] for each in devices_document(shown, "nvml")["devices"]} == {None}


def test_without_a_driver_the_reporting_processes_are_listed() -> None:
    snapshot = dataclasses.replace(one_of_each(), node=None)
    document = devices_document(snapshot, "nvml")
    assert (document["nvml"]["up"], document["devices"]) == (False, [])
    assert document["nvml"]["error"]
    processes = by_pid(processes_document(snapshot, "nvml"))
    assert set(processes) == {100, 200, "400@1"}
    assert processes[100]["devices"][0]["gpu"] is None
    assert processes[100]["devices"][0]["reserved_bytes"] == 160 * MIB
