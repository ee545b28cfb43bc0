"""The reporter of a process: starts its thread when CUDA starts, and removes its hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpumem_client.guest_safety import log
from gpumem_client.hooks.cuda_start import when_cuda_starts
from gpumem_client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_client.hooks.process_life import after_fork_in_child, process_singleton
from gpumem_client.hooks.steps import Steps, process_steps
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.reporter.worker import FAREWELL_SECONDS, Worker
from gpumem_client.wire.http import Connection


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
        self._observer = OutOfMemoryObserver()
        # Functions that remove the hooks. The worker has hooks of its own, until its thread ends.
        self._removals: list[Callable[[], None]] = []

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
        for each in settings.ignored:
            log.warning("start: %s", each)
        self._remove_at_stop(after_fork_in_child(self._forget_parent))
        self._remove_at_stop(when_cuda_starts(self._cuda_started))

    def stop(self, timeout_seconds: float = FAREWELL_SECONDS) -> None:
        """Send the final report, end the thread, and remove every hook; `start` may be called again.

        Waits at most `timeout_seconds` for the final report. A hook that cannot be removed now does nothing until it is
        removed: the hook on optimizer steps after the running step, the calls at exit and after a fork when the
        reporter's thread ends.
        """
        with self._lock:
            worker, removals = self._worker, self._removals
            self._worker = self._settings = None
            self._denied_actions, self._removals = set(), []
        for remove in removals:
            remove()
        self._steps.remove()
        if worker is not None:
            worker.stop(timeout_seconds)

    def _remove_at_stop(self, remove: Callable[[], None]) -> None:
        """Call the function that removes a new hook in `stop`; now if the reporter has been stopped meanwhile."""
        with self._lock:
            if self._settings is not None:
                self._removals.append(remove)
                return
        remove()
        self._steps.remove()

    def _cuda_started(self) -> None:
        with self._lock:
            if self._settings is None or self._worker is not None:
                return
            # Stored before its start, so that a concurrent `stop` ends it.
            self._worker = Worker(self._settings, self._observer, self._steps, denied_actions=self._denied_actions)
            try:
                self._worker.start()
            except (RuntimeError, MemoryError) as error:  # too many threads, or the interpreter is ending
                log.warning("this process is not reported: %s", error)
                self.stop()
        self._remove_at_stop(self._steps.listen(self._on_step))

    def _on_step(self, optimizer: Any) -> None:
        worker = self._worker
        sampler = worker.sampler if worker is not None else None
        if sampler is not None:
            sampler.on_step(optimizer)

    def _forget_parent(self) -> None:
        """Drop the parent's locks and its worker in a forked child."""
        self._lock = threading.RLock()
        self._steps.renew_lock()
        self._worker = None


def process_reporter() -> Reporter:
    """Return the reporter of this process."""
    return process_singleton("reporter", lambda: Reporter(process_steps()))
