"""Keeps what our own code raises from the program, and nothing of the program's from it.

Python runs a signal's handlers in the main thread, between any two of its instructions: also while that thread is in
our code. What a handler raises there (a timeout's error, say) is none of ours: it is for the program, which waits for
it further up.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType, TracebackType
from typing import Any

__all__ = ["Swallowing", "of_a_handler"]


class Swallowing:
    """`with Swallowing():` ends well whatever goes wrong in the block. May be entered again and by several threads."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and not of_a_handler(error)


def of_a_handler(error: BaseException) -> bool:
    """Whether a handler of a signal has raised this, in the thread that asks."""
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
    """What runs when this is called, as far as it is Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    called = getattr(type(handler), "__call__", None)  # noqa: B004 - it is not asked whether it can be called
    code = getattr(handler, "__code__", None) or getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None
