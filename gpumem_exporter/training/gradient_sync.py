"""Keeps wrapped models from averaging gradients over the ranks after every micro batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from gpumem_exporter.training.ranks import Ranks

__all__ = ["GradientSync", "device_type", "is_fsdp1", "ranks_of"]

_log = logging.getLogger("gpumem_exporter.training")


class GradientSync:
    """What averages the gradients of a model's micro batch, switched on or off for one forward and backward pass.

    Every part of the model that DDP, FSDP1 (`no_sync`) or FSDP2 (`set_requires_gradient_sync`) wraps is switched.
    """

    def __init__(self, model: Any) -> None:
        self._parts = tuple(_wrapped(model))
        self._held = ExitStack()

    @property
    def any_fsdp1(self) -> bool:
        """The model, or a part of it, is FSDP1's."""
        return any(is_fsdp1(part) for part in self._parts)

    def begin(self, *, average: bool) -> None:
        """From now on gradients are averaged in the backward pass, or stay this rank's own."""
        self.end()
        for part in () if average else self._parts:
            if hasattr(part, "set_requires_gradient_sync"):
                part.set_requires_gradient_sync(False)
                self._held.callback(part.set_requires_gradient_sync, True)
            else:
                self._held.enter_context(part.no_sync())

    def end(self) -> None:
        """As the model was: every backward pass averages."""
        self._held.close()

    def drop(self) -> None:
        """Forget gradients that were not averaged, where no optimizer finds them: FSDP2 keeps them for itself."""
        for part in self._parts:
            if hasattr(part, "reset_iter_state"):
                part.reset_iter_state()
            elif hasattr(part, "set_requires_gradient_sync"):
                _log.warning("this release of torch lets nobody drop what FSDP2 holds: it counts in the next window")


def _wrapped(module: Any) -> Iterator[Any]:
    """The outermost parts of a model that average gradients; what `torch.compile` made stands for what it compiled."""
    if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
        yield module
        return
    for child in module.children():
        yield from _wrapped(child)


def ranks_of(model: Any, group: Any = None) -> Ranks:
    """The ranks over which the model's gradients are averaged; this one alone where nothing does that.

    Those of the group, where one is given; else DDP's own; under FSDP all of them.

    Raises:
        ConfigurationError: this process does not belong to the group.
    """
    parts = tuple(_wrapped(model))
    if group is None and not parts:
        return Ranks()
    own = next((part.process_group for part in parts if hasattr(part, "require_backward_grad_sync")), None)
    return Ranks.of(group if group is not None else own)


def is_fsdp1(module: Any) -> bool:
    """It needs its own clipping and its own gradient scaler: each rank has a part of every gradient."""
    return hasattr(module, "no_sync") and hasattr(module, "clip_grad_norm_")


def device_type(model: Any) -> str:
    """Where the model computes, wherever its parameters wait for that."""
    for module in model.modules():
        if is_fsdp1(module):
            return str(module.compute_device.type)
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        return str(mesh.device_type if mesh is not None else parameter.device.type)
    return "cpu"
