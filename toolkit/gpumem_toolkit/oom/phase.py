"""Finds from the frames of a traceback what the error interrupted: its phase, known causes, and its objects."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

from gpumem_client.objects.referrers import instance_dictionary
from gpumem_toolkit.oom.known_causes import CAUSES, WITHOUT_ACTIVATIONS, Cause

_FRAMES_MAX = 400
_TRANSFER = re.compile(r"\.(?:to|cuda|copy_|pin_memory|to_empty)\(")
_BACKWARD = {"torch._tensor": "backward", "torch.autograd": "", "torch.autograd.graph": "_engine_run_backward"}
_NO_OPTIMIZER = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a frame, without a reference to the frame."""

    module: str
    function: str
    filename: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} in {self.function}"

    @property
    def in_user_code(self) -> bool:
        """Whether the code belongs neither to PyTorch nor to this package."""
        return self.module.partition(".")[0] not in ("torch", "gpumem_client", "gpumem_toolkit", "contextlib")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an error."""

    phase: str
    """`forward`, `backward`, `optimizer`, `data transfer`, `model transfer`, `a copy`, `loading`; empty if the frames
    do not show it."""
    recomputed: bool = False
    """Whether a backward pass was recomputing a checkpointed part."""
    place: str = ""
    """The innermost line of the user's code: file, line, function."""
    causes: tuple[Cause, ...] = ()
    """The known causes whose code the traceback passes, in the order of their table."""
    without_gradients: bool = False
    """Whether the traceback passes code that saves nothing for a backward pass."""


def origin_of(traceback: TracebackType | None) -> Origin:
    """Read a traceback, and the running frames that called it."""
    if traceback is None:
        return Origin("")
    outer = list(islice(walk_stack(traceback.tb_frame), 1, _FRAMES_MAX))
    frames = [*reversed(outer), *islice(walk_tb(traceback), _FRAMES_MAX)]
    places = [_place(frame, line) for frame, line in frames]
    phase, recomputed = phase_of(places, linecache.getline(places[-1].filename, places[-1].line))
    own = next((place for place in reversed(places[len(outer) :]) if place.in_user_code), None)
    passed = [cause for cause in CAUSES if _passes(cause, places, frames)]
    causes = tuple({cause.kind: cause for cause in reversed(passed)}.values())[::-1]
    no_gradients = any(cause.kind in WITHOUT_ACTIVATIONS for cause in causes) or any(
        place.module == "torch.utils._contextlib" and _context(frame) in ("no_grad", "inference_mode")
        for place, (frame, _) in zip(places, frames, strict=True)
    )
    return Origin(phase, recomputed, str(own) if own else "", causes, no_gradients)


def _passes(cause: Cause, places: Sequence[Place], frames: Sequence[tuple[FrameType, int]]) -> bool:
    """Return whether the outermost frame of a known cause is as the cause requires."""
    at = next((at for at, place in enumerate(places) if cause.is_at(place.module, place.function)), None)
    if at is None or not cause.variable:
        return at is not None
    value, named = _variables(frames[at][0], cause.variable, "kwargs")
    value = (named or {}).get(cause.variable) if value is None else value
    if cause.least == (0, 0):
        return value is not None
    # A layer's attribute `weight` may be a property that computes, as with a parametrization.
    parameters = (instance_dictionary(value) or {}).get("_parameters") or {}
    shape = getattr(parameters.get("weight", value), "shape", ())
    return len(shape) > 1 and all(size >= least for size, least in zip(shape[-2:], cause.least, strict=True))


def _context(frame: FrameType) -> str:
    """Return the name of the context manager that PyTorch's decorator has entered in this frame."""
    return type(getattr(_variables(frame, "ctx_factory")[0], "__self__", None)).__name__


def phase_of(places: Sequence[Place], source_line: str = "") -> tuple[str, bool]:
    """Return the phase, and whether a backward pass was recomputing. Pure. The line is the source of the last place."""
    phase, recomputed = "", False
    for place in places:
        event = _event(place)
        if event == "forward" and phase == "backward":
            recomputed = True  # activation checkpointing runs the forward pass again
        elif event:
            phase, recomputed = event, False
    # `.to()` and `.cuda()` of a tensor leave no frame; there the source line shows the call.
    if not phase and _TRANSFER.search(source_line):
        phase = "data transfer"
    return phase, recomputed


def _event(place: Place) -> str:
    # PyTorch's frames show it: a forward pass goes through `Module._call_impl`, a model moves through `Module._apply`,
    # `Optimizer.step` is wrapped in `torch.optim.optimizer`, a backward pass enters the engine through
    # `torch.autograd.graph`.
    module, function = place.module, place.function
    cause = next((each for each in CAUSES if each.phase and each.is_at(module, function)), None)
    if cause is not None:
        return cause.phase
    if module == "torch.nn.modules.module":
        return "forward" if function == "_call_impl" else "model transfer" if function == "_apply" else ""
    if module.startswith("torch.optim") and not module.startswith(_NO_OPTIMIZER):
        return "optimizer"
    if module in _BACKWARD and function in (_BACKWARD[module] or ("backward", "grad")):
        return "backward"
    return ""


def _place(frame: FrameType, line: int | None) -> Place:
    module = frame.f_globals.get("__name__")
    code = frame.f_code
    return Place(module if type(module) is str else "", code.co_name, code.co_filename, line or 0)


def _variables(frame: FrameType, *names: str) -> tuple[Any, ...]:
    """Return local variables of one of PyTorch's frames; None for a missing one."""
    variables = frame.f_locals
    found = tuple(variables.get(name) for name in names)
    if sys.version_info < (3, 13):
        variables.clear()  # the frame would keep this copy, and its tensors
    return found


def _frames_of(traceback: TracebackType | None, module: str, function: str) -> Iterator[FrameType]:
    """Yield the frames of a function of PyTorch, from the outermost to the innermost."""
    for frame, _ in islice(walk_tb(traceback), _FRAMES_MAX):
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == function:
            yield frame


def self_in_frame(traceback: TracebackType | None, module: str, function: str, *, outermost: bool) -> Any:
    """Return `self` in the outermost or innermost frame of a function of PyTorch; None if there is no such frame."""
    found = None
    for frame in _frames_of(traceback, module, function):
        found, arguments = _variables(frame, "self", "args")
        if found is None and arguments:
            found = arguments[0]
        if found is not None and outermost:
            return found
    return found


def tensor_arguments(traceback: TracebackType | None, *, outermost: bool) -> list[Any]:
    """Return the tensors among the arguments of the modules in a traceback, or of the outermost one alone."""
    torch, found = sys.modules["torch"], list[Any]()
    for frame in islice(_frames_of(traceback, "torch.nn.modules.module", "_call_impl"), 1 if outermost else None):
        arguments, named = _variables(frame, "args", "kwargs")
        found += [each for each in (*(arguments or ()), *(named or {}).values()) if type(each) is torch.Tensor]
    return found


def batch_of_forward(traceback: TracebackType | None) -> int | None:
    """Return the first dimension of the outermost module's inputs, if it has two or more and all agree."""
    inputs = [int(each.shape[0]) for each in tensor_arguments(traceback, outermost=True) if each.dim() > 0]
    return inputs[0] if len(inputs) > 1 and len(set(inputs)) == 1 else None
