"""Switches the averaging of gradients over the ranks, which DDP and FSDP do after every backward pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from gpumem_toolkit.training.ranks import Ranks

__all__ = ["GradientSync", "device_type", "is_fsdp1", "ranks_of"]

_log = logging.getLogger("gpumem_toolkit")


class GradientSync:
    """Switches the averaging of a model's gradients for one forward and backward pass.

    Applies to every part of the model that DDP, FSDP1 (`no_sync`) or FSDP2 (`set_requires_gradient_sync`) wraps.
    """

    def __init__(self, model: Any) -> None:
        self._parts = tuple(_wrapped(model))
        self._undo = ExitStack()

    @property
    def any_fsdp1(self) -> bool:
        """Whether FSDP1 wraps the model or a part of it."""
        return any(is_fsdp1(part) for part in self._parts)

    def start(self, *, average: bool) -> None:
        """Average gradients in the next backward pass, or keep them local."""
        self.end()
        for part in () if average else self._parts:
            if hasattr(part, "set_requires_gradient_sync"):
                part.set_requires_gradient_sync(False)
                self._undo.callback(part.set_requires_gradient_sync, True)
            else:
                self._undo.enter_context(part.no_sync())

    def end(self) -> None:
        """Restore the model: every backward pass averages."""
        self._undo.close()

    def drop(self) -> None:
        """Drop gradients that were not averaged and that FSDP2 keeps outside the parameters."""
        for part in self._parts:
            if hasattr(part, "reset_iter_state"):
                part.reset_iter_state()
            elif hasattr(part, "set_requires_gradient_sync"):
                _log.warning(
                    "this release of torch cannot drop gradients that FSDP2 keeps: the next window includes them"
                )


def _wrapped(module: Any) -> Iterator[Any]:
    """Return the outermost parts of a model that average gradients. A compiled module counts as its original."""
    if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
        yield module
        return
    for child in module.children():
        yield from _wrapped(child)


def ranks_of(model: Any, group: Any = None) -> Ranks:
    """Return the ranks over which gradients are averaged: those of `group`, else of DDP, else all ranks under FSDP."""
    parts = tuple(_wrapped(model))
    if group is None and not parts:
        return Ranks()
    own = next((part.process_group for part in parts if hasattr(part, "require_backward_grad_sync")), None)
    return Ranks.of(group if group is not None else own)


def is_fsdp1(module: Any) -> bool:
    """Whether FSDP1 wraps the module: it then needs FSDP1's own clipping and gradient scaler."""
    return hasattr(module, "no_sync") and hasattr(module, "clip_grad_norm_")


def device_type(model: Any) -> str:
    """Return the type of the device on which the model computes, even if its parameters are offloaded."""
    for module in model.modules():
        if is_fsdp1(module):
            return str(module.compute_device.type)
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor
        return str(mesh.device_type if mesh is not None else parameter.device.type)
    return "cpu"
