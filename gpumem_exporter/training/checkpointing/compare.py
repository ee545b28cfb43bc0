"""Runs a training step with none, some and all of a model's blocks under checkpoints, and measures each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_exporter.client.measure.measured import DeviceUse, Measured, MemoryUse
from gpumem_exporter.client.oom.message import is_out_of_memory
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.calling import check_autocast
from gpumem_exporter.training.checkpointing.blocks import checkpointed, find_blocks
from gpumem_exporter.training.checkpointing.comparison import CheckpointingComparison, CheckpointingRow
from gpumem_exporter.training.checkpointing.results import Results
from gpumem_exporter.training.checkpointing.step import Step, left_as_it_was

__all__ = ["compare_checkpointing"]

_DEFAULT_EVERY = (2, 4)
_NO_CUDA = "no CUDA: the model is on {device}; on the CPU simulate=True tells what CUDA would allocate"


def compare_checkpointing(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    every: Iterable[int] | None = None,
    repeats: int = 5,
    autocast: torch.dtype | None = None,
    reset_peaks: bool = False,
    simulate: bool = False,
) -> CheckpointingComparison:
    """Measure one training step, forward and backward, with more and more of the model recomputed in backward.

        print(compare_checkpointing(model, tokens, loss=lambda output: cross_entropy(output, targets)))

    Each way runs once to warm up and then `repeats` times. The model is left as it was: parameters, gradients, buffers,
    modes, forward functions, and the generators of random numbers. Its hooks run; the optimizer has no part in it.
    Every run starts from the same random numbers and buffers, and what it gives is compared to the bit: checkpointing
    moves no result, unless a block draws numbers elsewhere or changes something in forward (batch normalization counts
    each batch twice then, in its running statistics), and the result says so.

    Time includes the device's work. The peak is of the device of the model's first parameter, above what was allocated
    before the step, gradients included; workspaces that stay once they are made are not. No statistic is reset for it:
    the ways run in the order of what they need, so that each is likely to raise the allocator's peak, which makes its
    own exact. In a process that had a higher peak before it is bounded only, and the table says that; see
    `gpumem_exporter.client.phase`. A way for which there is not enough memory is told as such.

    In a distributed job every rank calls it. Not thread-safe: nothing else may use the model meanwhile.

    Args:
        model: where it trains. One in evaluation mode trains meanwhile.
        batch: what it is called with, on its device: a tensor, positional arguments in a tuple or list, or keywords in
            a mapping.
        loss: of the model's output; without one: the output's own `loss`, the output itself where it is one number,
            else its mean. What it has of parameters outside of the model gets gradients that stay.
        blocks: what is checkpointed: modules of the model, in the order in which they run. Without: the longest
            `nn.ModuleList` or `nn.Sequential` of modules of one class.
        every: which selections to measure beside none and all: 2 checkpoints every second block, from the first on.
            Without: 2 and 4, as far as there are more blocks than that.
        repeats: timed runs.
        autocast: what the forward pass computes in (`torch.bfloat16`).
        reset_peaks: let the allocator's peaks begin anew before each way's timed runs: then its own is exact.
        simulate: on a machine without CUDA, find the peaks by the planner's simulation. Meanwhile nothing else may
            compute on CPU tensors.

    Raises:
        ConfigurationError: an argument is wrong, or the model cannot be trained that way; says what would be right.
    """
    step = Step(model, batch, loss, autocast)
    if repeats < 1:
        raise ConfigurationError(f"repeats {repeats}; a time is the median of at least 1")
    told, names = _choose(model, blocks)
    check_autocast(autocast)
    on_cuda = step.device.type == "cuda"
    if simulate and step.device.type != "cpu":
        raise ConfigurationError(f"simulate is for models on the CPU; this one is on {step.device}: leave it out")
    if not on_cuda and reset_peaks:
        raise ConfigurationError(f"reset_peaks is of CUDA's allocator, and the model is on the {step.device}")
    with left_as_it_was(step) as renew:
        ways = _Ways(step, names, renew)
        rows = [ways.measure(k, repeats, reset_peaks) for k in _from_least_memory(every, len(names))][::-1]
        rows = ways.compare(rows)
        note = "" if on_cuda else _NO_CUDA.format(device=step.device)
        if simulate:
            rows, note = _simulated(step, names, rows, renew)
    return CheckpointingComparison(type(model).__name__, str(step.device), told, repeats, tuple(rows), note)


def _choose(model: nn.Module, blocks: Iterable[nn.Module] | None) -> tuple[str, list[str]]:
    """What the blocks are, in words, and their names in the model."""
    if blocks is None:
        place, found = find_blocks(model)
        told = f"{len(found)} {type(found[0]).__name__} in {place or 'the model itself'}"
    else:
        found = list(dict.fromkeys(blocks))
        told = f"{len(found)} given blocks"
    known = {id(module): name for name, module in model.named_modules()}
    if not found or any(not known.get(id(block)) for block in found):
        raise ConfigurationError("blocks are modules inside of the model, at least one")
    return told, [known[id(block)] for block in found]


def _from_least_memory(every: Iterable[int] | None, blocks: int) -> list[int | None]:
    if every is None:
        return [1, *(k for k in _DEFAULT_EVERY if k < blocks), None]
    asked = sorted({1, *every})
    if asked[0] < 1 or asked[-1] > max(1, blocks):
        raise ConfigurationError(
            f"every {asked[0] if asked[0] < 1 else asked[-1]}; there are {blocks} blocks: 1 to that"
        )
    return [*asked, None]


class _Ways:
    """Runs a step with some of the blocks checkpointed.

    Args:
        step: what is run.
        names: of the blocks.
        renew: called before each run.
    """

    def __init__(self, step: Step, names: Sequence[str], renew: Callable[[], None]) -> None:
        self._step = step
        self._names = names
        self._renew = renew

    def measure(self, every: int | None, repeats: int, reset_peaks: bool) -> CheckpointingRow:
        """Time and peak of one way."""
        seconds: list[float] = []
        chosen = _chosen(self._names, every)
        try:
            with self._checkpointed(chosen):
                self._renew()
                with _measured() as whole:
                    self._run(looking=True)
                    self._renew()
                    with _measured(reset_peaks) as timed:
                        for _ in range(repeats):
                            self._renew()
                            self._wait()
                            started = time.perf_counter()
                            self._run()
                            self._wait()
                            seconds.append(time.perf_counter() - started)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return CheckpointingRow(every, len(chosen), None, None, None, out_of_memory=True)
        return CheckpointingRow(every, len(chosen), statistics.median(seconds), *_peak(whole, timed, self._step.device))

    def compare(self, rows: Sequence[CheckpointingRow]) -> list[CheckpointingRow]:
        """The same rows with what differs from the first of them that runs; that one is run twice."""
        told: list[CheckpointingRow] = []
        reference: Results | None = None
        for row in rows:
            if not row.out_of_memory:
                try:
                    with self._checkpointed(_chosen(self._names, row.every)):
                        reference = reference or Results(self._step, self._once())
                        row = replace(row, difference=reference.difference(self._step, self._once()))
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    row = CheckpointingRow(row.every, row.blocks, None, None, None, out_of_memory=True)
            told.append(row)
        return told

    def _checkpointed(self, chosen: Sequence[str]) -> AbstractContextManager[None]:
        return checkpointed([self._step.model.get_submodule(name) for name in chosen])

    def _once(self) -> Tensor:
        self._renew()
        return self._run()

    def _run(self, looking: bool = False) -> Tensor:
        loss = self._step.forward()
        if looking:
            with _measured():  # a look at what is allocated now narrows the bounds of the peak
                pass
        loss.backward()
        return loss.detach()

    def _wait(self) -> None:
        if self._step.device.type == "cuda":
            torch.cuda.synchronize(self._step.device)


def _chosen(names: Sequence[str], every: int | None) -> Sequence[str]:
    return names[::every] if every is not None else ()


def _peak(whole: MemoryUse, timed: MemoryUse, device: torch.device) -> tuple[int | None, int | None]:
    """The bounds of the peak above what was allocated before the timed runs, when all that stays was there."""
    inner, outer = (_use(use, device) for use in (timed, whole))
    if inner is None or outer is None:
        return None, None
    peak = inner if inner.exact else outer
    most = peak.peak_at_most_bytes
    return peak.peak_bytes - inner.before_bytes, None if most is None else most - inner.before_bytes


def _measured(reset_peaks: bool = False) -> Measured:
    return Measured("compare_checkpointing", kept=False, reset_peaks=reset_peaks)


def _use(use: MemoryUse, device: torch.device) -> DeviceUse | None:
    return next((each for each in use.devices if device.type == "cuda" and each.index == device.index), None)


def _simulated(
    step: Step, names: Sequence[str], rows: Sequence[CheckpointingRow], renew: Callable[[], None]
) -> tuple[list[CheckpointingRow], str]:
    from gpumem_exporter.training.checkpointing.simulated import simulate_peak

    told = []
    for row in rows:
        renew()
        try:
            peak = simulate_peak(step, _chosen(names, row.every))
        except ConfigurationError as error:
            return list(rows), f"not simulated: {error}"
        told.append(replace(row, peak_bytes=peak, peak_at_most_bytes=peak, simulated=True))
    return told, ""
