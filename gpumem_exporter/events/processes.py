"""Reporting processes that came and went, each that went with the last that was known of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import NodeReading, ProcessFacts, ProcessKey, ReportingProcess
from gpumem_exporter.events.model import Event
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["ProcessHistory"]

_FACTS = tuple(f.name for f in fields(ProcessFacts) if f.name not in ("pid", "start_time_ticks", "command"))
_ROW = (
    "allocated_bytes",
    "reserved_bytes",
    "reclaimable_bytes",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "alloc_retries",
    "ooms",
)


@dataclass(slots=True)
class _Stay:
    """A process from its first report to its end."""

    process: ReportingProcess
    """As it reported last; its samples are those of the last report that had any."""
    used: dict[str, tuple[int, float]] = field(default_factory=dict)
    """What the driver last said that it held, by uuid, and when: a process that ends leaves its devices one by one."""
    facts: ProcessFacts | None = None


class ProcessHistory:
    """Follows reporting processes. Any thread may call it.

    Args:
        name: what a process is called at the moment.
        reading_expiry_seconds: what the driver said longer before a process' last report than this is not its last row.
    """

    def __init__(self, name: Callable[[ReportingProcess], int | str], *, reading_expiry_seconds: float) -> None:
        self._name = name
        self._reading_expiry_seconds = reading_expiry_seconds
        self._lock = threading.Lock()
        self._stays: dict[ProcessKey, _Stay] = {}
        self._gpus: dict[str, str] = {}
        self._reading: NodeReading | None = None
        self._used: dict[int, dict[str, tuple[int, float]]] = {}
        """What the last poll said that each process held, by host pid and uuid, and when that was."""

    def gpus(self) -> dict[str, str]:
        """The NVML index of each device by uuid, as the driver last said it."""
        return self._gpus

    def take_report(self, process: ReportingProcess) -> list[Event]:
        """A report was taken; gives the events that follow from it."""
        identity = process.report.process
        with self._lock:
            stay = self._stays.get(process.key)
            if stay is None:
                return [self._begin(process)]
            last = stay.process.report
            if last.process.session != identity.session:
                reason = "its pid is another process' now"
                if last.process.start_time_ticks == identity.start_time_ticks:
                    reason = "another reporter speaks for it"
                return [self._ended(stay, reason, process.received_unix_seconds), self._begin(process)]
            if process.report.sequence >= last.sequence:
                if not process.report.devices:  # a farewell brings none, and the last row is that of the report before
                    process = replace(process, report=replace(process.report, devices=last.devices))
                stay.process = process
            return []

    def take_reading(self, reading: NodeReading) -> None:
        """The driver was polled."""
        if not reading.up:
            return
        used: dict[int, dict[str, tuple[int, float]]] = {}
        for device in reading.devices:
            for listed in device.processes or ():
                if listed.used_bytes is not None:
                    used.setdefault(listed.pid, {})[device.uuid] = (listed.used_bytes, reading.taken_seconds)
        with self._lock:
            self._gpus = {device.uuid: device.gpu for device in reading.devices}
            self._reading, self._used = reading, used
            for stay in self._stays.values():
                self._look_up(stay)

    def gone(self, key: ProcessKey, reason: str, now_unix_seconds: float) -> list[Event]:
        """A process is forgotten; unknown keys are fine."""
        with self._lock:
            stay = self._stays.pop(key, None)
            return [] if stay is None else [self._ended(stay, reason, now_unix_seconds)]

    def keep_only(self, keys: Iterable[ProcessKey], reason: str, now_unix_seconds: float) -> list[Event]:
        """These are all that still report: the others fell silent."""
        with self._lock:
            silent = self._stays.keys() - set(keys)
            return [self._ended(self._stays.pop(key), reason, now_unix_seconds) for key in sorted(silent)]

    def _begin(self, process: ReportingProcess) -> Event:
        stay = self._stays[process.key] = _Stay(process)
        self._look_up(stay)  # the driver may have listed it before it reported, and it may end before the next poll
        return self._started(process)

    def _look_up(self, stay: _Stay) -> None:
        """What the last poll says of a process."""
        reading, host_pid = self._reading, stay.process.host_pid
        if reading is None or host_pid is None:
            return
        if host_pid in self._used and reading.lists(stay.process):
            stay.used.update(self._used[host_pid])
            stay.facts = reading.facts.get(host_pid, stay.facts)

    def _ended(self, stay: _Stay, reason: str, now_unix_seconds: float) -> Event:
        process = stay.process
        expired = process.received_seconds - self._reading_expiry_seconds
        used = {uuid: used_bytes for uuid, (used_bytes, seconds) in stay.used.items() if seconds >= expired}
        samples = {sample.uuid: sample for sample in process.report.devices}
        return Event(
            "process_ended",
            now_unix_seconds,
            **self._who(process),
            detail={
                "reason": reason,
                "command": (stay.facts.command if stay.facts else "") or process.report.process.command,
                **{name: getattr(stay.facts, name) if stay.facts else None for name in _FACTS},
                "step": process.report.step,
                "last_report_unix_seconds": process.received_unix_seconds,
                "pinned_host_bytes": process.report.pinned_host_bytes,
                "devices": [
                    _row(uuid, self._gpus.get(uuid), samples.get(uuid), used.get(uuid))
                    for uuid in dict.fromkeys((*samples, *used))
                ],
            },
            subject=_subject(process),
        )

    def _started(self, process: ReportingProcess) -> Event:
        identity = process.report.process
        return Event(
            "process_started",
            process.received_unix_seconds,
            **self._who(process),
            detail={
                "own_pid": identity.pid,
                "host_pid": process.host_pid,
                "pid_namespace": identity.pid_namespace,
                "command": identity.command,
                "torch_version": identity.torch_version,
                "allocator_settings": identity.allocator_settings,
                "client_version": identity.client_version,
            },
            subject=_subject(process),
        )

    def _who(self, process: ReportingProcess) -> dict[str, Any]:
        identity = process.report.process
        uuids = [sample.uuid for sample in process.report.devices]
        return {
            "gpu": self._gpus.get(uuids[0]) if len(uuids) == 1 else None,
            "uuid": uuids[0] if len(uuids) == 1 else None,
            "pid": self._name(process),
            "workload": identity.workload,
            "rank": identity.rank,
        }


def _subject(process: ReportingProcess) -> str:
    return f"process:{process.report.process.session}"


def _row(uuid: str, gpu: str | None, sample: DeviceSample | None, used_bytes: int | None) -> dict[str, Any]:
    """The process' part of a device's ledger, as it last stood there."""
    reserved = sample.reserved_bytes if sample is not None else None
    return {
        "gpu": gpu,
        "uuid": uuid,
        "used_bytes": used_bytes,
        **{name: getattr(sample, name) if sample is not None else None for name in _ROW},
        "fragmented_bytes": fragmented_bytes(sample) if sample is not None else None,
        "non_torch_bytes": None if used_bytes is None or reserved is None else used_bytes - reserved,
    }
