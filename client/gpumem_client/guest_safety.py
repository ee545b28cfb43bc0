"""The boundary that keeps the client's errors from the user's code, and lets the user's errors through.

Errors of the client are swallowed and logged, each kind once. Errors of logging handlers are swallowed, too. A part of
the client that fails with the same error again and again is turned off.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
import threading
from collections import Counter
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Callable, TypeVar

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")

# Equal errors of one kind after which it is not tried again.
_EQUAL_ERRORS = 3


class guest_safety:  # noqa: N801 - reads as a function, like contextlib.suppress
    """`with guest_safety():` swallows the errors of the block, except errors of a signal handler.

    `@guest_safety()` does the same for each call of a function, which then returns None. `report` is called with each
    error before it is swallowed. The boundary may be entered again, and by several threads at once.
    """

    def __init__(self, report: Callable[[Exception], object] | None = None) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or raised_by_signal_handler(error):
            return False
        if self._report is not None:
            self._report(error)
        return True

    def __call__(self, function: _Function) -> _Function:
        """Return the function with each call inside the boundary."""

        # Not by `contextlib.ContextDecorator`: all functions that it decorates share one code, and a signal handler of
        # the user's code may be one of them. Each error of the client would then count as raised by that handler. And
        # the search for owners skips the arguments of this code, which is the client's.
        @functools.wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            with self:
                return function(*arguments, **named)

        return guarded  # type: ignore[return-value]


def raised_by_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised this error in the calling thread."""
    # Python runs signal handlers in the main thread between any two of its instructions, also while that thread runs
    # code of the client. What a handler raises there, for example a timeout, belongs to the user's code.
    if threading.get_ident() != threading.main_thread().ident:
        return False
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in codes:
            return True
        step = step.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Return the code of the Python function that runs when the handler is called; None if there is none."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    called = getattr(type(handler), "__call__", None)  # noqa: B004 - needs the method itself
    code = getattr(handler, "__code__", None) or getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None


class GuestLog(_Adapter):
    """A logger of the client or the toolkit. It swallows the errors of logging handlers."""

    @guest_safety()
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; an error of a handler is swallowed."""
        if self.isEnabledFor(level):
            # As text, because a handler that keeps an error would also keep its frames and all tensors in them.
            text = str(msg) % args if args else msg
            # The record names the caller: skip the adapter's method, such as `warning`, and `guest_safety`.
            skipped = 2 if sys.version_info >= (3, 11) else 3
            super().log(level, text, stacklevel=kwargs.pop("stacklevel", 1) + skipped, **kwargs)


log = GuestLog(logging.getLogger("gpumem_client"), None)


class ErrorLog:
    """Logs the first error of each kind. Any thread may use it."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._counts: Counter[tuple[str, type]] = Counter()
        self._ended: set[str] = set()

    def note(self, kind: str, error: BaseException, level: int = logging.WARNING) -> None:
        """Log one line for the first error of this kind; later ones are silent until `clear`."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.log(level, "%s: %s", kind, error)

    def clear(self, kind: str) -> None:
        """Log the next error of this kind again, because the cause has ended."""
        self._logged.discard(kind)

    def attempt(self, kind: str, function: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return the result of a part of the client; `otherwise` if it fails, or has been turned off (`failed`)."""
        if kind not in self._ended:
            with guest_safety(functools.partial(self.failed, kind)):
                return function()
        return otherwise

    def failed(self, kind: str, error: BaseException, then: str = "not tried again in this process") -> bool:
        """Note an internal error, and return whether it is the third equal one of its kind, or a later one.

        What the caller does after the third is logged, in the words of `then`.
        """
        self.note(kind, error)
        equal = kind, type(error)
        self._counts[equal] += 1
        if self._counts[equal] == _EQUAL_ERRORS and kind not in self._ended:
            self._ended.add(kind)
            log.warning("%s: %s, after the same error %d times: %r", kind, then, _EQUAL_ERRORS, error)
        return kind in self._ended

    def ended(self, kind: str) -> bool:
        """Return whether three equal errors of this kind have occurred."""
        return kind in self._ended

    def swallowed(self, kind: str) -> guest_safety:
        """Return the boundary that notes and swallows the errors of a block."""
        return guest_safety(functools.partial(self.note, kind))
