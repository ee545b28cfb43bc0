"""The values in the text of an out-of-memory error of PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
_FIELDS = {
    "requested_bytes": rf"Tried to allocate {_SIZE}",
    "total_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allowed_bytes": rf"{_SIZE} allowed",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "private_pools_bytes": rf"with {_SIZE} allocated in private pools",
    "unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")


@dataclass(frozen=True)
class OomMessage:
    """The values of the text in bytes, accurate to half a percent, because they have two decimals. None if missing."""

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


def parse_oom_message(text: str) -> OomMessage:
    """Parse the text of an out-of-memory error of PyTorch 2.1 and later (CUDACachingAllocator.cpp). Raises nothing.

    Releases differ, and the text names other processes only if NVML knows them: so each value is optional.
    """
    found = {name: re.search(form, text) for name, form in _FIELDS.items()}
    values = {name: None if each is None else _bytes(each[1]) for name, each in found.items()}
    allocated, unallocated = values["allocated_bytes"], values.pop("unallocated_bytes")
    device = _DEVICE.search(text)
    total = values["total_bytes"]
    others = ((int(pid), _bytes(size)) for pid, size in _OTHERS.findall(text))
    return OomMessage(
        device=int(device[1]) if device else None,
        # Some releases write 17179869184.00 GiB if NVML does not know the memory of a process.
        other_processes=tuple((pid, size) for pid, size in others if total is None or size <= total),
        reserved_bytes=None if allocated is None or unallocated is None else allocated + unallocated,
        **values,
    )


def _bytes(size: str) -> int:
    number, unit = size.split(" ")
    return round(float(number) * _UNITS[unit])
