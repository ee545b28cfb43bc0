"""Reads this process' memory on one device from NVML, for occasional calls.

The library is loaded by its name and creates no CUDA context. The structures are those of nvml.h since driver 510.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE, pid_namespace

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_KNOWN_MAX = 2**63 - 1
"""A larger value means unknown."""
_PROCESSES_MAX = 65536
_ENTRY = struct.Struct("@IQII")
"""`nvmlProcessInfo_t`: pid, bytes, GPU instance, compute instance…"""
_ENTRY_PROTECTED = struct.Struct("@IQIIQ")
"""…and, in some 535 drivers under the same name, protected bytes."""
_UNTOUCHED = b"\xa5" * 8


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class DriverReading:
    """One device, as the driver reports it. None is unknown, for example in another PID namespace."""

    process_bytes: int | None = None
    """Memory of this process: CUDA context, libraries, and PyTorch's reserved memory."""
    other_processes_bytes: int | None = None
    utilization_ratio: float | None = None


def read_driver(uuid: str) -> DriverReading:
    """Read one device by its UUID (`GPU-…`, `MIG-…`). Takes a few milliseconds. Any thread may call this."""
    try:
        nvml = _library()
        if not uuid or nvml.nvmlInit_v2() != _SUCCESS:
            return DriverReading()
    except (OSError, AttributeError):
        return DriverReading()
    try:
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != _SUCCESS:
            return DriverReading()
        # The driver lists pids of the host: in another PID namespace they name other processes.
        processes = processes_of_device(nvml, device) if pid_namespace() == INITIAL_PID_NAMESPACE else None
        own = others = None
        if processes is not None and os.getpid() in processes:
            own = processes.pop(os.getpid())
            known = [used for used in processes.values() if used is not None]
            others = sum(known) if len(known) == len(processes) else None
        return DriverReading(own, others, _utilization(nvml, device))
    except AttributeError:  # the library lacks one of the functions
        return DriverReading()
    finally:
        with contextlib.suppress(AttributeError):
            nvml.nvmlShutdown()


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library once: each load leaves several kilobytes of garbage."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def processes_of_device(nvml: Any, device: ctypes.c_void_p) -> dict[int, int | None] | None:
    """Return bytes by pid. Each list that contains a process shows all of its bytes."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = process_list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3"), device)
        if listed is None and kind == "Compute":
            return None
        for pid, used in listed or ():
            known = None if used > _KNOWN_MAX else used
            before = found.get(pid)
            found[pid] = before if known is None or (before is not None and before > known) else known
    found.pop(0, None)  # an entry with pid 0 is not a process
    return found


def process_list(function: Any, device: ctypes.c_void_p) -> list[tuple[int, int]] | None:
    """Return pid and bytes of each entry of one list; None if this device does not have the list."""
    room = 128
    while True:
        size = (room + 1) * _ENTRY_PROTECTED.size
        buffer = ctypes.create_string_buffer(_UNTOUCHED * (size // len(_UNTOUCHED)), size)
        count = ctypes.c_uint(room)
        code = function(device, ctypes.byref(count), buffer)
        if code != _INSUFFICIENT_SIZE or room >= _PROCESSES_MAX:
            break
        room = max(2 * room, count.value + 16)
    if code != _SUCCESS:
        return None
    # The bytes that the driver has written show the layout more reliably than its version.
    short, long = count.value * _ENTRY.size, count.value * _ENTRY_PROTECTED.size
    written = buffer.raw
    entry = _ENTRY
    if written[short : short + 8] != _UNTOUCHED and written[long : long + 8] == _UNTOUCHED:
        entry = _ENTRY_PROTECTED
    return [(fields[0], fields[1]) for fields in entry.iter_unpack(written[: count.value * entry.size])]


def _utilization(nvml: Any, device: ctypes.c_void_p) -> float | None:
    rates = _Utilization()
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) != _SUCCESS:
        return None
    return float(rates.gpu) / 100
