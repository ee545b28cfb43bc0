"""Inference engines: what processes and jobs run, how they use their key-value caches, and a size that is enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumem_client.wire.protocol import KV_CACHE_STATES, DeviceSample, EngineState
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import DeviceMemory, KvCachePeak, Snapshot, kv_cache_size_bytes
from gpumem_exporter.page.documents import SeenProcess
from gpumem_exporter.page.jobs import STATES_OF_ENGINES, Job

ENOUGH_SECONDS = 72000.0
"""How much of the last 24 hours the use of a cache must be known before a smaller cache is proposed: 20 h. A shorter
time may lack the busiest hour of a day."""
DEMO_SECONDS = 60.0
"""The same for the demo, which runs for minutes."""
MARGIN = 1.5
"""The proposed size of a cache, relative to its highest use."""
# A smaller share of the devices' memory is not worth a restart of the engine.
_MIN_FREED_SHARE = 0.1
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_OPTIONS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def title_of(engine: EngineState) -> str:
    """Return the name of an engine as people write it."""
    return _TITLES.get(engine.name, engine.name)


def engine_document(processes: Sequence[SeenProcess], snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the engine of a process, or what the engines of a job's processes have in common; None if there is none.

    The sizes of the cache are sums over processes and devices. The peaks of several caches need not coincide.
    """
    engines = [
        (process.reporter.report.engine, process.hidden)
        for process in processes
        if process.reporter is not None and process.reporter.report.engine is not None
    ]
    if not engines:
        return None
    name = _common(title_of(engine) for engine, _ in engines)
    version = _common(engine.version for engine, _ in engines)
    model = _common("" if hidden else engine.model for engine, hidden in engines)
    states = {engine.state for engine, _ in engines}
    idle = [engine.idle_seconds for engine, _ in engines if engine.idle_seconds is not None]
    return {
        "label": " ".join(filter(None, (name, version, model))),
        "name": name,
        "version": version,
        "model": model,
        "state": next((state for state in STATES_OF_ENGINES if state in states), None),
        "idle_seconds": min(idle) if len(idle) == len(engines) else None,
        "kv_cache": _cache_document(list(_caches(processes)), snapshot),
    }


def _common(texts: Iterable[str]) -> str | None:
    known = set(texts)
    return known.pop() or None if len(known) == 1 else None


def _caches(processes: Iterable[SeenProcess]) -> Iterator[tuple[SeenProcess, DeviceSample]]:
    """Yield the sample of each process and device with a key-value cache whose use is known."""
    for process in processes:
        for sample in process.reporter.report.devices if process.reporter is not None else ():
            if sample.kv_cache_bytes:
                yield process, sample


def _cache_document(
    caches: Sequence[tuple[SeenProcess, DeviceSample]], snapshot: Snapshot
) -> dict[str, int | None] | None:
    if not caches:
        return None
    hour, day = (
        [snapshot.kv_cache_peak(str(process.pid), sample, window) for process, sample in caches]
        for window in ("1h", "24h")
    )
    states = {state: [sample.kv_cache_bytes.get(state) for _, sample in caches] for state in KV_CACHE_STATES}
    return {
        "size": sum(kv_cache_size_bytes(sample) for _, sample in caches),
        **{state: sum_of_known(sizes) for state, sizes in states.items()},
        "peak_hour": _sum_of_peaks(hour),
        "peak_day": _sum_of_peaks(day),
        "observed_seconds": min(peak.observed_seconds if peak is not None else 0 for peak in day),
    }


def _sum_of_peaks(peaks: Sequence[KvCachePeak | None]) -> int | None:
    known = [peak.used_bytes for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def component_sums(job: Job) -> dict[str, dict[str, int]]:
    """Return the mapped and the unmapped bytes of each component of a job, over its processes and devices."""
    sums: dict[str, dict[str, int]] = {"component_bytes": {}, "component_unmapped_bytes": {}}
    for part in job.parts:
        for field, sizes in sums.items():
            for name, size in getattr(part.sample, field, {}).items():
                sizes[name] = sizes.get(name, 0) + size
    return sums


class SmallerCache(NamedTuple):
    """A smaller key-value cache that is enough for a job."""

    engine: str
    size_bytes: int
    """The present size. This and the next value are sums over the processes."""
    peak_bytes: int
    """The highest use in the observed time."""
    observed_seconds: int
    uuids: tuple[str, ...]
    option: str
    """What makes the cache that small, such as `--gpu-memory-utilization 0.42`; empty without such an option."""
    freed_bytes: int
    """What the job leaves to others with the option."""

    @property
    def sentence(self) -> str:
        """The proposal, with the observation from which it is derived."""
        size, peak, freed = map(human_bytes, (self.size_bytes, self.peak_bytes, self.freed_bytes))
        used = f"at most {peak} used in {human_seconds(self.observed_seconds)}"
        return f"KV cache {size}, {used}; {self.option or 'a smaller cache'} would leave {freed} to others."


class _Cache(NamedTuple):
    """The cache of one process on one device."""

    size_bytes: int
    peak: KvCachePeak
    usable_bytes: int
    """The memory of the device."""
    in_fraction_bytes: int
    """What the fraction of the device that the engine is started with includes, besides the cache."""

    @property
    def fraction(self) -> float:
        """The smallest fraction in whole percents that has a cache with the margin."""
        wanted = self.in_fraction_bytes + min(self.size_bytes, int(MARGIN * self.peak.used_bytes))
        return math.ceil(100 * wanted / self.usable_bytes) / 100

    def freed_bytes(self, fraction: float) -> int:
        """Return what the process uses less, if it is started with a fraction."""
        return self.in_fraction_bytes + self.size_bytes - int(fraction * self.usable_bytes)


def smaller_cache(
    job: Job, snapshot: Snapshot, memory: Mapping[str, DeviceMemory], enough_seconds: float
) -> SmallerCache | None:
    """Return a smaller cache for a job of engines; None if it would free little, or if not enough is known.

    `memory` is by uuid. All processes must run the same engine, one on each device. docs/engines.md explains the
    computation.
    """
    places = list(_caches(job.processes))
    uuids = tuple(sample.uuid for _, sample in places)
    engines = {process.reporter.report.engine for process, _ in places if process.reporter is not None}
    names = {engine.name if engine is not None else "" for engine in engines}
    if len(names) != 1 or len(set(uuids)) < len(uuids):
        return None
    name = names.pop()
    caches = [_cache(process, sample, name, snapshot, memory) for process, sample in places]
    known = [each for each in caches if each is not None and each.peak.observed_seconds >= enough_seconds]
    if len(known) < len(caches):
        return None
    fraction = max(each.fraction for each in known)
    freed = sum(each.freed_bytes(fraction) for each in known)
    if freed < _MIN_FREED_SHARE * sum(each.usable_bytes for each in known):
        return None
    return SmallerCache(
        title_of(EngineState(name)),
        sum(each.size_bytes for each in known),
        sum(each.peak.used_bytes for each in known),
        min(each.peak.observed_seconds for each in known),
        uuids,
        f"{_OPTIONS[name]} {fraction:.2f}" if name in _OPTIONS else "",
        freed,
    )


def _cache(
    process: SeenProcess, sample: DeviceSample, engine: str, snapshot: Snapshot, memory: Mapping[str, DeviceMemory]
) -> _Cache | None:
    share, device = process.shares.get(sample.uuid), memory.get(sample.uuid)
    peak = snapshot.kv_cache_peak(str(process.pid), sample, "24h")
    if peak is None or share is None or share.used_bytes is None or device is None:
        return None
    size = kv_cache_size_bytes(sample)
    # SGLang's fraction is for weights and cache alone; vLLM's includes all that the process uses.
    included = sample.component_bytes.get("weights") if engine == "sglang" else share.used_bytes - size
    if included is None:
        return None
    usable = device.total_bytes - (device.reserved_bytes or 0)
    return _Cache(size, peak, usable, included)
