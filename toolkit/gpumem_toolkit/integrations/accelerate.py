"""`watching` for training loops with accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from gpumem_toolkit.integrations.training_watch import TrainingWatch, safely


class GpuMemTracker(GeneralTracker):
    """Adds the values of the main process to each record of the accelerator's other trackers."""

    name = "gpumem"
    requires_logging_directory = False

    def __init__(self, accelerator: Accelerator, watch: TrainingWatch) -> None:
        self._accelerator = accelerator
        self._watch = watch
        super().__init__()

    @property
    def tracker(self) -> TrainingWatch:
        """What measures."""
        return self._watch

    @safely
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:  # noqa: ARG002 - as in its class
        """Add to the values, which the other trackers get after this one."""
        values.update(self._watch.values())


@contextlib.contextmanager
def watching(accelerator: Accelerator, *, leaks: bool = True) -> Iterator[TrainingWatch]:
    """Watch a training loop: explain its out-of-memory errors, find leaks, and log memory.

        accelerator.init_trackers("run")
        with watching(accelerator):
            for batch in loader: ...
            accelerator.log({"loss": loss}, step=step)

    Each `accelerator.log` within the block also logs the values of the main process, such as `gpumem/reserved_bytes`,
    to the trackers that exist at its start. An out-of-memory error keeps its type and arguments: the explanation is a
    note below it, and in the log. `gpumem.phase` names the phases of the loop.

    Args:
        accelerator: its trackers get the values.
        leaks: detect memory that grows from step to step (`leak_detector`).
    """
    watch = TrainingWatch(leaks=leaks)
    trackers = accelerator.trackers
    tracker = GpuMemTracker(accelerator, watch)
    trackers.insert(0, tracker)
    try:
        yield watch
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.stop()
        trackers.remove(tracker)
