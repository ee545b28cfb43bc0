"""Proposes a smaller key-value cache for an engine that hardly uses its cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.core.ledger import DeviceLedger
from gpumem_exporter.core.readings import DeviceMemory
from gpumem_exporter.core.samples import KvCachePeak, Snapshot, kv_cache_size_bytes
from gpumem_exporter.page.documents import SeenProcess
from gpumem_exporter.page.findings import Finding, finding, gpus_in_words
from gpumem_exporter.page.job_document import caches_of, engine_title
from gpumem_exporter.page.jobs import Job, job_uuids

ENOUGH_SECONDS = 72000.0
"""How much of the last 24 hours the use of a cache must be known before a smaller cache is proposed: 20 h. A shorter
time may lack the busiest hour of a day."""
DEMO_SECONDS = 60.0
"""The same for the demo, which runs for minutes."""
MARGIN = 1.5
"""The proposed size of a cache, relative to its highest use."""
# A smaller share of the devices' memory is not worth a restart of the engine.
_MIN_FREED_SHARE = 0.1
_OPTIONS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def unused_kv_caches(
    snapshot: Snapshot, jobs: Iterable[Job], _: Mapping[str, DeviceLedger], *, enough_seconds: float
) -> list[Finding]:
    """Return the jobs for which a smaller cache is enough.

    `enough_seconds` is how long the use of a cache must be known.
    """
    devices = snapshot.node.devices if snapshot.node is not None and snapshot.node.up else ()
    memory = {device.uuid: device.memory for device in devices if device.memory is not None}
    found = (_smaller_cache(job, snapshot, memory, enough_seconds) for job in jobs)
    return [each for each in found if each is not None]


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


def _smaller_cache(
    job: Job, snapshot: Snapshot, memory: Mapping[str, DeviceMemory], enough_seconds: float
) -> Finding | None:
    """Return the finding of a job; None if a smaller cache would free little, or if not enough is known.

    `memory` is by uuid. All processes must run the same engine, one on each device. docs/engines.md explains the
    computation.
    """
    places = list(caches_of(job.processes))
    uuids = [sample.uuid for _, sample in places]
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
    option = f"{_OPTIONS[name]} {fraction:.2f}" if name in _OPTIONS else "a smaller cache"
    size = human_bytes(sum(each.size_bytes for each in known))
    peak = human_bytes(sum(each.peak.used_bytes for each in known))
    seconds = human_seconds(min(each.peak.observed_seconds for each in known))
    ordered = [uuid for uuid in job_uuids(job, snapshot.gpus) if uuid in uuids]
    who = [job.owner["user"], engine_title(name), gpus_in_words([snapshot.gpus[uuid] for uuid in ordered])]
    sentence = (
        f"{job.name} ({', '.join(filter(None, who))}): KV cache {size}, at most {peak} used in {seconds}; "
        f"{option} would leave {human_bytes(freed)} to others."
    )
    first = ordered[0]
    return finding("kv_cache", job.id, "Unused KV cache", sentence, job=job, gpu=snapshot.gpus[first], uuid=first)


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
