"""Searches for a batch size on an emulated device that models of a few MiB fill.

The functions run in a process with torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import NoBatchSizeError

MIB, GIB = 1 << 20, 1 << 30
UNIT = 256


def training_step(device: str = "cuda") -> Callable[[int], None]:
    layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.GELU())]
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(size: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        batch = torch.empty(size, 1024, device=device)
        net(batch).sum().backward()
        optimizer.step()

    return step


def runs(step: Callable[[int], None], size: int, times: int) -> bool:
    torch.cuda.empty_cache()
    try:
        for _ in range(times):
            step(size)
    except torch.OutOfMemoryError:
        return False
    return True


def the_found_size_trains_the_next_one_does_not_and_no_statistic_is_reset() -> None:
    step = training_step()
    resets: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_resetPeakMemoryStats", resets.append)
        search = toolkit.find_batch_size(step, start=1000, multiple_of=UNIT, margin=0)
        first = torch.cuda.max_memory_allocated()
        step(UNIT)  # creates the gradients, as after a search
        before = torch.cuda.memory_stats()
        again = toolkit.find_batch_size(step, start=60000, multiple_of=UNIT, margin=0.1)
        after = torch.cuda.memory_stats()
    assert [each.size for each in search.tries][:2] == [768, 1536], "the start, rounded down, and twice that"
    size = len(range(search))
    assert search.size == search.largest == size == max(each.size for each in search.tries if each.fits)
    assert min(each.size for each in search.tries if not each.fits) == size + UNIT
    assert [again.size, again.largest] == [int(size / UNIT * 0.9) * UNIT, size], "from above, and less a margin"

    peaks = [each.peak_bytes for each in search.tries if each.peak_bytes is not None]
    assert len(peaks) > 3, "each size larger than those before raises PyTorch's own peak"
    assert peaks == sorted(set(peaks))
    assert peaks[-1] == first
    assert all(each.peak_bytes is None or each.peak_bytes > first for each in again.tries)
    ooms = after["num_ooms"] - before["num_ooms"]
    assert (resets, ooms) == ([], sum(not each.fits for each in again.tries))
    assert after["allocated_bytes.all.peak"] >= before["allocated_bytes.all.peak"] == first
    assert after["reserved_bytes.all.current"] < GIB / 4, "the last try does not leave its cache"
    step(UNIT)
    assert torch.cuda.memory_allocated() == before["allocated_bytes.all.current"], "failed tries leave nothing behind"
    assert (runs(step, size, 20), runs(step, size + UNIT, 20)) == (True, False)


def the_found_size_is_tried_until_its_memory_stops_growing() -> None:
    """The buffer of the step is full after 12 steps: the peak is then three times that of the first step."""
    buffer: list[torch.Tensor] = []
    last = 0

    def step(size: int) -> None:
        nonlocal last
        if size != last:
            buffer.clear()
            last = size
        if len(buffer) < 12:
            buffer.append(torch.empty(size * MIB // 4, dtype=torch.uint8, device="cuda"))
        torch.empty(size * MIB, dtype=torch.uint8, device="cuda")

    search = toolkit.find_batch_size(step, start=64)
    short = toolkit.find_batch_size(step, start=64, max_runs=2)
    assert [runs(step, size, 20) for size in (search.size, short.size)] == [True, False], "two runs fill no buffer"
    size, tried = max((each.size, each.runs) for each in search.tries if each.fits and each.runs > 2)
    assert size == search.largest
    assert 20 <= tried < 28, "12 runs fill the buffer, and the last 8 reach no new maximum"
    assert all(each.fits for each in search.tries if each.size <= search.size)


def the_advice_of_a_guard_is_measured_although_the_search_had_a_higher_peak() -> None:
    step = training_step()
    found = toolkit.find_batch_size(step, start=4 * UNIT, multiple_of=UNIT, margin=0).size

    def advised(guard: Any, ran: list[int]) -> int:
        train = guard(step)
        for size in ran:
            train(size)
        with pytest.raises(torch.OutOfMemoryError):
            train(16 * found)
        return next(each.batch_size for each in guard.diagnosis.advice if each.kind == "smaller_batch")

    # The line of a guard identifies its block.
    guard = toolkit.oom_guard(batch_size=lambda size: size, free_frames=True)
    after_a_search = advised(guard, [found // 4, found // 8])
    step(found)  # leaves a cache into which all smaller batches fit
    guard = toolkit.oom_guard(batch_size=lambda size: size, free_frames=True)
    with_a_full_cache = advised(guard, [found // 2, found // 4])
    assert found * 0.7 < after_a_search <= found, "the first guess would be eight times as much"
    assert found * 0.4 < with_a_full_cache <= found, "at least about the size that is known to fit"
    assert all(runs(step, size, 3) for size in (after_a_search, with_a_full_cache))


def a_search_ends_with_an_error_of_the_step_without_a_fitting_size_or_at_its_limits() -> None:
    allocated, sizes = torch.cuda.memory_allocated(), []
    wrong = ValueError("no such sample")

    def fails(size: int) -> None:
        sizes.append(size)
        if size > 8:
            raise wrong

    with pytest.raises(ValueError, match="no such sample") as own:
        toolkit.find_batch_size(fails, start=4, runs=1)
    assert own.value is wrong
    assert not hasattr(wrong, "__notes__")
    assert sizes == [4, 8, 16]

    def takes(mib: int) -> Callable[[int], None]:
        def step(size: int) -> None:
            held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(size * mib * MIB, dtype=torch.uint8, device="cuda")
            del held

        return step

    with pytest.raises(NoBatchSizeError, match="4, 2, 1") as none_fits:
        toolkit.find_batch_size(takes(4096), start=4)
    cause = none_fits.value.__cause__
    assert isinstance(cause, torch.OutOfMemoryError)
    assert cause.__notes__, "the error says why"
    del none_fits, cause
    assert torch.cuda.memory_allocated() == allocated
    assert int(toolkit.find_batch_size(takes(1), start=4, maximum=50, margin=0)) == 50
    bounded = toolkit.find_batch_size(takes(1), start=1, max_tries=3, margin=0)
    assert (bounded.size, len(bounded.tries)) == (4, 4), "three tries, and the found size once more"

    def wraps(size: int) -> None:
        try:
            takes(1)(size)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("in the data loader") from error

    assert int(toolkit.find_batch_size(wraps, start=4096, maximum=4096, margin=0)) < 4096


def without_cuda_nothing_is_tried_and_invalid_arguments_are_rejected() -> None:
    sizes: list[int] = []
    search = toolkit.find_batch_size(sizes.append, start=30, multiple_of=8)
    assert (int(search), sizes, search.largest) == (24, [], None)
    assert re.search(r"\b24\b.*\bCUDA\b", str(search))
    for arguments, pattern in (
        ({"start": 64, "maximum": 32}, "start.*64.*maximum.*32"),
        ({"margin": 1.0}, r"margin.*1\.0"),
        ({"max_tries": 0}, "tries.*0"),
    ):
        with pytest.raises(ConfigurationError, match=pattern):
            toolkit.find_batch_size(lambda size: None, **arguments)
