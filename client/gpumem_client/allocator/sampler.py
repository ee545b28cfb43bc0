"""Takes samples of the allocator: at the end of a step while steps run, otherwise in the reporter's thread."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.idle_cache import IdleCache
from gpumem_client.guest_safety import guest_safety
from gpumem_client.hooks.steps import OneStep
from gpumem_client.wire.protocol import DeviceSample

# A step samples in the last tenth of the interval before the next report, or later. If steps are long, it samples in
# the last 1.25 steps before the report, so that at least one step ends in that time.
_LEAD, _LEAD_STEPS = 0.1, 1.25
# Steps have stopped if none has ended for this multiple of the last step's duration, within the bounds.
_QUIET_STEPS = 3.0
_QUIET_SECONDS_MIN, _QUIET_SECONDS_MAX = 2.0, 60.0
# The step time is the median of this number of steps, so that a step that waited for an evaluation does not count.
_RATE_STEPS = 9
# While the cache is being emptied, the last sample is reported again up to this age.
_FLUSH_SECONDS_MAX = 10.0
# The mean time between two readings of the cache is the longer one of this time and this multiple of a reading's CPU
# time, which is 0.02 % of a core.
_READING_SECONDS = 0.5
_READING_SHARE = 5_000
# Flushes come in series: after a retry, the reporter's thread reads nothing for this time while steps run. It is
# shorter than the gap after which the window of the idle cache starts again: a long step has no other reading.
_RETRY_SECONDS = 25.0


@dataclass(frozen=True)
class Sample:
    """The allocator's state at one time."""

    taken_seconds: float
    """Time on the monotonic clock."""
    devices: tuple[DeviceSample, ...]
    pinned_host_bytes: int | None
    step: int | None


class Sampler:
    """Takes samples of one process' allocator.

    `on_step` runs in the user's threads, everything else in the reporter's. `swallow` gets the errors of `on_step`, and
    returns whether steps should no longer sample and run commands. They are counted nevertheless.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        swallow: Callable[[Exception], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at_step: Callable[[int], None] = lambda _: None
        """Called in the user's thread at the end of each step, with its number; must not raise."""
        self._allocator = allocator
        self._swallow = swallow
        self._boundary = guest_safety(self._failed)
        self._steps_fail = False
        self._clock = clock
        self.exclusively = threading.Lock()
        """Keeps steps from sampling. It is held while a command runs; no step waits for it."""
        self._latest: Sample | None = None
        self._wanted_from_seconds = 0.0
        self._reported_seconds = 0.0
        self._steps = 0
        self._last_step_seconds: float | None = None
        self._recent_step_seconds: deque[float] = deque(maxlen=_RATE_STEPS)
        self._one_step = OneStep()
        self._idle_cache = IdleCache()
        self._next_reading_seconds = 0.0
        self._random = random.Random()  # noqa: S311 - a separate generator leaves the user's seeded one unchanged

    def on_step(self, optimizer: Any) -> None:
        """Called after a step of an optimizer, or with None for a mark of the user's code. Never raises.

        Once the user's code has marked a step, only its marks count.
        """
        with self._boundary:
            if self._one_step.ends(optimizer):
                self._stepped()

    @property
    def step(self) -> int | None:
        """The number of steps that have ended; None before the first. Any thread may read it."""
        return self._steps or None

    @property
    def step_seconds(self) -> float | None:
        """The median duration of the last steps; None while none run. Any thread may read it."""
        recent = list(self._recent_step_seconds)
        return statistics.median(recent) if recent and self.steps_run() else None

    def current(self, next_report_seconds: float) -> Sample:
        """Return the sample to report now, and schedule the next one.

        While steps run, this is the sample of the last step that took one. While another thread empties the cache, it
        may be an older sample, or a sample without devices.
        """
        # A sample in the training thread at the end of a step never meets that thread's own flush of the cache. In
        # another thread it may: the statistics lock the allocator's mutex with the GIL, so the whole interpreter would
        # stop until the flush ends (1.5 s for eight calls of `cudaFree` of 0.2 s).
        latest, steps_run = self._latest, self.steps_run() and not self._steps_fail
        if latest is None or not steps_run or self._late(latest):
            latest = self._last_known(latest) if self._allocator.flushing else self.take()
        else:
            self.read()
        now = self._clock()
        if not steps_run or self._wanted_from_seconds > now:  # otherwise a requested sample waits for a step
            lead = max((next_report_seconds - now) * _LEAD, (self.step_seconds or 0.0) * _LEAD_STEPS)
            self._wanted_from_seconds = next_report_seconds - lead
        self._reported_seconds = now
        return self._with_idle_cache(latest)

    def read_when_due(self) -> float:
        """Read the cache if its random time has come. Return the seconds until the next reading."""
        if self._clock() >= self._next_reading_seconds:
            self.read()
        return max(0.0, self._next_reading_seconds - self._clock())

    def outdated(self) -> None:
        """Drop the last sample: a command has changed the heap."""
        self._latest = None

    def take(self) -> Sample:
        """Take a sample now, in this thread."""
        with self.exclusively:
            return self._take()

    def steps_run(self) -> bool:
        """Whether the last step ended only a few step times ago. Any thread may call this."""
        if self._last_step_seconds is None:
            return False
        patience = min(max(_QUIET_STEPS * sum(self._last_steps(1)), _QUIET_SECONDS_MIN), _QUIET_SECONDS_MAX)
        return self._clock() - self._last_step_seconds < patience

    def _late(self, latest: Sample) -> bool:
        """Whether the last sample was reported already, and the next step is late: there may be no further step."""
        now = self._clock()
        step_seconds = max(sum(self._last_steps(1)), self.step_seconds or 0.0)
        late = self._last_step_seconds is not None and now - self._last_step_seconds > _LEAD_STEPS * step_seconds
        return late and latest.taken_seconds < self._reported_seconds and self._calm(now)

    def _calm(self, now: float) -> bool:
        """Whether no flush is expected: the allocator has retried no allocation for a while."""
        return now - self._idle_cache.retried_seconds > _RETRY_SECONDS

    def _stepped(self) -> None:
        now = self._clock()
        if self._last_step_seconds is not None:
            self._recent_step_seconds.append(now - self._last_step_seconds)
        self._last_step_seconds = now
        self._steps += 1
        if self._steps_fail:
            return
        # A step never waits: a command that runs meanwhile has the lock, and the next step can sample as well.
        if now >= self._wanted_from_seconds and self.exclusively.acquire(blocking=False):
            try:
                self._take()
                self._wanted_from_seconds = float("inf")
            finally:
                self.exclusively.release()
        self.at_step(self._steps)

    def _failed(self, error: Exception) -> None:
        self._steps_fail = bool(self._swallow(error)) or self._steps_fail

    def _take(self) -> Sample:
        sample = Sample(
            taken_seconds=self._clock(),
            devices=self._allocator.samples(),
            pinned_host_bytes=self._allocator.pinned_host_bytes(),
            step=self.step,
        )
        self._latest = sample
        for device in sample.devices:
            self._idle_cache.note(device, sample.taken_seconds)
        return sample

    def read(self) -> None:
        """Read the cache at this moment, unless that could wait for another thread."""
        # The cache is at its largest between two steps, where the samples are. So this reads it at random moments of a
        # step. After a retry there is no reading for a while, and 0 bytes are idle in any case.
        now, started = self._clock(), time.thread_time()
        if self._calm(now) and not self._allocator.flushing and self.exclusively.acquire(blocking=False):
            try:
                for reading in self._allocator.unused():
                    self._idle_cache.note(reading, now)
            finally:
                self.exclusively.release()
        pause = max(_READING_SECONDS, (time.thread_time() - started) * _READING_SHARE)
        if not self.steps_run():
            pause *= 2  # the samples of the reports are readings as well
        self._next_reading_seconds = self._clock() + pause * self._random.uniform(0.5, 1.5)

    def _with_idle_cache(self, sample: Sample) -> Sample:
        now, since = self._clock(), self._idle_cache_since_seconds()
        devices = [(device, self._idle_cache.bytes(device.uuid, now, since)) for device in sample.devices]
        # The sample of a step may be older than the window.
        return replace(
            sample,
            devices=tuple(
                device
                if idle is None or device.reclaimable_bytes is None
                else replace(device, idle_cache_bytes=min(idle, device.reclaimable_bytes))
                for device, idle in devices
            ),
        )

    def _idle_cache_since_seconds(self) -> float:
        # A long step, an evaluation or a checkpoint would fill the window with work that needs less than the steps. So
        # the window has a minute of steps, and two of them.
        if self._last_step_seconds is None:
            return math.inf
        return self._last_step_seconds - max(sum(self._last_steps(2)), self._idle_cache.window_seconds)

    def _last_steps(self, count: int) -> list[float]:
        """Return the durations of the last steps."""
        return list(self._recent_step_seconds)[-count:]

    def _last_known(self, latest: Sample | None) -> Sample:
        now = self._clock()
        if latest is not None and now - latest.taken_seconds < _FLUSH_SECONDS_MAX:
            return latest
        return Sample(taken_seconds=now, devices=(), pinned_host_bytes=None, step=self.step)
