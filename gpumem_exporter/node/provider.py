"""The interface of a driver, implemented by NVML and by the demo's simulated node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, ProcessMemory


class Provider(Protocol):
    """A driver. Only the poller's thread calls its methods, and each call may block for any time.

    The methods raise NvmlError. After NvmlUnavailableError, call `close`, and `open` later. After NvmlDeviceLostError,
    the device stays lost until NVML is initialized again. NvmlNotSupportedError: the device does not have the value.
    """

    @property
    def source(self) -> str:
        """`nvml` or `demo`: the value of `gpumem_exporter_build_info{source}`. Thread-safe."""

    def open(self) -> None:
        """Initialize NVML; has no effect if it is open."""

    def close(self) -> None:
        """Shut NVML down; has no effect if it is closed. Never raises."""

    def release(self) -> None:
        """Close and unload the driver's library, so that the driver can be unloaded. Never raises."""

    def driver_version(self) -> str:
        """Return the driver's version."""

    def devices(self) -> Sequence[DeviceReading]:
        """Return the devices in the driver's order, without their values.

        A device that fails has its `error`, and its MIG devices are left out. Its uuid is empty if the driver counts
        the device but does not return the uuid.
        """

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Return the frame-buffer memory of a device that `devices` returned; total = used + free + reserved."""

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the processes on a device, each once; empty if there are none."""

    def read_utilization_ratio(self, uuid: str) -> float:
        """Return the share of the driver's last sample period in which a kernel ran on the device, 0 to 1."""

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        """Return the processes that used a device in the last ten seconds."""
