"""The values that a rule's conditions may use, for one process on one device, and how they are written.

An unknown value is None: no condition on it is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite, nan
from types import MappingProxyType
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.timing import steps_with_ranks
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import DeviceReading, ReportingProcess, Snapshot

RESULTS: Mapping[str, str] = MappingProxyType(
    {
        "unmet": "a condition is false or its value is unknown",
        "pending": "all conditions are true; the rule waits for the time of `for`, or for an alert",
        "acted": "the rule requested its action",
        "would_act": "the rule requested its action as a dry run",
        "refused": "the exporter refused the action",
        "cooling": "the rule waits after its last action there; a dry run also until the conditions were false once",
        "busy": "another action is running or settling there",
        "held_back": "an inference engine starts on a device there, and released memory would spoil its start",
        "limited": "the rule has reached its number of actions per hour",
        "stopped": "the rule has stopped there for a while, because its actions did not help",
    }
)
"""The results of evaluating a rule for one process on one device, once a second and for each alert."""

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: Mapping[str, tuple[Mapping[str, float], str]] = {
    "bytes": ({"": 1, "B": 1, **_BINARY, **_DECIMAL}, "bytes, such as 4GiB or 512MiB"),
    "ratio": ({"": 1, "%": 0.01}, "a ratio, such as 5% or 0.05"),
    "seconds": ({"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}, "a time, such as 60s, 5m or 1h"),
}


def read_quantity(text: str, unit: str) -> float:
    """Read a number with a unit: bytes, ratio (0 to 1) or seconds. Raises ValueError with what is accepted."""
    factors, expected = _UNITS[unit]
    found = _NUMBER.fullmatch(text.strip())
    value = float(found[1]) * factors.get(found[2], nan) if found is not None else nan
    if not isfinite(value) or (unit == "ratio" and value > 1):
        raise ValueError(expected)
    return value


def shown_quantity(value: float, unit: str) -> str:
    """Format a quantity: `4.2 GiB`, `3.1 %`, `75 s`."""
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    return human_seconds(value) if unit == "seconds" else human_bytes(int(value))


class Observation(NamedTuple):
    """One process on one device, at the time of its last sample."""

    reporter_id: str
    """One reporter session of one process. A later process with the same pid differs, and so does another program."""
    process: ReportingProcess
    sample: DeviceSample
    device: DeviceReading | None
    """None if the driver does not answer."""
    inactive_seconds: float | None

    @property
    def key(self) -> str:
        """The process on the device."""
        return f"{self.reporter_id}:{self.sample.uuid}"

    @property
    def workload(self) -> str:
        """The workload of the process."""
        return self.process.report.process.workload

    @property
    def ranks(self) -> str:
        """The ranks that train together, as the subject of a rule; otherwise the process."""
        return repr(self.process.job) if steps_with_ranks(self.process) else self.reporter_id


def observations(snapshot: Snapshot, stale_seconds: float) -> Iterator[Observation]:
    """Yield every process on each of its devices, except processes whose last sample is older than `stale_seconds`."""
    node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None else {}
    for process in snapshot.processes:
        if process.sampled_seconds < snapshot.taken_seconds - stale_seconds:
            continue
        identity = process.report.process
        reporter_id = f"{identity.pid_namespace}:{identity.pid}:{identity.start_time_ticks}:{identity.session}"
        last_seconds = snapshot.last_active_seconds(process, process.host_pid)
        inactive_seconds = None if last_seconds is None else max(0.0, snapshot.taken_seconds - last_seconds)
        for sample in process.report.devices:
            yield Observation(reporter_id, process, sample, devices.get(sample.uuid), inactive_seconds)


def _slack(seen: Observation) -> int | None:
    reserved, allocated = seen.sample.reserved_bytes, seen.sample.allocated_bytes
    return None if reserved is None or allocated is None else reserved - allocated


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _engine_idle(seen: Observation) -> float | None:
    engine = seen.process.report.engine
    return None if engine is None or engine.state == "asleep" else engine.idle_seconds


def _device_free(seen: Observation) -> int | None:
    memory = seen.device.memory if seen.device is not None else None
    return None if memory is None else memory.free_bytes


def _device_free_ratio(seen: Observation) -> float | None:
    memory = seen.device.memory if seen.device is not None else None
    return None if memory is None else _ratio(memory.free_bytes, memory.total_bytes)


class Field(NamedTuple):
    """A value that a condition may use."""

    unit: str
    """bytes, ratio or seconds."""
    of: Callable[[Observation], float | None]


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "slack_bytes": Field("bytes", _slack),
        "slack_ratio": Field("ratio", lambda seen: _ratio(_slack(seen), seen.sample.reserved_bytes)),
        "reclaimable_bytes": Field("bytes", lambda seen: seen.sample.reclaimable_bytes),
        "idle_cache_bytes": Field("bytes", lambda seen: seen.sample.idle_cache_bytes),
        "fragmented_bytes": Field("bytes", lambda seen: fragmented_bytes(seen.sample)),
        "fragmentation_ratio": Field(
            "ratio", lambda seen: _ratio(fragmented_bytes(seen.sample), seen.sample.reserved_bytes)
        ),
        "allocated_bytes": Field("bytes", lambda seen: seen.sample.allocated_bytes),
        "reserved_bytes": Field("bytes", lambda seen: seen.sample.reserved_bytes),
        "idle_seconds": Field("seconds", lambda seen: seen.inactive_seconds),  # the name before 0.4
        "inactive_seconds": Field("seconds", lambda seen: seen.inactive_seconds),
        "engine_idle_seconds": Field("seconds", _engine_idle),
        "device_free_bytes": Field("bytes", _device_free),
        "device_free_ratio": Field("ratio", _device_free_ratio),
        "device_utilization_ratio": Field(
            "ratio", lambda seen: None if seen.device is None else seen.device.utilization_ratio
        ),
    }
)
"""The fields by name, in the words of the metrics: of the process on the device, except `inactive_seconds` and
`engine_idle_seconds` (of the process on all its devices) and `device_…` (of the device with all its processes)."""
