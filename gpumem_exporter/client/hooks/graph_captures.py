"""Calls at the start and the end of each CUDA graph capture, from torch 2.14 on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["on_captures"]


def on_captures(started: Callable[[Any], None], ended: Callable[[Any], None]) -> Callable[[], None]:
    """Call `started(graph)` and `ended(graph)` in the thread that captures; torch swallows what they raise.

    `ended` is not called if ending the capture failed. Before torch 2.14 nothing is called.

    Returns:
        A function that removes both hooks.
    """
    graphs = sys.modules.get("torch.cuda.graphs")
    handles: list[Any] = []
    for name, hook in (("start", started), ("end", ended)):
        register = getattr(graphs, f"register_graph_capture_{name}_hook", None)
        if register is not None:
            handles.append(register(hook))

    def remove() -> None:
        while handles:
            with contextlib.suppress(Exception):
                handles.pop().remove()

    return remove
