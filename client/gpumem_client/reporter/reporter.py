"""The reporter: its one thread waits until CUDA is initialized, reports, and leaves no hook behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.guest_safety import ErrorLog, guest_safety, log
from gpumem_client.hooks.cuda_start import when_cuda_starts
from gpumem_client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_client.hooks.process_life import after_fork_in_child, at_exit, loading, process_singleton, singletons
from gpumem_client.hooks.steps import Steps, process_steps
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.identity import current_process
from gpumem_client.reporter.planned_peak import planned_peak_bytes
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.torch_access import in_torch
from gpumem_client.wire.http import Connection

if TYPE_CHECKING:
    from gpumem_client.profile.heap_reader import HeapReader
    from gpumem_client.profile.recorder import Recorder

_CUDA_POLL_SECONDS = 0.05
# The time between two tries of what has failed with the same error three times.
_RARELY_SECONDS = 60.0
# The longest that the start of CUDA waits for a recording to start.
_RECORDING_SECONDS = 0.5
# The number of times that an ending reporter tries to remove the hook on steps, which fails during a step, and the
# seconds between two tries.
_UNHOOK_TRIES, _UNHOOK_SECONDS = 500, 0.01
# The longest that `stop`, or an ending interpreter, waits for the final report.
_FAREWELL_SECONDS = 0.3
# The longest that an ending interpreter waits for the report and the profile of an out-of-memory error, and for a call
# of torch.
_OOM_SECONDS, _TORCH_SECONDS = 3.0, 10.0


class Reporter:
    """Reports this process' allocator to an exporter, from `start` to `stop`.

    Until the user's code initializes CUDA there is no thread and no connection. Any thread may call any method. After
    `start` nothing raises into the user's code, and only `stop` waits for the network, for a limited time. In a forked
    child of a process with CUDA it does nothing; in another child it reports the child once that initializes CUDA.
    """

    def __init__(self, settings: ReporterSettings, steps: Steps, observer: OutOfMemoryObserver) -> None:
        self._settings = settings
        # What exporters may not request. A later `start` may add to it.
        self._denied_actions = set(settings.denied_actions)
        self._errors = ErrorLog()
        self._observer = observer
        self._steps = steps
        self._wakeup = Wakeup()
        self._delivery = Delivery(settings, self._wakeup, self._errors)
        self._allocator: Allocator | None = None
        self._loop: ReportLoop | None = None
        self._thread = self._new_thread()
        self._gate = torch_access.TorchGate()
        self._started_by = 0
        # Set once the thread has started the standing recording, or has not.
        self._recording_decided = threading.Event()
        # The recorder of this process' profiles, once there is one.
        self._recorder: Recorder | None = None
        # Functions that remove the hooks: in `stop`, and when the thread has ended, too.
        self._hooks: list[Callable[[], None]] = []
        self._last_hooks: list[Callable[[], None]] = []

    def start(self) -> None:
        """Report as soon as CUDA is initialized. To be called once."""
        for each in self._settings.ignored:
            log.warning("start: %s", each)
        self._last_hooks = [at_exit(self._exit), after_fork_in_child(self._forked)]
        self._remove_at_stop(when_cuda_starts(self._cuda_started))

    def deny(self, actions: Iterable[str]) -> None:
        """Deny further actions to exporters."""
        self._denied_actions.update(actions)

    def stop(self, timeout_seconds: float = _FAREWELL_SECONDS) -> None:
        """Send the final report, end the thread, and remove every hook.

        Waits at most `timeout_seconds` for the final report. A hook that cannot be removed now does nothing until it is
        removed: the hook on optimizer steps after the running step, the calls at exit and after a fork when the
        reporter's thread ends.
        """
        self._gate.stopping = not self._oom_waits
        self._wakeup.stop()
        self._remove_hooks()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _remove_at_stop(self, remove: Callable[[], None]) -> None:
        """Keep the function that removes a new hook for `stop`, which another thread may have called meanwhile."""
        self._hooks.append(remove)
        if self._wakeup.stopping:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        _call_all(self._hooks)
        self._steps.update()
        if not self._thread.is_alive():
            _call_all(self._last_hooks)

    def _cuda_started(self) -> None:
        if self._wakeup.stopping:
            return
        self._started_by = threading.get_native_id()
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # too many threads, or the interpreter is ending
            log.warning("this process is not reported: %s", error)
            singletons.pop("reporter", None)
            self.stop()
            return
        if self._settings.oom_profile:
            # Otherwise the first tensors would have no stack. The thread takes some milliseconds.
            self._recording_decided.wait(_RECORDING_SECONDS)
        self._remove_at_stop(self._steps.listen(self._on_step))

    def _on_step(self, optimizer: Any) -> None:
        loop = self._loop
        if loop is not None:
            loop.sampler.on_step(optimizer)

    def _exit(self) -> None:
        """End at the interpreter's exit: no sample is taken and no command runs from now on.

        Waits for the final report, for the report and the profile of an out-of-memory error, and for a call of torch.
        """
        self._last_hooks = []  # Python iterates over its calls at exit and must not be changed
        self.stop()
        loop = self._loop
        if self._oom_waits or (loop is not None and loop.ooms.waiting()):
            self._thread.join(_OOM_SECONDS)  # the error that may end this process is being reported
        end_seconds = time.monotonic() + _TORCH_SECONDS
        self._gate.close(_TORCH_SECONDS)
        if loop is not None:  # a command may run in a thread of the user, at the end of a step
            loop.sampler.exclusively.acquire(timeout=max(0.0, end_seconds - time.monotonic()))  # never released

    @property
    def _oom_waits(self) -> bool:
        loop = self._loop
        return loop is not None and loop.oom_moments is not None and loop.oom_moments.waiting

    def _new_thread(self) -> threading.Thread:
        # A daemon: the interpreter must not wait for it, and `_exit` waits for a running command.
        return threading.Thread(target=self._run, name="gpumem-reporter", daemon=True)

    def _forked(self) -> None:
        """Remove the parent's hooks in a forked child, where the thread does not exist."""
        if not self._started_by:
            # In a child, Python marks each thread of the parent as ended. From 3.13 on it cannot be started any more,
            # before that it starts and is not alive.
            self._thread = self._new_thread()
            return
        # A sample there would show the parent's bytes, or wait forever for a lock that was held during the fork.
        self._loop, self._wakeup = None, Wakeup()
        _call_all(self._last_hooks)
        self._observer.listener = None
        if self._allocator is not None:
            self._allocator.detach()
        self._delivery.close()  # a copy: the parent's connection stays open

    def _run(self) -> None:
        if threading.get_native_id() != self._started_by:  # equal under greenlets: this is a user's thread
            _block_signals()
        torch_access.use_gate(self._gate)
        try:
            self._report()
        finally:
            torch_access.use_gate(None)
            self._remove_step_hook()
            _call_all(self._last_hooks)

    def _report(self) -> None:
        if self._settings.oom_profile:
            with in_torch(), self._errors.swallowed("no profile of out-of-memory errors"):
                self._start_recording()
        self._recording_decided.set()
        try:
            self._report_to_the_end()
        finally:
            if self._recorder is not None:
                with in_torch():
                    self._recorder.close()

    def _start_recording(self) -> None:
        """Start the recording for a profile of out-of-memory errors, unless this process cannot take any."""
        if not torch_access.has_gil():
            log.warning("no profile of out-of-memory errors: this interpreter has no GIL")
        elif not self._make_recorder().start_standing():
            log.warning("no profile of out-of-memory errors: the program records the allocator's history itself")

    def _make_recorder(self) -> Recorder:
        with loading():
            from gpumem_client.profile.recorder import Recorder
        self._recorder = self._recorder or Recorder(sys.modules["torch"])
        return self._recorder

    def _report_to_the_end(self) -> None:
        self._allocator = allocator = self._wait_for_cuda()
        if allocator is None:
            return
        with self._errors.swallowed("reporter stopped"):
            self._loop = loop = self._make_loop(allocator)
            if torch_access.has_gil():
                with in_torch():
                    self._take_profiles(loop, allocator)
            listener = self._observer.listener = loop.note_oom
            try:
                with in_torch():
                    self._observer.install(sys.modules["torch"])
                while self._wakeup.starts_round():
                    with in_torch():
                        self._steps.update()  # if that was impossible earlier, because an optimizer was stepping
                    self._wakeup.wait(self._report_once(loop))
                loop.close()
                self._delivery.farewell(loop.final_report())
            finally:
                self._loop = None
                self._observer.remove(listener)
        with in_torch():
            allocator.detach()
        self._delivery.close()

    def _take_profiles(self, loop: ReportLoop, allocator: Allocator) -> None:
        def parts() -> tuple[HeapReader, Recorder]:
            from gpumem_client.profile.heap_reader import HeapReader

            heap = HeapReader(sys.modules["torch"], allocator, exclusively=loop.sampler.exclusively)
            return heap, self._make_recorder()

        standing = self._recorder is not None and self._recorder.standing
        loop.take_profiles(parts, self._delivery.send_profile, at_oom=standing)

    def _report_once(self, loop: ReportLoop) -> float:
        """Send a report, follow the reply, and return the seconds until the next report is due."""
        report, outcome, reply, fails = None, Outcome.FAILED, None, True
        with self._rarely("cannot sample"):
            report = loop.next_report()
            outcome, reply = self._delivery.deliver(report, loop.read_cache)
            fails = False
        seconds = loop.answered(report, outcome, reply)
        return _RARELY_SECONDS if fails and self._errors.ended("cannot sample") else seconds

    def _rarely(self, kind: str) -> guest_safety:
        """Return the boundary of what must go on after three equal errors, but rarely: it may not cost the job much."""
        then = f"tried every {_RARELY_SECONDS:g} s from now on"
        return guest_safety(lambda error: self._errors.failed(kind, error, then))

    def _make_loop(self, allocator: Allocator) -> ReportLoop:
        planned_bytes = None
        with self._errors.swallowed("the plan is ignored"):
            if self._settings.plan is not None:
                planned_bytes = planned_peak_bytes(self._settings.plan)
        return ReportLoop(
            current_process(self._settings, allocator.torch_version),
            allocator,
            self._errors,
            wake=self._wakeup.wake,
            default_rank=self._settings.default_rank,
            planned_bytes=planned_bytes,
            denied_actions=self._denied_actions,
        )

    def _wait_for_cuda(self) -> Allocator | None:
        """Attach to the allocator, as soon as the initialization of CUDA that started this thread has ended."""
        while not self._wakeup.stopping:
            with self._rarely("cannot read the allocator"), in_torch():
                allocator = Allocator.attach()
                if allocator is not None:
                    return allocator
            fails = self._errors.ended("cannot read the allocator")
            self._wakeup.wait(_RARELY_SECONDS if fails else _CUDA_POLL_SECONDS)
        return None

    def _remove_step_hook(self) -> None:
        """Remove the hook on steps if `stop` could not, because an optimizer was stepping."""
        with self._errors.swallowed("the hook on optimizer steps stays"):
            for _ in range(_UNHOOK_TRIES):
                if not self._wakeup.stopping or self._steps.update():
                    break
                time.sleep(_UNHOOK_SECONDS)


def start_reporter(settings: ReporterSettings) -> None:
    """Start the reporter of this process. While one runs, only the denied actions have an effect.

    Raises:
        ConfigurationError: an exporter URL is none of `http://host:port`, `https://host:port` and `unix:///path`.
    """
    for url in settings.urls:
        # This connects to nothing. An invalid URL raises here, where the user sees it, and not in the thread.
        Connection(url, timeout_seconds=1.0).close()
    if settings.disabled:
        return
    reporter = Reporter(settings, process_steps(), process_singleton("oom_observer", OutOfMemoryObserver))
    running = process_singleton("reporter", lambda: reporter)
    if running is reporter:
        reporter.start()
    else:
        running.deny(settings.denied_actions)


def _call_all(functions: list[Callable[[], None]]) -> None:
    """Call and remove all functions. Several threads may do this at once."""
    while functions:
        with contextlib.suppress(IndexError):
            functions.pop()()


def _block_signals() -> None:
    """Leave all signals to the user's threads, except signals of faults."""
    # Otherwise a signal that they have blocked, to wait for it with `sigwait`, could reach this thread and end the
    # process. So could SIGPIPE with its default action, when the exporter ends.
    faults = {getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS")}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
