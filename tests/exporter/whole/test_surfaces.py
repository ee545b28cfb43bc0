"""The metrics, the JSON documents and the live page show the same values of one snapshot, for random snapshots."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families

from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.page.documents import devices_document, processes_document
from gpumem_exporter.page.live import NodeView
from gpumem_exporter.reports.report_schema import contradictions
from tests.support.builders.exposition_builders import exposition, text_of
from tests.support.builders.random_snapshots import SNAPSHOTS

VALUES = {
    "gpumem_process_memory_used_bytes": "used_bytes",
    "gpumem_torch_non_torch_bytes": "non_torch_bytes",
    "gpumem_torch_allocated_bytes": "allocated_bytes",
    "gpumem_torch_reserved_bytes": "reserved_bytes",
    "gpumem_torch_reclaimable_bytes": "reclaimable_bytes",
    "gpumem_torch_idle_cache_bytes": "idle_cache_bytes",
    "gpumem_torch_fragmented_bytes": "fragmented_bytes",
}
"""The values of a process on a device that all three show."""


def possible(known: Snapshot) -> Snapshot:
    """The part that a driver and reporters can report: each device and process once, no contradictions."""
    processes = {process.key: _possible_process(process) for process in known.processes}
    return dataclasses.replace(
        known,
        node=None if known.node is None else _possible_node(known.node),
        processes=tuple(processes.values()),
        silent=tuple({silent.key: silent for silent in known.silent if silent.key not in processes}.values()),
    )


def _possible_node(node: NodeReading) -> NodeReading:
    devices = {}
    for device in node.devices if node.up else ():
        if device.error:
            devices[device.uuid] = dataclasses.replace(device, memory=None, processes=None, utilization_ratio=None)
        else:
            listed = device.processes
            once = None if listed is None else tuple({process.pid: process for process in listed}.values())
            devices[device.uuid] = dataclasses.replace(device, processes=once)
    listed_pids = {process.pid for device in devices.values() for process in device.processes or ()}
    facts = {pid: facts for pid, facts in node.facts.items() if pid in listed_pids}
    return dataclasses.replace(node, devices=tuple(devices.values()), facts=facts)


def _possible_process(process: ReportingProcess) -> ReportingProcess:
    devices = {one.uuid: one for one in process.report.devices if not list(contradictions(one, ""))}
    return dataclasses.replace(process, report=dataclasses.replace(process.report, devices=tuple(devices.values())))


@given(SNAPSHOTS.map(possible))
@settings(deadline=None, max_examples=30)
def test_a_value_is_the_same_everywhere(known: Snapshot) -> None:
    page: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text_of(exposition(), known)):
        for sample in family.samples:
            page.setdefault(sample.name, []).append((sample.labels, sample.value))
    processes = processes_document(known, "nvml")["processes"]
    devices = devices_document(known, "nvml")["devices"]
    view = NodeView(clock=lambda: known.taken_seconds, wall_clock=lambda: 1e9, minima_of=lambda _: ())
    live = view.document(known, {"failed_checks": []}, 1e9)
    rows = [
        {**process, **device}
        for job in live["jobs"]
        for process in job["processes"]
        for device in process["devices"] or [dict.fromkeys(("uuid", *VALUES.values()))]
    ]

    for name, key in VALUES.items():
        shown = {(labels["pid"], labels["uuid"]): value for labels, value in page.get(name, ())}
        listed = {
            (str(one["pid"]), on["uuid"]): on[key] for one in processes for on in one["devices"] if on[key] is not None
        }
        drawn = {(str(row["pid"]), row["uuid"]): row[key] for row in rows if row[key] is not None}
        assert shown == listed == drawn, name
    infos = {labels["pid"]: labels for labels, _ in page.get("gpumem_process_info", ())}
    assert infos.keys() == {str(one["pid"]) for one in processes} == {str(row["pid"]) for row in rows}
    for one in processes:
        info = infos[str(one["pid"])]
        assert info["reporting"] == str(one["reporting"]).lower()
        for name in ("workload", "rank", "command", "user", "container_id"):
            assert info[name] == (one[name] or ""), name
    ledgers = {
        (device["uuid"], category): size for device in devices for category, size in (device["ledger"] or {}).items()
    }
    assert {(labels["uuid"], labels["category"]): v for labels, v in page.get("gpumem_ledger_bytes", ())} == ledgers
    for device in devices:
        if device["memory"] is not None:
            assert sum(device["ledger"].values()) == device["memory"]["total_bytes"]
