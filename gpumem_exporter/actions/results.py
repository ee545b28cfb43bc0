"""Builds the results of an action in one process: one for each device. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from gpumem_client.wire.protocol import CommandResult, DeviceResult, DeviceSample, denied_by_owner
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.action import ActionResult, EngineWait, describe_starts
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.kinds import KINDS, is_done
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.samples import ReportingProcess

_MEASURED = tuple(each.name for each in fields(DeviceResult))
_RESERVED = ("reserved_before_bytes", "reserved_after_bytes", "allocated_before_bytes", "allocated_after_bytes")


class DriverValues(NamedTuple):
    """The driver's bytes of a process by device, before and after an action on engines; without unknown values."""

    before: Mapping[str, int]
    after: Mapping[str, int] | None
    """None in a dry run, which keeps the expected `freed_bytes`."""

    def of(self, result: ActionResult, action: str) -> ActionResult:
        """Return a result with these values. What was freed is known only if both values are."""
        # A process that the last reading lacks may have used the device since: 0 bytes are then no measurement.
        before = self.before.get(result.uuid) or None
        if self.after is None:
            return replace(result, driver_before_bytes=before)
        after = None if before is None else self.after.get(result.uuid)
        freed = None
        if action == "release_memory" and before is not None and after is not None:
            freed = max(0, before - after)
        return replace(result, driver_before_bytes=before, driver_after_bytes=after, freed_bytes=freed)


def command_results(target: SelectedProcess, result: CommandResult, request: ActionRequest) -> Iterator[ActionResult]:
    """Yield the result for each measured device, otherwise for each target device, otherwise one for the process.

    A device that the process has not reported is left out, and so is memory that the exporter shows as unmapped and the
    reporter does not know to be unmapped.
    """
    reported = {sample.uuid: sample.unmapped_bytes or 0 for sample in target.process.report.devices}
    shown = {sample.uuid: sample.unmapped_bytes or 0 for sample in target.samples}
    devices = {}
    for device in result.devices:
        if device.uuid in reported or device.uuid in shown:
            less = shown.get(device.uuid, 0) - reported.get(device.uuid, 0)
            if less > 0:
                sizes = {name: max(0, size - less) for name in _RESERVED if (size := getattr(device, name)) is not None}
                device = replace(device, **sizes)
            devices[device.uuid] = device
    measured = list(devices.values()) or [DeviceResult(sample.uuid) for sample in target.samples]
    # What the process did not need for a minute. The rest is reserved again, as in every minute before.
    idle = {sample.uuid: sample.idle_cache_bytes for sample in target.samples if request.dry_run}
    for row in _rows(target, measured, result):
        idle_bytes = idle.get(row.uuid)
        if idle_bytes is not None and row.freed_bytes is not None:
            row = replace(row, still_free_bytes=min(idle_bytes, row.freed_bytes))
        yield row


def outside_results(target: SelectedProcess, result: CommandResult, request: ActionRequest) -> Iterator[ActionResult]:
    """Yield the result for each device. A process that was ended has released the memory that the driver listed."""
    released = dict(target.used_bytes)
    if request.action != "terminate":
        samples = target.reporter.report.devices if target.reporter is not None else ()
        released = {sample.uuid: released_bytes(sample, request) for sample in samples}
    done = is_done(result.outcome)
    devices = [DeviceResult(uuid, freed_bytes=released.get(uuid) if done else None) for uuid in target.uuids]
    return _rows(target, devices, result)


def _rows(target: SelectedProcess, devices: Sequence[DeviceResult], result: CommandResult) -> Iterator[ActionResult]:
    for number, device in enumerate(devices or (DeviceResult(""),)):
        yield ActionResult(
            pid=target.pid,
            workload=target.workload,
            rank=target.rank,
            gpu="",  # the action knows it
            outcome=result.outcome,
            reason=result.reason,
            reason_code=result.reason_code,
            **{name: getattr(device, name) for name in _MEASURED},
            duration_seconds=result.duration_seconds,
            step=result.step,
            thread_id=result.thread_id,
            # The same for all devices of the process.
            snapshot=result.snapshot if number == 0 else None,
            job=target.job,
            profile=result.profile or None,
        )


def expected_result(selected: SelectedProcess, request: ActionRequest, reason: str) -> CommandResult:
    """Return the expected result of a process, from its last report, and the reason for when it acts.

    The effect of a garbage collection is unknown.
    """
    devices = []
    for sample in selected.samples:
        freed = sample.reclaimable_bytes if request.action == "empty_cache" else released_bytes(sample, request)
        reserved = sample.reserved_bytes
        devices.append(
            DeviceResult(
                uuid=sample.uuid,
                reserved_before_bytes=reserved,
                reserved_after_bytes=None if reserved is None or freed is None else max(0, reserved - freed),
                allocated_before_bytes=sample.allocated_bytes,
                freed_bytes=freed,
            )
        )
    report = selected.process.report
    step = report.step if report.step_seconds else None
    return CommandResult("", KINDS[request.action].would, reason, devices=tuple(devices), step=step)


def released_bytes(sample: DeviceSample, request: ActionRequest) -> int | None:
    """Return what an engine is expected to release on a device; None if its report does not show that."""
    sizes = sample.component_bytes
    if request.action != "release_memory" or "kv_cache" not in sizes:
        return None
    return sum(sizes.get(name, 0) for name in ("kv_cache", "weights") if name != request.keep)


def unsupported(process: ReportingProcess, request: ActionRequest, mode: str) -> CommandResult | None:
    """Return the result if a process's reporter does not support the request in a mode, or its owner does not allow it.

    None for any other request.
    """
    report = process.report
    denied = denied_by_owner(report.denied_actions, request.action, collect_garbage=request.collect_garbage)
    if denied:
        return CommandResult("", "refused", denied, ReasonCode.DENIED_BY_OWNER)
    if report.actions and request.action not in report.actions:
        reason = f"its reporter supports only {', '.join(report.actions)}"
        return CommandResult("", "unsupported", reason, ReasonCode.UNKNOWN_ACTION)
    if mode not in report.modes:
        reason = f"its reporter supports only the mode {', '.join(report.modes)}"
        return CommandResult("", "unsupported", reason, ReasonCode.UNKNOWN_MODE)
    return None


def expected_refusal(
    selected: SelectedProcess, request: ActionRequest, limits: Mapping[str, int]
) -> CommandResult | None:
    """Return the result of a fraction that the process would refuse, from its last report; None if it would not."""
    if request.force:
        return None
    for sample in selected.samples:
        limit_bytes = limits.get(sample.uuid)
        if limit_bytes is not None and sample.reserved_bytes is not None and sample.reserved_bytes > limit_bytes:
            reason = (
                f"{sample.uuid}: {human_bytes(sample.reserved_bytes)} are reserved, which is more than "
                f"{request.fraction:g} of the device ({human_bytes(limit_bytes)}); clear the cache first, or use force"
            )
            return CommandResult("", "refused", reason, ReasonCode.RESERVED_EXCEEDS_FRACTION)
    return None


def starting_refusal(waits: Sequence[EngineWait]) -> CommandResult:
    """Return the result of a process that does not act because these engines start."""
    latest = time.gmtime(max(each.until_unix_seconds for each in waits))
    reason = (
        f"{describe_starts(waits)}. It counts as started at {time.strftime('%H:%M:%S UTC', latest)} at the latest; use "
        "a longer --deadline to wait for it, or --force"
    )
    return CommandResult("", "refused", reason, ReasonCode.ENGINE_STARTING)
