"""The JSON documents of devices and processes. Pure: each is built from one snapshot; unknown values are null."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.ledger import (
    DeviceLedger,
    ProcessShare,
    fragmented_bytes,
    idle_cache_bytes,
    node_ledgers,
    node_shares,
)
from gpumem_exporter.core.naming import command_of, json_pid
from gpumem_exporter.core.readings import IDENTITY_FIELDS, DeviceReading, LostLauncher, NodeReading, ProcessFacts
from gpumem_exporter.core.samples import ReportingProcess, SilentReporter, Snapshot, plan_error_ratio

Document: TypeAlias = dict[str, Any]
_SAMPLE_MAPPINGS = ("phase_peak_bytes", "component_bytes", "component_unmapped_bytes", "kv_cache_bytes")
_SAMPLE_NUMBERS = tuple(f.name for f in fields(DeviceSample) if f.name not in ("uuid", *_SAMPLE_MAPPINGS))
_SHOWN_NUMBERS = (
    *("allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes", "unmapped_bytes", "nccl_bytes"),
)
_DEVICE = ("gpu", "uuid", "name", "pci_bus_id", "mig_profile", "parent_uuid", "up", "error", "utilization_ratio")
_IDENTITY = ("world_size", "torch_version", "allocator_settings", "client_version", "nvml_interceptor")
_FACTS_ALWAYS = ("user", "k8s_namespace", "k8s_pod")
_FACTS = tuple(name for name in IDENTITY_FIELDS if name not in ("command", *_FACTS_ALWAYS))
JOB_NUMBERS = ("slurm_job_id", "ray_job_id")


def devices_document(snapshot: Snapshot, source: str) -> Document:
    """Return every device that the driver lists, with its memory and its ledger."""
    node = snapshot.node
    shares, ledgers = node_shares(snapshot), node_ledgers(snapshot)
    return {
        "source": source,
        "taken_unix_seconds": node.taken_unix_seconds if node else None,
        "nvml": {
            "up": bool(node and node.up),
            "error": node.error if node else "the driver has not answered recently",
            "driver_version": node.driver_version if node else "",
        },
        "devices": [
            device_document(device, ledgers.get(device.uuid), shares.get(device.uuid, []))
            for device in (node.devices if node else ())
        ],
    }


def device_document(device: DeviceReading, ledger: DeviceLedger | None, shares: Sequence[ProcessShare]) -> Document:
    """Return a device with its memory and its ledger; null where they are unknown."""
    return {
        **{name: getattr(device, name) for name in _DEVICE},
        "memory": None if device.memory is None else asdict(device.memory),
        "ledger": None if ledger is None else dict(ledger.categories),
        "idle_cache_bytes": idle_cache_bytes(shares),
        "allocatable_bytes": None if ledger is None else ledger.allocatable_bytes,
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
    hidden: bool = False
    """Its user, command, pod and Slurm job are hidden."""
    orphan: LostLauncher | None = None
    """What it has lost, if it is an orphan."""

    @property
    def known(self) -> ReportingProcess | SilentReporter | None:
        """What its reporter has shown of it; None if it never reported."""
        return self.reporter or self.silent

    @property
    def state(self) -> str:
        """`reporting`, `silent` or `unreported`."""
        return "reporting" if self.reporter else "silent" if self.silent else "unreported"

    @property
    def command(self) -> str | None:
        """Program and script, as the host reports them, otherwise as the reporter does."""
        if self.hidden:
            return None
        host = self.facts.command if self.facts else ""
        return command_of(host, self.reporter.report.process.command if self.reporter else "") or None

    def identity(self, name: str) -> str | None:
        """Return one of the host's `IDENTITY_FIELDS`; None if it is unknown or hidden."""
        return None if self.facts is None or self.hidden else getattr(self.facts, name)

    def job_number(self, name: str) -> str | None:
        """Return one of `JOB_NUMBERS`, as the process reports it, otherwise as the host does; None if it is hidden."""
        if self.hidden and name == "slurm_job_id":  # Slurm names the user of every job
            return None
        own = getattr(self.reporter.report.process, name) if self.reporter is not None else ""
        return own or getattr(self.facts, name, None) or None

    @property
    def rank(self) -> str | None:
        """The rank that the process reports, empty if it has none; None if the process never reported."""
        if self.reporter is not None:
            return self.reporter.report.process.rank
        return self.silent.rank if self.silent is not None else None

    def started_unix_seconds(self, node: NodeReading | None) -> float | None:
        """Return when the process started; None if /proc does not show it."""
        if node is None or self.facts is None or self.facts.started_seconds is None:
            return None
        return round(node.unix_seconds(self.facts.started_seconds), 1)

    @property
    def last_report_unix_seconds(self) -> float | None:
        """None if the process never reported."""
        if self.reporter is not None:
            return self.reporter.received_unix_seconds
        return self.silent.last_report_unix_seconds if self.silent is not None else None


class Part(NamedTuple):
    """One process on one device."""

    process: SeenProcess
    uuid: str
    share: ProcessShare | None
    """The driver's values; None if the driver does not list the process on the device."""
    sample: DeviceSample | None
    """The reporter's values."""


def parts_of(process: SeenProcess) -> Iterator[Part]:
    """Yield a process on each of its devices."""
    samples = {sample.uuid: sample for sample in process.reporter.report.devices} if process.reporter else {}
    for uuid in dict.fromkeys([*samples, *process.shares]):
        yield Part(process, uuid, process.shares.get(uuid), samples.get(uuid))


def seen_processes(snapshot: Snapshot, viewer: Caller | None = None) -> list[SeenProcess]:
    """Return every process that reports, that is silent, or that the driver lists.

    The identities of others' processes are hidden from `viewer`; None shows them.
    """
    node, names = snapshot.node, snapshot.names
    seen = [SeenProcess(process.host_pid, json_pid(name), reporter=process) for name, process in names.reporting]
    seen += [SeenProcess(silent.host_pid, json_pid(name), silent=silent) for name, silent in names.silent]
    by_name = {str(process.pid): process for process in seen}
    for uuid, of_device in node_shares(snapshot).items():
        for share in of_device:
            process = by_name.get(share.pid)
            if process is None:  # only the driver lists it
                process = by_name[share.pid] = SeenProcess(int(share.pid), int(share.pid))
                seen.append(process)
            process.shares[uuid] = share
    for process in seen:
        if node is not None:
            known = process.known
            process.facts = node.facts_of(known) if known is not None else node.facts.get(process.host_pid or 0)
        rights = Rights.ALL if viewer is None else viewer.rights
        own = viewer is not None and process.reporter is not None and viewer.may_act_on(process.reporter)
        process.hidden = rights is not Rights.ALL and not (rights is Rights.OWN and own)
        process.orphan = snapshot.orphans.get(process.facts.pid) if process.facts is not None else None
    return seen


def processes_document(snapshot: Snapshot, source: str, viewer: Caller | None = None) -> Document:
    """Return the processes with all of their values; see `seen_processes`."""
    processes = [process_document(process, snapshot, whole=True) for process in seen_processes(snapshot, viewer)]
    return {"source": source, "processes": processes}


def process_document(process: SeenProcess, snapshot: Snapshot, *, whole: bool) -> Document:
    """Return a process with its values for each device: all values, or the values that every reader needs."""
    # The shorter form has few values: a node has hundreds of processes, each second, and reports wait meanwhile.
    reporter, known = process.reporter, process.known
    report = reporter.report if reporter else None
    identity = report.process if report else process.silent
    document = {
        "pid": process.pid,
        "own_pid": known.key.pid if known else None,
        "state": process.state,
        "rank": process.rank,
        "workload": identity.workload if identity else None,
        "command": process.command,
        **{name: process.identity(name) for name in _FACTS_ALWAYS},
        "last_report_unix_seconds": process.last_report_unix_seconds,
        "started_unix_seconds": process.started_unix_seconds(snapshot.node),
        "orphan": orphan_document(process, snapshot.node),
        "clears": reporter.clears if reporter else False,
        "step": report.step if report else None,
        "devices": [_process_device(part, snapshot, whole=whole) for part in parts_of(process)],
    }
    if not whole:
        return document
    return {
        **document,
        "host_pid": process.host_pid,
        "pid_namespace": known.key.pid_namespace if known else None,
        "attested": reporter.attested if reporter else None,
        "reporting": reporter is not None,
        **{name: getattr(identity, name, None) for name in _IDENTITY},
        **{name: process.identity(name) for name in _FACTS},
        **{name: process.job_number(name) for name in JOB_NUMBERS},
        **{name: getattr(report, name, None) for name in ("step_seconds", "pinned_host_bytes")},
        "sample_age_seconds": max(0.0, snapshot.taken_seconds - reporter.sampled_seconds) if reporter else None,
        "uid": reporter.owner_uid if reporter and not process.hidden else None,
        "actions": list(report.actions) if report else [],
        "denied_actions": list(report.denied_actions) if report else [],
    }


def orphan_document(process: SeenProcess, node: NodeReading | None) -> Document | None:
    """Return what an orphan has lost, and since when; None for any other process."""
    lost = process.orphan
    if lost is None or node is None:
        return None
    ended = lost.ended_seconds
    return {
        "reason": lost.reason,
        "launcher": None if process.hidden else lost.command or None,
        "launcher_pid": lost.pid,
        "ended_unix_seconds": None if ended is None else round(node.unix_seconds(ended), 1),
    }


def _process_device(part: Part, snapshot: Snapshot, *, whole: bool) -> Document:
    sample, reporter = part.sample, part.process.reporter
    document = {
        "gpu": snapshot.gpus.get(part.uuid),
        "uuid": part.uuid,
        "used_bytes": part.share.used_bytes if part.share else None,
        "non_torch_bytes": part.share.non_torch_bytes if part.share else None,
        "fragmented_bytes": fragmented_bytes(sample) if sample else None,
        **{name: getattr(sample, name, None) for name in (_SAMPLE_NUMBERS if whole else _SHOWN_NUMBERS)},
    }
    if whole:
        document |= {name: dict(getattr(sample, name, ())) for name in _SAMPLE_MAPPINGS}
        document["plan_error_ratio"] = plan_error_ratio(sample, reporter.report.step) if sample and reporter else None
    return document
