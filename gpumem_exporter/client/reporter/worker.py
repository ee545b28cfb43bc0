"""The reporter's one thread: ships samples, runs commands, and outlives every trouble with the exporter."""

from __future__ import annotations

import json
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from gpumem_exporter.client.allocator.sampler import Sampler
from gpumem_exporter.client.allocator.torch_access import Allocator
from gpumem_exporter.client.commands.executor import Executor
from gpumem_exporter.client.commands.scheduler import Waiting
from gpumem_exporter.client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_exporter.client.hooks.steps import Steps
from gpumem_exporter.client.measure.phases import current_phase
from gpumem_exporter.client.oom.observer import OutOfMemoryLog
from gpumem_exporter.client.reporter.errors_seen import Troubles
from gpumem_exporter.client.reporter.identity import current_process
from gpumem_exporter.client.reporter.plan import planned_peak_bytes, with_plan
from gpumem_exporter.client.reporter.settings import ReporterSettings
from gpumem_exporter.errors import (
    ConfigurationError,
    ExporterAnswerError,
    ExporterError,
    ExporterUnreachableError,
    ExporterUntrustedError,
    WireError,
)
from gpumem_exporter.wire.http import Connection
from gpumem_exporter.wire.protocol import (
    MAX_LABEL_LENGTH,
    MODES,
    REPORTS_PATH,
    CommandResult,
    OutOfMemory,
    Reply,
    Report,
    reply_from_wire,
    to_wire,
)

__all__ = ["Worker"]

_DEFAULT_INTERVAL_SECONDS = 1.0
_INTERVAL_SECONDS_MAX = 60.0
_ANSWER_MARGIN_SECONDS = 5.0
"""How much longer than the agreed hold an answer may take before the exporter counts as gone."""
_FAREWELL_SECONDS = 0.25
_REFUSED_INTERVALS = 5
"""An exporter that refuses our reports is asked again this many intervals later: nothing changes within one."""
_NOT_FOR_US = (401, 403)
"""An exporter's socket belongs to its owner; the same exporter may take this user's reports over loopback."""
_UNACCEPTABLE = (413, 422)
_MAX_RESULTS = 64
"""In one report; more ride on the next."""
_CUDA_POLL_SECONDS = 0.05
_UNHOOK_TRIES, _UNHOOK_SECONDS = 500, 0.01
"""How often an ending reporter looks for a moment in which no optimizer steps."""


class Worker:
    """Reports one process until it is told to stop. The thread begins with `start`.

    Args:
        settings: where to, and under which labels.
        troubles: where errors go.
        observer: of out-of-memory errors; the process' one.
        steps: the process' steps, to which the owner listens; made sure of with each report.
        ended: called with the worker, as the last act of its thread.

    Attributes:
        sampler: to be fed with steps, in the threads that make them; None before CUDA has started and after the end.
    """

    def __init__(
        self,
        settings: ReporterSettings,
        troubles: Troubles,
        observer: OutOfMemoryObserver,
        steps: Steps,
        *,
        ended: Callable[[Worker], None],
    ) -> None:
        self.sampler: Sampler | None = None
        self._settings = settings
        self._troubles = troubles
        self._observer = observer
        self._steps = steps
        self._ended = ended
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._ooms = OutOfMemoryLog(self._wake)
        self._on_oom: Callable[[int, int, int, int], None] | None = None
        self._connection: Connection | None = None
        self._allocator: Allocator | None = None
        self._thread = threading.Thread(target=self._run, name="gpumem-reporter", daemon=True)
        self._started_by = 0
        self._interval_seconds = _DEFAULT_INTERVAL_SECONDS
        self._jitter = random.Random()  # noqa: S311 - its own: a seeded program counts on what the module's gives next
        self._sequence = 0
        self._unacceptable = False
        """The last report was refused for what was in it."""

    def start(self) -> None:
        """Begin reporting."""
        self._started_by = threading.get_native_id()
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Say goodbye and end; returns after `timeout_seconds` at the latest, whatever the network does."""
        self._stopping.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def run_no_more(self, timeout_seconds: float) -> None:
        """Have no sample taken and no command run from now on; waits that long at most for one that runs."""
        sampler = self.sampler
        if sampler is not None:
            sampler.exclusively().acquire(timeout=timeout_seconds)  # for good

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def latest_oom(self) -> tuple[float, OutOfMemory] | None:
        """The last out-of-memory error, and when it was (monotonic seconds). Any thread may ask."""
        return self._ooms.latest

    def _wake(self) -> None:
        """Have the next report sent now. Any thread may call it; it does not wait."""
        self._woken.set()
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: take the parent's hooks out of torch.

        A sample there would show the parent's bytes, or wait for ever for a lock that was held when it forked. The
        connection is a copy: closing it leaves the parent's open, keeping it would hide the parent's end.
        """
        self._observer.listener = None
        if self._allocator is not None:
            self._allocator.detach()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        if threading.get_native_id() != self._started_by:  # else it is a greenlet, and the signals are the program's
            _take_no_signals()
        try:
            self._report()
        finally:
            self._remove_step_hook()
            self._ended(self)

    def _report(self) -> None:
        self._allocator = allocator = self._wait_for_cuda()
        if allocator is None:
            return
        try:
            self._report_until_stopped(allocator)
        except Exception as error:  # noqa: BLE001 - a guest's thread ends quietly
            self._troubles.note("reporter stopped", error)
        finally:
            self.sampler = None
            self._observer.remove(self._on_oom)
            allocator.detach()
            if self._connection is not None:
                self._connection.close()

    def _remove_step_hook(self) -> None:
        """Remove the hook on steps if `stop` could not, because an optimizer was stepping."""
        with self._troubles.swallowed("the hook on optimizer steps stays"):
            for _ in range(_UNHOOK_TRIES):
                if not self._stopping.is_set() or self._steps.remove():
                    break
                time.sleep(_UNHOOK_SECONDS)

    def _wait_for_cuda(self) -> Allocator | None:
        """The callback that started this thread runs inside CUDA's initialisation, which is over in a moment."""
        while not self._stopping.is_set():
            with self._troubles.swallowed("cannot read the allocator"):
                allocator = Allocator.attach()
                if allocator is not None:
                    return allocator
            self._woken.wait(_CUDA_POLL_SECONDS)
        return None

    def _report_until_stopped(self, allocator: Allocator) -> None:
        sampler = Sampler(allocator, swallow=lambda error: self._troubles.note("cannot sample at a step", error))
        executor = Executor(allocator, sampler)
        waiting = Waiting(executor, allocator, sampler, wake=self._wake)
        sampler.at_step = waiting.at_step
        identity = current_process(
            self._settings, torch_version=allocator.torch_version, allocator_settings=allocator.settings
        )
        self.sampler = sampler
        self._observe_ooms(allocator, sampler)
        planned_bytes = self._planned_bytes()
        results: list[CommandResult] = []
        while True:
            self._woken.clear()
            if self._stopping.is_set():  # asked after clearing, or a stop in between would go unnoticed for a second
                break
            begun, hold_seconds = time.monotonic(), self._interval_seconds
            reply = None
            self._steps.install()
            with self._troubles.swallowed("cannot sample"):
                sample = sampler.current(begun + hold_seconds)
                if not self._observer.attached:
                    self._ooms.compare(sample.devices, sample.step)
                ooms = self._ooms.waiting()
                self._sequence += 1
                results += waiting.take_results()
                batch = tuple(results[:_MAX_RESULTS])
                identity = replace(identity, allocator_settings=allocator.settings[:MAX_LABEL_LENGTH])
                reply = self._deliver(
                    Report(
                        process=identity,
                        sequence=self._sequence,
                        sample_age_seconds=max(0.0, time.monotonic() - sample.taken_seconds),
                        devices=with_plan(sample.devices, planned_bytes),
                        pinned_host_bytes=sample.pinned_host_bytes,
                        step=sample.step,
                        results=batch,
                        ooms=ooms,
                        actions=executor.actions,
                        modes=MODES,
                        waiting=waiting.ids,
                        step_seconds=sampler.step_seconds,
                        hold_seconds=hold_seconds,
                    )
                )
                if reply is not None or self._unacceptable:
                    # What the exporter does not take for its content, it never will: nothing is to stand behind it.
                    self._ooms.reported(ooms)
                    results = results[len(batch) :]
            if reply is None:
                self._wait(hold_seconds * self._jitter.uniform(0.75, 1.25))
                continue
            self._interval_seconds = min(reply.report_interval_seconds, _INTERVAL_SECONDS_MAX)
            # A reply may lie unread while the process is stopped, but it was not sent later than the hold allows:
            # a command must not run because a hung job has recovered.
            sent = min(time.monotonic(), begun + hold_seconds)
            waiting.cancel(reply.cancelled)
            for command in reply.commands:
                expires_seconds = sent + command.deadline_seconds
                if command.mode == "now" and not allocator.capturing:
                    results.append(executor.run(command, expires_seconds=expires_seconds))
                else:
                    waiting.take(command, expires_seconds=expires_seconds)
            waiting.look()
            results += waiting.take_results()
            # What is held now is said at once: the exporter need not give it again, and knows that it arrived.
            if not results and not reply.commands:
                self._wait(begun + self._interval_seconds - time.monotonic())
        try:
            ooms = self._ooms.waiting()
            results += waiting.take_results()
            last = tuple(results[:_MAX_RESULTS])
            self._farewell(Report(identity, self._sequence + 1, results=last, ooms=ooms, final=True))
        except (ExporterError, WireError, ValueError, OSError) as error:
            self._troubles.note("no goodbye", error, level=logging.INFO)

    def _observe_ooms(self, allocator: Allocator, sampler: Sampler) -> None:
        def listen(device: int, requested_bytes: int, limit_bytes: int, device_free_bytes: int) -> None:
            if not allocator.uuid(device):
                return  # a device that cannot be named
            self._ooms.note(
                OutOfMemory(
                    uuid=allocator.uuid(device),
                    number=0,
                    requested_bytes=requested_bytes,
                    device_free_bytes=device_free_bytes,
                    limit_bytes=limit_bytes,
                    step=sampler.step,
                    phase=current_phase() or "",
                    sample=allocator.sample_at_oom(device),
                )
            )

        self._on_oom = self._observer.listener = listen
        self._observer.install(allocator.observe_ooms)

    def _planned_bytes(self) -> int | None:
        """What the job's plan expects; None without one, after saying what is wrong with it."""
        planned_bytes: int | None = None
        with self._troubles.swallowed("the plan is left out"):
            if self._settings.plan is not None:
                planned_bytes = planned_peak_bytes(self._settings.plan)
        return planned_bytes

    def _wait(self, seconds: float) -> None:
        """Until the time is over, or something must be reported at once."""
        self._woken.wait(max(0.0, seconds))

    def _deliver(self, report: Report) -> Reply | None:
        """Post a report and read the reply; None when there is none, after saying why once."""
        self._unacceptable = False
        try:
            reply = self._post(report, _ANSWER_MARGIN_SECONDS + report.hold_seconds)
        except ExporterUnreachableError as error:
            if not self._woken.is_set():
                # An exporter that is not there is no news to the program: no line at the default level. One that
                # cannot be believed is: somebody has to do something.
                untrusted = isinstance(error, ExporterUntrustedError)
                self._troubles.note("no exporter", error, level=logging.WARNING if untrusted else logging.INFO)
            return None
        except ExporterAnswerError as error:
            self._troubles.note(f"the exporter refused a report ({error.status})", error)
            self._unacceptable = error.status in _UNACCEPTABLE
            self._wait(self._interval_seconds * (_REFUSED_INTERVALS - 1))
            return None
        except (WireError, ValueError) as error:
            self._troubles.note("the exporter's reply makes no sense", error)
            return None
        except (OSError, ConfigurationError) as error:
            self._troubles.note("cannot report", error)
            return None
        self._troubles.clear("no exporter")
        return reply

    def _post(self, report: Report, timeout_seconds: float) -> Reply:
        headers = {"Content-Type": "application/json", **self._settings.authorization()}
        body = json.dumps(to_wire(report), separators=(",", ":")).encode()
        refusal: ExporterError = ExporterUnreachableError("the reporter stops")
        for connection in self._candidates():
            try:
                answer = connection.request("POST", REPORTS_PATH, body, headers, timeout_seconds=timeout_seconds)
                if answer.status == 200:
                    return reply_from_wire(json.loads(answer.body))
                refusal = ExporterAnswerError(answer.status, _detail(answer.body))
                if answer.status not in _NOT_FOR_US:
                    break
            except ExporterUnreachableError as error:
                refusal = error
            if not self._stopping.is_set():
                connection.close()
                self._connection = None
        try:
            raise refusal
        finally:
            del refusal  # it holds this frame by now, and would be garbage of every report that fails

    def _candidates(self) -> Iterator[Connection]:
        """The connection that works, or one to each address in turn."""
        if self._connection is not None:
            yield self._connection
            return
        for url in self._settings.urls:
            if not self._stopping.is_set():
                self._connection = Connection(url, timeout_seconds=_ANSWER_MARGIN_SECONDS)
                yield self._connection

    def _farewell(self, report: Report) -> None:
        """Tell the exporter to forget this process, on a connection of its own: `stop` broke the other."""
        if self._connection is not None:  # whoever was never reached misses nothing
            self._connection.close()
            self._connection = Connection(self._connection.url, timeout_seconds=_FAREWELL_SECONDS)
            self._post(report, _FAREWELL_SECONDS)


def _take_no_signals() -> None:
    """Leave every signal to the program's threads.

    One that the program's threads have blocked, to wait for it by `sigwait` or a signalfd, would come here, and end the
    process. So would SIGPIPE, where the program has given that its default action and the exporter ends. What a fault
    of this thread's own raises is let through, to whoever tells of it.
    """
    faults = {getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS")}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)


def _detail(body: bytes) -> str:
    """What an RFC 9457 problem says, or the beginning of whatever else came."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
