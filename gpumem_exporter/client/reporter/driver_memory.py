"""What the driver says of this process on one device, through its management library, for one who asks now and then.

The library is NVML, the one that `nvidia-smi` uses; it is loaded by name, and touches no CUDA context. The structures
are those of nvml.h, the same since driver 510.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.procfs import INITIAL_PID_NAMESPACE, pid_namespace

__all__ = ["DriverReading", "read_driver"]

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_KNOWN_MAX = 2**63 - 1
"""Above it the driver means that it does not know."""
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
    """One device, as the driver says; None is what it does not say, or not in a way that can be told to be ours."""

    process_bytes: int | None = None
    """Held by this process: CUDA context, what libraries took, and PyTorch's reserved memory."""
    other_processes_bytes: int | None = None
    utilization_ratio: float | None = None


def read_driver(uuid: str) -> DriverReading:
    """Ask the driver about one device, by its UUID (`GPU-…`, `MIG-…`). Some milliseconds; any thread may ask.

    In a container whose pids are its own, the driver's list cannot be matched, and nothing is said of processes.
    """
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
        processes = processes_of_device(nvml, device) if _pids_are_the_driver_s() else None
        mine = others = None
        if processes is not None and os.getpid() in processes:
            mine = processes.pop(os.getpid())
            known = [used for used in processes.values() if used is not None]
            others = sum(known) if len(known) == len(processes) else None
        return DriverReading(mine, others, _utilization(nvml, device))
    except AttributeError:  # a library that lacks one of the functions
        return DriverReading()
    finally:
        with contextlib.suppress(AttributeError):
            nvml.nvmlShutdown()


@functools.cache
def _library() -> ctypes.CDLL:
    """Made once: each is several kilobytes of garbage afterwards."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def processes_of_device(nvml: Any, device: ctypes.c_void_p) -> dict[int, int | None] | None:
    """Bytes by pid. A process that is on several lists has its whole use on each."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = process_list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3"), device)
        if listed is None and kind == "Compute":
            return None
        for pid, used in listed or ():
            known = None if used > _KNOWN_MAX else used
            before = found.get(pid)
            found[pid] = before if known is None or (before is not None and before > known) else known
    found.pop(0, None)  # names no process
    return found


def process_list(ask: Any, device: ctypes.c_void_p) -> list[tuple[int, int]] | None:
    """The (pid, bytes) of one list; None where this device does not have it."""
    room = 128
    while True:
        size = (room + 1) * _ENTRY_PROTECTED.size
        buffer = ctypes.create_string_buffer(_UNTOUCHED * (size // len(_UNTOUCHED)), size)
        count = ctypes.c_uint(room)
        code = ask(device, ctypes.byref(count), buffer)
        if code != _INSUFFICIENT_SIZE or room >= _PROCESSES_MAX:
            break
        room = max(2 * room, count.value + 16)
    if code != _SUCCESS:
        return None
    # Which layout it is, is told by where the driver stopped writing; its version says it less surely.
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


def _pids_are_the_driver_s() -> bool:
    return pid_namespace() == INITIAL_PID_NAMESPACE
