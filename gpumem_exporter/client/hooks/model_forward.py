"""Calls before the forward pass of any module, until the callback has seen enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpumem_exporter.client.hooks.guest_safety import guest_safety

__all__ = ["before_forwards"]


class _ForwardHook:
    """Torch's global hook for one callback. A hook on the model itself would be pickled with it."""

    def __init__(self, callback: Callable[[Any], bool]) -> None:
        self._callback: Callable[[Any], bool] | None = callback
        self._handle: Any = None

    def install(self) -> None:
        register = getattr(sys.modules.get("torch.nn.modules.module"), "register_module_forward_pre_hook", None)
        if register is not None:
            self._handle = register(self._before)

    def remove(self) -> None:
        """End the calls; the hook leaves torch at the next forward pass.

        A garbage collection may call this while a forward pass copies the hooks, where a removal would raise.
        """
        self._callback = None

    @guest_safety()
    def _before(self, module: Any, _arguments: Any) -> None:
        if self._callback is None or not self._callback(module):
            self._callback = None
            self._handle.remove()


def before_forwards(callback: Callable[[Any], bool]) -> Callable[[], None]:
    """Call `callback(module)` before each forward pass of any module, until it returns False.

    Returns:
        A function that ends the calls.
    """
    hook = _ForwardHook(callback)
    hook.install()
    return hook.remove
