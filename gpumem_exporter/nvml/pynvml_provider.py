"""NVML, by the distribution nvidia-ml-py. The only module that imports pynvml.

Everything here is called by the poller's thread alone; ctypes lets go of the GIL for as long as the driver takes.
"""

from __future__ import annotations

import _ctypes
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml

from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory
from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)
from gpumem_exporter.nvml.process_lists import ProcessLists, known_bytes
from gpumem_exporter.nvml.provider import DeviceIdentity
from gpumem_exporter.nvml.return_codes import LIB_RM_VERSION_MISMATCH, NOT_FOUND, error_of
from gpumem_exporter.nvml.unified_memory import host_memory, is_integrated

__all__ = ["PynvmlProvider"]


class PynvmlProvider:
    """The real driver.

    Every listing asks the driver for its devices anew, so no handle outlives a change of the devices or of a GPU's MIG
    instances; the library answers count, handle and UUID from its own memory.

    Args:
        nvml: the pynvml module, or what stands in for it.
        meminfo: where the kernel tells of the host's memory.
    """

    source = "nvml"

    def __init__(self, nvml: Any = pynvml, meminfo: Path = Path("/proc/meminfo")) -> None:
        self._nvml = nvml
        self._meminfo = meminfo
        self._open = False
        self._process_lists: ProcessLists | None = None
        self._handles: dict[str, Any] = {}
        self._descriptions: dict[str, tuple[str, str, str]] = {}

    def open(self) -> None:
        """Load libnvidia-ml.so.1 and initialise it.

        Raises:
            NvmlUnavailableError: no library, no driver, or it refuses; try again later.
        """
        if self._open:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if error.value == LIB_RM_VERSION_MISMATCH:
                self._unload_library()
            raise NvmlUnavailableError(str(error_of(error.value, "nvmlInit"))) from error
        self._process_lists = ProcessLists(self._nvml.nvmlLib)
        self._open = True

    def close(self) -> None:
        """Shut NVML down; what it answers to that changes nothing."""
        if not self._open:
            return
        self._open = False
        self._process_lists = None
        self._handles.clear()
        self._descriptions.clear()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return

    def release(self) -> None:
        """Close, and unload libnvidia-ml.so.1: the next `open` loads the one that lies there then."""
        self.close()
        self._unload_library()

    def driver_version(self) -> str:
        """The driver's version, such as `580.159.04`.

        Raises:
            NvmlError: it cannot be read.
        """
        return str(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def devices(self) -> tuple[DeviceIdentity, ...]:
        """List the GPUs, each one with MIG on replaced by its MIG devices; a GPU that fails is listed alone with why.

        A GPU whose handle this user may not have is not listed, as with nvidia-smi: it is not his to see.

        Raises:
            NvmlError: the GPUs cannot be counted, or NVML is gone for all of them.
        """
        handles: dict[str, Any] = {}
        listed: list[DeviceIdentity] = []
        gone: NvmlUnavailableError | None = None
        for index in range(self._ask(self._nvml.nvmlDeviceGetCount)):
            try:
                handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
            except NvmlPermissionError:
                continue
            except NvmlError as error:
                gone = error if isinstance(error, NvmlUnavailableError) else gone
                listed.append(DeviceIdentity(gpu=str(index), uuid="", error=str(error)))
                continue
            try:
                found = list(self._devices_of(index, handle))
            except NvmlError as error:
                gone = error if isinstance(error, NvmlUnavailableError) else gone
                listed.append(DeviceIdentity(gpu=str(index), uuid="", error=str(error)))
                continue
            for identity, device in found:
                listed.append(identity)
                if not identity.error:
                    handles[identity.uuid] = device
        if gone is not None and not handles:
            raise gone
        self._handles = handles
        self._descriptions = {uuid: text for uuid, text in self._descriptions.items() if uuid in handles}
        return tuple(listed)

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Read the frame-buffer memory of one device.

        All values are bytes of one `nvmlDeviceGetMemoryInfo_v2` call, so they agree with each other. A driver that has
        only the first version of the call counts what it holds back as used: reserved is then unknown. Of an integrated
        GPU, which NVML gives no memory, it is the host's.

        Raises:
            NvmlNotSupportedError: the device has no such figure.
            NvmlDeviceLostError: the device fell off the bus.
            NvmlError: it does not answer.
        """
        handle = self._handle(uuid)
        try:
            return self._own_memory(handle)
        except NvmlNotSupportedError:
            if not is_integrated(self._descriptions[uuid][0]):
                raise
            return host_memory(self._meminfo)

    def _own_memory(self, handle: Any) -> DeviceMemory:
        try:
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle, self._nvml.nvmlMemory_v2)
        except NvmlNotSupportedError:
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            return _device_memory(memory.total, memory.free, None)
        return _device_memory(memory.total, memory.free, known_bytes(memory.reserved))

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """List the processes on one device, whichever way they use it, each once.

        Raises:
            NvmlError: the list is unknown; NvmlPermissionError and NvmlNotSupportedError leave the device readable.
        """
        handle = self._handle(uuid)
        if self._process_lists is None:
            raise NvmlUnavailableError("NVML is closed")
        return self._process_lists.read(handle)

    def read_utilization_ratio(self, uuid: str) -> float:
        """Share of the last sample period (1/6 s to 1 s) in which a kernel ran on the device, 0 to 1.

        Raises:
            NvmlNotSupportedError: the device does not have the figure; MIG devices do not.
            NvmlError: it does not answer.
        """
        percent = int(self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._handle(uuid)).gpu)
        if not 0 <= percent <= 100:
            raise NvmlNotSupportedError(f"nvmlDeviceGetUtilizationRates: {percent} is no percentage")
        return percent / 100

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise error_of(error.value, function.__name__) from error

    def _handle(self, uuid: str) -> Any:
        try:
            return self._handles[uuid]
        except KeyError:
            raise NvmlDeviceLostError(f"the driver does not list {uuid!r}") from None

    def _devices_of(self, index: int, handle: Any) -> Iterator[tuple[DeviceIdentity, Any]]:
        uuid = self._ask(self._nvml.nvmlDeviceGetUUID, handle)
        name, bus_id, _ = self._describe(uuid, handle, handle)
        if not self._has_mig_on(handle):
            yield DeviceIdentity(gpu=str(index), uuid=uuid, name=name, pci_bus_id=bus_id), handle
            return
        for instance, mig_handle in self._mig_handles(handle):
            try:
                mig_uuid = self._ask(self._nvml.nvmlDeviceGetUUID, mig_handle)
            except NvmlError as error:
                yield DeviceIdentity(gpu=f"{index}:{instance}", uuid="", parent_uuid=uuid, error=str(error)), mig_handle
                continue
            mig_name, bus_id, profile = self._describe(mig_uuid, mig_handle, handle)
            identity = DeviceIdentity(
                gpu=f"{index}:{instance}",
                uuid=mig_uuid,
                name=mig_name or name,
                pci_bus_id=bus_id,
                mig_profile=profile,
                parent_uuid=uuid,
            )
            yield identity, mig_handle

    def _has_mig_on(self, handle: Any) -> bool:
        try:
            current, _pending = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        except (NvmlNotSupportedError, NvmlPermissionError):
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _mig_handles(self, handle: Any) -> Iterator[tuple[int, Any]]:
        for instance in range(self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            try:
                yield instance, self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance)
            except self._nvml.NVMLError as error:
                # Slots are not filled in order: an empty one is not the end.
                if error.value != NOT_FOUND:
                    raise error_of(error.value, "nvmlDeviceGetMigDeviceHandleByIndex") from error

    def _describe(self, uuid: str, handle: Any, parent: Any) -> tuple[str, str, str]:
        """Name, PCI bus id and MIG profile, asked once a device; empty where the driver does not say."""
        known = self._descriptions.get(uuid)
        if known is not None:
            return known
        name = bus_id = ""
        try:
            name = self._ask(self._nvml.nvmlDeviceGetName, handle)
            bus_id = self._ask(self._nvml.nvmlDeviceGetPciInfo, parent).busId
        except (NvmlNotSupportedError, NvmlPermissionError):
            pass
        # A MIG device's name is its GPU's with the profile behind: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        _, mig, profile = name.rpartition(" MIG ")
        self._descriptions[uuid] = described = (name, bus_id, profile if mig else "")
        return described

    def _unload_library(self) -> None:
        # Of a driver that was replaced under a process that had loaded the old one's library, dlopen would go on
        # answering with that, and this exporter would never attach again.
        library = self._nvml.nvmlLib
        self._nvml.nvmlLib = None
        self._nvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - it holds pointers into the library
        if library is not None:
            with contextlib.suppress(OSError):
                _ctypes.dlclose(library._handle)  # noqa: SLF001 - ctypes has no public way


def _device_memory(total: int, free: int, reserved: int | None) -> DeviceMemory:
    """What holds by NVML's definition, total = used + free + reserved, made to hold for what the driver said.

    Total and free are what CUDA programs see too. Used is what is left, which is NVML's own figure to the byte wherever
    its figures agree; where they do not, a reserved that does not fit is unknown.

    Raises:
        NvmlNotSupportedError: total and free are no memory of a device.
    """
    if known_bytes(total) is None or total == 0 or free > total:
        raise NvmlNotSupportedError(f"nvmlDeviceGetMemoryInfo: {free} bytes free of {total} is no memory of a device")
    if reserved is not None and reserved > total - free:
        reserved = None
    return DeviceMemory(
        total_bytes=total, used_bytes=total - free - (reserved or 0), free_bytes=free, reserved_bytes=reserved
    )
