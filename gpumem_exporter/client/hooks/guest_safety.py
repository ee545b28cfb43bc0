"""Keeps the client's own errors from the user's code, and lets the user's errors through.

Python runs signal handlers in the main thread between any two of its instructions, also while that thread is in the
client's code. An exception that a handler raises there, for example a timeout, belongs to the user's code, which waits
for it further up.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType, TracebackType
from typing import Any

__all__ = ["Swallowing", "raised_by_signal_handler"]


class Swallowing:
    """`with Swallowing():` swallows the errors of the block, except those of a signal handler.

    It may be entered again, and by several threads at once.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and not raised_by_signal_handler(error)


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
    """The code of the Python function that runs when the handler is called; None if there is none."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    called = getattr(type(handler), "__call__", None)  # noqa: B004 - it is not asked whether it can be called
    code = getattr(handler, "__code__", None) or getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None
