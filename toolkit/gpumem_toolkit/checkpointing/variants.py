"""Runs a training step with none, some and all of a model's blocks checkpointed, and measures each variant."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_client.hooks.out_of_memory import is_out_of_memory
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.checkpointing.comparison import CheckpointingComparison, CheckpointingRow
from gpumem_toolkit.checkpointing.step import Results, Step, left_as_it_was
from gpumem_toolkit.planning.fake_model import find_blocks, recomputed
from gpumem_toolkit.training.model_runs import check_autocast, measure_peak, run_seconds


def compare_checkpointing(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    repeats: int = 5,
    autocast: torch.dtype | None = None,
) -> CheckpointingComparison:
    """Measure one training step, forward and backward, with more and more blocks recomputed in backward.

        print(compare_checkpointing(model, tokens, loss=lambda output: cross_entropy(output, targets)))

    Each variant runs once to warm up, once to measure its peak, and then `repeats` times, from the same random numbers
    and buffers. Afterwards the model and the random number generators are as before. The model's hooks run; no
    optimizer does. The results of the variants are compared to the bit. They differ if a block draws random numbers
    from another generator, or changes something in forward, as batch normalization does.

    The peak is above what was allocated before the step, on the device of the model's first parameter. The allocator's
    peaks are reset for it. In a distributed job every rank calls this. Not thread-safe: no other thread may use the
    model during the call. Raises ConfigurationError if an argument is invalid, or if the model cannot be trained that
    way.

    Args:
        model: the model, on the device where it trains. During the call it is in training mode.
        batch: a tensor, positional arguments in a tuple or list, or keyword arguments in a mapping.
        loss: returns the loss of the model's output. Default: the output's `loss`, the output if it has one element,
            else its mean.
        blocks: the modules to checkpoint, in the order in which they run. Default: the longest list of one class.
        repeats: number of timed runs.
        autocast: the dtype of the forward pass, such as `torch.bfloat16`.
    """
    step = Step(model, batch, loss, autocast)
    check_autocast(autocast)
    if repeats < 1:
        raise ConfigurationError(f"invalid repeats {repeats}: it must be at least 1")
    description, names = _choose(model, blocks)
    with left_as_it_was(step) as restore:
        rows = _Variants(step, names, restore).rows(repeats)
    return CheckpointingComparison(type(model).__name__, str(step.device), description, repeats, tuple(rows))


def _choose(model: nn.Module, blocks: Iterable[nn.Module] | None) -> tuple[str, list[str]]:
    """Return a description of the blocks, and their names in the model."""
    if blocks is None:
        place, found = find_blocks(model)
        description = f"{len(found)} {type(found[0]).__name__} in {place or 'the model itself'}"
    else:
        found = list(dict.fromkeys(blocks))
        description = f"{len(found)} given blocks"
    known = {id(module): name for name, module in model.named_modules()}
    if not found or any(not known.get(id(block)) for block in found):
        raise ConfigurationError("invalid blocks: give at least one module inside the model")
    return description, [known[id(block)] for block in found]


class _Variants:
    """Runs a step with some of the named blocks checkpointed. `restore` resets what a run changes."""

    def __init__(self, step: Step, names: Sequence[str], restore: Callable[[], None]) -> None:
        self._step = step
        self._names = names
        self._restore = restore

    def rows(self, repeats: int) -> Sequence[CheckpointingRow]:
        """Return the rows of the comparison: no checkpointed blocks, every fourth, every second, and all."""
        selections = (None, *(k for k in (4, 2) if k < len(self._names)), 1)
        return self._compare([self._measure(every, repeats) for every in selections])

    def _measure(self, every: int | None, repeats: int) -> CheckpointingRow:
        """Measure time and peak of one variant."""
        device, seconds = self._step.device, list[float]()
        count = len(self._names[::every]) if every is not None else 0
        try:
            with self._checkpointed(every):
                self._run_once()  # warms up
                self._restore()
                peak_bytes = measure_peak(self._run, device)
                for _ in range(repeats):
                    self._restore()
                    seconds.append(run_seconds(self._run, device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return CheckpointingRow(every, count, None, None, out_of_memory=True)
        return CheckpointingRow(every, count, statistics.median(seconds), peak_bytes)

    def _compare(self, rows: Sequence[CheckpointingRow]) -> list[CheckpointingRow]:
        """Add to each row how its results differ from the results of the first row that runs, which runs twice."""
        # The first row runs twice: checkpointing would otherwise be blamed for a model that differs from itself.
        compared: list[CheckpointingRow] = []
        reference: Results | None = None
        for row in rows:
            if not row.out_of_memory:
                try:
                    with self._checkpointed(row.every):
                        reference = reference or Results(self._step, self._run_once())
                        row = replace(row, differs=reference.differing(self._step, self._run_once()))
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    row = CheckpointingRow(row.every, row.blocks, None, None, out_of_memory=True)
            compared.append(row)
        return compared

    def _checkpointed(self, every: int | None) -> AbstractContextManager[None]:
        chosen = self._names[::every] if every is not None else ()
        return _checkpointed([self._step.model.get_submodule(name) for name in chosen])

    def _run_once(self) -> Tensor:
        self._restore()
        return self._run()

    def _run(self) -> Tensor:
        loss = self._step.forward()
        loss.backward()
        return loss.detach()


@contextmanager
def _checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, recompute the forward pass of these modules in backward. Their hooks run once."""
    replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for block in dict.fromkeys(blocks):
            replaced.append((block, vars(block).get("forward")))
            block.forward = recomputed(block.forward)
        yield
    finally:
        for block, own in reversed(replaced):
            if own is None:
                vars(block).pop("forward", None)
            else:
                block.forward = own
