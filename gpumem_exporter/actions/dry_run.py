"""Predicts from the last report which result a command would have. Pure."""

from __future__ import annotations

from gpumem_client.wire.protocol import CommandResult, ReasonCode
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.actions.results import unsupported
from gpumem_exporter.actions.targets import SelectedProcess
from gpumem_exporter.core.samples import Snapshot

__all__ = ["expected_refusal"]


def expected_refusal(selected: SelectedProcess, request: ActionRequest, snapshot: Snapshot) -> CommandResult | None:
    """Return the result of a command that the process would not run; None if it would."""
    refusal = unsupported(selected.process, request)
    if refusal is None and request.fraction is not None and not request.force:
        return _reserves_more(selected, request.fraction, snapshot)
    return refusal


def _reserves_more(selected: SelectedProcess, fraction: float, snapshot: Snapshot) -> CommandResult | None:
    devices = snapshot.node.devices if snapshot.node is not None else ()
    # PyTorch's total is what the driver does not reserve for itself.
    totals = {
        device.uuid: device.memory.total_bytes - (device.memory.reserved_bytes or 0)
        for device in devices
        if device.memory is not None
    }
    for sample in selected.samples:
        total, reserved = totals.get(sample.uuid), sample.reserved_bytes
        if total is not None and reserved is not None and reserved > int(fraction * total):
            reason = (
                f"{sample.uuid}: {human_bytes(reserved)} are reserved, which is more than {fraction:g} of the device"
                f" ({human_bytes(int(fraction * total))}); clear the cache first, or use force"
            )
            return CommandResult("", "refused", reason, ReasonCode.RESERVED_EXCEEDS_FRACTION)
    return None
