"""The reports of one process, and the commands of the replies."""

from __future__ import annotations

import functools
import gc
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.executor import Executor
from gpumem_client.commands.scheduler import Scheduler
from gpumem_client.engines.engine_reader import process_engine
from gpumem_client.engines.engine_state import EngineClock, EngineFacts
from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.hooks.out_of_memory import OutOfMemoryLog
from gpumem_client.hooks.process_life import loading
from gpumem_client.reporter.activity import Activity
from gpumem_client.reporter.delivery import Outcome
from gpumem_client.reporter.identity import with_rank, with_ray
from gpumem_client.reporter.planned_peak import with_plan
from gpumem_client.torch_access import in_torch
from gpumem_client.wire.protocol import (
    COMMAND_ACTIONS,
    MAX_TEXT_LENGTH,
    MODES,
    OutOfMemory,
    ProcessIdentity,
    Reply,
    Report,
)

if TYPE_CHECKING:
    from gpumem_client.commands.profiling import Profiling
    from gpumem_client.engines.sleep import CoreMemory
    from gpumem_client.profile.heap_reader import HeapReader
    from gpumem_client.profile.profiler import OomMoments
    from gpumem_client.profile.recorder import Recorder

_DEFAULT_INTERVAL_SECONDS = 1.0
_INTERVAL_SECONDS_MAX = 60.0
# The next report after a refused one comes this many intervals later.
_REFUSED_INTERVALS = 5
# The next report is due this long after a deadline or a settling time, so that it is not a little too early.
_LATE_SECONDS = 0.005
# The limit per report; further results follow in the next one.
_MAX_RESULTS = 64


class ReportLoop:
    """Builds the reports and follows the replies. The caller sends them, and waits between them, in one thread.

    The reporter's thread has one loop; the demo of the exporter has one for each simulated process, in one thread. The
    user's threads call `sampler.on_step` and `note_oom`. `wake` asks the caller for the next report now.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        allocator: Allocator,
        errors: ErrorLog,
        *,
        wake: Callable[[], None] = lambda: None,
        default_rank: str = "",
        planned_bytes: int | None = None,
        denied_actions: Collection[str] = (),
        collect_garbage: Callable[[], object] = gc.collect,
        engine: Callable[[], CoreMemory | None] = lambda: process_engine().memory(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._allocator = allocator
        self.ooms = OutOfMemoryLog(wake, clock=clock)
        """The out-of-memory errors that wait for a report."""
        self._errors = errors
        self._default_rank = default_rank
        self._planned_bytes = planned_bytes
        self._wake = wake
        self._clock = clock
        self.sampler = Sampler(
            allocator, swallow=lambda error: errors.failed("cannot sample at a step", error), clock=clock
        )
        self._denied_actions = denied_actions
        self._executor = Executor(
            allocator,
            self.sampler,
            denied_actions=denied_actions,
            collect_garbage=collect_garbage,
            engine=engine,
            clock=clock,
        )
        self._scheduler = Scheduler(self._executor, allocator, self.sampler, wake=wake, clock=clock)
        self.oom_moments: OomMoments | None = None
        """The errors that get a profile, if that is set."""
        self.sampler.at_step = self._scheduler.at_step
        self._ray_is_known = False
        self._engine_clock = EngineClock(clock)
        self._activity = Activity(clock)
        self._interval_seconds = _DEFAULT_INTERVAL_SECONDS
        self._jitter = random.Random()  # noqa: S311 - a separate generator leaves the user's seeded one unchanged
        self._sequence = 0
        self._started_seconds = 0.0
        # When the report after the current one is due before the interval is over.
        self._early_seconds = math.inf

    def take_profiles(
        self, parts: Callable[[], tuple[HeapReader, Recorder]], send: Callable[[bytes], str], *, at_oom: bool = False
    ) -> None:
        """Accept commands for profiles, and take a profile of out-of-memory errors with `at_oom`.

        `parts` is called within `loading`: for the first command, or now with `at_oom`. `send` sends a document to the
        exporter and returns its id.
        """

        def make_profiling() -> Profiling:
            with loading():
                from gpumem_client.commands.profiling import Profiling
                from gpumem_client.profile.aggregate import encode

                heap, recorder = parts()
            return Profiling(
                *(heap, recorder, self.sampler),
                capturing=lambda: self._allocator.capturing,
                send=lambda profile: send(encode(profile, self.identity)),
                failed=functools.partial(self._errors.failed, "cannot take a profile"),
                clock=self._clock,
            )

        self._executor.make_profiling = make_profiling
        if at_oom:
            # Now: when the error happens, nothing is loaded.
            with self._errors.swallowed("no profile of out-of-memory errors"):
                with loading():
                    from gpumem_client.profile.profiler import OomMoments
                self._executor.profiling = profiling = make_profiling()
                self.oom_moments = OomMoments(profiling.heap, profiling.recorder, clock=self._clock)

    def close(self) -> None:
        """Take the profile of an error that has none yet, and end a recording."""
        self._take_oom_profile()
        if self._executor.profiling is not None:
            with in_torch():
                self._executor.profiling.close()

    def next_report(self) -> Report:
        """Take the current sample, and return the report to send now."""
        self._take_oom_profile()
        self._advance_profile()
        self._started_seconds = started_seconds = self._clock()
        # A settling time or a deadline may end before the interval is over.
        profiling = self._executor.profiling
        ends = (
            self._executor.settling.next_due_seconds(),
            self._scheduler.next_expiry_seconds(),
            None if profiling is None else profiling.next_due_seconds(),
        )
        later = [end + _LATE_SECONDS for end in ends if end is not None and end > started_seconds]
        self._early_seconds = min(later, default=math.inf)
        hold_seconds = min(self._interval_seconds, self._early_seconds - started_seconds)
        with in_torch():
            return self._report(hold_seconds)

    def _report(self, hold_seconds: float) -> Report:
        # Before the sample, which has its bytes.
        facts = self._errors.attempt("cannot read the inference engine", self._allocator.engine, None)
        profiling = self._executor.profiling
        sample = self.sampler.current(self._started_seconds + hold_seconds)
        allocations = self._allocations(facts)
        self._executor.settling.measure(sample.devices, sample.taken_seconds)
        self._sequence += 1
        settings = self._allocator.settings[:MAX_TEXT_LENGTH]
        if settings != self.identity.allocator_settings:
            self.identity = replace(self.identity, allocator_settings=settings)
        self.identity = with_rank(self.identity, self._default_rank)
        if not self._ray_is_known:
            in_ray = self._errors.attempt("the Ray job is unknown", lambda: with_ray(self.identity), None)
            self.identity, self._ray_is_known = in_ray or self.identity, in_ray is not None
        return Report(
            process=self.identity,
            sequence=self._sequence,
            sample_age_seconds=max(0.0, self._clock() - sample.taken_seconds),
            devices=with_plan(sample.devices, self._planned_bytes),
            pinned_host_bytes=sample.pinned_host_bytes,
            step=sample.step,
            results=tuple(self._executor.undelivered[:_MAX_RESULTS]),
            still_free=tuple(self._executor.settling.ended[:_MAX_RESULTS]),
            ooms=self.ooms.waiting(),
            actions=self._executor.actions,
            denied_actions=tuple(action for action in COMMAND_ACTIONS if action in self._denied_actions),
            modes=MODES,
            waiting=(*self._scheduler.ids, *(() if profiling is None else profiling.ids)),
            step_seconds=self.sampler.step_seconds,
            hold_seconds=hold_seconds,
            engine_starting=None if facts is None else facts.measures,
            engine=self._engine_clock.state(
                facts,
                asleep=any(device.unmapped_bytes for device in sample.devices),
                allocations=allocations if facts is not None else None,
            ),
            inactive_seconds=self._activity.inactive_seconds(
                step=self.sampler.step,
                allocations=None if allocations is None else tuple([allocated for allocated, _ in allocations]),
                requests=None if facts is None else facts.requests,
                graphs=any(device.private_pools_bytes for device in sample.devices),
            ),
        )

    def answered(self, report: Report | None, outcome: Outcome, reply: Reply | None) -> float:
        """Follow the reply to a report, and return the seconds until the next report is due.

        `report` is None if no sample could be taken.
        """
        # What was rejected is dropped, too: each later report that has it would be rejected again.
        if report is not None and outcome in (Outcome.ACCEPTED, Outcome.REJECTED):
            self.ooms.reported(report.ooms)
            del self._executor.undelivered[: len(report.results)]
            del self._executor.settling.ended[: len(report.still_free)]
        hold_seconds = self._interval_seconds if report is None else report.hold_seconds
        if reply is None:
            # Jitter: after a restart of the exporter, the processes of a node do not all come back at one time.
            pause = hold_seconds * self._jitter.uniform(0.75, 1.25)
            refused = outcome in (Outcome.REFUSED, Outcome.REJECTED)
            return pause + (self._interval_seconds * (_REFUSED_INTERVALS - 1) if refused else 0.0)
        self._interval_seconds = min(reply.report_interval_seconds, _INTERVAL_SECONDS_MAX)
        # The reply was sent before the hold ended, even if this process was stopped and reads it later. A command must
        # not run late after such a stop.
        self._follow(reply, sent_seconds=min(self._clock(), self._started_seconds + hold_seconds))
        if self._executor.undelivered or reply.commands:
            return 0.0  # the exporter then knows at once that commands have arrived, and their results
        return min(self._started_seconds + self._interval_seconds, self._early_seconds) - self._clock()

    def final_report(self) -> Report:
        """Return the report that ends this session, with what was not delivered."""
        results = tuple(self._executor.undelivered[:_MAX_RESULTS])
        return Report(self.identity, self._sequence + 1, results=results, ooms=self.ooms.waiting(), final=True)

    def read_cache(self) -> float:
        """Read the cache if that is due, during the wait for a reply. Return the seconds until the next reading."""
        with in_torch():
            return self._errors.attempt("cannot read the cache", self.sampler.read_when_due, self._interval_seconds)

    def note_oom(self, device: int, requested_bytes: int, limit_bytes: int, device_free_bytes: int) -> None:
        """Record an out-of-memory error in the allocating thread. Ignores devices without a UUID."""
        uuid = self._allocator.uuid(device)
        if uuid:
            oom = self.ooms.note(
                OutOfMemory(
                    uuid=uuid,
                    number=0,
                    requested_bytes=requested_bytes,
                    device_free_bytes=device_free_bytes,
                    limit_bytes=limit_bytes,
                    step=self.sampler.step,
                    phase=self._allocator.current_phase() or "",
                    sample=self._allocator.sample_at_oom(device),
                )
            )
            if self.oom_moments is not None:
                self.oom_moments.note(device, oom)
                # The reporter's thread finds the error's entry in the history only until later entries overwrite it.
                self._wake()

    def _allocations(self, facts: EngineFacts | None) -> tuple[tuple[int, int], ...] | None:
        """Return how many blocks of each device were allocated and freed; None if that is not known, or not needed."""
        # While steps run, they show that the process is active; a flush in another thread would stop this one.
        if self._allocator.flushing or (facts is None and self.sampler.steps_run()):
            return None
        counted = [self._allocator.allocations(index) for index in self._allocator.devices()]
        known = tuple([each for each in counted if each is not None])
        return known if len(known) == len(counted) else None

    def _follow(self, reply: Reply, *, sent_seconds: float) -> None:
        """Run the commands of a reply, or keep them until they can run."""
        self._advance_profile(reply.cancelled)
        with in_torch():
            self._scheduler.cancel(reply.cancelled)
            for command in reply.commands:
                log.debug("command %s received: %s, mode %s", command.id, command.action, command.mode)
                expires_seconds = sent_seconds + command.deadline_seconds
                if command.mode == "now" and not self._allocator.capturing:
                    self._executor.run(command, expires_seconds=expires_seconds)
                else:
                    self._scheduler.add(command, expires_seconds=expires_seconds)
            self._scheduler.run_due()
        self._advance_profile()

    def _advance_profile(self, cancelled: Collection[str] = ()) -> None:
        """Start the profile of a command, or end its recording that is over or cancelled, and send it."""
        profiling = self._executor.profiling
        result = None if profiling is None else profiling.cancel(cancelled) or profiling.run_due()
        if result is not None:
            self._executor.record(result)
            if self._errors.ended("cannot take a profile"):
                self._executor.make_profiling = self._executor.profiling = None

    def _take_oom_profile(self) -> None:
        """Take and send the profile of an out-of-memory error that has none."""
        moments, profiling = self.oom_moments, self._executor.profiling
        if moments is None or profiling is None or not moments.waiting:
            return
        with in_torch():
            if self._allocator.capturing:
                return
        try:
            with in_torch():
                profile = self._errors.attempt("an out-of-memory error has no profile", moments.take, None)
            if profile is not None:
                with self._errors.swallowed("the profile of an out-of-memory error was not sent"):
                    profiling.send(profile)
        finally:
            moments.done()
