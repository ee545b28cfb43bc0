"""Finds an object of an engine on the stacks of this process."""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Tuple

ClassName = Tuple[str, str]
"""The module and the name of a class."""

# A search of the stacks is followed by a pause of this multiple of its CPU time: 0.05 % of a core. A search takes
# 0.7 µs a frame and keeps the GIL; while an object is not found, the searches do not end.
_SEARCH_SHARE = 2000


class LiveObjects:
    """Objects that were found once, and that nothing here keeps alive. For one thread.

    `methods` has, by the module and the name of a class, methods such as `Worker.load_model` of this class or of its
    subclasses in the same module: an object of the class is found while one of its methods runs in any thread. Reading
    the local variables of a frame keeps them alive until the method returns, so methods that run for long must have no
    large ones.
    """

    def __init__(self, methods: Mapping[ClassName, Sequence[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._methods = methods
        self._clock = clock
        self._found: dict[ClassName, weakref.ref[Any]] = {}
        self._next_search_seconds = 0.0

    def get(self, name: ClassName) -> Any:
        """Return the object of a class; None if it was not found or was deleted. Any thread may call this."""
        found = self._found.get(name)
        return None if found is None else found()

    def search(self) -> None:
        """Search the stacks of all threads, unless the last search was too recent."""
        if self._clock() < self._next_search_seconds:
            return
        # The stacks, because engines have no list of their objects. The garbage collector does not show them either:
        # vLLM freezes its heap once it has started.
        started = time.thread_time()
        codes = {code: name for name, methods in self._methods.items() for code in _codes(name[0], methods)}
        for innermost in sys._current_frames().values() if codes else ():  # noqa: SLF001
            frame: Any = innermost
            while frame is not None:
                name = codes.get(frame.f_code)
                found = None if name is None else frame.f_locals.get("self")
                if name is not None and isinstance(found, _attribute(*name) or ()):
                    self._found[name] = weakref.ref(found)
                frame = frame.f_back
        self._next_search_seconds = self._clock() + (time.thread_time() - started) * _SEARCH_SHARE


def _codes(module: str, methods: Sequence[str]) -> list[Any]:
    """Return the code of each method that the loaded module has."""
    found = [inspect.unwrap(method) for method in (_attribute(module, *each.split(".")) for each in methods) if method]
    codes = [getattr(method, "__code__", None) for method in found]
    return [code for code in codes if code is not None]


def _attribute(module: str, class_name: str, method: str | None = None) -> Any:
    """Return a class of a loaded module, or a method of it; None if there is none of this name."""
    # From the dictionary: a lookup of an attribute may import a module.
    found = vars(sys.modules[module]).get(class_name) if module in sys.modules else None
    if not isinstance(found, type):
        return None
    return found if method is None else getattr(found, method, None)
