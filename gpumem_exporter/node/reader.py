"""One poll of the driver: attach NVML, list the devices, read each device, and describe its processes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)
from gpumem_exporter.node.failures import Backoff, FailureLog
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.provider import Provider

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# How often the active processes are read; the provider returns the processes of a longer time.
_ACTIVITY_SECONDS = 5.0


class NodeReader:
    """Reads a node through a provider, which nothing else uses. Not thread-safe."""

    def __init__(
        self,
        provider: Provider,
        host: Host,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._provider = provider
        self._host = host
        self._clock = clock
        self._wall_clock = wall_clock
        self._attach_backoff = Backoff(1.0, 30.0, jitter=jitter)
        # A lost device recovers only when NVML is initialized again. That interrupts the other devices.
        self._lost_backoff = Backoff(2.0, 60.0, jitter=jitter)
        self._registry = DeviceRegistry()
        self._failures = FailureLog(_logger, clock)
        self._attached = False
        self._error = ""
        self._driver_version = ""
        self._reattach_wanted = False
        # By uuid: when the active processes of a device were read, and which these were.
        self._active_pids: dict[str, tuple[float, frozenset[int] | None]] = {}

    def read(self) -> NodeReading:
        """Poll the driver once. If it does not answer, the reading is not up and has the error. May block."""
        started = self._clock()
        try:
            if not self._attach():
                return self._reading(started, up=False)
            devices = self._read_devices()
        except Exception as error:  # noqa: BLE001 - polling must continue after any error
            self._fail(error)
            return self._reading(started, up=False)
        self._failures.recovered("NVML")
        self._want_reattach(devices)
        return self._reading(started, up=True, devices=devices)

    def retry_attach_now(self) -> None:
        """Try to attach at the next poll, without waiting for the backoff."""
        self._attach_backoff.succeeded()

    def release(self, reason: str) -> NodeReading:
        """Release NVML, and return a reading that says so; the next `read` attaches again."""
        started = self._clock()
        self.close()
        self._provider.release()
        # The known devices are forgotten, because they may be different after the next attach.
        self._registry = DeviceRegistry()
        self._active_pids = {}
        self._reattach_wanted = False
        self._lost_backoff.succeeded()
        self._attach_backoff.succeeded()
        self._error = reason
        self._failures.retain(set())
        return self._reading(started, up=False)

    def close(self) -> None:
        """Shut NVML down."""
        self._attached = False
        self._provider.close()

    def _reading(self, started: float, *, up: bool, devices: tuple[DeviceReading, ...] = ()) -> NodeReading:
        facts = self._facts(devices)
        taken = self._clock()
        return NodeReading(
            taken_seconds=taken,
            taken_unix_seconds=self._wall_clock(),
            duration_seconds=taken - started,
            up=up,
            error="" if up else self._error,
            driver_version=self._driver_version if up else "",
            devices=devices,
            facts=facts,
        )

    def _attach(self) -> bool:
        """Return whether NVML is attached; False if the next attempt is not due."""
        if self._attached and self._reattach_wanted and self._lost_backoff.due(self._clock()):
            self._lost_backoff.failed(self._clock())
            _logger.debug("NVML is initialized again, because a device is lost or none is listed")
            self.close()
        elif self._attached:
            return True
        elif not self._attach_backoff.due(self._clock()):
            return False
        self._provider.open()
        self._attached = True
        self._driver_version = _optional(self._provider.driver_version) or ""
        _logger.debug("NVML attached: driver %s", self._driver_version or "of an unknown version")
        return True

    def _fail(self, error: Exception) -> None:
        expected = isinstance(error, NvmlError)
        self._error = str(error) if expected else f"{type(error).__name__}: {error}"
        self._failures.failed("NVML", self._error, exc_info=not expected)
        self.close()
        self._attach_backoff.failed(self._clock())

    def _want_reattach(self, devices: tuple[DeviceReading, ...]) -> None:
        """Schedule another initialization of NVML if a device is lost or there is no device."""
        # Recovered and added devices appear only after NVML is initialized again.
        self._attach_backoff.succeeded()
        wanted = not devices or any(device.error for device in devices)
        if wanted and not self._reattach_wanted:
            self._lost_backoff.failed(self._clock())
        elif not wanted:
            self._lost_backoff.succeeded()
        self._reattach_wanted = wanted

    def _read_devices(self) -> tuple[DeviceReading, ...]:
        listed = self._registry.merge(self._provider.devices())
        unavailable: list[NvmlUnavailableError] = []
        present = {device.uuid for device in listed}
        self._active_pids = {uuid: read for uuid, read in self._active_pids.items() if uuid in present}
        readings = tuple(self._read_device(device, unavailable) for device in listed)
        # If one device answers, the driver is there: the other devices fail alone.
        if unavailable and not any(reading.up for reading in readings):
            raise unavailable[0]
        errors = {reading.uuid: reading.error for reading in readings if reading.error}
        self._registry.note_errors(errors)
        self._log_failures(readings)
        return readings

    def _read_device(self, device: DeviceReading, unavailable: list[NvmlUnavailableError]) -> DeviceReading:
        if device.error:
            return device
        try:
            memory = self._memory(device)
            processes = self._processes(device)
            return replace(
                device,
                memory=memory,
                processes=processes,
                utilization_ratio=_optional(self._provider.read_utilization_ratio, device.uuid),
                active_pids=self._read_active_pids(device) if processes else None,
            )
        except NvmlError as failure:
            if isinstance(failure, NvmlUnavailableError):
                unavailable.append(failure)
            return replace(device, error=str(failure))
        except Exception as failure:  # noqa: BLE001 - one device must not affect the others
            return replace(device, error=f"{type(failure).__name__}: {failure}")

    def _memory(self, device: DeviceReading) -> DeviceMemory | None:
        """Return the device's memory; None if the device does not provide it. Other errors count as device failures."""
        try:
            return self._provider.read_memory(device.uuid)
        except (NvmlNotSupportedError, NvmlPermissionError):
            return None

    def _processes(self, device: DeviceReading) -> tuple[ProcessMemory, ...] | None:
        subject = f"processes of device {device.gpu}"
        try:
            processes = self._provider.read_processes(device.uuid)
        except (NvmlDeviceLostError, NvmlUnavailableError):
            raise
        except NvmlError as error:
            self._failures.failed(subject, str(error))
            return None
        self._failures.recovered(subject)
        return processes

    def _read_active_pids(self, device: DeviceReading) -> frozenset[int] | None:
        now = self._clock()
        read_seconds, active = self._active_pids.get(device.uuid, (now - _ACTIVITY_SECONDS, None))
        if now - read_seconds >= _ACTIVITY_SECONDS:
            active = _optional(self._provider.read_active_pids, device.uuid)
            self._active_pids[device.uuid] = now, active
        return active

    def _log_failures(self, readings: Iterable[DeviceReading]) -> None:
        subjects = {"NVML", "process facts"}
        for reading in readings:
            subject = f"device {reading.gpu} {reading.uuid}".rstrip()
            subjects |= {subject, f"processes of device {reading.gpu}"}
            if reading.error:
                self._failures.failed(subject, reading.error)
            else:
                self._failures.recovered(subject)
        self._failures.retain(subjects)

    def _facts(self, devices: Iterable[DeviceReading]) -> dict[int, ProcessFacts]:
        facts = {}
        pids = {process.pid for device in devices for process in device.processes or ()}
        try:
            for pid in pids:
                found = self._host.facts(pid)
                if found is not None:
                    facts[pid] = found
        except Exception as error:  # noqa: BLE001 - a failing host must not lose the driver's reading
            self._failures.failed("process facts", f"{type(error).__name__}: {error}", exc_info=True)
        else:
            self._failures.recovered("process facts")
        return facts


def _optional(read: Callable[..., T], *uuid: str) -> T | None:
    """Return a value; None if driver or device do not provide it. Raises the error of a lost device or driver."""
    try:
        return read(*uuid)
    except (NvmlDeviceLostError, NvmlUnavailableError):
        raise
    except NvmlError:
        return None


class DeviceRegistry:
    """Keeps the identity of lost devices, so that a lost device differs from a removed one. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, DeviceReading] = {}
        self._lost: dict[str, DeviceReading] = {}

    def merge(self, listed: Sequence[DeviceReading]) -> tuple[DeviceReading, ...]:
        """Return the listed devices, completed from earlier calls, and the lost devices that the driver leaves out."""
        # The driver may not return the UUID of a GPU that fell off the bus, and may not count the GPU after NVML is
        # initialized again. A device that disappears without an earlier error was removed: a GPU was unbound, or a MIG
        # instance was destroyed.
        identified = {device.uuid for device in listed if device.uuid}
        merged: list[DeviceReading] = []
        for device in listed:
            if device.uuid:
                merged.append(device)
                continue
            remembered = [
                replace(known, error=device.error)
                for known in self._known.values()
                if known.uuid not in identified and _is_or_is_part_of(known.gpu, device.gpu)
            ]
            merged.extend(remembered or [device])
        present = {device.uuid for device in merged}
        taken = {_gpu_of(device) for device in merged}
        left_out = [lost for uuid, lost in self._lost.items() if uuid not in present]
        self._known = {device.uuid: device for device in (*merged, *left_out) if device.uuid}
        # The driver may assign the index of a lost device to another device. The lost device then has no index, because
        # an action for that index must have one target.
        return (*merged, *(replace(lost, gpu="") if _gpu_of(lost) in taken else lost for lost in left_out))

    def note_errors(self, errors: Mapping[str, str]) -> None:
        """Record which merged devices are lost: listed with an error, or not readable for a reason in `errors`."""
        self._lost = {}
        for uuid, device in self._known.items():
            # A MIG device that cannot be read may have been destroyed, so it is lost only together with its GPU.
            error = device.error or ("" if device.parent_uuid else errors.get(uuid, ""))
            if error:
                self._lost[uuid] = replace(device, error=error)


def _gpu_of(device: DeviceReading) -> str:
    """Return the index of the GPU; of a MIG device, the index of its parent."""
    return device.gpu.partition(":")[0]


def _is_or_is_part_of(gpu: str, other: str) -> bool:
    return gpu == other or gpu.startswith(f"{other}:")
