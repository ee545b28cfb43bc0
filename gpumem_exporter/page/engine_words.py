"""Inference engines: what processes and jobs run, and how they use their key-value caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpumem_client.wire.protocol import KV_CACHE_STATES, DeviceSample, EngineState
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import KvCachePeak, Snapshot, kv_cache_size_bytes
from gpumem_exporter.page.documents import SeenProcess
from gpumem_exporter.page.jobs import STATES_OF_ENGINES, Job

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


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
        "kv_cache": _cache_document(list(caches_of(processes)), snapshot),
    }


def _common(texts: Iterable[str]) -> str | None:
    known = set(texts)
    return known.pop() or None if len(known) == 1 else None


def caches_of(processes: Iterable[SeenProcess]) -> Iterator[tuple[SeenProcess, DeviceSample]]:
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
