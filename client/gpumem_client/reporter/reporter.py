"""The reporter of a process: starts its thread when CUDA starts, and ends it with the interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.hooks.cuda_start import when_cuda_starts
from gpumem_client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_client.hooks.process_life import after_fork_in_child, at_exit, process_singleton
from gpumem_client.hooks.steps import Steps, process_steps
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.reporter.worker import Worker
from gpumem_client.wire.http import Connection

# The longest that `stop`, or an ending interpreter, waits for the final report.
_FAREWELL_SECONDS = 0.3
# The longest that an ending interpreter waits for a call of torch in the reporter's thread.
_TORCH_SECONDS = 10.0


class Reporter:
    """Reports this process' allocator to an exporter.

    Until the user's code initializes CUDA there is no thread and no connection. Any thread may call any method. After
    `start` nothing raises into the user's code, and only `stop` waits for the network, for a limited time. A forked
    child has no thread; if it can use CUDA, it reports for itself once it does.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        # Reentrant: a signal handler or a finalizer may stop the reporter while its thread has the lock.
        self._lock = threading.RLock()
        self._settings: ReporterSettings | None = None
        # What exporters may not request. The worker reads it, because a later `start` may add to it.
        self._denied_actions: set[str] = set()
        self._worker: Worker | None = None
        # The workers whose thread may run: also stopped ones.
        self._workers: list[Worker] = []
        self._observer = OutOfMemoryObserver()
        self._stop_waiting: Callable[[], None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        # Functions that remove the calls at exit and after a fork.
        self._process_hooks: list[Callable[[], None]] = []

    def start(self, settings: ReporterSettings) -> None:
        """Report as soon as CUDA is initialized. While the reporter runs, only the denied actions have an effect.

        Raises:
            ConfigurationError: an exporter URL is none of `http://host:port`, `https://host:port` and `unix:///path`.
        """
        for url in settings.urls:
            # This connects to nothing. An invalid URL raises here, where the user sees it, and not in the thread.
            Connection(url, timeout_seconds=1.0).close()
        with self._lock:
            if settings.disabled:
                return
            self._denied_actions.update(settings.denied_actions)
            if self._settings is not None:
                return
            self._settings = settings
            if not self._process_hooks:
                self._process_hooks = [at_exit(self._end), after_fork_in_child(self._forget_parent)]
        for each in settings.ignored:
            log.warning("start: %s", each)
        self._stop_waiting = when_cuda_starts(self._cuda_started)

    def stop(self, timeout_seconds: float = _FAREWELL_SECONDS) -> None:
        """Send the final report, end the thread, and remove every hook; `start` may be called again.

        Waits at most `timeout_seconds` for the final report. A hook that cannot be removed now does nothing until it is
        removed: the hook on optimizer steps after the running step, the calls at exit and after a fork when the
        reporter's thread ends.
        """
        self._stop_reporting(timeout_seconds)
        self._remove_process_hooks(None)

    def _stop_reporting(self, timeout_seconds: float) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            self._settings = None
            self._denied_actions = set()
            stops = self._stop_waiting, self._stop_listening
            self._stop_waiting = self._stop_listening = None
        for stop in stops:
            if stop is not None:
                stop()
        self._steps.remove()
        if worker is not None:
            worker.stop(timeout_seconds)

    def _remove_process_hooks(self, ended: Worker | None) -> None:
        """Remove the calls at exit and after a fork, if this process does not report and no thread does.

        `ended` is the worker whose ending thread calls this.
        """
        with self._lock:
            if ended in self._workers:
                self._workers.remove(ended)
            if self._settings is None and not any(worker.alive for worker in self._workers):
                hooks, self._process_hooks = self._process_hooks, []
                for remove in hooks:
                    remove()

    def _end(self) -> None:
        """End the reporter at the interpreter's exit."""
        self._process_hooks = []  # Python iterates over its calls at exit and must not be changed
        self._stop_reporting(_FAREWELL_SECONDS)
        end_seconds = time.monotonic() + _TORCH_SECONDS
        for worker in tuple(self._workers):
            worker.disable(max(0.0, end_seconds - time.monotonic()))

    def _cuda_started(self) -> None:
        with self._lock:
            if self._settings is None or self._worker is not None:
                return
            errors = ErrorLog()
            # Stored before its start, so that a concurrent `stop` ends it.
            worker = self._worker = Worker(
                self._settings,
                errors,
                self._observer,
                self._steps,
                denied_actions=self._denied_actions,
                ended=self._remove_process_hooks,
            )
            self._workers.append(worker)
            try:
                worker.start()
            except (RuntimeError, MemoryError) as error:  # too many threads, or the interpreter is ending
                self._worker = self._settings = None
                self._workers.remove(worker)
                errors.note("this process is not reported", error)
        stop_listening: Callable[[], None] | None = self._steps.listen(self._on_step)
        with self._lock:
            if self._worker is worker and self._stop_listening is None:
                self._stop_listening, stop_listening = stop_listening, None
        if stop_listening is not None:  # the reporter has been stopped, or no thread could be started
            stop_listening()
            self._steps.remove()

    def _on_step(self, optimizer: Any) -> None:
        worker = self._worker
        sampler = worker.sampler if worker is not None else None
        if sampler is not None:
            sampler.on_step(optimizer)

    def _forget_parent(self) -> None:
        """Drop the parent's locks, thread, hooks and connection in a forked child."""
        self._lock = threading.RLock()
        self._steps.renew_lock()
        worker, self._worker, self._workers = self._worker, None, []
        if worker is not None:
            worker.abandon()


def process_reporter() -> Reporter:
    """Return the reporter of this process."""
    return process_singleton("reporter", lambda: Reporter(process_steps()))
