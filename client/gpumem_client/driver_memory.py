"""Reads this process' memory on one device from NVML, for occasional calls.

The library is loaded by its name and creates no CUDA context. The structures are as in nvml.h since driver 510.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.nvml_processes import ProcessListError, processes_on_device
from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE, nvml_interceptor, pid_namespace

_SUCCESS = 0


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True)
class DriverReading:
    """One device, as the driver reports it. None is unknown, for example in another PID namespace."""

    process_bytes: int | None = None
    """Memory of this process: CUDA context, libraries, and PyTorch's reserved memory."""
    other_processes_bytes: int | None = None
    utilization_ratio: float | None = None


def read_driver(uuid: str) -> DriverReading:
    """Read one device by its UUID (`GPU-…`, `MIG-…`). Takes a few milliseconds. Any thread may call this.

    Nothing is known without a UUID, and where another library answers for NVML.
    """
    if not uuid or nvml_interceptor():
        return DriverReading()
    try:
        nvml = _library()
        return _read(nvml, uuid) if nvml.nvmlInit_v2() == _SUCCESS else DriverReading()
    except (OSError, AttributeError):  # there is no library, or it lacks one of the functions
        return DriverReading()


def _read(nvml: Any, uuid: str) -> DriverReading:
    try:
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != _SUCCESS:
            return DriverReading()
        processes = _processes(nvml, device)
        own = others = None
        if os.getpid() in processes:
            own = processes.pop(os.getpid())
            known = [used for used in processes.values() if used is not None]
            others = sum(known) if len(known) == len(processes) else None
        return DriverReading(own, others, _utilization(nvml, device))
    finally:
        nvml.nvmlShutdown()


@functools.lru_cache(maxsize=None)  # each load leaves several kilobytes of garbage
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libnvidia-ml.so.1")


def _utilization(nvml: Any, device: ctypes.c_void_p) -> float | None:
    rates = _Utilization()
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) != _SUCCESS:
        return None
    return float(rates.gpu) / 100


def _processes(nvml: Any, device: ctypes.c_void_p) -> dict[int, int | None]:
    """Return bytes by pid; empty in another PID namespace."""
    # NVML reports pids of the host. In a container such a pid may be the pid of another process.
    try:
        return processes_on_device(nvml, device) if pid_namespace() == INITIAL_PID_NAMESPACE else {}
    except ProcessListError:
        return {}
