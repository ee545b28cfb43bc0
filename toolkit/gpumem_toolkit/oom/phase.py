"""Finds the phase of a training step in which an error happened, and its objects, from the frames of its traceback."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any

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
    """`forward`, `backward`, `optimizer`, `data transfer`, `model transfer`; empty if the frames do not show it."""
    recomputed: bool = False
    """Whether a backward pass was recomputing a checkpointed part."""
    place: str = ""
    """The innermost line of the user's code: file, line, function."""


def origin_of(traceback: TracebackType | None) -> Origin:
    """Read a traceback, and the running frames that called it."""
    if traceback is None:
        return Origin("")
    outer = [_place(frame, line) for frame, line in islice(walk_stack(traceback.tb_frame), 1, _FRAMES_MAX)]
    inner = [_place(frame, line) for frame, line in islice(walk_tb(traceback), _FRAMES_MAX)]
    phase, recomputed = phase_of([*reversed(outer), *inner], linecache.getline(inner[-1].filename, inner[-1].line))
    own = next((place for place in reversed(inner) if place.in_user_code), None)
    return Origin(phase, recomputed, str(own) if own else "")


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


def self_in_frame(traceback: TracebackType | None, module: str, function: str, *, outermost: bool) -> Any:
    """Return `self` in the outermost or innermost frame of a function of PyTorch; None if there is no such frame."""
    found = None
    for frame, _ in islice(walk_tb(traceback), _FRAMES_MAX):
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == function:
            found, arguments = _variables(frame, "self", "args")
            if found is None and arguments:
                found = arguments[0]
            if found is not None and outermost:
                return found
    return found


def batch_of_forward(traceback: TracebackType | None) -> int | None:
    """Return the first dimension of the first tensor among the arguments of the outermost module."""
    torch = sys.modules.get("torch")
    for frame, _ in islice(walk_tb(traceback), _FRAMES_MAX):
        if frame.f_globals.get("__name__") == "torch.nn.modules.module" and frame.f_code.co_name == "_call_impl":
            arguments, named = _variables(frame, "args", "kwargs")
            for argument in (*(arguments or ()), *(named or {}).values()):
                if torch is not None and type(argument) is torch.Tensor and argument.dim() > 0:
                    return int(argument.shape[0])
            return None
    return None
