"""The document of a job: its memory, its state, its inference engine, and the actions on it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpumem_client.wire.protocol import ENGINE_ACTIONS, KV_CACHE_STATES, DeviceSample, EngineState
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.actions.sentences import stays_free
from gpumem_exporter.actions.timing import turns_of_job
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import Snapshot, kv_cache_size_bytes
from gpumem_exporter.page.documents import Document, SeenProcess, process_document
from gpumem_exporter.page.growth import GrowingPart
from gpumem_exporter.page.jobs import STATES_OF_ENGINES, Job, common, job_uuids

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_CLEAR = ActionRequest("empty_cache", Target(all=True))


def job_document(
    job: Job, snapshot: Snapshot, now_unix_seconds: float, growing: Sequence[GrowingPart], *, hue: int, whole: bool
) -> Document:
    """Return a job; `growing` are its processes that grow, the fastest first, and `whole` is as for processes."""
    uuids = job_uuids(job, snapshot.gpus)
    full = min((each.full_in_seconds for each in growing if each.full_in_seconds is not None), default=None)
    idle = job.idle_since_seconds(snapshot)
    last_reports = [process.last_report_unix_seconds for process in job.processes]
    sizes = {each.report.process.world_size for each in job.reporters} - {None}
    components: dict[str, Counter[str]] = {"component_bytes": Counter(), "component_unmapped_bytes": Counter()}
    for part in job.parts:
        for name, sums in components.items():
            sums.update(getattr(part.sample, name, {}))
    return {
        "id": job.id,
        "name": job.name,
        "hue": hue,
        "workload": job.workload,
        "command": job.command,
        **job.owner,
        "gpus": [snapshot.gpus[uuid] for uuid in uuids if uuid in snapshot.gpus],
        "uuids": uuids,
        "process_count": len(job.processes),
        "reporting_count": len(job.reporters),
        "orphan_count": sum(process.orphan is not None for process in job.processes),
        "ranks": [process.rank for process in job.processes if process.rank],
        "world_size": sizes.pop() if len(sizes) == 1 else None,
        **job.sums,
        "incomplete": job.incomplete,
        "growth_bytes_per_hour": growing[0].growth.bytes_per_hour if growing else None,
        "full_in_seconds": None if full is None else round(full),
        "state": job.state(snapshot.taken_seconds, [engine.host_pid for engine in snapshot.starting]),
        "inactive_since_unix_seconds": None
        if idle is None
        else round(snapshot.unix_seconds(idle, next(iter(job.reporters), None))),
        "engine": engine_document(job.processes, snapshot),
        **components,
        "since_unix_seconds": job.started_unix_seconds(snapshot.node),
        **job.steps(snapshot, now_unix_seconds),
        "last_report_unix_seconds": min((last for last in last_reports if last is not None), default=None),
        "clear": clear_document(job, snapshot.taken_seconds),
        "engine_memory": _engine_memory(job),
        "processes": [
            {**process_document(process, snapshot, whole=whole), "engine": engine_document([process], snapshot)}
            for process in job.processes
        ],
    }


def clear_document(job: Job, now_seconds: float) -> Document | None:
    """Return the target of a clear of the job, and when it would act; None where nothing stays free."""
    able = [
        SelectedProcess(process.pid, process.reporter, process.reporter.report.devices)
        for process in job.processes
        if process.reporter is not None and process.reporter.clears
    ]
    samples = [sample for one in able for sample in one.samples]
    idle = sum(sample.idle_cache_bytes or 0 for sample in samples)
    if not idle:
        return None
    differences = (
        sample.reclaimable_bytes - sample.idle_cache_bytes
        for sample in samples
        if sample.reclaimable_bytes is not None and sample.idle_cache_bytes is not None
    )
    again = max(0, sum(differences))
    modes = {turn.mode for _, turn in turns_of_job(_CLEAR, able, able, now_seconds)}
    mode = next(mode for mode in ("step", "idle", "now") if mode in modes)
    at_least = any(sample.idle_cache_bytes is None and sample.reserved_bytes != 0 for sample in samples)
    return {
        "stays_free_bytes": idle,
        "again_bytes": again,
        "at_least": at_least,
        "sentence": f"{stays_free(idle, again, at_least=at_least, at_step=mode == 'step')}.",
        "target": _target([one.pid for one in able]),
        "mode": mode,
    }


def _engine_memory(job: Job) -> Document | None:
    """Return the action that lets the engines of a job sleep, or wakes them; None without an engine that reports."""
    release, resume = ENGINE_ACTIONS
    engines = [
        (process.pid, process.reporter.report)
        for process in job.processes
        if process.reporter is not None
        and release not in process.reporter.report.denied_actions
        and (process.reporter.report.engine is not None or release in process.reporter.report.actions)
    ]
    if not engines:
        return None
    asleep = any(sample.unmapped_bytes for _, report in engines for sample in report.devices)
    return {"action": resume if asleep else release, "target": _target([pid for pid, _ in engines])}


def _target(pids: Sequence[int | str]) -> Document:
    return {"pid": pids[0] if len(pids) == 1 else pids}


def engine_title(name: str) -> str:
    """Return the name of an engine as people write it."""
    return _TITLES.get(name, name)


def engine_document(processes: Sequence[SeenProcess], snapshot: Snapshot) -> Document | None:
    """Return the engine of a process, or what the engines of a job's processes have in common; None if there is none.

    The sizes of the cache are sums over processes and devices. The peaks of several caches need not coincide.
    """
    engines: list[tuple[EngineState, bool]] = [
        (process.reporter.report.engine, process.hidden)
        for process in processes
        if process.reporter is not None and process.reporter.report.engine is not None
    ]
    if not engines:
        return None
    name = common(engine_title(engine.name) for engine, _ in engines)
    version = common(engine.version for engine, _ in engines)
    model = common("" if hidden else engine.model for engine, hidden in engines)
    states = {engine.state for engine, _ in engines}
    idle = [engine.idle_seconds for engine, _ in engines if engine.idle_seconds is not None]
    return {
        "label": " ".join(filter(None, (name, version, model))),
        "name": name,
        "version": version,
        "model": model,
        "state": next((state for state in STATES_OF_ENGINES if state in states), None),
        "idle_seconds": min(idle) if len(idle) == len(engines) else None,
        "kv_cache": _cache_document(processes, snapshot),
    }


def caches_of(processes: Iterable[SeenProcess]) -> Iterator[tuple[SeenProcess, DeviceSample]]:
    """Yield the sample of each process and device with a key-value cache whose use is known."""
    for process in processes:
        for sample in process.reporter.report.devices if process.reporter is not None else ():
            if sample.kv_cache_bytes:
                yield process, sample


def _cache_document(processes: Sequence[SeenProcess], snapshot: Snapshot) -> dict[str, int | None] | None:
    caches = list(caches_of(processes))
    if not caches:
        return None
    peaks = {
        window: [snapshot.kv_cache_peak(str(process.pid), sample, window) for process, sample in caches]
        for window in ("1h", "24h")
    }
    used = {
        window: None if None in known else sum(peak.used_bytes for peak in known if peak is not None)
        for window, known in peaks.items()
    }
    return {
        "size": sum(kv_cache_size_bytes(sample) for _, sample in caches),
        **{
            state: sum_of_known([sample.kv_cache_bytes.get(state) for _, sample in caches]) for state in KV_CACHE_STATES
        },
        "peak_hour": used["1h"],
        "peak_day": used["24h"],
        "observed_seconds": min(peak.observed_seconds if peak is not None else 0 for peak in peaks["24h"]),
    }
