"""Parses the text of PyTorch's out-of-memory errors.

Sizes have two decimals, so they are accurate to half a percent. Each value has its own optional expressions, because
releases differ, and the text names other processes only if NVML knows them. The forms come from
CUDACachingAllocator.cpp; releases before 2.1 used another order.
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
    """The values of the text in bytes; None if missing."""

    device: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    """Memory of the device without what the driver reserves."""
    free_bytes: int | None = None
    """Free memory of the device."""
    process_bytes: int | None = None
    """Memory of this process from NVML, with context and libraries."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """Process ids from NVML, and their bytes."""
    allowed_bytes: int | None = None
    """Limit by the memory fraction of the process, if one is set."""
    allocated_bytes: int | None = None
    private_pools_bytes: int | None = None
    reserved_bytes: int | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that device memory is exhausted, from PyTorch or from a library."""
    if any(kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)[:4000]) is not None


def parse_oom_message(text: str) -> OomMessage:
    """Parse the text of an out-of-memory error. Raises nothing."""
    values = {name: _first(text, forms) for name, forms in _EXPRESSIONS.items()}
    unallocated = values.pop("unallocated_bytes")
    if values["reserved_bytes"] is None and values["allocated_bytes"] is not None and unallocated is not None:
        values["reserved_bytes"] = values["allocated_bytes"] + unallocated
    device = _DEVICE.search(text)
    total = values["total_bytes"]
    others = ((int(pid), _bytes(size)) for pid, size in _OTHERS.findall(text))
    return OomMessage(
        device=int(device[1]) if device else None,
        # Some releases write 17179869184.00 GiB if NVML does not know the memory of a process.
        other_processes=tuple((pid, size) for pid, size in others if total is None or size <= total),
        **values,
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
