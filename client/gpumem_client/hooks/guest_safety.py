"""The boundary that keeps the client's errors from the user's code, and lets the user's errors through.

Python runs signal handlers in the main thread between any two of its instructions, also while that thread runs code of
the client. An exception that a handler raises there, for example a timeout, belongs to the user's code and must reach
it.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, TypeVar

__all__ = ["guest_safety", "raised_by_signal_handler"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class guest_safety:  # noqa: N801 - reads as a function, like contextlib.suppress
    """`with guest_safety():` swallows the errors of the block, except those of a signal handler.

    `@guest_safety()` does the same for each call of a function, which then returns None. The boundary may be entered
    again, and by several threads at once.

    Args:
        report: called with each error before it is swallowed.
    """

    __slots__ = ("_report",)

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

        @functools.wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            with self:
                return function(*arguments, **named)

        return guarded  # type: ignore[return-value]


def raised_by_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised this error in the calling thread."""
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
