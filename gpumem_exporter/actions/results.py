"""What became of an action in one process, as rows of its results: one for each device. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumem_exporter.actions.model import ActionRequest, ActionResult
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.wire.protocol import CommandResult, DeviceResult, DeviceSample

__all__ = ["TerminationTarget", "dry_rows", "rows", "termination_rows", "termination_target"]


@dataclass(frozen=True, slots=True)
class TerminationTarget:
    """A process to terminate."""

    pid: int | str
    workload: str
    rank: str
    host_pid: int | None
    start_time_ticks: int
    used_bytes: tuple[tuple[str, int | None], ...]
    """The driver's figure for each of its devices, by uuid."""


def rows(
    pid: int | str,
    process: ReportingProcess,
    samples: tuple[DeviceSample, ...],
    result: CommandResult,
    gpus: dict[str, str],
) -> Iterator[ActionResult]:
    """One row a device that was measured; else one a device that was meant; else one for the process."""
    devices = result.devices or tuple(DeviceResult(sample.uuid) for sample in samples) or (DeviceResult(""),)
    identity = process.report.process
    for device in devices:
        yield ActionResult(
            pid=pid,
            workload=identity.workload,
            rank=identity.rank,
            gpu=gpus.get(device.uuid, ""),
            uuid=device.uuid,
            outcome=result.outcome,
            reason=result.reason,
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
            snapshot=result.snapshot,
        )


def dry_rows(
    pid: int | str,
    process: ReportingProcess,
    samples: tuple[DeviceSample, ...],
    request: ActionRequest,
    gpus: dict[str, str],
) -> Iterator[ActionResult]:
    """What the last report says would come back. What a garbage collection would find cannot be known beforehand."""
    devices = []
    for sample in samples:
        freed = {"empty_cache": sample.reclaimable_bytes, "reset_peak": 0}.get(request.action)
        known = freed is not None and sample.reserved_bytes is not None
        devices.append(
            DeviceResult(
                uuid=sample.uuid,
                reserved_before_bytes=sample.reserved_bytes,
                reserved_after_bytes=sample.reserved_bytes - freed if known else None,  # type: ignore[operator]
                allocated_before_bytes=sample.allocated_bytes,
                freed_bytes=freed,
            )
        )
    return rows(pid, process, samples, CommandResult("", "done", devices=tuple(devices)), gpus)


def termination_target(pid: int | str, process: ReportingProcess, snapshot: Snapshot) -> TerminationTarget:
    """A reporting process as somebody to be terminated, with what the driver says of it."""
    identity = process.report.process
    used = {
        device.uuid: listed.used_bytes
        for device in (snapshot.node.devices if snapshot.node is not None else ())
        for listed in device.processes or ()
        if listed.pid == process.host_pid
    }
    on = {sample.uuid: used.pop(sample.uuid, None) for sample in process.report.devices}
    return TerminationTarget(
        pid, identity.workload, identity.rank, process.host_pid, identity.start_time_ticks, tuple((on | used).items())
    )


def termination_rows(target: TerminationTarget, result: CommandResult, gpus: dict[str, str]) -> Iterator[ActionResult]:
    """One row a device: a process that has ended has given back what the driver said that it used."""
    for uuid_, used_bytes in target.used_bytes or (("", None),):
        yield ActionResult(
            pid=target.pid,
            workload=target.workload,
            rank=target.rank,
            gpu=gpus.get(uuid_, ""),
            uuid=uuid_,
            outcome=result.outcome,
            reason=result.reason,
            freed_bytes=used_bytes if result.outcome == "done" else None,
            duration_seconds=result.duration_seconds,
        )
