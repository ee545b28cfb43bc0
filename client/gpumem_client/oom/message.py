"""Parses the text of PyTorch's out-of-memory errors.

Sizes have two decimals, so they are accurate to half a percent. Each value is optional: releases differ, and the text
names other processes only if NVML knows them. The forms come from CUDACachingAllocator.cpp of 2.1 and later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["OomMessage", "chain", "is_out_of_memory", "out_of_memory_in", "parse_oom_message"]

_CHAIN_MAX = 8

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


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    at: BaseException | None = error
    for _ in range(_CHAIN_MAX):  # a chain may be a circle
        if at is None:
            return
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """Return the first out-of-memory error among an error and its causes; None if there is none."""
    return next((each for each in chain(error) if is_out_of_memory(each)), None)


def parse_oom_message(text: str) -> OomMessage:
    """Parse the text of an out-of-memory error. Raises nothing."""
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
