"""Reads how much of its key-value cache a vLLM with several workers uses, from the engine's own metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample, Report
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.features.engines.engine_control import EngineControl
from gpumem_exporter.features.engines.vllm import EngineRefusedError, Vllm
from gpumem_exporter.node.failures import FailureLog

_LOOK_SECONDS = 1.0
_INTERVAL_SECONDS = 15.0
# The age at which a use no longer describes the engine.
_KNOWN_SECONDS = 30.0
# Of the interval, for an engine that does not answer: 2 minutes.
_MAX_DOUBLINGS = 3
# The engines of one user, or of one container, get no further request in a round that has taken this time for them.
_SECONDS_OF_OWNER = 0.25

_log = logging.getLogger(__name__)


class _Use(NamedTuple):
    ratio: float
    read_seconds: float


@dataclass(slots=True)
class _Worker:
    """A process with a cache. The thread replaces `use`, and the event loop reads it or drops it."""

    due_seconds: float = float("-inf")
    failures: int = 0
    engine: Vllm | None = None
    """The interface, as the kernel has shown it. Each request checks that the same socket still listens."""
    use: _Use | None = None


class CacheUse:
    """Reads the use of the caches in a thread of its own. `complete` is called on the event loop.

    `snapshot` is called in the thread.
    """

    def __init__(self, engines: EngineControl, snapshot: Callable[[], Snapshot], *, clock: Callable[[], float]) -> None:
        self._engines = engines
        self._snapshot = snapshot
        self._clock = clock
        # By process and start time. Only the thread replaces it.
        self._workers: dict[tuple[ProcessKey, int], _Worker] = {}
        # A report without the use of its cache has arrived. Most nodes have no such process, and the thread waits.
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumem-cache-use", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its present request."""
        self._stopping.set()
        self._wanted.set()

    def complete(self, report: Report, key: ProcessKey) -> Report:
        """Return the report with the used bytes of its caches, as far as they are known and it does not have them."""
        worker = self._workers.get((key, report.process.start_time_ticks))
        if not any(_lacks_use(report, sample) for sample in report.devices):
            if worker is not None:
                worker.use = None  # what was used before a sleep is not used after it
            return report
        self._wanted.set()
        use = worker.use if worker is not None else None
        if use is None or self._clock() - use.read_seconds > _KNOWN_SECONDS:
            return report
        # The workers have the cache and report the size. Only the scheduler knows the use, in a process without CUDA
        # and without a reporter. It is the same part on each worker, because all workers have the same blocks.
        devices = [
            replace(sample, kv_cache_bytes={"used": round(use.ratio * sample.component_bytes["kv_cache"])})
            if _lacks_use(report, sample)
            else sample
            for sample in report.devices
        ]
        return replace(report, devices=tuple(devices))

    def read_due(self) -> None:
        """Read the use of the engines that are due. The engine that waits for the longest time comes first."""
        processes = {}
        for process in self._snapshot().processes:
            name = process.key, process.start_time_ticks
            known = self._workers.get(name)
            completed = known is not None and known.use is not None
            if process.attested and any(_lacks_use(process.report, each, completed) for each in process.report.devices):
                processes[name] = process
        self._workers = {name: self._workers.get(name) or _Worker() for name in processes}
        answers: dict[Hashable, float | None] = {}
        spent_seconds: defaultdict[str, float] = defaultdict(float)
        now = self._clock()
        for name, worker in sorted(self._workers.items(), key=lambda item: item[1].due_seconds):
            share = name[0].share
            if self._stopping.is_set() or worker.due_seconds > now or spent_seconds[share] > _SECONDS_OF_OWNER:
                continue
            started = time.monotonic()
            worker.due_seconds = now + _INTERVAL_SECONDS  # also after an unexpected error
            self._read(worker, processes[name], answers)
            spent_seconds[share] += time.monotonic() - started

    def _read(self, worker: _Worker, process: ReportingProcess, answers: dict[Hashable, float | None]) -> None:
        """Read the use of the engine of a process, unless `answers` has it, which then gets it."""
        ratio, reason = None, "its metrics do not have one use of one cache"
        try:
            engine = worker.engine = worker.engine or self._engines.find(_target(process))
            if engine.key not in answers:
                answers[engine.key] = None
                answers[engine.key] = engine.cache_use()
            ratio = answers[engine.key]
        except EngineRefusedError as error:
            reason = str(error)
        now = self._clock()
        if ratio is not None:
            worker.use, worker.failures = _Use(ratio, now), 0
            return
        if worker.failures == 0:
            _log.debug("the use of the key-value cache of pid %s is not known: %s", process.name, reason)
        worker.engine, worker.failures = None, min(worker.failures + 1, _MAX_DOUBLINGS)
        worker.due_seconds = now + _INTERVAL_SECONDS * 2**worker.failures

    def _run(self) -> None:
        failures = FailureLog(_log, time.monotonic)
        while True:
            if not self._workers:
                self._wanted.wait()
            if self._stopping.wait(_LOOK_SECONDS):
                return
            self._wanted.clear()
            try:
                self.read_due()
            except Exception as error:  # noqa: BLE001 - the other engines must be read
                failures.failed("cache use", repr(error), exc_info=True)
            else:
                failures.recovered("cache use")


def _lacks_use(report: Report, sample: DeviceSample, completed: bool = False) -> bool:
    """Return whether a worker of vLLM does not report the use of its cache, apart from a `completed` one."""
    engine, size_bytes = report.engine, sample.component_bytes.get("kv_cache")
    known = sample.kv_cache_bytes and not completed
    return engine is not None and engine.name == "vllm" and bool(size_bytes) and not known and not sample.unmapped_bytes


def _target(process: ReportingProcess) -> SelectedProcess:
    return SelectedProcess(process.name, process)
