"""Sends samples to the exporter and runs the commands of its replies, until the reporter stops."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.executor import Executor
from gpumem_client.commands.scheduler import Scheduler
from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.hooks.out_of_memory import OutOfMemoryLog
from gpumem_client.hooks.steps import Steps
from gpumem_client.phases.measured import current_phase
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.engine_start import EngineStart
from gpumem_client.reporter.identity import current_process, with_rank, with_ray
from gpumem_client.reporter.plan import planned_peak_bytes, with_plan
from gpumem_client.reporter.settings import ReporterSettings
from gpumem_client.wire.protocol import MAX_TEXT_LENGTH, MODES, CommandResult, OutOfMemory, Reply, Report

__all__ = ["ReportLoop"]

_DEFAULT_INTERVAL_SECONDS = 1.0
_INTERVAL_SECONDS_MAX = 60.0
_REFUSED_INTERVALS = 5
"""The next report after a refused one comes this many intervals later."""
_LATE_SECONDS = 0.005
"""The next report is due this long after a deadline or a settling time, so that it is not a little too early."""
_MAX_RESULTS = 64
"""The limit per report; further results follow in the next one."""


class ReportLoop:
    """One process' reports, in the reporter's thread.

    Args:
        settings: the labels and the plan.
        allocator: the allocator to sample.
        delivery: posts the reports.
        wakeup: ends the waits.
        ooms: out-of-memory errors that no report has delivered yet.
        errors: logs errors.

    Attributes:
        sampler: takes the samples; `on_step` is for the user's threads.
    """

    def __init__(
        self,
        settings: ReporterSettings,
        allocator: Allocator,
        delivery: Delivery,
        wakeup: Wakeup,
        ooms: OutOfMemoryLog,
        errors: ErrorLog,
    ) -> None:
        self._allocator = allocator
        self._delivery = delivery
        self._wakeup = wakeup
        self._ooms = ooms
        self._errors = errors
        self.sampler = Sampler(
            allocator,
            swallow=lambda error: errors.note("cannot sample at a step", error),
            idle_cache_seconds=settings.idle_cache_seconds,
        )
        self._executor = Executor(allocator, self.sampler)
        self._waiting = Scheduler(self._executor, allocator, self.sampler, wake=wakeup.wake)
        self.sampler.at_step = self._waiting.at_step
        self._identity = current_process(
            settings, torch_version=allocator.torch_version, allocator_settings=allocator.settings
        )
        self._ray_is_known = False
        self._engine_start = EngineStart()
        self._planned_bytes: int | None = None
        with errors.swallowed("the plan is ignored"):
            if settings.plan is not None:
                self._planned_bytes = planned_peak_bytes(settings.plan)
        self._interval_seconds = _DEFAULT_INTERVAL_SECONDS
        self._jitter = random.Random()  # noqa: S311 - a separate generator leaves the user's seeded one unchanged
        self._sequence = 0
        self._results: list[CommandResult] = []

    def run(self, steps: Steps) -> None:
        """Report until the reporter stops, then send the final report.

        Before each report the hook on steps is installed if that was impossible earlier.
        """
        while self._wakeup.starts_round():
            steps.install()
            self._report_once()
        self._collect_results()
        results = tuple(self._results[:_MAX_RESULTS])
        self._delivery.farewell(
            Report(self._identity, self._sequence + 1, results=results, ooms=self._ooms.waiting(), final=True)
        )

    def note_oom(self, device: int, requested_bytes: int, limit_bytes: int, device_free_bytes: int) -> None:
        """Record an out-of-memory error in the allocating thread. Ignores devices without a UUID."""
        uuid = self._allocator.uuid(device)
        if uuid:
            self._ooms.note(
                OutOfMemory(
                    uuid=uuid,
                    number=0,
                    requested_bytes=requested_bytes,
                    device_free_bytes=device_free_bytes,
                    limit_bytes=limit_bytes,
                    step=self.sampler.step,
                    phase=current_phase() or "",
                    sample=self._allocator.sample_at_oom(device),
                )
            )

    def _report_once(self) -> None:
        """Send a report, follow the reply, and wait until the next report is due."""
        started = time.monotonic()
        early_seconds = self._early_report_seconds(started)
        hold_seconds = min(self._interval_seconds, early_seconds - started)
        outcome, reply = Outcome.FAILED, None
        with self._errors.swallowed("cannot sample"):
            report = self._next_report(started, hold_seconds)
            outcome, reply = self._delivery.deliver(report, self._read_cache)
            if outcome in (Outcome.ACCEPTED, Outcome.REJECTED):
                self._ooms.reported(report.ooms)
                del self._results[: len(report.results)]
                self._executor.settling.delivered(report.still_free)
        if outcome in (Outcome.REFUSED, Outcome.REJECTED):
            self._wakeup.wait(self._interval_seconds * (_REFUSED_INTERVALS - 1))
        if reply is None:
            self._wakeup.wait(hold_seconds * self._jitter.uniform(0.75, 1.25))
            return
        self._interval_seconds = min(reply.report_interval_seconds, _INTERVAL_SECONDS_MAX)
        # The reply was sent before the hold ended, even if this process was stopped and reads it later. A command must
        # not run late after such a stop.
        self._follow(reply, sent_seconds=min(time.monotonic(), started + hold_seconds))
        self._collect_results()
        # New commands and results are reported immediately: the exporter then knows that they have arrived.
        if not self._results and not reply.commands:
            self._wakeup.wait(min(started + self._interval_seconds, early_seconds) - time.monotonic())

    def _early_report_seconds(self, now: float) -> float:
        """Return when a settling time or a deadline ends, for which a report may be due before the interval is over."""
        ends = (self._executor.settling.next_due_seconds(), self._waiting.next_expiry_seconds())
        return min((end + _LATE_SECONDS for end in ends if end is not None and end > now), default=math.inf)

    def _read_cache(self) -> float:
        """Read the cache if that is due, during the wait for a reply. Return the seconds until the next reading."""
        with self._errors.swallowed("cannot read the cache"):
            return self.sampler.read_when_due()
        return self._interval_seconds

    def _next_report(self, started_seconds: float, hold_seconds: float) -> Report:
        sample = self.sampler.current(started_seconds + hold_seconds)
        self._collect_results()
        self._executor.settling.measure(sample.devices, sample.taken_seconds)
        self._sequence += 1
        settings = self._allocator.settings[:MAX_TEXT_LENGTH]
        if settings != self._identity.allocator_settings:
            self._identity = replace(self._identity, allocator_settings=settings)
        self._identity = with_rank(self._identity)
        if not self._ray_is_known:
            with self._errors.swallowed("the Ray job is unknown"):
                self._identify_in_ray()
        return Report(
            process=self._identity,
            sequence=self._sequence,
            sample_age_seconds=max(0.0, time.monotonic() - sample.taken_seconds),
            devices=with_plan(sample.devices, self._planned_bytes),
            pinned_host_bytes=sample.pinned_host_bytes,
            step=sample.step,
            results=tuple(self._results[:_MAX_RESULTS]),
            still_free=self._executor.settling.results(_MAX_RESULTS),
            ooms=self._ooms.waiting(),
            actions=self._executor.actions,
            modes=MODES,
            waiting=self._waiting.ids,
            step_seconds=self.sampler.step_seconds,
            hold_seconds=hold_seconds,
            engine_starting=self._engine_starting(),
        )

    def _identify_in_ray(self) -> None:
        identity = with_ray(self._identity)
        if identity is not None:
            self._identity, self._ray_is_known = identity, True

    def _engine_starting(self) -> bool | None:
        with self._errors.swallowed("cannot see whether an inference engine starts"):
            return self._engine_start.look()
        return None

    def _follow(self, reply: Reply, *, sent_seconds: float) -> None:
        """Run the commands of a reply, or keep them until they can run."""
        self._waiting.cancel(reply.cancelled)
        for command in reply.commands:
            expires_seconds = sent_seconds + command.deadline_seconds
            if command.mode == "now" and not self._allocator.capturing:
                self._take([self._executor.run(command, expires_seconds=expires_seconds)])
            else:
                self._waiting.take(command, expires_seconds=expires_seconds)
        self._waiting.look()

    def _collect_results(self) -> None:
        self._take(self._waiting.take_results())

    def _take(self, results: Sequence[CommandResult]) -> None:
        for result in results:
            log.debug("command %s: %s %s", result.id, result.outcome, result.reason)
        self._results += results
