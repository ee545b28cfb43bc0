"""What the exporter asks of a driver, whoever answers: NVML, or the demo's simulated node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory

__all__ = ["DeviceIdentity", "Provider"]


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A device as the driver lists it: one physical GPU, or one MIG device where MIG is on."""

    gpu: str
    """NVML index, which may change whenever the driver is initialised; `parent:instance` for a MIG device."""
    uuid: str
    """`GPU-…` or `MIG-…`; empty where the driver counts a device and does not even answer with its name."""
    name: str = ""
    pci_bus_id: str = ""
    mig_profile: str = ""
    parent_uuid: str = ""
    error: str = ""
    """Why the driver does not answer for this device; empty while it does."""


class Provider(Protocol):
    """A driver. One thread, the poller's, calls everything here; any call may block for as long as the driver likes."""

    @property
    def source(self) -> str:
        """`nvml` or `demo`: the value of `gpumem_exporter_build_info{source}`. Any thread may ask."""
        ...

    def open(self) -> None:
        """Initialise the driver's library; on an open one, nothing.

        Raises:
            NvmlUnavailableError: it cannot be; try again later.
        """
        ...

    def close(self) -> None:
        """End the session with the driver. Never raises; on a closed one, nothing."""
        ...

    def release(self) -> None:
        """Close, and let go of the driver's library too, so that the driver can be unloaded. Never raises."""
        ...

    def driver_version(self) -> str:
        """The driver's version.

        Raises:
            NvmlError: it cannot be read.
        """
        ...

    def devices(self) -> Sequence[DeviceIdentity]:
        """List the devices, in the driver's order; a broken one is listed with its `error`, and alone.

        Raises:
            NvmlError: no device can be listed; NvmlUnavailableError asks for `close` and `open`.
        """
        ...

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Read the frame-buffer memory of a device that `devices` listed; total = used + free + reserved.

        Raises:
            NvmlNotSupportedError: the device does not have the figure.
            NvmlDeviceLostError: the device fell off the bus; it stays lost until NVML is initialised again.
            NvmlError: the device does not answer.
        """
        ...

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """List the processes on a device, each once; empty means that there are none.

        Raises:
            NvmlError: the list is unknown, in the cases of `read_memory`, or by NvmlPermissionError.
        """
        ...

    def read_utilization_ratio(self, uuid: str) -> float:
        """Share of the driver's last sample period in which a kernel ran on the device, 0 to 1.

        Raises:
            NvmlError: in the cases of `read_memory`.
        """
        ...
