"""Explains out-of-memory errors where they happen, and lets them go on as they are."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

from gpumem_exporter.client.allocator.attached import attached
from gpumem_exporter.client.allocator.statistics import Statistics, initialised_torch
from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.measured import pop_running
from gpumem_exporter.client.oom.diagnosis import NOTE_BEGINS, OomDiagnosis, Run, diagnose
from gpumem_exporter.client.oom.growth import BlockHistory
from gpumem_exporter.client.oom.message import is_out_of_memory

__all__ = ["OomGuard", "oom_guard"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BLOCKS_MAX = 64
_CHAIN_MAX = 8
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class OomGuard:
    """Guards the block under `with`, or each call of the function that it decorates. `oom_guard` makes one.

    It may be used again, inside itself and by several threads at once.

    Attributes:
        diagnosis: of the last error that went through it, else None.
        batch_size: of the block's next run; may be set anew for each.
    """

    def __init__(
        self,
        block: tuple[str, int],
        batch_size: int | Callable[..., int] | None,
        on_oom: Callable[[OomDiagnosis], None] | None,
        *,
        free_frames: bool,
        clean: bool,
    ) -> None:
        self.diagnosis: OomDiagnosis | None = None
        self.batch_size = batch_size if isinstance(batch_size, int) else None
        self._batch_of = batch_size if callable(batch_size) else None
        self._block = block
        self._on_oom = on_oom
        self._free_frames = free_frames
        self._clean = clean
        self._running: dict[int, list[tuple[Run | None]]] = {}

    def __enter__(self) -> OomGuard:
        run = None
        try:
            run = _blocks.begin(self._block, self.batch_size)
        except Exception as error:  # a guest breaks nothing
            if raised_by_signal_handler(error):
                raise
            log.info("a block is not measured: %r", error)
        self._running.setdefault(threading.get_ident(), []).append((run,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (run,) = pop_running(self._running) or (None,)
        try:
            if error is None:
                _blocks.end(run, self.batch_size)
            elif initialised_torch() is not None and any(is_out_of_memory(each) for each in chain(error)):
                self._explain(error, traceback, run)
        except Exception as trouble:  # the program's own error goes on, whatever happens here
            if raised_by_signal_handler(trouble):
                raise
            log.info("an out-of-memory error is not explained: %r", trouble)

    def _explain(self, error: BaseException, traceback: TracebackType | None, run: Run | None) -> None:
        try:
            if not has_note(error):
                first = next(each for each in chain(error) if is_out_of_memory(each))
                self.diagnosis = diagnose(first, traceback if first is error else first.__traceback__, run)
                add_note(error, str(self.diagnosis))
                if self._on_oom is not None:
                    self._on_oom(self.diagnosis)
        finally:  # whatever the explaining raises: the program's next try needs the memory
            if self._free_frames:
                for each in chain(error):
                    clear_frames(each.__traceback__)
            if self._clean:
                allocator = attached()
                if allocator is not None and not allocator.capturing:
                    gc.collect()
                    allocator.empty_cache()

    def _again(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> OomGuard:
        """One for a single call: calls of coroutines do not end in the order in which they began."""
        again = copy.copy(self)
        again._running = {}
        if self._batch_of is not None:
            try:
                again.batch_size = int(self._batch_of(*arguments, **named))
            except Exception as error:  # as above
                if raised_by_signal_handler(error):
                    raise
                log.info("the size of a batch is not known: %r", error)
        again._on_oom = self._keep
        return again

    def _keep(self, diagnosis: OomDiagnosis) -> None:
        self.diagnosis = diagnosis
        if self._on_oom is not None:
            self._on_oom(diagnosis)

    def __call__(self, function: _Function) -> _Function:
        """Guard each call of a function, of a coroutine function to its end, of a generator to its last value."""
        guarded: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def guarded(*args: Any, **kwargs: Any) -> Any:
                with self._again(args, kwargs):
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            def guarded(*args: Any, **kwargs: Any) -> Any:
                with self._again(args, kwargs):
                    return (yield from function(*args, **kwargs))

        elif inspect.isasyncgenfunction(function):
            raise TypeError("an asynchronous generator cannot be guarded by a decorator; use `with` around its loop")
        else:

            def guarded(*args: Any, **kwargs: Any) -> Any:
                with self._again(args, kwargs):
                    return function(*args, **kwargs)

        functools.update_wrapper(guarded, function)
        guarded.__dict__["gpumem_guard"] = self
        return guarded  # type: ignore[return-value]


def oom_guard(
    *,
    batch_size: int | Callable[..., int] | None = None,
    on_oom: Callable[[OomDiagnosis], None] | None = None,
    free_frames: bool = False,
    clean: bool = True,
) -> OomGuard:
    """Explain out-of-memory errors of a block or a function: where, why, and what would help, the best first.

        @gpumem.oom_guard(batch_size=lambda model, batch: len(batch))
        def train_step(model, batch): ...

        with gpumem.oom_guard(batch_size=len(batch)) as guard:
            loss = model(batch).sum()

    The error goes on as it is, of its type and with its arguments; the explanation is a note below it, as of
    `add_note` (on Python 3.10 in `__notes__`, which only newer Pythons print), and `guard.diagnosis`. Runs that end
    well teach what the block grows by with each size of batch, and whether more is left from run to run; no statistic
    is reset for that. A run costs about 30 µs, and nothing without CUDA. Any thread may use it.

    After an error, the garbage and the cache are released. The frames that the error went through keep their local
    variables, and with them their tensors, until the error is dropped: a post-mortem debugger or an error tracker reads
    them. `free_frames=True` clears the frames that have ended, so that the handler of the error, for example one that
    tries a smaller batch, starts with all the memory that can be released.

    Args:
        batch_size: items in the block's batch; for a decorator also a function of its call's arguments.
        on_oom: called with each diagnosis, in the program's thread.
        free_frames: clear the local variables of the frames that the error has ended.
        clean: collect garbage and empty the cache after an error, unless a CUDA graph is being captured.
    """
    caller = sys._getframe(1)
    block = caller.f_code.co_filename, caller.f_lineno
    return OomGuard(block, batch_size, on_oom, free_frames=free_frames, clean=clean)


class _Blocks:
    """What is remembered of each guarded block, by where it stands in the program."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that runs inside may enter a guard itself
        self._histories: OrderedDict[tuple[tuple[str, int], int], BlockHistory] = OrderedDict()
        self._statistics: Statistics | None = None

    def begin(self, block: tuple[str, int], batch_size: int | None) -> Run | None:
        torch = initialised_torch()
        if torch is None:
            return None
        if self._statistics is None:
            self._statistics = Statistics(torch)
        device = int(torch.cuda.current_device())
        state = self._statistics.state(device)
        if state is None:
            return None
        figures = state["allocated_bytes"]["all"]
        with self._lock:
            history = self._histories.setdefault((block, device), BlockHistory())
            self._histories.move_to_end((block, device))
            while len(self._histories) > _BLOCKS_MAX:
                self._histories.popitem(last=False)
            history.begun(figures["current"])
        return Run(device, figures["current"], figures["peak"], batch_size, history)

    def end(self, run: Run | None, batch_size: int | None) -> None:
        if run is None or self._statistics is None or initialised_torch() is None:
            return
        state = self._statistics.state(run.device)
        if state is None:
            return
        peak = state["allocated_bytes"]["all"]["peak"]
        if peak > run.peak_bytes:  # so this run made it; else it is not known how high it came
            with self._lock:
                run.history.ended(batch_size, peak - run.begin_bytes)


_blocks = _Blocks()  # a process has one allocator


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _CHAIN_MAX:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def has_note(error: BaseException) -> bool:
    """It is explained already. What happened before it, in whose handler it was raised, is another error."""
    for each in chain(error):
        if any(isinstance(note, str) and note.startswith(NOTE_BEGINS) for note in getattr(each, "__notes__", ())):
            return True
        if is_out_of_memory(each):
            return False
    return False


def add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]


def clear_frames(traceback: TracebackType | None) -> None:
    """Clear the frames that the error has ended.

    A frame that runs refuses (it is the program's, or another thread's). So does a suspended generator's, from Python
    3.13 on; before, clearing it would end the generator, so that those are left as they are.
    """
    while traceback is not None:
        frame: FrameType = traceback.tb_frame
        if sys.version_info >= (3, 13) or not frame.f_code.co_flags & _SUSPENDABLE:
            with contextlib.suppress(RuntimeError):
                frame.clear()
        traceback = traceback.tb_next
