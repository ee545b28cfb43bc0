"""`GpuMemCallback` for the `Trainer` of Lightning, from the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpumem_toolkit.integrations.training_watch import TrainingWatch, safely

# Both packages may be installed, and their classes differ. A user of one has imported it.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_pytorch: Any = importlib.import_module(next((name for name in _PACKAGES if name in sys.modules), _PACKAGES[0]))


class GpuMemCallback(_pytorch.Callback):
    """Measures the phases of a training, explains its out-of-memory errors, finds leaks and logs memory.

        trainer = lightning.Trainer(callbacks=[GpuMemCallback()])

    The phases are `train` (one batch), `evaluate` (validation, test and prediction) and `save`. The trainer's loggers
    get the values of this rank every `log_every_n_steps` batches, such as `gpumem/reserved_bytes`: it replaces
    `DeviceStatsMonitor` for memory. An out-of-memory error keeps its type and arguments: the explanation is a note
    below it, and in the log.

    Args:
        leaks: detect memory that grows from step to step (`leak_detector`).
    """

    def __init__(self, *, leaks: bool = True) -> None:
        self._leaks = leaks
        self._watch: TrainingWatch | None = None
        self._evaluation = ExitStack()
        self._restore: Callable[[], object] = lambda: None

    def __reduce__(self) -> tuple[Callable[[], GpuMemCallback], tuple[()]]:
        """Copy or pickle as a callback that watches no training."""
        return functools.partial(GpuMemCallback, leaks=self._leaks), ()

    @safely
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - the hooks have these arguments
        """Start to watch."""
        self._stop()
        self._watch = watch = TrainingWatch(leaks=self._leaks and stage == "fit")

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with watch.phase("save"):
                type(trainer).save_checkpoint(trainer, *args, **kwargs)

        # An attribute of this one trainer, until it ends: a callback does not learn when a checkpoint is written.
        if "save_checkpoint" not in vars(trainer):
            self._restore = lambda: vars(trainer).pop("save_checkpoint", None)
            trainer.save_checkpoint = functools.wraps(trainer.save_checkpoint)(save_checkpoint)

    @safely
    def teardown(self, *_: Any, **__: Any) -> None:
        """End the watch."""
        self._stop()

    @safely
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Explain an out-of-memory error, and end the watch."""
        if self._watch is not None:
            self._watch.failed(exception)
        self._stop()

    @safely
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Start a step."""
        if self._watch is not None:
            self._watch.step_starts(None)

    @safely
    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """End a step, and log."""
        if self._watch is None:
            return
        self._watch.step_ends()
        # As `DeviceStatsMonitor` counts, so that the values are in the rows of the trainer's own metrics.
        steps = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step - 1)
        if trainer.is_global_zero and trainer.loggers and (steps + 1) % trainer.log_every_n_steps == 0:
            values = self._watch.values()
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, step=steps)

    @safely
    def on_validation_start(self, *_: Any, **__: Any) -> None:
        """Start the phase `evaluate`."""
        self._evaluation.close()
        if self._watch is not None:
            self._evaluation.enter_context(self._watch.phase("evaluate"))

    @safely
    def on_validation_end(self, *_: Any, **__: Any) -> None:
        """End the phase `evaluate`."""
        self._evaluation.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        restore, self._restore = self._restore, lambda: None
        self._evaluation.close()
        if watch is not None:
            watch.stop()
        restore()
