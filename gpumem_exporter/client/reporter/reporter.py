"""The guest in a PyTorch process: starts when CUDA does, reports, and runs what the exporter asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpumem_exporter.client.hooks.cuda_start import when_cuda_starts
from gpumem_exporter.client.hooks.lifecycle import after_fork_in_child, at_exit
from gpumem_exporter.client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_exporter.client.hooks.steps import Steps
from gpumem_exporter.client.reporter.errors_seen import Troubles
from gpumem_exporter.client.reporter.settings import ReporterSettings
from gpumem_exporter.client.reporter.worker import Worker
from gpumem_exporter.wire.http import Connection
from gpumem_exporter.wire.protocol import OutOfMemory

__all__ = ["Reporter"]

_GOODBYE_SECONDS = 0.3
"""The longest that `stop`, or an ending interpreter, waits for the goodbye."""
_COMMAND_SECONDS = 10.0
"""The longest that an ending interpreter waits for a command that the reporter's thread runs."""


class Reporter:
    """Reports this process' allocator to an exporter.

    Until the program initialises CUDA there is no thread and no connection. Any thread may call any method; after
    `start` has returned nothing raises into the program, and nothing waits for the network but `stop`, whose wait is
    bounded. A forked child begins without a thread; if it may use CUDA at all, it reports for itself once it does.

    Args:
        steps: the process' steps.
        on_trouble: sees each error before it is swallowed; for tests.
    """

    def __init__(self, steps: Steps, *, on_trouble: Callable[[str, BaseException], None] | None = None) -> None:
        self._steps = steps
        self._on_trouble = on_trouble
        # Reentrant, here and in a forked child: a signal's handler or a finalizer that runs inside may stop reporting.
        self._lock = threading.RLock()
        self._settings: ReporterSettings | None = None
        self._worker: Worker | None = None
        self._last_worker: Worker | None = None
        self._observer = OutOfMemoryObserver()
        self._waiting_for_cuda = False
        self._stop_waiting: Callable[[], None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._process_hooks: list[Callable[[], None]] = []
        """Remove what is called at the interpreter's exit and after a fork."""

    def start(self, settings: ReporterSettings) -> None:
        """Report from the moment CUDA is initialised on. While it reports, starting again changes nothing.

        Raises:
            ConfigurationError: an exporter URL is none of `http://host:port`, `https://host:port` and `unix:///path`.
        """
        for url in settings.urls:
            Connection(url, timeout_seconds=1.0).close()
        with self._lock:
            if self._settings is not None or settings.disabled:
                return
            self._settings = settings
            if not self._process_hooks:
                self._process_hooks = [at_exit(self._end), after_fork_in_child(self._forget_parent)]
            wait, self._waiting_for_cuda = not self._waiting_for_cuda, True
        if wait:
            self._stop_waiting = when_cuda_starts(self._cuda_started)

    def stop(self, timeout_seconds: float = _GOODBYE_SECONDS) -> None:
        """Say goodbye to the exporter, end the thread, and remove every hook; `start` begins again.

        A hook that cannot be removed at the moment stays, does nothing, and is removed as soon as it can be: the one on
        optimizer steps while an optimizer steps, those on exit and fork while the reporter's thread still runs.

        Args:
            timeout_seconds: how long the calling thread waits for the goodbye at most.
        """
        self._stop_reporting(timeout_seconds)
        self._remove_process_hooks(None)

    def _remove_process_hooks(self, ended: Worker | None) -> None:
        """Remove what is called at exit and after a fork, if this process does not report and no thread does.

        Args:
            ended: the worker whose thread calls this as its last act, if one does.
        """
        with self._lock:
            last = self._last_worker
            if self._settings is None and (last is None or last is ended or not last.alive):
                hooks, self._process_hooks, self._last_worker = self._process_hooks, [], None
                for remove in hooks:
                    remove()

    def _stop_reporting(self, timeout_seconds: float) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            self._settings = None
            self._waiting_for_cuda = False
            stops = self._stop_waiting, self._stop_listening
            self._stop_waiting = self._stop_listening = None
        for stop in stops:
            if stop is not None:
                stop()
        self._steps.remove()
        if worker is not None:
            worker.stop(timeout_seconds)

    def _end(self) -> None:
        """The interpreter ends.

        A thread that comes back from PyTorch into an interpreter that has ended takes the process down with it
        (`terminate called without an active exception`, up to Python 3.13): so a command that runs is waited for.
        """
        self._process_hooks = []  # Python is walking over its list of what it calls at exit
        self._stop_reporting(_GOODBYE_SECONDS)
        worker, self._last_worker = self._last_worker, None
        if worker is not None:
            worker.run_no_more(_COMMAND_SECONDS)

    def latest_oom(self) -> tuple[float, OutOfMemory] | None:
        """The last out-of-memory error that was observed, and when (monotonic seconds)."""
        worker = self._worker
        return worker.latest_oom if worker is not None else None

    def _cuda_started(self) -> None:
        with self._lock:
            self._waiting_for_cuda = False
            if self._settings is None or self._worker is not None:
                return
            troubles = Troubles(self._on_trouble)
            # known before it runs, so that whoever stops it meanwhile does
            worker = self._worker = self._last_worker = Worker(
                self._settings, troubles, self._observer, self._steps, ended=self._remove_process_hooks
            )
            try:
                worker.start()
            except (RuntimeError, MemoryError) as error:  # no thread more for this process, or the interpreter ends
                self._worker = self._settings = None
                troubles.note("this process is not reported", error)
        stop_listening: Callable[[], None] | None = self._steps.listen(self._on_step)
        with self._lock:
            if self._worker is worker and self._stop_listening is None:
                self._stop_listening, stop_listening = stop_listening, None
        if stop_listening is not None:  # stopped meanwhile, or no thread could be started
            stop_listening()
            self._steps.remove()

    def _on_step(self, optimizer: Any) -> None:
        worker = self._worker
        sampler = worker.sampler if worker is not None else None
        if sampler is not None:
            sampler.on_step(optimizer)

    def _forget_parent(self) -> None:
        """In a forked child: the parent's lock, thread, hooks and connection are not ours."""
        self._lock = threading.RLock()
        worker, self._worker, self._last_worker = self._worker, None, None
        if worker is not None:
            worker.abandon()
