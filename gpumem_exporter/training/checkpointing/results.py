"""Compares the results of two runs of a training step: loss, gradients and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpumem_exporter.training.checkpointing.step import Step

__all__ = ["Difference", "Results", "distance_ratio"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two runs.

    Attributes:
        names: the results that differ: `loss`, `gradient of …`, `buffer …`.
        largest_ratio: the largest distance, divided by the norm of the first run's tensor. None if a tensor is missing
            or has another shape.
    """

    names: tuple[str, ...]
    largest_ratio: float | None


class Results:
    """The results of one run, copied to the host's memory.

    Args:
        step: the step that has just run.
        loss: its loss.
    """

    def __init__(self, step: Step, loss: Tensor) -> None:
        self._kept = {name: None if tensor is None else tensor.clone() for name, tensor in _on_host(step, loss)}

    def difference(self, step: Step, loss: Tensor) -> Difference | None:
        """Compare with the run that has just ended; None if all results are equal to the bit, or both NaN."""
        names: list[str] = []
        ratios: list[float | None] = []
        for name, tensor in _on_host(step, loss):
            kept = self._kept.get(name)
            if kept is None and tensor is None:
                continue
            if kept is None or tensor is None or kept.shape != tensor.shape:
                names.append(name)
                ratios.append(None)
            elif not torch.isclose(kept, tensor, rtol=0, atol=0, equal_nan=True).all():
                names.append(name)
                ratios.append(distance_ratio(kept, tensor))
        if not names:
            return None
        known = [ratio for ratio in ratios if ratio is not None]
        return Difference(tuple(names), max(known) if len(known) == len(ratios) else None)


def _on_host(step: Step, loss: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    yield "loss", loss.detach().cpu()
    for name, parameter in step.model.named_parameters():
        yield f"gradient of {name}", _plain(parameter.grad)
    for name, buffer in step.model.named_buffers():
        yield f"buffer {name}", _plain(buffer)


def _plain(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    local = getattr(tensor, "to_local", None)  # the local part of a DTensor
    whole = (local() if local is not None else tensor).detach().cpu()
    return whole if whole.layout is torch.strided else whole.to_dense()


def distance_ratio(kept: Tensor, tensor: Tensor) -> float:
    """Return the distance of a tensor from `kept`, divided by the norm of `kept`. Both are on the CPU."""
    before = kept.to(torch.float64).flatten()
    size, distance = float(before.norm()), float((tensor.to(torch.float64).flatten() - before).norm())
    if not distance:
        return 0.0
    return distance / size if size else math.inf
