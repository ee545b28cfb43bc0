"""Reads PyTorch's out-of-memory text: the figures of the very moment, in every process, with or without a reporter.

Sizes are written with two decimals, so they are right to half a percent. Each field stands behind its own optional
expression: releases differ in what they tell, and the processes are there only where NVML names them. Source of the
forms: c10's CUDACachingAllocator.cpp; releases before 2.1 used another order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["OomMessage", "is_out_of_memory", "parse_oom_message"]

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
_FIELDS = {
    "requested_bytes": (rf"Tried to allocate {_SIZE}",),
    "total_bytes": (rf"total capacity of {_SIZE}", rf"{_SIZE} total capacity"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"; {_SIZE} free"),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed",),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "private_pools_bytes": (rf"with {_SIZE} allocated in private pools",),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
}
_EXPRESSIONS = {name: tuple(re.compile(form) for form in forms) for name, forms in _FIELDS.items()}
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|CUBLAS|CUDNN|NCCL|GPU).*(?:out of memory|ALLOC_FAILED)", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class OomMessage:
    """What an error's text tells, in bytes; None where it does not."""

    device: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    """The device's memory, less what the driver keeps for itself."""
    free_bytes: int | None = None
    """Device-wide."""
    process_bytes: int | None = None
    """This process' use as NVML has it: context and libraries included."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """Process id, as NVML has it, and bytes."""
    allowed_bytes: int | None = None
    """What the process' memory fraction allows, where one is set."""
    allocated_bytes: int | None = None
    private_pools_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def other_bytes(self) -> int:
        """All that the other processes use."""
        return sum(size for _, size in self.other_processes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that the device has no memory left: torch's own, or a library's in its words."""
    if any(kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)[:4000]) is not None


def parse_oom_message(text: str) -> OomMessage:
    """Take the figures out of the text of an out-of-memory error. Never raises."""
    figures = {name: _first(text, forms) for name, forms in _EXPRESSIONS.items()}
    unallocated = figures.pop("unallocated_bytes")
    if figures["reserved_bytes"] is None and figures["allocated_bytes"] is not None and unallocated is not None:
        figures["reserved_bytes"] = figures["allocated_bytes"] + unallocated
    device = _DEVICE.search(text)
    total = figures["total_bytes"]
    others = ((int(pid), _bytes(size)) for pid, size in _OTHERS.findall(text))
    return OomMessage(
        device=int(device[1]) if device else None,
        # Where NVML does not know a process' memory it has been written as 17179869184.00 GiB.
        other_processes=tuple((pid, size) for pid, size in others if total is None or size <= total),
        **figures,
    )


def _first(text: str, forms: tuple[re.Pattern[str], ...]) -> int | None:
    for form in forms:
        found = form.search(text)
        if found:
            return _bytes(found[1])
    return None


def _bytes(size: str) -> int:
    number, unit = size.split(" ")
    return round(float(number) * _UNITS[unit])
