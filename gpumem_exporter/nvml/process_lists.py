"""The driver's process lists of a device, merged, read with one call a list into a buffer that is kept.

pynvml asks each list twice (for its size, then for the data), races with processes that come in between, and builds an
object per process: at 64 processes on each of 8 devices that is a hundred times the cost of one call and one unpack.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from gpumem_exporter.core.samples import ProcessMemory
from gpumem_exporter.errors import NvmlError, NvmlNotSupportedError
from gpumem_exporter.nvml.return_codes import FUNCTION_NOT_FOUND, INSUFFICIENT_SIZE, SUCCESS, error_of

__all__ = ["ProcessLists", "known_bytes"]

# nvmlProcessInfo_t: pid, usedGpuMemory, then (v2 on) gpuInstanceId and computeInstanceId, then (in some 535 drivers,
# in the v3 call alone and under the same name) usedGpuCcProtectedMemory.
_ENTRY_V1 = struct.Struct("@IQ")
_ENTRY = struct.Struct("@IQII")
_ENTRY_PROTECTED = struct.Struct("@IQIIQ")
_UNTOUCHED = 0xA5
_MAX_ATTEMPTS = 4
_MAX_ENTRIES = 1 << 16


def known_bytes(value: int) -> int | None:
    """A figure of the driver; None for NVML_VALUE_NOT_AVAILABLE (2^64 − 1) and whatever else cannot be a byte count."""
    return value if value < 1 << 63 else None


class ProcessLists:
    """Reads the lists of compute, graphics and MPS processes. Not thread-safe: its buffer is one.

    Args:
        library: the loaded libnvidia-ml, as ctypes has it.
        capacity: entries that the buffer holds at first; it grows with what the driver has.
    """

    def __init__(self, library: Any, capacity: int = 128) -> None:
        self._compute = _List(library, "nvmlDeviceGetComputeRunningProcesses")
        self._others = (
            _List(library, "nvmlDeviceGetGraphicsRunningProcesses"),
            _List(library, "nvmlDeviceGetMPSComputeRunningProcesses"),
        )
        self._buffer = _Buffer(capacity)

    def read(self, handle: Any) -> tuple[ProcessMemory, ...]:
        """List the processes on a device, each once, in the driver's order.

        A process that is on several lists has the same figure on each, its whole use of the device: the largest is
        taken, never the sum. A list of graphics or MPS processes that the device does not have holds none. An entry
        with pid 0 names no process and is left out.

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

    def _merge(self, used: dict[int, int | None], one: _List, handle: Any) -> None:
        for pid, value in one.read(handle, self._buffer):
            if pid == 0:
                continue
            figure = known_bytes(value)
            known = used.get(pid)
            if known is None or (figure is not None and figure > known):
                used[pid] = figure


class _Buffer:
    """Room for the driver to write entries to, of whichever layout, with a margin behind the last."""

    def __init__(self, capacity: int) -> None:
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._size = (capacity + 1) * _ENTRY_PROTECTED.size
        self.memory = ctypes.create_string_buffer(self._size)
        self._view = memoryview(self.memory).cast("B")

    def make_room(self, count: int) -> None:
        """Hold `count` entries and as many more: processes may come faster than the driver is asked again."""
        self._allocate(min(max(count, self.capacity) * 2, _MAX_ENTRIES))

    def clear(self) -> None:
        ctypes.memset(self.memory, _UNTOUCHED, self._size)

    def entries(self, count: int, entry: struct.Struct) -> list[tuple[int, int]]:
        """The (pid, bytes) of the entries that the driver wrote."""
        if entry is _ENTRY and self._has_protected_memory(count):
            entry = _ENTRY_PROTECTED
        return [(fields[0], fields[1]) for fields in entry.iter_unpack(self._view[: count * entry.size])]

    def _has_protected_memory(self, count: int) -> bool:
        # Told by where the driver stopped writing; a driver's version says it less surely.
        short, long = count * _ENTRY.size, count * _ENTRY_PROTECTED.size
        margin = bytes([_UNTOUCHED]) * 8
        return (
            self._view[short : short + 8] != margin
            and self._view[long - 8 : long] != margin
            and self._view[long : long + 8] == margin
        )


class _List:
    """One of the driver's lists, by the newest of its functions that the library has."""

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
            raise error_of(FUNCTION_NOT_FOUND, self._name)
        for _ in range(_MAX_ATTEMPTS):
            buffer.clear()
            count = ctypes.c_uint(buffer.capacity)
            code = self._function(handle, ctypes.byref(count), buffer.memory)
            if code == SUCCESS:
                return buffer.entries(min(count.value, buffer.capacity), self._entry)
            if code != INSUFFICIENT_SIZE:
                raise error_of(code, self._name)
            buffer.make_room(count.value)
        raise NvmlError(f"{self._name}: the list outgrew {buffer.capacity} entries in {_MAX_ATTEMPTS} attempts")
