"""The NVML provider, based on the distribution nvidia-ml-py. ctypes releases the GIL during calls to the driver."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from gpumem_client.wire.nvml_processes import ProcessListError, known_bytes, processes_on_device
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, ProcessMemory
from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)
from gpumem_exporter.node.driver_library import unload_library

# NVML returns NOT_SUPPORTED for the memory of an integrated GPU, which uses the host's memory, and also for some other
# GPUs (such as a GPU passed to a virtual machine). No call of NVML says that a GPU is integrated, so these are the
# product names: Grace-Blackwell GB10 (DGX Spark) and the Jetson modules.
_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier)\b", re.IGNORECASE)
# Longer than the time between two calls: no short use is missed.
_ACTIVITY_US = 10_000_000
_MEMINFO_LINE = re.compile(r"^(MemTotal|MemAvailable): +(\d+) kB$", re.MULTILINE)


# The codes are part of NVML's binary interface and do not change. Every other code is an NvmlError with its name.
RETURN_CODES: Mapping[int, tuple[type[NvmlError], str]] = {
    1: (NvmlUnavailableError, "NVML is not initialized"),
    3: (NvmlNotSupportedError, "not supported"),
    4: (NvmlPermissionError, "no permission"),
    9: (NvmlUnavailableError, "the NVIDIA driver is not loaded"),
    12: (NvmlUnavailableError, "libnvidia-ml.so.1 is not found"),
    13: (NvmlNotSupportedError, "this driver lacks the function"),
    15: (NvmlDeviceLostError, "GPU is lost"),
    16: (NvmlDeviceLostError, "the GPU needs a reset"),
    17: (NvmlPermissionError, "the operating system has blocked the request"),
    18: (NvmlUnavailableError, "libnvidia-ml.so.1 and the loaded driver differ in version"),
    21: (NvmlNotSupportedError, "no data"),
    22: (NvmlNotSupportedError, "not supported on a vGPU with ECC"),
    24: (NvmlNotSupportedError, "the frequency is not supported"),
    25: (NvmlNotSupportedError, "this driver lacks this version of the structure"),
    26: (NvmlNotSupportedError, "this driver no longer has the function"),
    28: (NvmlDeviceLostError, "the GPU is not found"),
    30: (NvmlNotSupportedError, "the kind of reset is not supported"),
    999: (NvmlError, "unknown error in the driver"),
}
_NAMES = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


def error_for_code(code: int, call: str) -> NvmlError:
    """Return the error for a return code; its text has the call, the description and the name of the code."""
    error, text = RETURN_CODES.get(code, (NvmlError, "the call failed"))
    return error(f"{call}: {text} ({_NAMES.get(code, f'return code {code}')})")


class PynvmlProvider:
    """The real driver. `meminfo` is the path of /proc/meminfo, which describes the whole host also in a container."""

    source = "nvml"

    def __init__(self, meminfo: Path = Path("/proc/meminfo")) -> None:
        self._nvml: Any = pynvml
        self._meminfo = meminfo
        self._open = False
        self._handles: dict[str, Any] = {}
        # By uuid; a description is read once.
        self._known: dict[str, DeviceReading] = {}
        # The devices for which the driver has shown the utilization of a process.
        self._shows_processes: set[str] = set()

    def open(self) -> None:
        """Load libnvidia-ml.so.1 and initialize it."""
        if self._open:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            # The driver was replaced: only the library of the new driver can attach.
            if error.value == self._nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                unload_library(self._nvml)
            raise NvmlUnavailableError(str(error_for_code(error.value, "nvmlInit"))) from error
        self._open = True

    def close(self) -> None:
        """Shut NVML down and ignore its errors."""
        if not self._open:
            return
        self._open = False
        self._handles.clear()
        self._known.clear()
        self._shows_processes.clear()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return

    def release(self) -> None:
        """Close and unload libnvidia-ml.so.1, so that the next `open` loads the library then installed."""
        self.close()
        unload_library(self._nvml)

    def driver_version(self) -> str:
        """Return the driver's version, such as `580.159.04`."""
        return str(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def devices(self) -> tuple[DeviceReading, ...]:
        """Return the GPUs; a GPU with MIG on is replaced by its MIG devices. Without one, the GPU has an error.

        As in nvidia-smi, a GPU whose handle this user may not get is not listed.
        """
        # New handles at each call: no handle outlives a change of the devices or of a GPU's MIG instances. This is
        # cheap, because the library has counts, handles and UUIDs in its own memory.
        handles: dict[str, Any] = {}
        listed: list[DeviceReading] = []
        unavailable: NvmlUnavailableError | None = None
        for index in range(self._ask(self._nvml.nvmlDeviceGetCount)):
            try:
                found = list(self._devices_of(index))
            except NvmlError as error:
                unavailable = error if isinstance(error, NvmlUnavailableError) else unavailable
                listed.append(DeviceReading(gpu=str(index), uuid="", error=str(error)))
                continue
            for identity, device in found:
                listed.append(identity)
                if not identity.error:
                    handles[identity.uuid] = device
        if unavailable is not None and not handles:
            raise unavailable
        self._handles = handles
        self._known = {uuid: device for uuid, device in self._known.items() if uuid in handles}
        return tuple(listed)

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Return the frame-buffer memory of a device; an integrated GPU has the host's memory."""
        handle = self._handle(uuid)
        try:
            return self._own_memory(handle)
        except NvmlNotSupportedError:
            if _INTEGRATED.search(self._known[uuid].name) is None:
                raise
            return _host_memory(self._meminfo)

    def _own_memory(self, handle: Any) -> DeviceMemory:
        # One call returns all values, so they are consistent.
        try:
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle, self._nvml.nvmlMemory_v2)
        except NvmlNotSupportedError:
            # A driver with only the first version of the call counts reserved memory as used.
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            return _device_memory(memory.total, memory.free, None)
        return _device_memory(memory.total, memory.free, known_bytes(memory.reserved))

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the compute, graphics and MPS processes on a device, each once."""
        handle = self._handle(uuid)
        try:
            used = processes_on_device(self._nvml.nvmlLib, handle)
        except ProcessListError as error:
            raise error_for_code(error.code, error.call) from error
        return tuple([ProcessMemory(pid, used_bytes) for pid, used_bytes in used.items()])

    def read_utilization_ratio(self, uuid: str) -> float:
        """Return the share of the last sample period (1/6 s to 1 s) in which a kernel ran on the device, 0 to 1.

        MIG devices do not provide the value.
        """
        percent = int(self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._handle(uuid)).gpu)
        if not 0 <= percent <= 100:
            raise NvmlNotSupportedError(f"nvmlDeviceGetUtilizationRates: {percent} is not a percentage")
        return percent / 100

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        """Return the processes that used a device in the last ten seconds. MIG devices do not provide the value."""
        # Not the time of the last sample, as NVML's documentation has it: drivers return entries with random times.
        since_us = time.time_ns() // 1000 - _ACTIVITY_US
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle(uuid), since_us)
        except self._nvml.NVMLError as error:
            if error.value not in (self._nvml.NVML_SUCCESS, self._nvml.NVML_ERROR_NOT_FOUND):
                raise error_for_code(error.value, "nvmlDeviceGetProcessUtilization") from error
            samples = ()
        # Unset entries have a random pid and random numbers: only percentages count (Syllo/nvtop issue 110).
        active = frozenset(
            int(each.pid)
            for each in samples
            for values in [(each.smUtil, each.memUtil, each.encUtil, each.decUtil)]
            if max(values) <= 100 and any(values)
        )
        if active:
            self._shows_processes.add(uuid)
        elif uuid not in self._shows_processes and self.read_utilization_ratio(uuid) > 0:
            raise NvmlNotSupportedError("nvmlDeviceGetProcessUtilization: no process on a device that is in use")
        return active

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise error_for_code(error.value, function.__name__) from error

    def _handle(self, uuid: str) -> Any:
        try:
            return self._handles[uuid]
        except KeyError:
            raise NvmlDeviceLostError(f"the driver does not list {uuid!r}") from None

    def _devices_of(self, index: int) -> Iterator[tuple[DeviceReading, Any]]:
        try:
            handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
        except NvmlPermissionError:
            return
        uuid = self._ask(self._nvml.nvmlDeviceGetUUID, handle)
        gpu = self._described(DeviceReading(str(index), uuid), handle, handle)
        if not self._has_mig_on(handle):
            yield gpu, handle
            return
        instances = list(self._mig_handles(handle))
        if not instances:
            # MIG mode survives a reboot, its devices do not. Without a device here, the GPU would vanish.
            error = "MIG is on, and there is no MIG device: create one with nvidia-smi mig -cgi PROFILE -C"
            yield replace(gpu, minor=None, error=error), handle
        for instance, mig_handle in instances:
            mig = DeviceReading(f"{index}:{instance}", "", parent_uuid=uuid)
            try:
                mig = replace(mig, uuid=self._ask(self._nvml.nvmlDeviceGetUUID, mig_handle))
            except NvmlError as error:
                yield replace(mig, error=str(error)), mig_handle
                continue
            mig = self._described(mig, mig_handle, handle)
            yield replace(mig, name=mig.name or gpu.name), mig_handle

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
                if error.value != self._nvml.NVML_ERROR_NOT_FOUND:
                    raise error_for_code(error.value, "nvmlDeviceGetMigDeviceHandleByIndex") from error

    def _described(self, device: DeviceReading, handle: Any, parent: Any) -> DeviceReading:
        """Return a device with what does not change about it; empty or None where the driver has no value."""
        known = self._known.get(device.uuid)
        if known is not None and known.gpu == device.gpu:
            return known
        name = bus_id = ""
        minor = None
        try:
            name = self._ask(self._nvml.nvmlDeviceGetName, handle)
            bus_id = self._ask(self._nvml.nvmlDeviceGetPciInfo, parent).busId
            if not device.parent_uuid:
                minor = self._ask(self._nvml.nvmlDeviceGetMinorNumber, handle)
        except (NvmlNotSupportedError, NvmlPermissionError):
            pass
        # A MIG device's name is the name of its GPU and the profile: "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        _, mig, profile = name.rpartition(" MIG ")
        known = replace(device, name=name, pci_bus_id=bus_id, minor=minor, mig_profile=profile if mig else "")
        self._known[device.uuid] = known
        return known


def _device_memory(total: int, free: int, reserved: int | None) -> DeviceMemory:
    """Return the memory of a device such that total = used + free + reserved, which is NVML's definition."""
    # CUDA programs see the same total and free, so used is computed. A reserved value that does not fit is unknown.
    if known_bytes(total) is None or total == 0 or free > total:
        raise NvmlNotSupportedError(f"nvmlDeviceGetMemoryInfo: {free} bytes free of {total} is not valid")
    if reserved is not None and reserved > total - free:
        reserved = None
    return DeviceMemory(
        total_bytes=total, used_bytes=total - free - (reserved or 0), free_bytes=free, reserved_bytes=reserved
    )


def _host_memory(meminfo: Path) -> DeviceMemory:
    # CUDA can allocate `MemAvailable`, not only `MemFree`, because the kernel shrinks the page cache; NVIDIA recommends
    # this for DGX Spark.
    try:
        values = {name: int(kib) * 1024 for name, kib in _MEMINFO_LINE.findall(meminfo.read_text(encoding="ascii"))}
        total, available = values["MemTotal"], values["MemAvailable"]
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise NvmlNotSupportedError(f"{meminfo} does not have the host's memory, which this GPU uses") from error
    return DeviceMemory(
        total_bytes=total, used_bytes=total - available, free_bytes=available, reserved_bytes=None, of_host=True
    )
