"""The guest in a PyTorch process: starts when CUDA does, reports, and runs what the exporter asks for."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

from gpumem_exporter.client.hooks.cuda_start import when_cuda_starts
from gpumem_exporter.client.hooks.steps import Steps
from gpumem_exporter.client.oom.observer import OutOfMemoryObserver
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
        self._hooked = False
        self._waiting_for_cuda = False
        self._listening = False

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
            hook, self._hooked = not self._hooked, True
            wait, self._waiting_for_cuda = not self._waiting_for_cuda, True
        if hook:
            atexit.register(self._end)
            os.register_at_fork(after_in_child=self._forget_parent)
        if wait:
            when_cuda_starts(self._cuda_started)

    def stop(self, timeout_seconds: float = _GOODBYE_SECONDS) -> None:
        """Say goodbye to the exporter and end the thread; `start` begins anew.

        Args:
            timeout_seconds: how long the calling thread waits for that at most.
        """
        with self._lock:
            worker, self._worker = self._worker, None
            self._settings = None
        if worker is not None:
            worker.stop(timeout_seconds)

    def _end(self) -> None:
        """The interpreter ends.

        A thread that comes back from PyTorch into an interpreter that has ended takes the process down with it
        (`terminate called without an active exception`, up to Python 3.13): so a command that runs is waited for.
        """
        self.stop()
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
            listen, self._listening = not self._listening, True
            troubles = Troubles(self._on_trouble)
            # known before it runs, so that whoever stops it meanwhile does
            worker = self._worker = self._last_worker = Worker(self._settings, troubles, self._observer, self._steps)
            try:
                worker.start()
            except (RuntimeError, MemoryError) as error:  # no thread more for this process, or the interpreter ends
                self._worker = self._settings = None
                troubles.note("this process is not reported", error)
        if listen:
            self._steps.listen(self._on_step)

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
