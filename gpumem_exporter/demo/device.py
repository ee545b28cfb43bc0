"""A simulated GPU: its memory and its utilization."""

from __future__ import annotations

from random import Random

from gpumem_exporter.core.samples import DeviceMemory
from gpumem_exporter.nvml.provider import DeviceIdentity

MIB = 1 << 20


class SimulatedDevice:
    """One device, from which processes allocate memory. Driver and firmware reserve a part of it."""

    def __init__(self, identity: DeviceIdentity, *, total_bytes: int, reserved_bytes: int) -> None:
        self.identity = identity
        self.total_bytes = total_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = total_bytes - reserved_bytes
        self.utilization_ratio = 0.0

    @property
    def usable_bytes(self) -> int:
        """The bytes available to programs: the total of `cudaMemGetInfo`."""
        return self.total_bytes - self.reserved_bytes

    @property
    def memory(self) -> DeviceMemory:
        """The result of `nvmlDeviceGetMemoryInfo_v2`."""
        used_bytes = self.usable_bytes - self.free_bytes
        return DeviceMemory(self.total_bytes, used_bytes, self.free_bytes, self.reserved_bytes)

    def allocate(self, size_bytes: int) -> bool:
        """Allocate memory; returns False if there is not enough."""
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    def free(self, size_bytes: int) -> None:
        """Release memory."""
        self.free_bytes += size_bytes


def build_devices(rng: Random) -> tuple[SimulatedDevice, ...]:
    """Create the eight devices of the node: seven of one model, and one of another model."""
    devices = []
    for index in range(8):
        digits = f"{rng.getrandbits(128):032x}"
        uuid = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        bus_id = f"00000000:{0x1A + 0x11 * index:02X}:00.0"
        if index < 7:
            identity = DeviceIdentity(str(index), uuid, "NVIDIA H100 80GB HBM3 (demo)", bus_id)
            devices.append(SimulatedDevice(identity, total_bytes=81559 * MIB, reserved_bytes=551 * MIB))
        else:
            identity = DeviceIdentity(str(index), uuid, "NVIDIA A100 80GB PCIe (demo)", bus_id)
            devices.append(SimulatedDevice(identity, total_bytes=81920 * MIB, reserved_bytes=626 * MIB))
    return tuple(devices)
