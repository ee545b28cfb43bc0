"""Calls a function before each forward pass of any module, until the function returns False."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpumem_client.guest_safety import guest_safety

__all__ = ["before_forwards"]


def before_forwards(callback: Callable[[Any], bool]) -> Callable[[], None]:
    """Call `callback(module)` before each forward pass of any module, until it returns False.

    Returns:
        A function that ends the calls. The hook leaves torch at the next forward pass, because a garbage collection may
        call the function while a forward pass copies the hooks, where a removal would raise.
    """
    # A hook on the model itself would be pickled with it.
    register = getattr(sys.modules.get("torch.nn.modules.module"), "register_module_forward_pre_hook", None)
    ended = False

    @guest_safety()
    def before(module: Any, _arguments: Any) -> None:
        nonlocal ended
        if ended or not callback(module):
            ended = True
            handle.remove()

    def end() -> None:
        nonlocal ended
        ended = True

    handle: Any = None if register is None else register(before)
    return end
