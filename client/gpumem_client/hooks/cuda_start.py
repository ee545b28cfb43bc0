"""Runs a callback when this process initializes CUDA, without importing torch and without polling.

A finder on `sys.meta_path` waits until `torch.cuda` is imported. Then torch's own queue of deferred calls
(`torch.cuda._lazy_call`, in every release since 1.0) runs the callback in the thread that initializes CUDA. The finder
costs one comparison per import and is removed once it has seen `torch.cuda`.

`bootstrap/sitecustomize.py` loads this file by its path in every Python process below `gpumem-exporter run`: it must
stay a single file that imports `sys` alone.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def when_cuda_starts(callback: "Callable[[], None]") -> "Callable[[], None]":
    """Call `callback` once while CUDA is being initialized; immediately if CUDA is initialized already.

    The callback runs in the thread that initializes CUDA, within that initialization: it must be quick. Its exceptions
    are swallowed, since torch would report them as a failure of CUDA. A forked child of a process without CUDA inherits
    the wait.

    Returns:
        A function that ends the wait and removes it from `sys.meta_path` and from torch's queue.
    """
    wait = _Wait(callback)
    wait.install()
    return wait.remove


class _Wait:
    """One callback, which waits as a finder for the import of `torch.cuda`, then in torch's queue."""

    def __init__(self, callback: "Callable[[], None]") -> None:
        self._callback: Callable[[], None] | None = callback
        self._found = False
        self._queued = self._call  # `remove` looks for the same object

    def install(self) -> None:
        torch_cuda = sys.modules.get("torch.cuda")
        if torch_cuda is not None and hasattr(torch_cuda, "_lazy_call"):
            self._enqueue(torch_cuda)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        self._callback = None
        self._stop_finding()
        torch_cuda = sys.modules.get("torch.cuda")
        queue = getattr(torch_cuda, "_queued_calls", None)
        lock = getattr(torch_cuda, "_initialization_lock", None)
        if not isinstance(queue, list) or lock is None or not lock.acquire(False):
            return  # torch iterates over the queue now; the callback does nothing
        try:
            for entry in list(queue):
                if entry[0] is self._queued:
                    queue.remove(entry)
        except Exception:  # noqa: BLE001, S110 - a queue of another form keeps a call that does nothing
            pass
        finally:
            lock.release()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find `torch.cuda` through the other finders, and wait for its execution."""
        if name != "torch.cuda" or self._found:
            return None
        self._found = True  # another instance also calls find_spec of all finders
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            try:
                self._enqueue_after(loader)
            except Exception:  # noqa: BLE001, S110 - a loader that cannot be changed: torch is not observed
                pass
        return spec

    def _enqueue_after(self, loader: "Any") -> None:
        execute = loader.exec_module

        def execute_then_enqueue(module: "ModuleType") -> None:
            try:
                # A loader that wraps another one may have set this attribute there.
                del loader.exec_module
            except Exception:  # noqa: BLE001, S110 - removed already, by another finder like this one
                pass
            execute(module)
            try:
                self._stop_finding()
                self._enqueue(module)
            except Exception:  # noqa: BLE001, S110 - a torch without that queue is not observed
                pass

        loader.exec_module = execute_then_enqueue

    def _stop_finding(self) -> None:
        """Replace `sys.meta_path` by a list without this finder."""
        # A thread that is searching the old list continues there. If that list became shorter, the thread would skip a
        # finder and might not find its module.
        self._found = True
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _enqueue(self, torch_cuda: "ModuleType") -> None:
        """Add the callback to torch's queue of calls at the initialization of CUDA."""
        # A thread that runs this queue runs the callback now. It has the lock of the queue, and older releases (2.9,
        # but not 2.15) would wait for that lock forever.
        if hasattr(getattr(torch_cuda, "_tls", None), "is_initializing"):
            self._call()
        elif self._callback is not None:
            torch_cuda._lazy_call(self._queued)

    def _call(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            try:
                callback()
            except Exception:  # noqa: BLE001, S110 - no error of the client may keep CUDA from starting
                pass
