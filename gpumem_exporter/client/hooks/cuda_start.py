"""Runs a callback when this process initialises CUDA, without importing torch and without polling.

A finder on `sys.meta_path` waits for `torch.cuda` to be imported; torch's own queue of deferred calls
(`torch.cuda._lazy_call`, in every release since 1.0) then runs the callback in the thread that initialises CUDA. A
process pays one comparison an import.

`bootstrap/sitecustomize.py` loads this file by its path in every Python process below `gpumem-exporter run`: it must
stay a single file that imports `sys` alone.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["when_cuda_starts"]


def when_cuda_starts(callback: "Callable[[], None]") -> None:
    """Call `callback` once CUDA is being initialised, at once if it is already.

    The callback runs in whichever thread initialises CUDA and inside of that initialisation: it must be quick. What it
    raises is swallowed, since torch would make it a failure of CUDA itself. A forked child of a process without CUDA
    inherits the wait.
    """

    def quiet() -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001, S110 - see above: nothing of ours may keep CUDA from starting
            pass

    torch_cuda = sys.modules.get("torch.cuda")
    if hasattr(torch_cuda, "_lazy_call"):
        torch_cuda._lazy_call(quiet)  # type: ignore[union-attr]
    else:
        sys.meta_path.insert(0, _TorchCudaFinder(quiet))


class _TorchCudaFinder:
    """Finds nothing itself: has the other finders find `torch.cuda`, and adds a step after its execution.

    It stays where it is when that is done. A thread that imports something at that moment is on its way along the list:
    it would pass over a finder, as all of them came a place nearer, and say that there is no such module.
    """

    def __init__(self, callback: "Callable[[], None]") -> None:
        self._callback = callback
        self._done = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "torch.cuda" or self._done:
            return None
        self._done = True  # also for the finders like this one that are asked now: they ask the others, too
        for finder in list(sys.meta_path):
            if not hasattr(finder, "find_spec"):
                continue  # as Python does
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_then_wait(module: "ModuleType") -> None:
                try:
                    # A loader that wraps another may have put this onto that one, and call it there.
                    del loader.exec_module
                except Exception:  # noqa: BLE001, S110 - gone already: another finder like this one has had it, too
                    pass
                execute(module)
                try:
                    module._lazy_call(self._callback)
                except Exception:  # noqa: BLE001, S110 - a torch without that queue is a torch we do not observe
                    pass

            try:
                loader.exec_module = execute_then_wait  # type: ignore[method-assign]
            except Exception:  # noqa: BLE001, S110 - a loader that cannot be changed: its torch we do not observe
                pass
        return spec
