from __future__ import annotations

import dataclasses
from typing import Any

from gpumem_exporter.core.samples import DeviceReading, ProcessFacts, ProcessKey, SilentReporter, Snapshot
from gpumem_exporter.page.documents import devices_document, processes_document
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

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


def test_a_reporting_process_has_the_values_of_driver_allocator_and_host() -> None:
    process = by_pid(processes_document(one_of_each(), "nvml"))[100]
    facts = {"user": "ada", "k8s_pod": "p", "command": "python train.py"}
    assert process.items() >= {**facts, "workload": "train", "step": 7, "sample_age_seconds": 2.0}.items()
    (on_device,) = process["devices"]
    assert on_device["gpu"] == "0"
    assert on_device["non_torch_bytes"] == 440 * MIB
    assert on_device["fragmented_bytes"] == 10 * MIB


def test_without_a_driver_the_reporting_processes_are_listed() -> None:
    snapshot = dataclasses.replace(one_of_each(), node=None)
    document = devices_document(snapshot, "nvml")
    assert (document["nvml"]["up"], document["devices"]) == (False, [])
    assert document["nvml"]["error"]
    processes = by_pid(processes_document(snapshot, "nvml"))
    assert set(processes) == {100, 200, "400@1"}
    assert processes[100]["devices"][0]["gpu"] is None
    assert processes[100]["devices"][0]["reserved_bytes"] == 160 * MIB
