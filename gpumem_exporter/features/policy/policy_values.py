"""The values that a rule's conditions may use, for one process on one device, and how they are written.

An unknown value is NaN: it is neither over nor under any bound, so no condition on it is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from types import MappingProxyType
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
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
    if unit == "seconds":
        return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
    for name, size in reversed(_BINARY.items()):
        if abs(value) >= size:
            return f"{value / size:.1f} {name}"
    return f"{value:.0f} bytes"


class Observation(NamedTuple):
    """One process on one device, at the time of its last sample."""

    reporter_id: str
    """One reporter session of one process. A later process with the same pid differs, and so does another program."""
    process: ReportingProcess
    sample: DeviceSample
    device: DeviceReading | None
    """None if the driver does not answer."""
    idle_seconds: float
    inactive_seconds: float
    sampled_seconds: float

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


@dataclass(frozen=True, slots=True)
class Field:
    """A value that a condition may use."""

    unit: str
    """bytes, ratio or seconds."""
    of: Callable[[Observation], float]


class IdleClock:
    """Measures how long each process has been idle: no step, and nothing allocated or freed.

    A program that replays CUDA graphs, counts no steps and allocates nothing looks idle. Only
    `device_utilization_ratio` and the mode `idle`, which the process itself evaluates, show that it is busy.
    After a gap of more than `stale_seconds` between two samples, the idle time starts again.
    """

    def __init__(self, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        # The activity of each process, since when it is unchanged, and when it was last seen.
        self._seen: dict[str, tuple[object, float, float]] = {}

    def update(self, processes: Mapping[str, tuple[ReportingProcess, float]]) -> dict[str, float]:
        """Return the idle seconds of each process at its last sample, whose time is given; forget all others."""
        seen: dict[str, tuple[object, float, float]] = {}
        for reporter_id, (process, seconds) in processes.items():
            activity = _activity(process)
            known = self._seen.get(reporter_id)
            if known is None or known[0] != activity or seconds - known[2] > self._stale_seconds:
                seen[reporter_id] = (activity, seconds, seconds)
            else:
                seen[reporter_id] = (activity, known[1], seconds)
        self._seen = seen
        return {
            reporter_id: nan if activity is None else last - since
            for reporter_id, (activity, since, last) in seen.items()
        }


def observations(snapshot: Snapshot, stale_seconds: float, clock: IdleClock | None = None) -> Iterator[Observation]:
    """Yield every process on each of its devices, except processes whose last sample is older than `stale_seconds`.

    The idle times are unknown without a clock.
    """
    node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None else {}
    oldest_seconds = snapshot.taken_seconds - stale_seconds
    fresh = {
        _reporter_id(process): (process, seconds)
        for process in snapshot.processes
        if (seconds := process.sampled_seconds) >= oldest_seconds
    }
    idle = clock.update(fresh) if clock is not None else {}
    for reporter_id, (process, seconds) in fresh.items():
        idle_seconds = idle.get(reporter_id, nan)
        last_seconds = snapshot.last_active_seconds(process, process.host_pid)
        inactive_seconds = nan if last_seconds is None else max(0.0, snapshot.taken_seconds - last_seconds)
        for sample in process.report.devices:
            device = devices.get(sample.uuid)
            yield Observation(reporter_id, process, sample, device, idle_seconds, inactive_seconds, seconds)


def _reporter_id(process: ReportingProcess) -> str:
    # A string caches its hash, unlike a tuple, and this key is used many times a second.
    identity = process.report.process
    return f"{identity.pid_namespace}:{identity.pid}:{identity.start_time_ticks}:{identity.session}"


def _activity(process: ReportingProcess) -> object:
    """Return a value that changes whenever the process does something; None if its samples do not show that."""
    report = process.report
    if report.step is None and any(sample.allocated_bytes is None for sample in report.devices):
        return None
    # Without the reserved bytes: memory that is released to the driver must not end the idle time, or a clear would.
    return (
        report.step,
        *(
            (
                sample.uuid,
                sample.allocated_bytes,
                sample.active_bytes,
                sample.requested_bytes,
                sample.segments_allocated,
                sample.alloc_retries,
            )
            for sample in report.devices
        ),
    )


def _engine_idle(seen: Observation) -> float:
    engine = seen.process.report.engine
    return nan if engine is None or engine.state == "asleep" else _known(engine.idle_seconds)


def _known(value: float | None) -> float:
    return nan if value is None else value


def _slack(seen: Observation) -> float:
    reserved, allocated = seen.sample.reserved_bytes, seen.sample.allocated_bytes
    return nan if reserved is None or allocated is None else reserved - allocated


def _of_reserved(part: Callable[[Observation], float]) -> Callable[[Observation], float]:
    def ratio(seen: Observation) -> float:
        reserved = seen.sample.reserved_bytes
        return part(seen) / reserved if reserved else nan

    return ratio


def _fragmented(seen: Observation) -> float:
    return _known(fragmented_bytes(seen.sample))


def _device_free(seen: Observation) -> float:
    memory = seen.device.memory if seen.device is not None else None
    return nan if memory is None else memory.free_bytes


def _device_free_ratio(seen: Observation) -> float:
    memory = seen.device.memory if seen.device is not None else None
    return memory.free_bytes / memory.total_bytes if memory is not None and memory.total_bytes else nan


def _utilization(seen: Observation) -> float:
    return nan if seen.device is None else _known(seen.device.utilization_ratio)


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "slack_bytes": Field("bytes", _slack),
        "slack_ratio": Field("ratio", _of_reserved(_slack)),
        "reclaimable_bytes": Field("bytes", lambda seen: _known(seen.sample.reclaimable_bytes)),
        "idle_cache_bytes": Field("bytes", lambda seen: _known(seen.sample.idle_cache_bytes)),
        "fragmented_bytes": Field("bytes", _fragmented),
        "fragmentation_ratio": Field("ratio", _of_reserved(_fragmented)),
        "allocated_bytes": Field("bytes", lambda seen: _known(seen.sample.allocated_bytes)),
        "reserved_bytes": Field("bytes", lambda seen: _known(seen.sample.reserved_bytes)),
        "idle_seconds": Field("seconds", lambda seen: seen.idle_seconds),
        "inactive_seconds": Field("seconds", lambda seen: seen.inactive_seconds),
        "engine_idle_seconds": Field("seconds", _engine_idle),
        "device_free_bytes": Field("bytes", _device_free),
        "device_free_ratio": Field("ratio", _device_free_ratio),
        "device_utilization_ratio": Field("ratio", _utilization),
    }
)
"""The fields by name, in the words of the metrics: of the process on the device, except `idle_seconds`,
`inactive_seconds` and `engine_idle_seconds` (of the process on all its devices) and `device_…` (of the device with all
its processes)."""
