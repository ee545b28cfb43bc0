"""Shared parts of phases, measured blocks and out-of-memory guards: context managers that are also decorators."""

from __future__ import annotations

import functools
import inspect
import threading
from contextlib import AbstractContextManager
from typing import Any, Callable, Generic, TypeVar

_Block = TypeVar("_Block")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class RunningBlocks(Generic[_Block]):
    """The running blocks of one context manager. Several threads may enter it, repeatedly and nested."""

    def __init__(self) -> None:
        self._by_thread: dict[int, list[_Block]] = {}

    def push(self, block: _Block) -> None:
        """Add a block of this thread."""
        self._by_thread.setdefault(threading.get_ident(), []).append(block)

    def pop(self) -> _Block | None:
        """Remove the latest block of this thread. If this thread started none, the latest of another thread."""
        thread = threading.get_ident()
        own = self._by_thread.get(thread)
        stack = own or next((stack for stack in list(self._by_thread.values()) if stack), None)
        if not stack:
            return None
        block = stack.pop()
        if own is not None and not own:
            self._by_thread.pop(thread, None)
        return block


def run_calls_in(
    function: _Function, block_of: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]]
) -> _Function:
    """Return a function that runs each call in a block of its own, which `block_of` makes from the call's arguments.

    The block of a coroutine function ends with the coroutine, the block of a generator function with its last value.

    Raises:
        TypeError: the function is an asynchronous generator function.
    """
    wrapped: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block_of(args, kwargs):
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block_of(args, kwargs):
                return (yield from function(*args, **kwargs))

    elif inspect.isasyncgenfunction(function):
        name = function.__qualname__
        raise TypeError(f"cannot decorate the asynchronous generator {name}: put a `with` block around its loop")
    else:

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block_of(args, kwargs):
                return function(*args, **kwargs)

    return functools.update_wrapper(wrapped, function)  # type: ignore[return-value]
