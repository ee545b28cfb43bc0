"""Read the driver's process lists of a device with one call per list into a reused buffer.

pynvml calls the driver twice per list (for the size, then for the data), fails if a process starts between the calls,
and creates an object per process. With 64 processes on each of 8 devices, that takes a hundred times as long.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from gpumem_exporter.core.samples import ProcessMemory
from gpumem_exporter.errors import NvmlError, NvmlNotSupportedError
from gpumem_exporter.nvml.return_codes import FUNCTION_NOT_FOUND, INSUFFICIENT_SIZE, SUCCESS, error_for_code

__all__ = ["ProcessLists", "known_bytes"]

# nvmlProcessInfo_t: pid, usedGpuMemory; since v2 also gpuInstanceId and computeInstanceId. The v3 call of some 535
# drivers appends usedGpuCcProtectedMemory without changing the name of the structure.
_ENTRY_V1 = struct.Struct("@IQ")
_ENTRY = struct.Struct("@IQII")
_ENTRY_PROTECTED = struct.Struct("@IQIIQ")
_UNTOUCHED = 0xA5
_MAX_ATTEMPTS = 4
_MAX_ENTRIES = 1 << 16


def known_bytes(value: int) -> int | None:
    """Return a byte count of the driver; None for NVML_VALUE_NOT_AVAILABLE (2^64 − 1) and other impossible values."""
    return value if value < 1 << 63 else None


class ProcessLists:
    """Reads the lists of compute, graphics and MPS processes. Not thread-safe, because the lists share a buffer.

    Args:
        library: the loaded libnvidia-ml, a ctypes library.
        capacity: the initial number of entries in the buffer, which grows as needed.
    """

    def __init__(self, library: Any, capacity: int = 128) -> None:
        self._compute = _List(library, "nvmlDeviceGetComputeRunningProcesses")
        self._others = (
            _List(library, "nvmlDeviceGetGraphicsRunningProcesses"),
            _List(library, "nvmlDeviceGetMPSComputeRunningProcesses"),
        )
        self._buffer = _Buffer(capacity)

    def read(self, handle: Any) -> tuple[ProcessMemory, ...]:
        """Return the processes on a device, each once, in the driver's order.

        A process on several lists has the same value on each, which is all its memory on the device. The result has the
        largest value, never the sum. A list of graphics or MPS processes that the device does not support counts as
        empty. An entry with pid 0 is not a process and is left out.

        Raises:
            NvmlError: the list cannot be read.
        """
        used: dict[int, int | None] = {}
        self._merge(used, self._compute, handle)
        for other in self._others:
            try:
                self._merge(used, other, handle)
            except NvmlNotSupportedError:
                continue
        return tuple([ProcessMemory(pid, used_bytes) for pid, used_bytes in used.items()])

    def _merge(self, used: dict[int, int | None], process_list: _List, handle: Any) -> None:
        for pid, value in process_list.read(handle, self._buffer):
            if pid == 0:
                continue
            used_bytes = known_bytes(value)
            known = used.get(pid)
            if known is None or (used_bytes is not None and used_bytes > known):
                used[pid] = used_bytes


class _Buffer:
    """Memory for the driver's entries of either layout, with a margin after the last entry."""

    def __init__(self, capacity: int) -> None:
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._size = (capacity + 1) * _ENTRY_PROTECTED.size
        self.memory = ctypes.create_string_buffer(self._size)
        self._view = memoryview(self.memory).cast("B")

    def make_room(self, count: int) -> None:
        """Grow to twice `count` entries, because more processes may start before the next call."""
        self._allocate(min(max(count, self.capacity) * 2, _MAX_ENTRIES))

    def clear(self) -> None:
        ctypes.memset(self.memory, _UNTOUCHED, self._size)

    def entries(self, count: int, entry: struct.Struct) -> list[tuple[int, int]]:
        """Return (pid, bytes) of each entry that the driver wrote."""
        if entry is _ENTRY and self._has_protected_memory(count):
            entry = _ENTRY_PROTECTED
        return [(fields[0], fields[1]) for fields in entry.iter_unpack(self._view[: count * entry.size])]

    def _has_protected_memory(self, count: int) -> bool:
        # The end of the written bytes shows the layout more reliably than the driver's version.
        short, long = count * _ENTRY.size, count * _ENTRY_PROTECTED.size
        margin = bytes([_UNTOUCHED]) * 8
        return (
            self._view[short : short + 8] != margin
            and self._view[long - 8 : long] != margin
            and self._view[long : long + 8] == margin
        )


class _List:
    """One of the driver's lists, read by the newest version of its function that the library has."""

    def __init__(self, library: Any, name: str) -> None:
        self._name = name
        self._entry = _ENTRY
        for version in ("_v3", "_v2", ""):
            self._function = getattr(library, name + version, None)
            if self._function is not None:
                self._entry = _ENTRY if version else _ENTRY_V1
                return

    def read(self, handle: Any, buffer: _Buffer) -> list[tuple[int, int]]:
        if self._function is None:
            raise error_for_code(FUNCTION_NOT_FOUND, self._name)
        for _ in range(_MAX_ATTEMPTS):
            buffer.clear()
            count = ctypes.c_uint(buffer.capacity)
            code = self._function(handle, ctypes.byref(count), buffer.memory)
            if code == SUCCESS:
                return buffer.entries(min(count.value, buffer.capacity), self._entry)
            if code != INSUFFICIENT_SIZE:
                raise error_for_code(code, self._name)
            buffer.make_room(count.value)
        raise NvmlError(f"{self._name}: the list outgrew {buffer.capacity} entries in {_MAX_ATTEMPTS} attempts")
