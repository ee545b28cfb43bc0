"""What a training step gives: loss, gradients and changed buffers, compared with those of another run."""

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
    """Where two runs differ.

    Attributes:
        names: of what differs: `loss`, `gradient of …`, `buffer …`.
        largest_ratio: the largest distance, as a part of the norm of what it differs from; None where one of the two
            is missing or has another shape.
    """

    names: tuple[str, ...]
    largest_ratio: float | None


class Results:
    """The results of one run, copied to the host one by one: as much of its memory as the gradients take.

    Args:
        step: has just been run.
        loss: its loss.
    """

    def __init__(self, step: Step, loss: Tensor) -> None:
        self._held = {name: None if tensor is None else tensor.clone() for name, tensor in _on_host(step, loss)}

    def difference(self, step: Step, loss: Tensor) -> Difference | None:
        """Where another run, just over, differs; None where it is the same to the bit (not-a-numbers included)."""
        names: list[str] = []
        ratios: list[float | None] = []
        for name, tensor in _on_host(step, loss):
            held = self._held.get(name)
            if held is None and tensor is None:
                continue
            if held is None or tensor is None or held.shape != tensor.shape:
                names.append(name)
                ratios.append(None)
            elif not torch.isclose(held, tensor, rtol=0, atol=0, equal_nan=True).all():
                names.append(name)
                ratios.append(distance_ratio(held, tensor))
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
    local = getattr(tensor, "to_local", None)  # of a DTensor: this process' part
    whole = (local() if local is not None else tensor).detach().cpu()
    return whole if whole.layout is torch.strided else whole.to_dense()


def distance_ratio(held: Tensor, tensor: Tensor) -> float:
    """How far a tensor is from another, as a part of that one's norm. Both are in the host's memory."""
    before = held.to(torch.float64).flatten()
    size, distance = float(before.norm()), float((tensor.to(torch.float64).flatten() - before).norm())
    if not distance:
        return 0.0
    return distance / size if size else math.inf
