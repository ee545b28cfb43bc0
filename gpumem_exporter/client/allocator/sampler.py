"""When to look at the allocator: at the optimizer's step where there are steps, else on the reporter's thread.

A sample in the training thread at a step boundary never meets that thread's own cache flush; one from another thread
might, and would stop the interpreter for as long as the flush takes. So the reporter's thread samples only while no
step runs, and the two never at once. While the program is in `empty_cache()` it does not look either.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.torch_access import Allocator
from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.client.hooks.steps import OneStep
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["Sample", "Sampler"]

_LEAD, _LEAD_STEPS = 0.1, 1.25
"""A step samples if it comes in the last tenth of the interval before the next report, or later; where steps are longer
than that, in the last stretch in which one is to be expected."""
_QUIET_STEPS = 3.0
"""Steps are over when none has come for three times the last one's length…"""
_QUIET_SECONDS_MIN, _QUIET_SECONDS_MAX = 2.0, 60.0
"""…and for at least two seconds, or for a minute at most."""
_PACE_STEPS = 9
"""The pace is the median of so many steps: one that waited for an evaluation or another rank is not the pace."""
_FLUSH_SECONDS_MAX = 10.0
"""A sample is given again, with its age, while the cache is being emptied; one that is older says nothing any more."""


def _nothing(_step: int) -> None:
    """What is done at a step as long as nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the allocator held at one moment."""

    taken_seconds: float
    """On the monotonic clock."""
    devices: tuple[DeviceSample, ...]
    pinned_host_bytes: int | None
    step: int | None


class Sampler:
    """Takes samples of one process' allocator.

    `on_step` runs in the program's threads; everything else in the reporter's.

    Args:
        allocator: what to sample.
        swallow: called with what a sample raised in the program's thread.
        clock: monotonic seconds.

    Attributes:
        at_step: called in the program's thread at the end of each step, with its number; must not raise.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        swallow: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at_step: Callable[[int], None] = _nothing
        self._allocator = allocator
        self._swallow = swallow
        self._clock = clock
        self._busy = threading.Lock()
        self._latest: Sample | None = None
        self._wanted_from_seconds = 0.0
        self._steps = 0
        self._last_step_seconds: float | None = None
        self._step_seconds = 0.0
        self._recent_step_seconds = [0.0] * _PACE_STEPS
        self._one_step = OneStep()

    def on_step(self, optimizer: Any) -> None:
        """After a step of an optimizer, or with None the program's mark of one, in the thread that made it.

        Once the program has marked one, its marks alone count. Never raises.
        """
        try:
            if self._one_step.ends(optimizer):
                self._stepped()
        except Exception as error:  # this runs inside the program's optimizer
            if raised_by_signal_handler(error):
                raise
            self._swallow(error)

    @property
    def step(self) -> int | None:
        """How many steps have ended; None before the first. Any thread may ask."""
        return self._steps or None

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes, the median of the last few; None while none run. Any thread may ask."""
        recent = [seconds for seconds in self._recent_step_seconds if seconds > 0]
        return statistics.median(recent) if recent and self.steps_run() else None

    def current(self, next_report_seconds: float) -> Sample:
        """The sample to report now, and when the next one will be wanted.

        While steps run that is the last step's; otherwise one is taken here, unless the program is emptying the cache:
        looking would wait for that, and stop the interpreter meanwhile. Then it is the last one, and, if there is none
        or it is too old, one without devices: what cannot be known is not told.
        """
        latest, steps_run = self._latest, self.steps_run()
        if latest is None or not steps_run:
            latest = self._last_known(latest) if self._allocator.flushing else self.take()
        now = self._clock()
        if not steps_run or self._wanted_from_seconds > now:  # else none has come since it was wanted: it still is
            lead = max((next_report_seconds - now) * _LEAD, (self.step_seconds or 0.0) * _LEAD_STEPS)
            self._wanted_from_seconds = next_report_seconds - lead
        return latest

    def outdated(self) -> None:
        """Something has changed the heap: the next report must not show what was before."""
        self._latest = None

    def take(self) -> Sample:
        """Look now, in this thread."""
        with self._busy:
            return self._look()

    def exclusively(self) -> threading.Lock:
        """The lock that keeps steps from sampling: held while the cache is being cleared, so that none waits for it."""
        return self._busy

    def _stepped(self) -> None:
        now = self._clock()
        if self._last_step_seconds is not None:
            self._step_seconds = now - self._last_step_seconds
            self._recent_step_seconds[self._steps % _PACE_STEPS] = self._step_seconds
        self._last_step_seconds = now
        self._steps += 1
        if now >= self._wanted_from_seconds and self._busy.acquire(blocking=False):
            try:
                self._look()
                self._wanted_from_seconds = float("inf")
            finally:
                self._busy.release()
        self.at_step(self._steps)

    def _look(self) -> Sample:
        sample = Sample(
            taken_seconds=self._clock(),
            devices=self._allocator.samples(),
            pinned_host_bytes=self._allocator.pinned_host_bytes(),
            step=self.step,
        )
        self._latest = sample
        return sample

    def _last_known(self, latest: Sample | None) -> Sample:
        now = self._clock()
        if latest is not None and now - latest.taken_seconds < _FLUSH_SECONDS_MAX:
            return latest
        return Sample(taken_seconds=now, devices=(), pinned_host_bytes=None, step=self.step)

    def steps_run(self) -> bool:
        """Steps are being made: the last is no longer ago than a few of them take. Any thread may ask."""
        if self._last_step_seconds is None:
            return False
        patience = min(max(_QUIET_STEPS * self._step_seconds, _QUIET_SECONDS_MIN), _QUIET_SECONDS_MAX)
        return self._clock() - self._last_step_seconds < patience
