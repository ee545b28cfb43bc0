"""The processes on a device as the driver lists them, for reporters and the exporter."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from gpumem_client.wire.errors import GpumemError

# Not through pynvml: it calls the driver twice for each list (for the size, then for the data), fails if a process
# starts between the calls, and creates an object for each process. With 64 processes on each of 8 devices, that takes a
# hundred times as long as one call into a buffer.
_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
# nvmlProcessInfo_t: pid, usedGpuMemory; since v2 also gpuInstanceId and computeInstanceId. The v3 call of some 535
# drivers appends usedGpuCcProtectedMemory without changing the name of the structure.
_ENTRY_V1 = struct.Struct("@IQ")
_ENTRY = struct.Struct("@IQII")
_ENTRY_PROTECTED = struct.Struct("@IQIIQ")
_VERSIONS = (("_v3", _ENTRY), ("_v2", _ENTRY), ("", _ENTRY_V1))
_UNTOUCHED = b"\xa5" * 8

_SUCCESS, _NOT_SUPPORTED, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH = 0, 3, 7, 13, 25
_UNSUPPORTED = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH)
_FIRST_ROOM = 128
_MAX_ROOM = 1 << 16
_MAX_ATTEMPTS = 4


class ProcessListError(GpumemError):
    """The driver does not list the processes of a device: `call` has returned `code`."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: NVML return code {code}")
        self.call = call
        self.code = code


def known_bytes(value: int) -> int | None:
    """Return a byte count of the driver; None for NVML_VALUE_NOT_AVAILABLE (2^64 − 1) and other impossible values."""
    return value if value < 1 << 63 else None


def processes_on_device(library: Any, device: Any) -> dict[int, int | None]:
    """Return the bytes of each process by pid, in the driver's order; None where the driver does not know them.

    Raises ProcessListError. A list of graphics or MPS processes that the device does not support counts as empty.
    """
    found: dict[int, int | None] = {}
    for name in _LISTS:
        code, entries = _read(library, name, device)
        if code in _UNSUPPORTED and name != _LISTS[0]:
            continue
        if code != _SUCCESS:
            raise ProcessListError(name, code)
        for pid, value in entries:
            # Each list that has a process shows all of its memory on the device, so the values are never added.
            used, before = known_bytes(value), found.get(pid)
            found[pid] = before if used is None or (before is not None and before > used) else used
    found.pop(0, None)  # an entry with pid 0 is not a process
    return found


def _read(library: Any, name: str, device: Any) -> tuple[int, list[tuple[int, int]]]:
    """Return NVML's return code, and pid and bytes of each entry of one list."""
    versions = ((getattr(library, name + suffix, None), entry) for suffix, entry in _VERSIONS)
    function, entry = next((version for version in versions if version[0] is not None), (None, _ENTRY))
    if function is None:
        return _FUNCTION_NOT_FOUND, []
    code, room = _INSUFFICIENT_SIZE, _FIRST_ROOM
    for _ in range(_MAX_ATTEMPTS):
        size = (room + 1) * _ENTRY_PROTECTED.size
        buffer = ctypes.create_string_buffer(_UNTOUCHED * (size // len(_UNTOUCHED)), size)
        count = ctypes.c_uint(room)
        code = function(device, ctypes.byref(count), buffer)
        if code != _INSUFFICIENT_SIZE:
            break
        room = min(2 * max(room, count.value), _MAX_ROOM)  # more processes may start before the next call
    if code != _SUCCESS:
        return code, []
    written, listed = buffer.raw, min(count.value, room)
    # The end of the written bytes shows the layout more reliably than the driver's version.
    short, long = listed * _ENTRY.size, listed * _ENTRY_PROTECTED.size
    if entry is _ENTRY and written[short : short + 8] != _UNTOUCHED and written[long : long + 8] == _UNTOUCHED:
        entry = _ENTRY_PROTECTED
    return code, [(fields[0], fields[1]) for fields in entry.iter_unpack(written[: listed * entry.size])]
