"""The figures that a rule's conditions may name, for one process on one device. Pure, but for a clock of stillness.

What cannot be known is NaN: it is neither over nor under anything, so that no condition holds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import NamedTuple

from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import DeviceReading, ReportingProcess, Snapshot
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["FIELDS", "Field", "Sighting", "StillClock", "sightings"]


class Sighting(NamedTuple):
    """One process on one device, at the time of its last sample."""

    who: str
    """One reporter of one process: neither a later process with its pid nor a later program in it is the same."""
    process: ReportingProcess
    sample: DeviceSample
    device: DeviceReading | None
    """None where the driver does not answer."""
    still_seconds: float
    """NaN where it cannot be known."""
    sampled_seconds: float
    """When that was; of the process, kept since it is asked for often."""


@dataclass(frozen=True, slots=True)
class Field:
    """A figure that a condition may name."""

    unit: str
    """bytes, ratio or seconds."""
    of: Callable[[Sighting], float]


class StillClock:
    """How long each process has done nothing that its samples show: no step, and nothing allocated or freed.

    What gives memory back to the driver is no stir, or a clear would make an idle process a busy one. A program that
    replays CUDA graphs, counts no steps and allocates nothing looks still: `device_utilization_ratio` tells it, and the
    mode `idle` asks the process itself.

    Args:
        stale_seconds: after a gap of more than this between two samples the count begins anew.
    """

    def __init__(self, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        self._still: dict[str, tuple[object, float, float]] = {}
        """What was seen, since when, and when last."""

    def look(self, processes: Mapping[str, tuple[ReportingProcess, float]]) -> dict[str, float]:
        """Seconds by process, as of each one's last sample; those that are not given are forgotten.

        Args:
            processes: each with when its last sample was taken.
        """
        still: dict[str, tuple[object, float, float]] = {}
        for who, (process, seconds) in processes.items():
            stir = _stir(process)
            known = self._still.get(who)
            if known is None or known[0] != stir or seconds - known[2] > self._stale_seconds:
                still[who] = (stir, seconds, seconds)
            else:
                still[who] = (stir, known[1], seconds)
        self._still = still
        return {who: nan if stir is None else last - since for who, (stir, since, last) in still.items()}


def sightings(snapshot: Snapshot, stale_seconds: float, clock: StillClock | None = None) -> Iterator[Sighting]:
    """Every process on each of its devices, as far as its last sample is no older than `stale_seconds`.

    Args:
        snapshot: what is known.
        stale_seconds: an older sample is not what the process is like.
        clock: where some condition asks for stillness.
    """
    node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None else {}
    oldest_seconds = snapshot.taken_seconds - stale_seconds
    fresh = {
        _who(process): (process, seconds)
        for process in snapshot.processes
        if (seconds := process.sampled_seconds) >= oldest_seconds
    }
    still = clock.look(fresh) if clock is not None else {}
    for who, (process, seconds) in fresh.items():
        still_seconds = still.get(who, nan)
        for sample in process.report.devices:
            yield Sighting(who, process, sample, devices.get(sample.uuid), still_seconds, seconds)


def _who(process: ReportingProcess) -> str:
    # A text knows its own hash, unlike a tuple: it is a key many times a second.
    identity = process.report.process
    return f"{identity.pid_namespace}:{identity.pid}:{identity.start_time_ticks}:{identity.session}"


def _stir(process: ReportingProcess) -> object:
    """What is another once a process has done something; None where its samples do not show it."""
    report = process.report
    if report.step is None and any(sample.allocated_bytes is None for sample in report.devices):
        return None
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


def _known(value: float | None) -> float:
    return nan if value is None else value


def _slack(seen: Sighting) -> float:
    reserved, allocated = seen.sample.reserved_bytes, seen.sample.allocated_bytes
    return nan if reserved is None or allocated is None else reserved - allocated


def _of_reserved(part: Callable[[Sighting], float]) -> Callable[[Sighting], float]:
    def ratio(seen: Sighting) -> float:
        reserved = seen.sample.reserved_bytes
        return part(seen) / reserved if reserved else nan

    return ratio


def _fragmented(seen: Sighting) -> float:
    return _known(fragmented_bytes(seen.sample))


def _device_free(seen: Sighting) -> float:
    memory = seen.device.memory if seen.device is not None else None
    return nan if memory is None else memory.free_bytes


def _device_free_ratio(seen: Sighting) -> float:
    memory = seen.device.memory if seen.device is not None else None
    return memory.free_bytes / memory.total_bytes if memory is not None and memory.total_bytes else nan


def _utilization(seen: Sighting) -> float:
    return nan if seen.device is None else _known(seen.device.utilization_ratio)


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "slack_bytes": Field("bytes", _slack),
        "slack_ratio": Field("ratio", _of_reserved(_slack)),
        "reclaimable_bytes": Field("bytes", lambda seen: _known(seen.sample.reclaimable_bytes)),
        "fragmented_bytes": Field("bytes", _fragmented),
        "fragmentation_ratio": Field("ratio", _of_reserved(_fragmented)),
        "allocated_bytes": Field("bytes", lambda seen: _known(seen.sample.allocated_bytes)),
        "reserved_bytes": Field("bytes", lambda seen: _known(seen.sample.reserved_bytes)),
        "idle_seconds": Field("seconds", lambda seen: seen.still_seconds),
        "device_free_bytes": Field("bytes", _device_free),
        "device_free_ratio": Field("ratio", _device_free_ratio),
        "device_utilization_ratio": Field("ratio", _utilization),
    }
)
"""By name, in the words of the metrics; of the process on the device, but for `idle_seconds`, which is of the process
on all its devices, and `device_…`, which is of the device whoever uses it."""
