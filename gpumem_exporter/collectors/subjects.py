"""The parts of a page. Each is a pure function of a view, and a failing part does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.allocators import allocator_samples
from gpumem_exporter.collectors.devices import device_samples, ledger_samples
from gpumem_exporter.collectors.lines import Column, Sample
from gpumem_exporter.collectors.ooms import oom_samples
from gpumem_exporter.collectors.processes import process_samples
from gpumem_exporter.collectors.reporters import poll_samples, reporter_samples
from gpumem_exporter.collectors.view import View

__all__ = ["DEVICE", "PROCESS", "SUBJECTS", "TORCH", "Subject", "SubjectRunner"]

Subject: TypeAlias = "Callable[[View], Iterator[Sample] | Iterator[Column] | Iterator[Sample | Column]]"
T = TypeVar("T")

DEVICE, PROCESS, TORCH = "device", "process", "torch"
SUBJECTS: tuple[tuple[str, Subject], ...] = (
    ("poll", poll_samples),
    (DEVICE, lambda view: device_samples(view.node, view.ordered)),
    ("ledger", ledger_samples),
    (PROCESS, process_samples),
    (TORCH, allocator_samples),
    ("oom", oom_samples),
    ("reporter", reporter_samples),
)
"""The value of the label `collector`, and the function that returns its samples."""

_log = logging.getLogger(__name__)


class SubjectRunner:
    """Runs subjects so that a failing one does not affect the others. It logs the first failure. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: set[str] = set()

    def run(self, name: str, make: Callable[[], T], outcomes: list[Sample]) -> T | None:
        """Return the result of `make`, or None if it raises; adds success and duration to `outcomes`."""
        started = self._clock()
        made: T | None = None
        success = 0
        try:
            made = make()
        except Exception:  # noqa: BLE001 - one failing subject must not lose the page
            if name not in self._failing:
                self._failing.add(name)
                _log.exception("collector %r failed; its metrics are left out until it succeeds", name)
        else:
            success = 1
            self._failing.discard(name)
        outcomes.append((catalog.COLLECTOR_SUCCESS, (name,), success))
        outcomes.append((catalog.COLLECTOR_DURATION, (name,), self._clock() - started))
        return made
