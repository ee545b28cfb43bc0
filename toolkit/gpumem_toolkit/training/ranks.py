"""The ranks that train together: the exchange of a number, and the averaging of their gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import RankFailedError


class Ranks:
    """The members of a process group with their global numbers, or this process alone.

    `gather` and `total` are collective: every rank calls them, in the same order. They raise RankFailedError if a rank
    exited, or did not answer within the group's timeout. Not thread-safe.
    """

    def __init__(self) -> None:
        self.size = 1
        self.numbers: tuple[int, ...] = (0,)
        self._group: Any = None
        self._rank = 0
        self._device = torch.device("cpu")
        self._row: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Return the members of a group, by default of the default group; this process alone if there is no group."""
        ranks = cls()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ConfigurationError("the process group needs torch.distributed, which is not initialized")
            return ranks
        ranks._group, ranks._rank = group, dist.get_rank(group)
        if ranks._rank < 0:
            raise ConfigurationError(f"rank {dist.get_rank()} does not belong to the given process group")
        ranks.numbers = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        ranks.size = len(ranks.numbers)
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]  # "cpu:gloo,cuda:nccl"
        ranks._device = torch.device("cpu" if "cpu" in kinds else kinds[0])
        return ranks

    def gather(self, value: float) -> dict[int, float]:
        """Return the value of each rank by its global number. Only the first call allocates on a device."""
        if self.size == 1:
            return {self.numbers[0]: value}
        if self._row is None:
            # A sum of rows is a gather that every backend has. Numbers up to 2^53 are exact in this type.
            self._row = torch.empty(self.size, dtype=torch.float64, device=self._device)
        self._row.zero_()
        self._row[self._rank] = value
        self._reduce(self._row)
        return dict(zip(self.numbers, self._row.tolist(), strict=True))

    def total(self, value: float) -> Any:
        """Return the sum over the ranks: a number with a CPU backend, otherwise a tensor on the device."""
        if self.size == 1:
            return value
        total = torch.full((), value, dtype=torch.float64, device=self._device)
        self._reduce(total)
        return total.item() if self._device.type == "cpu" else total

    def _reduce(self, tensor: Any) -> None:
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:  # a closed connection or a timeout
            raise RankFailedError(f"the all-reduce over ranks {list(self.numbers)} failed: {error}") from error


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
    """Return the ranks that average gradients: the ranks of `group`, else of DDP, else all ranks under FSDP."""
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
