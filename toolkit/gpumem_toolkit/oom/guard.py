"""`oom_guard`: adds a diagnosis to out-of-memory errors, and passes them on."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.reclaimable import known
from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.out_of_memory import chain, is_out_of_memory, out_of_memory_in
from gpumem_client.phases.block_contexts import RunningBlocks, run_calls_in
from gpumem_client.torch_access import DeviceState, initialized_torch, process_statistics
from gpumem_toolkit.oom.diagnosis import NOTE_PREFIX, OomDiagnosis, Run, diagnose
from gpumem_toolkit.oom.growth import BlockHistory

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BLOCKS_MAX = 64
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class OomGuard:
    """Guards a `with` block, or each call of a decorated function. `oom_guard` creates it.

    An instance can be used repeatedly, nested, and by several threads at once. `diagnosis` is the diagnosis of the last
    error, otherwise None. The user's code may set `batch_size` before each run.
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
        self._running: RunningBlocks[tuple[Run | None]] = RunningBlocks()

    def __enter__(self) -> OomGuard:
        run = None
        with guest_safety(lambda error: log.info("a guarded block is not measured: %r", error)):
            run = _blocks.start(self._block, self.batch_size)
        self._running.push((run,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (run,) = self._running.pop() or (None,)
        with guest_safety(lambda own: log.info("an out-of-memory error has no diagnosis: %r", own)):
            if error is None:
                _blocks.end(run, self.batch_size)
            elif initialized_torch() is not None and (first := out_of_memory_in(error)) is not None:
                self._diagnose(error, first, traceback, run)

    def __call__(self, function: _Function) -> _Function:
        """Guard each call of a function, of a coroutine function or of a generator function until it ends."""
        guarded = run_calls_in(function, self._for_one_call)
        guarded.__dict__["gpumem_guard"] = self
        return guarded

    def _diagnose(
        self, error: BaseException, first: BaseException, traceback: TracebackType | None, run: Run | None
    ) -> None:
        """Diagnose `first`, the out-of-memory error in the chain of `error`."""
        try:
            if not has_note(error):
                self.diagnosis = diagnose(first, traceback if first is error else first.__traceback__, run)
                add_note(error, str(self.diagnosis))
                if self._on_oom is not None:
                    self._on_oom(self.diagnosis)
        finally:
            # Also if the diagnosis fails: the user's next try needs the memory.
            # The frames of an error keep its tensors as long as the error exists (pytorch/pytorch#18853).
            if self._free_frames:
                for each in chain(error):
                    clear_frames(each.__traceback__)
            if self._clean:
                allocator = attached()
                # During a capture, neither a finalizer nor the cudaFree of a clear is permitted in any thread.
                if allocator is not None and not allocator.capturing:
                    gc.collect()
                    allocator.empty_cache()

    def _for_one_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OomGuard:
        """Return a guard for one call."""
        # Calls of coroutines may end in any order, and the running blocks of one guard are a stack.
        one = copy.copy(self)
        one._running = RunningBlocks()
        if self._batch_of is not None:
            with guest_safety(lambda error: log.info("the batch size of a guarded call is unknown: %r", error)):
                one.batch_size = int(self._batch_of(*args, **kwargs))
        one._on_oom = self._keep_diagnosis
        return one

    def _keep_diagnosis(self, diagnosis: OomDiagnosis) -> None:
        self.diagnosis = diagnosis
        if self._on_oom is not None:
            self._on_oom(diagnosis)


def oom_guard(
    *,
    batch_size: int | Callable[..., int] | None = None,
    on_oom: Callable[[OomDiagnosis], None] | None = None,
    free_frames: bool = False,
    clean: bool = True,
) -> OomGuard:
    """Explain out-of-memory errors of a block or a function: where, why, and what helps, the best advice first.

        @gpumem_toolkit.oom_guard(batch_size=lambda model, batch: len(batch))
        def train_step(model, batch): ...

        with gpumem_toolkit.oom_guard(batch_size=len(batch)) as guard:
            loss = model(batch).sum()

    The error keeps its type and arguments. The explanation is a note below it (`add_note`; on Python 3.10 in
    `__notes__`, which only newer versions print), and `guard.diagnosis`. From runs without an error, the guard learns
    how much memory the block needs per batch size, and whether memory grows from run to run. It resets no statistic: if
    the process once had a higher peak, the reserved bytes bound the need of a run. A run costs about 30 µs, and nothing
    without CUDA. Any thread may use it.

    After an error, the guard collects garbage and empties the cache. The frames of the error keep their local
    variables, and with them their tensors, for post-mortem debuggers and error trackers.

    Args:
        batch_size: items in the batch of the block; for a decorator also a function of the arguments of a call.
        on_oom: called with each diagnosis, in the user's thread.
        free_frames: clear the local variables of the frames that the error has ended, for a handler that tries again.
        clean: collect garbage and empty the cache after an error, unless a CUDA graph is being captured.
    """
    caller = sys._getframe(1)
    block = caller.f_code.co_filename, caller.f_lineno
    return OomGuard(block, batch_size, on_oom, free_frames=free_frames, clean=clean)


class _Blocks:
    """The histories of the guarded blocks of this process, by their place in the code and their device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may enter a guard while its thread has the lock
        self._histories: OrderedDict[tuple[tuple[str, int], int], BlockHistory] = OrderedDict()

    def start(self, block: tuple[str, int], batch_size: int | None) -> Run | None:
        statistics = process_statistics()
        if statistics is None:
            return None
        device = int(sys.modules["torch"].cuda.current_device())
        state = statistics.state(device)
        if state is None:
            return None
        allocated = state["allocated_bytes"]
        with self._lock:
            history = self._histories.setdefault((block, device), BlockHistory())
            self._histories.move_to_end((block, device))
            while len(self._histories) > _BLOCKS_MAX:
                self._histories.popitem(last=False)
            history.started(allocated["current"])
        return Run(device, allocated["current"], allocated["peak"], *_reserved(state), batch_size, history)

    def end(self, run: Run | None, batch_size: int | None) -> None:
        statistics = process_statistics()
        state = None if run is None or statistics is None else statistics.state(run.device)
        if run is None or state is None:
            return
        peak = state["allocated_bytes"]["peak"]
        with self._lock:
            if peak > run.peak_bytes:
                run.history.measured(batch_size, peak - run.start_bytes)
                return
            # The process once had a higher peak. What this run allocated is still reserved, unless memory was released.
            reserved, freed = _reserved(state)
            kept = freed is not None and freed == run.reserved_freed_bytes
            most = min(peak, reserved) if kept else peak
            run.history.bounded(batch_size, most - run.start_bytes, close=kept and reserved > run.reserved_bytes)


def _reserved(state: DeviceState) -> tuple[int, int | None]:
    """Return the reserved bytes, and all that were ever released; None if the allocator does not count these."""
    return state["reserved_bytes"]["current"], known(state, "reserved_bytes", "freed")


_blocks = _Blocks()


def has_note(error: BaseException) -> bool:
    """Whether this error has a diagnosis, apart from earlier out-of-memory errors in its context."""
    for each in chain(error):
        if any(isinstance(note, str) and note.startswith(NOTE_PREFIX) for note in getattr(each, "__notes__", ())):
            return True
        if is_out_of_memory(each):
            return False
    return False


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, in all Python versions."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]


def clear_frames(traceback: TracebackType | None) -> None:
    """Clear the frames that the error has ended. Running frames and frames of suspended generators stay."""
    while traceback is not None:
        frame: FrameType = traceback.tb_frame
        # Before Python 3.13, clearing the frame of a suspended generator would end its generator.
        if sys.version_info >= (3, 13) or not frame.f_code.co_flags & _SUSPENDABLE:
            with contextlib.suppress(RuntimeError):
                frame.clear()
        traceback = traceback.tb_next
