"""Diagnoses an out-of-memory error: collects values from its text, its frames and the allocator, and adds advice."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.oom_message import OomMessage, parse_oom_message
from gpumem_client.guest_safety import GuestLog
from gpumem_client.hooks.out_of_memory import latest_oom
from gpumem_client.objects.referrers import instance_dictionary
from gpumem_client.phases.measured_block import phase_at_error
from gpumem_client.torch_access import rank_and_size, tensor_base_class
from gpumem_client.wire.protocol import OutOfMemory
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.leaks.detector import known_leak
from gpumem_toolkit.leaks.live_tensors import unfinished_losses, walk
from gpumem_toolkit.leaks.suspects import frequent
from gpumem_toolkit.measure.tensor_bytes import Storages, tensors_in
from gpumem_toolkit.oom.advice import Advice, advise
from gpumem_toolkit.oom.growth import BlockHistory
from gpumem_toolkit.oom.phase import Origin, batch_of_forward, origin_of, self_in_frame, tensor_arguments
from gpumem_toolkit.oom.settings_advice import expandable_segments_conflict
from gpumem_toolkit.oom.values import OomValues

_log = GuestLog(logging.getLogger("gpumem_toolkit"), None)

NOTE_PREFIX = "gpumem: "
_ADVICE_SHOWN = 5
# An observed error that is older is another error of the same size, as in a search for a batch size.
_OBSERVED_SECONDS = 5.0
# The allocator requests at least this from the driver for a large block.
_SEGMENT_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a guarded block."""

    device: int
    start_bytes: int
    """Allocated bytes at the start."""
    peak_bytes: int
    """The allocator's peak at the start."""
    reserved_bytes: int
    """Reserved bytes at the start."""
    reserved_freed_bytes: int | None
    """The allocator's count of released bytes at the start; None if it has none."""
    batch_size: int | None
    history: BlockHistory


@dataclass(frozen=True, slots=True)
class OomDiagnosis(ShownAsText):
    """The values of an out-of-memory error, and advice. Prints as the note below the error."""

    values: OomValues
    advice: tuple[Advice, ...]
    """The best advice first."""

    def __str__(self) -> str:
        lines = [f"{NOTE_PREFIX}out of memory{_where(self.values)}"]
        lines += [f"  {line}" for line in _summary(self.values)]
        lines += [f"  {number}. {advice}" for number, advice in enumerate(self.advice[:_ADVICE_SHOWN], 1)]
        return "\n".join(lines)


def diagnose(error: BaseException, traceback: TracebackType | None, run: Run | None) -> OomDiagnosis:
    """Diagnose an error in the user's thread. Takes milliseconds, and half a second to name a leak."""
    values = _values(parse_oom_message(str(error)), origin_of(traceback), traceback, run, phase_at_error(error) or "")
    return OomDiagnosis(values, advise(values))


def _values(
    message: OomMessage, origin: Origin, traceback: TracebackType | None, run: Run | None, user_phase: str
) -> OomValues:
    device = message.device if message.device is not None else run.device if run is not None else None
    if run is not None and run.device != device:
        run = None
    memory = _memory(message, device)
    allocated: int | None = memory["allocated"]
    batch_size = run.batch_size if run is not None else None
    if batch_size is None:
        batch_size = batch_of_forward(traceback)
    phase = origin.phase or user_phase
    return OomValues(
        phase=phase,
        user_phase=user_phase,
        recomputed=origin.recomputed,
        place=origin.place,
        device=device,
        causes=origin.causes,
        batch_size=batch_size,
        grown=None if run is None or allocated is None else max(0, allocated - run.start_bytes),
        batch_growth=run.history.growth(batch_size) if run is not None else None,
        bytes_per_item=run.history.bytes_per_item() if run is not None else None,
        ranks=(rank_and_size() or (0, 1))[1],
        **memory,
        **_if_possible(lambda: _leak(device, run)),
        **_if_possible(lambda: _model(phase, traceback, device)),
        **_if_possible(lambda: _graph(origin, traceback)),
    )


def _if_possible(values: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return values()
    except Exception as error:  # noqa: BLE001 - modules and optimizers of other libraries may raise any error
        _log.info("the diagnosis of an out-of-memory error is incomplete: %r", error)
        return {}


def _memory(message: OomMessage, device: int | None) -> dict[str, Any]:
    """Return the memory of the device at the error.

    If the reporter has observed the error, its values are exact; the values of the text are rounded.
    """
    allocator = attached() if device is not None else None
    allocated, reserved = message.allocated_bytes, message.reserved_bytes
    reclaimable: int | None = 0
    requested, free = message.requested_bytes, message.free_bytes
    settings, seen = "", None
    if allocator is not None and device is not None:
        settings = allocator.settings
        if allocated is None or reserved is None:
            # A library has raised the error, not the allocator, which writes these values. The current statistics
            # describe the error, and the cache is still full.
            samples = {each.uuid: each for each in (() if allocator.capturing else allocator.samples())}
            sample = samples.get(allocator.uuid(device)) or allocator.sample_now(device)
            allocated, reserved, reclaimable = sample.allocated_bytes, sample.reserved_bytes, sample.reclaimable_bytes
        free = allocator.free_bytes(device) if free is None else free
        seen = _observed(message, allocator.uuid(device))
    if seen is not None and seen.sample is not None:
        requested, free = seen.requested_bytes, seen.device_free_bytes
        allocated, reserved = seen.sample.allocated_bytes, seen.sample.reserved_bytes
    fragmented = None
    if allocated is None or reserved is None:
        reclaimable = None
    elif reclaimable is not None:
        fragmented = max(0, reserved - allocated - reclaimable)  # includes unused memory of private pools
    process = message.process_bytes
    return {
        "requested": requested,
        "free": free,
        "total": message.total_bytes,
        "allowed": message.allowed_bytes,
        "other_processes": message.other_processes,
        "non_torch": None if process is None or reserved is None else max(0, process - reserved),
        "allocated": allocated,
        "reserved": reserved,
        "private_pools": message.private_pools_bytes,
        "reclaimable": reclaimable,
        "fragmented": fragmented,
        "expandable": "expandable_segments:true" in settings.lower().replace(" ", ""),
        "expandable_conflict": expandable_segments_conflict() if fragmented else "",
    }


def _observed(message: OomMessage, uuid: str) -> OutOfMemory | None:
    """Return this error as the reporter's observer recorded it, if there is a reporter."""
    latest = latest_oom()
    if latest is None or message.requested_bytes is None:
        return None
    seconds, oom = latest
    # The text rounds the request to two decimals. The allocator requests whole segments from the driver.
    near = oom.requested_bytes is not None and 0 <= oom.requested_bytes - 0.99 * message.requested_bytes <= max(
        _SEGMENT_BYTES, 0.02 * message.requested_bytes
    )
    return oom if near and oom.uuid == uuid and time.monotonic() - seconds < _OBSERVED_SECONDS else None


def _leak(device: int | None, run: Run | None) -> dict[str, Any]:
    """Return the leak that a detector has found, otherwise the growth of the block from run to run."""
    leak = known_leak(device) if device is not None else None
    if leak is not None:
        leaked, rate, suspects = leak.leaked_bytes, leak.bytes_per_step, leak.suspects
    else:
        found = run.history.leaked() if run is not None else None
        if run is None or found is None:
            return {}
        leaked, rate = found
        least = max(8, run.history.runs // 2)
        live = walk(sys.modules["torch"], referrers=True)
        suspects = frequent(live, least=least)
    return {"leaked": leaked, "leak_per_step": round(rate), "leak_suspects": suspects}


def _graph(origin: Origin, traceback: TracebackType | None) -> dict[str, Any]:
    """Return whether activations are kept for a backward pass, and for how many forward passes."""
    torch = sys.modules["torch"]
    if origin.without_gradients or not torch.is_grad_enabled():
        return {}
    if origin.phase == "forward":
        # In a forward pass the inputs of inner modules show it. The loss of an earlier step may still have its graph.
        base = tensor_base_class(torch)
        inputs = tensor_arguments(traceback, outermost=False)
        gradients = any(base.grad_fn.__get__(each) is not None for each in inputs)
    else:
        gradients = origin.phase == "backward" or any(each.with_graph and each.shape for each in walk(torch).groups)
    module = self_in_frame(traceback, "torch.nn.modules.module", "_call_impl", outermost=True)
    return {
        "gradients": gradients,
        "evaluating": (instance_dictionary(module) or {}).get("training") is False,
        "losses": unfinished_losses(torch) if gradients and origin.phase != "backward" else 0,
    }


def _model(phase: str, traceback: TracebackType | None, device: int | None) -> dict[str, Any]:
    """Return values of the optimizer whose step failed, or of the model that was moved."""
    torch = sys.modules.get("torch")
    if torch is None or phase not in ("optimizer", "model transfer"):
        return {}
    if phase == "model transfer":
        model = self_in_frame(traceback, "torch.nn.modules.module", "_apply", outermost=True)
        return {} if model is None else {"parameters": Storages(torch, torch.nn.Module.parameters(model)).total()}
    optimizer = self_in_frame(traceback, "torch.optim.optimizer", "wrapper", outermost=False)
    attributes = instance_dictionary(optimizer) or {}
    groups, states = attributes.get("param_groups") or [], attributes.get("state")
    parameters = Storages(torch, (parameter for group in groups for parameter in group["params"])).total(device)
    present = Storages(torch, tensors_in(dict(states or {}).values(), torch)).total(device)
    full = _full_state(type(optimizer).__name__, groups, states) * parameters
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": parameters,
        "optimizer_state": present,
        "optimizer_state_missing": max(0, full - present),
        "optimizer_fused": all(group.get("fused") for group in groups),
        "optimizer_foreach": any(group.get("foreach", False) is not False for group in groups),
    }


# Tensors of a parameter's size in the state of an optimizer. Adam and most others have two.
_STATES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1, "Lion": 1, "Adadelta": 2}


def _full_state(optimizer: str, groups: list[dict[str, Any]], states: Any) -> int:
    """Return the number of tensors of a parameter's size in a complete state; 0 if the state is complete."""
    stepped = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if states is None or all(len(states.get(parameter, ())) > 0 for parameter in stepped):
        return 0
    if optimizer == "SGD" and not any(group.get("momentum") for group in groups):
        return 0
    return _STATES.get(optimizer, 2) + any(bool(group.get("amsgrad")) for group in groups)


def _where(values: OomValues) -> str:
    phase = {"": "", "optimizer": " in the optimizer's step", "model transfer": " while the model was moved"}.get(
        values.phase, f" in {values.phase}"
    )
    if values.user_phase and values.user_phase != values.phase:
        phase += f" of phase {values.user_phase}"
    if values.recomputed:
        phase += ", while a checkpointed part was computed again"
    return f"{phase}, {values.place}" if values.place else phase


def _summary(values: OomValues) -> Iterator[str]:
    device = f"cuda:{values.device}" if values.device is not None else "the device"
    total = f" of {human_bytes(values.total)}" if values.total is not None else ""
    parts = [
        f"requested {human_bytes(values.requested)}" if values.requested is not None else "",
        f"{device} has {human_bytes(values.free)}{total} free" if values.free is not None else "",
        f"other processes use {human_bytes(values.other)}",
    ]
    yield "; ".join(filter(None, parts))
    if values.allocated is not None:
        cache = f"{human_bytes(values.reclaimable)} reclaimable, {human_bytes(values.fragmented)} fragmented"
        if values.reclaimable is None and values.reserved is not None:
            cache = f"{human_bytes(values.reserved - values.allocated)} cache, may be released"
        yield f"PyTorch: {human_bytes(values.allocated)} allocated, {cache}"
    if values.grown is not None:
        batch = f" with a batch of {values.batch_size}" if values.batch_size else ""
        expected = f"; {human_bytes(values.batch_growth)} were expected" if values.batch_growth is not None else ""
        yield f"this run had grown by {human_bytes(values.grown)}{batch}{expected}"
    if values.optimizer:
        yield (
            f"{values.optimizer}: {human_bytes(values.parameters)} of parameters,"
            f" {human_bytes(values.optimizer_state)} of state, {human_bytes(values.optimizer_state_missing)} of state"
            " still to be created"
        )
