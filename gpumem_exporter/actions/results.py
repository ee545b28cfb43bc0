"""Builds the results of an action in one process: one for each device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpumem_client.wire.protocol import CommandResult, DeviceResult, DeviceSample, ReasonCode
from gpumem_exporter.actions.model import ActionResult
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.actions.targets import ListedProcess, SelectedProcess
from gpumem_exporter.core.samples import ReportingProcess, Snapshot

__all__ = [
    "TerminationTarget",
    "as_shown",
    "command_results",
    "dry_run_results",
    "host_pids",
    "listed_target",
    "reporting_target",
    "termination_results",
    "unsupported",
]

GpuLabels = Mapping[str, str]
"""The NVML index of each device, by uuid."""


def unsupported(process: ReportingProcess, request: ActionRequest) -> CommandResult | None:
    """Return the result of a request that the process's reporter does not support; None if it supports it."""
    report = process.report
    if report.actions and request.action not in report.actions:
        reason = f"its reporter supports only {', '.join(report.actions)}"
        return CommandResult("", "unsupported", reason, ReasonCode.UNKNOWN_ACTION)
    if request.mode not in report.modes:
        reason = f"its reporter supports only the mode {', '.join(report.modes)}"
        return CommandResult("", "unsupported", reason, ReasonCode.UNKNOWN_MODE)
    return None


def command_results(selected: SelectedProcess, result: CommandResult, gpus: GpuLabels) -> Iterator[ActionResult]:
    """Yield the result for each measured device, otherwise for each target device, otherwise one for the process.

    Only the first one has the summary of a snapshot, which is the same for all devices of the process. A device that
    the process has not reported is left out.
    """
    report = selected.process.report
    identity = report.process
    used = {sample.uuid for sample in (*selected.samples, *report.devices)}
    by_uuid = {device.uuid: device for device in result.devices if device.uuid in used}
    measured = tuple(by_uuid.values()) or tuple(DeviceResult(sample.uuid) for sample in selected.samples)
    for number, device in enumerate(measured or (DeviceResult(""),)):
        yield ActionResult(
            pid=selected.pid,
            workload=identity.workload,
            rank=identity.rank,
            gpu=gpus.get(device.uuid, ""),
            uuid=device.uuid,
            outcome=result.outcome,
            reason=result.reason,
            reason_code=result.reason_code,
            reserved_before_bytes=device.reserved_before_bytes,
            reserved_after_bytes=device.reserved_after_bytes,
            allocated_before_bytes=device.allocated_before_bytes,
            allocated_after_bytes=device.allocated_after_bytes,
            freed_bytes=device.freed_bytes,
            device_free_before_bytes=device.device_free_before_bytes,
            device_free_after_bytes=device.device_free_after_bytes,
            duration_seconds=result.duration_seconds,
            step=result.step,
            thread_id=result.thread_id,
            snapshot=result.snapshot if number == 0 else None,
        )


def as_shown(result: CommandResult, shown: Iterable[DeviceSample], reported: Iterable[DeviceSample]) -> CommandResult:
    """Return a result without the memory that the exporter shows as unmapped and the reporter does not know to be.

    Args:
        result: the reporter's result.
        shown: the samples that the exporter shows.
        reported: the samples as reported.
    """
    said = {sample.uuid: sample.unmapped_bytes or 0 for sample in reported}
    unmapped = {sample.uuid: (sample.unmapped_bytes or 0) - said.get(sample.uuid, 0) for sample in shown}
    devices = tuple(_without(device, max(0, unmapped.get(device.uuid, 0))) for device in result.devices)
    return replace(result, devices=devices)


def _without(device: DeviceResult, unmapped_bytes: int) -> DeviceResult:
    values = {
        name: max(0, value - unmapped_bytes)
        for name in ("reserved_before_bytes", "reserved_after_bytes", "allocated_before_bytes", "allocated_after_bytes")
        if (value := getattr(device, name)) is not None
    }
    return replace(device, **values)


def dry_run_results(selected: SelectedProcess, request: ActionRequest, gpus: GpuLabels) -> Iterator[ActionResult]:
    """Yield the expected results, from the last report. The effect of a garbage collection is unknown."""
    devices = []
    for sample in selected.samples:
        freed = {"empty_cache": sample.reclaimable_bytes, "reset_peak": 0}.get(request.action)
        reserved = sample.reserved_bytes
        devices.append(
            DeviceResult(
                uuid=sample.uuid,
                reserved_before_bytes=reserved,
                reserved_after_bytes=None if reserved is None or freed is None else reserved - freed,
                allocated_before_bytes=sample.allocated_bytes,
                freed_bytes=freed,
            )
        )
    idle = {sample.uuid: sample.idle_cache_bytes for sample in selected.samples}
    for result in command_results(selected, CommandResult("", "done", devices=tuple(devices)), gpus):
        still_free = None
        if request.action == "empty_cache" and result.freed_bytes is not None:
            # What the process did not need for a minute. The rest is reserved again, as in every minute before.
            idle_bytes = idle.get(result.uuid)
            still_free = None if idle_bytes is None else min(idle_bytes, result.freed_bytes)
        yield replace(result, still_free_bytes=still_free)


@dataclass(frozen=True, slots=True)
class TerminationTarget:
    """A process to terminate."""

    pid: int | str
    workload: str
    rank: str
    host_pid: int | None
    start_time_ticks: int
    used_bytes: tuple[tuple[str, int | None], ...]
    """The driver's value for each of its devices, by uuid."""
    attested: bool = True
    """The kernel has named the sender of its report; true for a process without a report."""
    listed: bool = True
    """The driver lists it on a device."""


def reporting_target(selected: SelectedProcess, snapshot: Snapshot) -> TerminationTarget:
    """Return the termination target for a process that reports."""
    process, identity = selected.process, selected.process.report.process
    used = {
        device.uuid: listed.used_bytes
        for device in (snapshot.node.devices if snapshot.node is not None else ())
        for listed in device.processes or ()
        if listed.pid == process.host_pid
    }
    listed = bool(used)
    reported = {sample.uuid: used.pop(sample.uuid, None) for sample in process.report.devices}
    return TerminationTarget(
        pid=selected.pid,
        workload=identity.workload,
        rank=identity.rank,
        host_pid=process.host_pid,
        start_time_ticks=identity.start_time_ticks,
        used_bytes=tuple((reported | used).items()),
        attested=process.attested,
        listed=listed,
    )


def listed_target(listed: ListedProcess) -> TerminationTarget:
    """Return the termination target for a process that only the driver lists."""
    return TerminationTarget(listed.pid, "", "", listed.pid, listed.start_time_ticks, listed.used_bytes)


def host_pids(targets: Iterable[TerminationTarget]) -> list[int]:
    """Return the known pids of targets on this host."""
    return [target.host_pid for target in targets if target.host_pid is not None]


def termination_results(target: TerminationTarget, result: CommandResult, gpus: GpuLabels) -> Iterator[ActionResult]:
    """Yield the result for each device. A process that exited has released the memory that the driver listed."""
    for uuid, used_bytes in target.used_bytes or (("", None),):
        yield ActionResult(
            pid=target.pid,
            workload=target.workload,
            rank=target.rank,
            gpu=gpus.get(uuid, ""),
            uuid=uuid,
            outcome=result.outcome,
            reason=result.reason,
            reason_code=result.reason_code,
            freed_bytes=used_bytes if result.outcome == "done" else None,
            duration_seconds=result.duration_seconds,
        )
