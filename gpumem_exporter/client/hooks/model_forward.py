"""Calls before the forward pass of any module, until the callback has seen enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpumem_exporter.client.hooks.guest_safety import Swallowing

__all__ = ["before_forwards"]


def before_forwards(callback: Callable[[Any], bool]) -> Callable[[], None]:
    """Call `callback(module)` before each forward pass of any module, until it returns False.

    The hook is torch's global one: a hook on the model itself would be pickled with it. Before torch has one, nothing
    is called.

    Returns:
        A function that ends the calls. The hook itself leaves torch at the next forward pass: a garbage collection may
        run the function while a forward pass copies the hooks (before Python 3.12), and a removal would raise there.
    """
    register = getattr(sys.modules.get("torch.nn.modules.module"), "register_module_forward_pre_hook", None)
    wanted = register is not None

    def look(module: Any, _arguments: Any) -> None:
        nonlocal wanted
        with Swallowing():  # this runs inside the program's forward
            wanted = wanted and callback(module)
            if not wanted:
                handle.remove()

    def remove() -> None:
        nonlocal wanted
        wanted = False

    if register is not None:
        handle = register(look)
    return remove
