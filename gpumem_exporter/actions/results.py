"""Builds the results of an action in one process: one for each device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpumem_client.wire.protocol import CommandResult, DeviceResult, DeviceSample, ReasonCode
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.model import ActionResult
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.actions.selection import SelectedProcess, TerminationTarget
from gpumem_exporter.core.samples import Snapshot

GpuLabels = Mapping[str, str]
"""The NVML index of each device, by uuid."""
_RESERVED = ("reserved_before_bytes", "reserved_after_bytes", "allocated_before_bytes", "allocated_after_bytes")
_MEASURED = (*_RESERVED, "freed_bytes", "device_free_before_bytes", "device_free_after_bytes")
"""What a process measures on each device."""


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
            **{name: getattr(device, name) for name in _MEASURED},
            duration_seconds=result.duration_seconds,
            step=result.step,
            thread_id=result.thread_id,
            snapshot=result.snapshot if number == 0 else None,
        )


def as_shown(result: CommandResult, shown: Iterable[DeviceSample], reported: Iterable[DeviceSample]) -> CommandResult:
    """Return a result without the memory that the exporter shows as unmapped and the reporter does not know to be."""
    said = {sample.uuid: sample.unmapped_bytes or 0 for sample in reported}
    unmapped = {sample.uuid: (sample.unmapped_bytes or 0) - said.get(sample.uuid, 0) for sample in shown}
    devices = tuple(_without(device, max(0, unmapped.get(device.uuid, 0))) for device in result.devices)
    return replace(result, devices=devices)


def _without(device: DeviceResult, unmapped_bytes: int) -> DeviceResult:
    known = {name: value for name in _RESERVED if (value := getattr(device, name)) is not None}
    return replace(device, **{name: max(0, value - unmapped_bytes) for name, value in known.items()})


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


def expected_refusal(selected: SelectedProcess, request: ActionRequest, snapshot: Snapshot) -> CommandResult | None:
    """Return the result of a command that the process would not run, from its last report; None if it would."""
    refusal = selected.refusal(request)
    if refusal is not None or request.fraction is None or request.force:
        return refusal
    for device in snapshot.node.devices if snapshot.node is not None else ():
        sample = next((each for each in selected.samples if each.uuid == device.uuid), None)
        if device.memory is None or sample is None or sample.reserved_bytes is None:
            continue
        # PyTorch's total is what the driver does not reserve for itself.
        cap_bytes = int(request.fraction * (device.memory.total_bytes - (device.memory.reserved_bytes or 0)))
        if sample.reserved_bytes > cap_bytes:
            reason = (
                f"{sample.uuid}: {human_bytes(sample.reserved_bytes)} are reserved, which is more than "
                f"{request.fraction:g} of the device ({human_bytes(cap_bytes)}); clear the cache first, or use force"
            )
            return CommandResult("", "refused", reason, ReasonCode.RESERVED_EXCEEDS_FRACTION)
    return None


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
