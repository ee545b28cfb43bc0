"""`GpuMemCallback` for the `Trainer` of transformers and the trainers that derive from it, such as those of trl."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import transformers

from gpumem_toolkit.integrations.training_watch import TrainingWatch, safely

# The frames between `on_train_begin` and the trainer: the boundary, and the handler of callbacks.
_CALLERS_MAX = 8


class GpuMemCallback(transformers.TrainerCallback):
    """Measures the phases of a training, explains its out-of-memory errors, finds leaks and logs memory.

        trainer = transformers.Trainer(..., callbacks=[GpuMemCallback()])

    The phases are `train` (a step with all of its micro batches), `evaluate` and `save`. Each record of the loss that
    the trainer logs gets the values of this rank, such as `gpumem/reserved_bytes`. An out-of-memory error keeps its
    type and arguments: the explanation is a note below it, and in the log.

    Args:
        leaks: detect memory that grows from step to step (`leak_detector`).
    """

    def __init__(self, *, leaks: bool = True) -> None:
        self._leaks = leaks
        self._watch: TrainingWatch | None = None
        self._restore: Callable[[], object] = lambda: None

    def __reduce__(self) -> tuple[Callable[[], GpuMemCallback], tuple[()]]:
        """Copy or pickle as a callback that watches no training."""
        return functools.partial(GpuMemCallback, leaks=self._leaks), ()

    @safely
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start to watch."""
        self._stop()
        self._watch = TrainingWatch(leaks=self._leaks)
        trainer = _calling_trainer()
        if trainer is not None:
            self._surround(trainer, self._watch)

    @safely
    def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Start a step."""
        if self._watch is not None:
            self._watch.step_starts(args.per_device_train_batch_size)

    @safely
    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step."""
        if self._watch is not None:
            self._watch.step_ends()

    @safely
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the watch."""
        self._stop()

    def _surround(self, trainer: Any, watch: TrainingWatch) -> None:
        """Learn of errors, evaluations and records, which no callback shows, until the training ends."""

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                logs.update(watch.values())
            usual_log(logs, *args, **kwargs)

        usual_log = trainer.log
        loop = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"  # one method before transformers 5
        methods = {
            "evaluate": _within(lambda: watch.phase("evaluate"), trainer.evaluate),
            "_save_checkpoint": _within(lambda: watch.phase("save"), trainer._save_checkpoint),
            loop: _within(lambda: self._errors(watch), getattr(trainer, loop)),
            "log": functools.wraps(usual_log)(log),
        }
        # Attributes of this one trainer. What others have put there is restored.
        before = {name: value for name, value in vars(trainer).items() if name in methods}
        self._restore = lambda: [*map(vars(trainer).pop, methods), vars(trainer).update(before)]
        vars(trainer).update(methods)

    @contextlib.contextmanager
    def _errors(self, watch: TrainingWatch) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            watch.failed(error)
            safely(self._stop)()
            raise

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        restore, self._restore = self._restore, lambda: None
        if watch is not None:
            watch.stop()
        restore()


def _calling_trainer() -> Any | None:
    """Return the trainer that calls the callback. Transformers hands callbacks its state, model and optimizer only."""
    callers = islice(traceback.walk_stack(sys._getframe(1)), _CALLERS_MAX)
    found = (frame.f_locals.get("self") for frame, _ in callers)
    return next((each for each in found if isinstance(each, transformers.Trainer)), None)


def _within(context: Callable[[], contextlib.AbstractContextManager[None]], method: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return within
