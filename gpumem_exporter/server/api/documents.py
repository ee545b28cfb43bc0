"""The JSON documents of devices and processes. Pure: each is built from one snapshot; unknown values are null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from gpumem_exporter.actions.targets import gpu_labels
from gpumem_exporter.core.ledger import DeviceLedger, ProcessShare, fragmented_bytes, node_ledgers, node_shares
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.plan_errors import plan_error_ratio
from gpumem_exporter.core.samples import DeviceReading, ProcessFacts, ReportingProcess, SilentReporter, Snapshot
from gpumem_exporter.server.api.state_schema import (
    DeviceDocument,
    DevicesDocument,
    ProcessDeviceDocument,
    ProcessDocument,
    ProcessesDocument,
)
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["SeenProcess", "devices_document", "processes_document", "seen_processes"]

_SAMPLE_FIELDS = tuple(f.name for f in fields(DeviceSample) if f.name != "uuid")
_FACTS = ("user", "container_id", "k8s_pod_uid", "k8s_namespace", "k8s_pod", "k8s_container")
_JOBS = ("slurm_job_id", "ray_job_id")


def devices_document(snapshot: Snapshot, source: str) -> DevicesDocument:
    """Return every device that the driver lists, with its memory and its ledger."""
    node = snapshot.node
    ledgers = node_ledgers(snapshot)
    return {
        "source": source,
        "taken_unix_seconds": node.taken_unix_seconds if node else None,
        "nvml": {
            "up": bool(node and node.up),
            "error": node.error if node else "the driver has not answered recently",
            "driver_version": node.driver_version if node else "",
        },
        "devices": [_device(device, ledgers.get(device.uuid)) for device in (node.devices if node else ())],
    }


def _device(device: DeviceReading, ledger: DeviceLedger | None) -> DeviceDocument:
    memory = device.memory
    return {
        "gpu": device.gpu,
        "uuid": device.uuid,
        "name": device.name,
        "pci_bus_id": device.pci_bus_id,
        "mig_profile": device.mig_profile,
        "parent_uuid": device.parent_uuid,
        "up": device.up,
        "error": device.error,
        "memory": None
        if memory is None
        else {
            "total_bytes": memory.total_bytes,
            "used_bytes": memory.used_bytes,
            "free_bytes": memory.free_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "of_host": memory.of_host,
        },
        "utilization_ratio": device.utilization_ratio,
        "ledger": None if ledger is None else dict(ledger.categories),
    }


@dataclass(slots=True)
class SeenProcess:
    """A process, with what its reporter, the driver and the host report about it."""

    host_pid: int | None
    pid: int | str
    """Its name; see `core.naming`."""
    reporter: ReportingProcess | None = None
    silent: SilentReporter | None = None
    shares: dict[str, ProcessShare] = field(default_factory=dict)
    """By uuid, for the devices on which the driver lists it."""
    facts: ProcessFacts | None = None
    """The host's description of this process."""

    @property
    def state(self) -> str:
        """`reporting`, `silent` or `unreported`."""
        return "reporting" if self.reporter else "silent" if self.silent else "unreported"

    @property
    def command(self) -> str | None:
        """Program and script, as the host reports them, otherwise as the reporter does."""
        own = self.reporter.report.process.command if self.reporter else None
        return (self.facts.command if self.facts else "") or own

    @property
    def last_report_unix_seconds(self) -> float | None:
        """None if the process never reported."""
        if self.reporter is not None:
            return self.reporter.received_unix_seconds
        return self.silent.last_report_unix_seconds if self.silent is not None else None


def processes_document(snapshot: Snapshot, source: str) -> ProcessesDocument:
    """Return every process that reports, that is silent, or that the driver lists."""
    gpus = gpu_labels(snapshot)
    return {"source": source, "processes": [_process(process, gpus, snapshot) for process in seen_processes(snapshot)]}


def seen_processes(snapshot: Snapshot) -> list[SeenProcess]:
    """Return every process that reports, that is silent, or that the driver lists."""
    facts = snapshot.node.facts if snapshot.node else {}
    names = Names.of(snapshot)
    seen = [SeenProcess(process.host_pid, json_pid(name), reporter=process) for name, process in names.reporting]
    seen += [SeenProcess(silent.host_pid, json_pid(name), silent=silent) for name, silent in names.silent]
    by_host_pid = {process.host_pid: process for process in reversed(seen) if process.host_pid is not None}
    for uuid, shares in node_shares(snapshot, names).items():
        for share in shares:
            host_pid = int(share.pid)
            process = by_host_pid.get(host_pid)
            if process is None:
                process = by_host_pid[host_pid] = SeenProcess(host_pid, host_pid)
                seen.append(process)
            process.shares[uuid] = share
    for process in seen:
        process.facts = _facts(process, facts)
    return seen


def _facts(process: SeenProcess, facts: Mapping[int, ProcessFacts]) -> ProcessFacts | None:
    """Return the host's description, unless it is of another process that used the same pid."""
    found = facts.get(process.host_pid) if process.host_pid is not None else None
    known = process.reporter or process.silent
    return found if found is None or known is None or known.start_time_ticks == found.start_time_ticks else None


def _process(process: SeenProcess, gpus: Mapping[str, str], snapshot: Snapshot) -> ProcessDocument:
    reporter, silent, facts = process.reporter, process.silent, process.facts
    report = reporter.report if reporter else None
    identity = report.process if report else None
    known = reporter or silent
    document = {
        "pid": process.pid,
        "own_pid": known.key.pid if known else None,
        "host_pid": process.host_pid,
        "pid_namespace": known.key.pid_namespace if known else None,
        "attested": reporter.attested if reporter else None,
        "reporting": reporter is not None,
        "state": process.state,
        "workload": identity.workload if identity else silent.workload if silent else None,
        "rank": identity.rank if identity else silent.rank if silent else None,
        "world_size": identity.world_size if identity else None,
        "command": process.command,
        **{name: getattr(facts, name) if facts else None for name in _FACTS},
        **{name: getattr(identity, name, "") or getattr(facts, name, None) for name in _JOBS},
        "torch_version": identity.torch_version if identity else None,
        "allocator_settings": identity.allocator_settings if identity else None,
        "client_version": identity.client_version if identity else None,
        "step": report.step if report else None,
        "step_seconds": report.step_seconds if report else None,
        "pinned_host_bytes": report.pinned_host_bytes if report else None,
        "sample_age_seconds": max(0.0, snapshot.taken_seconds - reporter.sampled_seconds) if reporter else None,
        "last_report_unix_seconds": process.last_report_unix_seconds,
        "actions": list(report.actions) if report else [],
        "devices": _process_devices(process, gpus),
    }
    return cast("ProcessDocument", document)


def _process_devices(process: SeenProcess, gpus: Mapping[str, str]) -> list[ProcessDeviceDocument]:
    report = process.reporter.report if process.reporter else None
    samples = {sample.uuid: sample for sample in report.devices} if report else {}
    step = report.step if report else None
    uuids = [*samples, *(uuid for uuid in process.shares if uuid not in samples)]
    return [_process_device(uuid, gpus.get(uuid), samples.get(uuid), process.shares.get(uuid), step) for uuid in uuids]


def _process_device(
    uuid: str, gpu: str | None, sample: DeviceSample | None, share: ProcessShare | None, step: int | None
) -> ProcessDeviceDocument:
    document: dict[str, Any] = {
        "gpu": gpu,
        "uuid": uuid,
        "used_bytes": share.used_bytes if share else None,
        "non_torch_bytes": share.non_torch_bytes if share else None,
        "fragmented_bytes": fragmented_bytes(sample) if sample else None,
        "plan_error_ratio": plan_error_ratio(sample, step) if sample else None,
    }
    for name in _SAMPLE_FIELDS:
        value = getattr(sample, name) if sample else None
        document[name] = dict(value) if isinstance(value, Mapping) else value
    if sample is None:
        document["phase_peak_bytes"] = document["component_bytes"] = {}
    return cast("ProcessDeviceDocument", document)
