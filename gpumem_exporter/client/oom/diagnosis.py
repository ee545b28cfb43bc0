"""Puts together what is known of an out-of-memory error, and what follows from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from gpumem_exporter.client.allocator.attached import attached
from gpumem_exporter.client.api import latest_oom
from gpumem_exporter.client.leaks.detector import known_leak
from gpumem_exporter.client.leaks.live_tensors import walk
from gpumem_exporter.client.leaks.referrers import instance_dictionary
from gpumem_exporter.client.leaks.suspects import descriptions, frequent
from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.phases import current_phase
from gpumem_exporter.client.measure.tensor_bytes import Storages
from gpumem_exporter.client.oom.advice import Advice, advise
from gpumem_exporter.client.oom.figures import OomFigures
from gpumem_exporter.client.oom.growth import BlockHistory
from gpumem_exporter.client.oom.message import OomMessage, parse_oom_message
from gpumem_exporter.client.oom.phase import Trail, trail
from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.wire.protocol import OutOfMemory

__all__ = ["NOTE_BEGINS", "OomDiagnosis", "Run", "diagnose"]


NOTE_BEGINS = "gpumem: "
_ADVICE_TOLD = 5
_WALK_SECONDS = 0.5
_FRAMES_MAX = 400
_OBSERVED_SECONDS = 5.0
_SEGMENT_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a guarded block."""

    device: int
    begin_bytes: int
    """Allocated when it began."""
    peak_bytes: int
    """The allocator's peak then."""
    batch_size: int | None
    history: BlockHistory


@dataclass(frozen=True, slots=True)
class OomDiagnosis:
    """What is known of an out-of-memory error, and what to do. Prints as the note that stands below the error."""

    figures: OomFigures
    advice: tuple[Advice, ...]
    """The best first."""

    def __str__(self) -> str:
        figures = self.figures
        lines = [f"{NOTE_BEGINS}out of memory{_where(figures)}"]
        lines += [f"  {line}" for line in _told(figures)]
        lines += [f"  {number}. {advice}" for number, advice in enumerate(self.advice[:_ADVICE_TOLD], 1)]
        return "\n".join(lines)


def diagnose(error: BaseException, traceback: TracebackType | None, run: Run | None) -> OomDiagnosis:
    """Read the error's text, its frames and the allocator, and rank what can be done.

    Runs in the program's thread, after the error; takes milliseconds, half a second where a leak is to be named.
    """
    message = parse_oom_message(str(error))
    came_from = trail(traceback)
    figures = _figures(message, came_from, traceback, run)
    return OomDiagnosis(figures, advise(figures))


def _figures(message: OomMessage, came_from: Trail, traceback: TracebackType | None, run: Run | None) -> OomFigures:
    device = message.device if message.device is not None else run.device if run is not None else None
    if run is not None and run.device != device:
        run = None
    told = _allocator_figures(message, device)
    allocated: int | None = told["allocated"]
    batch_size = run.batch_size if run is not None else None
    if batch_size is None:
        batch_size = _batch_of_forward(traceback)
    phase = came_from.phase or current_phase() or ""
    return OomFigures(
        phase=phase,
        recomputed=came_from.recomputed,
        place=came_from.place,
        device=device,
        batch_size=batch_size,
        grown=None if run is None or allocated is None else max(0, allocated - run.begin_bytes),
        batch_growth=run.history.growth(batch_size) if run is not None else None,
        bytes_per_item=run.history.bytes_per_item() if run is not None else None,
        ranks=_ranks(),
        **told,
        **_alone(lambda: _leak_figures(device, run)),
        **_alone(lambda: _model_figures(phase, traceback, device)),
    )


def _alone(figures: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What cannot be told leaves the rest as it is."""
    try:
        return figures()
    except Exception as error:  # noqa: BLE001 - other libraries' modules and optimizers may raise anything
        log.info("an out-of-memory error is explained in part: %r", error)
        return {}


def _allocator_figures(message: OomMessage, device: int | None) -> dict[str, Any]:
    """The text's figures are those of the very moment, rounded; the statistics are exact, and those of now.

    Where the text has none, the error was not the allocator's: nothing has been freed since, nor has the cache been.
    """
    allocator = attached()
    state = allocator.state(device) if allocator is not None and device is not None else None
    allocated, reserved = message.allocated_bytes, message.reserved_bytes
    reclaimable: int | None = None
    if allocated is not None and reserved is not None:
        reclaimable = 0  # PyTorch gives its cache back before it gives up
    elif state is not None:
        allocated, reserved = _current(state, "allocated_bytes"), _current(state, "reserved_bytes")
        split, active = _current(state, "inactive_split_bytes"), _current(state, "active_bytes")
        if None not in (reserved, split, active):
            reclaimable = max(0, (reserved or 0) - (active or 0) - (split or 0))
    fragmented: int | None = None
    if allocated is not None and reserved is not None and reclaimable is not None:
        # What private pools hold, and is in no tensor of theirs, counts here too.
        fragmented = max(0, reserved - allocated - reclaimable)
    settings = allocator.settings if allocator is not None else ""
    free = message.free_bytes
    if free is None and allocator is not None and device is not None:
        free = allocator.free_bytes(device)
    requested = message.requested_bytes
    seen = _observed(message, allocator.uuid(device)) if allocator is not None and device is not None else None
    if seen is not None and seen.sample is not None:
        # The same figures, to the byte.
        requested, free = seen.requested_bytes, seen.device_free_bytes
        allocated, reserved = seen.sample.allocated_bytes, seen.sample.reserved_bytes
        if None not in (allocated, reserved, reclaimable):
            fragmented = max(0, (reserved or 0) - (allocated or 0) - (reclaimable or 0))
    return {
        "requested": requested,
        "free": free,
        "total": message.total_bytes,
        "allowed": message.allowed_bytes,
        "other_processes": message.other_processes,
        "non_torch": None
        if message.process_bytes is None or reserved is None
        else max(0, message.process_bytes - reserved),
        "allocated": allocated,
        "reserved": reserved,
        "private_pools": message.private_pools_bytes,
        "reclaimable": reclaimable,
        "fragmented": fragmented,
        "expandable": "expandable_segments:true" in settings.lower().replace(" ", ""),
    }


def _observed(message: OomMessage, uuid: str) -> OutOfMemory | None:
    """What the reporter's observer took down of this very error, if there is a reporter."""
    latest = latest_oom()
    if latest is None or message.requested_bytes is None:
        return None
    seconds, oom = latest
    # The text rounds the request to two decimals; the allocator asks the driver for whole segments.
    near = oom.requested_bytes is not None and 0 <= oom.requested_bytes - 0.99 * message.requested_bytes <= max(
        _SEGMENT_BYTES, 0.02 * message.requested_bytes
    )
    return oom if near and oom.uuid == uuid and time.monotonic() - seconds < _OBSERVED_SECONDS else None


def _leak_figures(device: int | None, run: Run | None) -> dict[str, Any]:
    known = known_leak(device) if device is not None else None
    if known is not None:
        suspects = known.suspects
        return {
            "leaked": known.leaked_bytes,
            "leak_per_step": round(known.bytes_per_step),
            "leak_suspects": suspects,
        }
    leaked = run.history.leaked() if run is not None else None
    if run is None or leaked is None:
        return {}
    torch = sys.modules.get("torch")
    found = frequent(walk(torch, 0, 1000, _WALK_SECONDS, 5_000_000), least=max(8, run.history.runs // 2))
    return {
        "leaked": leaked[0],
        "leak_per_step": round(leaked[1].slope),
        "leak_suspects": descriptions(found),
    }


def _model_figures(phase: str, traceback: TracebackType | None, device: int | None) -> dict[str, Any]:
    """Of the optimizer that was stepping, or the model that was moved."""
    torch = sys.modules.get("torch")
    if torch is None or phase not in ("optimizer", "model transfer"):
        return {}
    if phase == "model transfer":
        model = _self_of(traceback, "torch.nn.modules.module", "_apply", outermost=True)
        return {} if model is None else {"parameters": _bytes_of(torch.nn.Module.parameters(model), torch, None)}
    optimizer = _self_of(traceback, "torch.optim.optimizer", "wrapper", outermost=False)
    attributes = instance_dictionary(optimizer) or {}
    groups, states = attributes.get("param_groups") or [], attributes.get("state")
    updated = [parameter for group in groups for parameter in group["params"]]
    parameters = _bytes_of(updated, torch, device)
    kept = (tensor for state in dict(states or {}).values() if isinstance(state, dict) for tensor in state.values())
    present = _bytes_of((tensor for tensor in kept if isinstance(tensor, torch.Tensor)), torch, device)
    full = _full_state(type(optimizer).__name__, groups, states) * parameters
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": parameters,
        "optimizer_state": present,
        "optimizer_state_missing": max(0, full - present),
    }


def _bytes_of(tensors: Iterable[Any], torch: Any, device: int | None) -> int:
    """Of the tensors on a device, or of all; a storage that several share counts once."""
    storages = Storages(torch)
    storages.add(list(tensors))
    return sum(size for on, size in storages.bytes().items() if device in (None, on))


_STATES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1, "Lion": 1, "Adadelta": 2}
"""Tensors as large as a parameter that an optimizer keeps for each; Adam and its kin, and most others, keep two."""


def _full_state(optimizer: str, groups: list[dict[str, Any]], states: Any) -> int:
    """How many tensors as large as it each parameter will have in the state; 0 once they all have theirs."""
    stepped = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if states is None or all(len(states.get(parameter, ())) > 0 for parameter in stepped):
        return 0
    if optimizer == "SGD" and not any(group.get("momentum") for group in groups):
        return 0
    return _STATES.get(optimizer, 2) + any(bool(group.get("amsgrad")) for group in groups)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    for _ in range(_FRAMES_MAX):
        if traceback is None:
            return
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _variables(frame: FrameType, *names: str) -> tuple[Any, ...]:
    """Some local variables of one of PyTorch's own frames, None where it has them not."""
    variables = frame.f_locals
    found = tuple(variables.get(name) for name in names)
    if sys.version_info < (3, 13):
        variables.clear()  # a copy that outlives even the frame's clearing, and the tensors with it
    return found


def _self_of(traceback: TracebackType | None, module: str, function: str, *, outermost: bool) -> Any:
    found = None
    for frame in _frames(traceback):
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == function:
            found, arguments = _variables(frame, "self", "args")
            if found is None and arguments:
                found = arguments[0]
            if found is not None and outermost:
                return found
    return found


def _batch_of_forward(traceback: TracebackType | None) -> int | None:
    """The first dimension of the first tensor that the outermost module was called with."""
    torch = sys.modules.get("torch")
    for frame in _frames(traceback):
        if frame.f_globals.get("__name__") == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl":
            arguments, named = _variables(frame, "args", "kwargs")
            for argument in (*(arguments or ()), *(named or {}).values()):
                if torch is not None and type(argument) is torch.Tensor and argument.dim() > 0:
                    return int(argument.shape[0])
            return None
    return None


def _ranks() -> int:
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_world_size())
    except (AttributeError, RuntimeError, ValueError):
        pass
    return 1


def _current(state: Any, name: str) -> int | None:
    value: int | None = state.get(name, {}).get("all", {}).get("current")
    return value


def _where(figures: OomFigures) -> str:
    phase = {"": "", "optimizer": " in the optimizer's step", "model transfer": " while the model was moved"}.get(
        figures.phase, f" in the {figures.phase}"
    )
    if figures.recomputed:
        phase += ", while a checkpointed part was computed again"
    return f"{phase}, {figures.place}" if figures.place else phase


def _told(figures: OomFigures) -> Iterator[str]:
    asked = f"asked for {human_bytes(figures.requested)}; " if figures.requested is not None else ""
    device = f"cuda:{figures.device}" if figures.device is not None else "the device"
    of = f" of {human_bytes(figures.total)}" if figures.total is not None else ""
    yield f"{asked}{device} has {human_bytes(figures.free)}{of} free, other processes use {human_bytes(figures.other)}"
    yield (
        f"PyTorch: {human_bytes(figures.allocated)} in tensors, {human_bytes(figures.reclaimable)} reclaimable,"
        f" {human_bytes(figures.fragmented)} fragmented"
    )
    if figures.grown is not None:
        batch = f", with a batch of {figures.batch_size}" if figures.batch_size else ""
        measured = f"; {human_bytes(figures.batch_growth)} expected" if figures.batch_growth is not None else ""
        yield f"this run had grown by {human_bytes(figures.grown)}{batch}{measured}"
    if figures.optimizer:
        yield (
            f"{figures.optimizer}: {human_bytes(figures.parameters)} of parameters, "
            f"{human_bytes(figures.optimizer_state)} of state, "
            f"{human_bytes(figures.optimizer_state_missing)} still to be made"
        )
