"""The values that a rule's conditions may use, for one process on one device, and how they are written.

An unknown value is None: no condition on it is true.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from math import isfinite, nan
from types import MappingProxyType
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample, EngineState
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.timing import steps_with_ranks
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import DeviceReading, ReportingProcess, Snapshot

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: Mapping[str, tuple[Mapping[str, float], str]] = {
    "bytes": ({"": 1, "B": 1, **_BINARY, **_DECIMAL}, "bytes, such as 4GiB or 512MiB"),
    "ratio": ({"": 1, "%": 0.01}, "a ratio, such as 5% or 0.05"),
    "seconds": ({"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}, "a time, such as 60s, 5m or 1h"),
}


def read_quantity(text: object, unit: str) -> float:
    """Read a number with a unit: bytes, ratio (0 to 1) or seconds. Raises ValueError with what is accepted."""
    factors, accepted = _UNITS[unit]
    found = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    value = float(found[1]) * factors.get(found[2], nan) if found is not None else nan
    if not isfinite(value) or (unit == "ratio" and value > 1):
        raise ValueError(f"expected {accepted}")
    return value


def shown_quantity(value: float, unit: str) -> str:
    """Format a quantity: `4.2 GiB`, `3.1 %`, `75 s`."""
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    return human_seconds(value) if unit == "seconds" else human_bytes(int(value))


class Observation(NamedTuple):
    """One process on one device, at the time of its last sample."""

    process: ReportingProcess
    reporter: Hashable
    """The session of the reporter. A later process with the same pid differs, and so does another program."""
    ranks: Hashable
    """The job whose ranks train together; for another process, `reporter`."""
    uuid: str
    values: Mapping[str, float | None]
    """The value of each of `FIELDS`."""

    @property
    def key(self) -> Hashable:
        """The process on the device."""
        return self.reporter, self.uuid


def observations(snapshot: Snapshot, stale_seconds: float) -> Iterator[Observation]:
    """Yield every process on each of its devices, except processes whose last sample is older than `stale_seconds`."""
    node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None else {}
    for process in snapshot.processes:
        if process.sampled_seconds < snapshot.taken_seconds - stale_seconds:
            continue
        identity = process.report.process
        reporter = process.key, identity.start_time_ticks, identity.session
        ranks = process.job if steps_with_ranks(process) else reporter
        last_seconds = snapshot.last_active_seconds(process, process.host_pid)
        inactive_seconds = None if last_seconds is None else max(0.0, snapshot.taken_seconds - last_seconds)
        for sample in process.report.devices:
            values = _values(sample, devices.get(sample.uuid), process.report.engine, inactive_seconds)
            yield Observation(process, reporter, ranks, sample.uuid, values)


def _values(
    sample: DeviceSample,
    device: DeviceReading | None = None,
    engine: EngineState | None = None,
    inactive_seconds: float | None = None,
) -> dict[str, float | None]:
    """Return the values in the words of the metrics. `device` is None if the driver does not answer.

    They are of the process on the device, except `inactive_seconds` and `engine_idle_seconds` (of the process on all
    its devices) and `device_…` (of the device with all its processes).
    """
    allocated, reserved, fragmented = sample.allocated_bytes, sample.reserved_bytes, fragmented_bytes(sample)
    slack = None if reserved is None or allocated is None else reserved - allocated
    memory = None if device is None else device.memory
    free = None if memory is None else memory.free_bytes
    return {
        "slack_bytes": slack,
        "slack_ratio": _ratio(slack, reserved),
        "reclaimable_bytes": sample.reclaimable_bytes,
        "idle_cache_bytes": sample.idle_cache_bytes,
        "fragmented_bytes": fragmented,
        "fragmentation_ratio": _ratio(fragmented, reserved),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "idle_seconds": inactive_seconds,  # the name before 0.4
        "inactive_seconds": inactive_seconds,
        "engine_idle_seconds": None if engine is None or engine.state == "asleep" else engine.idle_seconds,
        "device_free_bytes": free,
        "device_free_ratio": _ratio(free, None if memory is None else memory.total_bytes),
        "device_utilization_ratio": None if device is None else device.utilization_ratio,
    }


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


FIELDS: Mapping[str, str] = MappingProxyType({name: name.rpartition("_")[2] for name in _values(DeviceSample(""))})
"""The unit of each value: bytes, ratio or seconds."""
