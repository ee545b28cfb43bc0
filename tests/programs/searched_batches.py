"""Searches for a batch size on an emulated device that models of a few MiB fill.

The functions run in a process with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import NoBatchSizeError

MIB = 1 << 20
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


def found() -> dict[str, Any]:
    """Search, train with the result, and return the statistics."""
    step = training_step()
    resets: list[Any] = []
    reset = torch._C._cuda_resetPeakMemoryStats
    torch._C._cuda_resetPeakMemoryStats = resets.append
    search = toolkit.find_batch_size(step, start=1000, multiple_of=UNIT, margin=0)
    first = torch.cuda.max_memory_allocated()
    step(UNIT)  # creates the gradients, as after a search
    before = torch.cuda.memory_stats()
    again = toolkit.find_batch_size(step, start=60000, multiple_of=UNIT, margin=0.1)
    after = torch.cuda.memory_stats()
    step(UNIT)
    left = torch.cuda.memory_allocated()
    torch._C._cuda_resetPeakMemoryStats = reset
    return {
        "size": int(search),
        "largest": search.largest,
        "tries": [[each.size, each.fits, each.peak_bytes] for each in search.tries],
        "peak": first,
        "printed": str(search),
        "in a range": len(range(search)),
        "again": [again.size, again.largest],
        "again_peaks": [each.peak_bytes for each in again.tries],
        "ooms": after["num_ooms"] - before["num_ooms"] - sum(not each.fits for each in again.tries),
        "peak_kept": after["allocated_bytes.all.peak"] >= before["allocated_bytes.all.peak"] == first,
        "resets": len(resets),
        "left": left - before["allocated_bytes.all.current"],
        "reserved": after["reserved_bytes.all.current"],
        "trains": runs(step, search.largest or 0, 20),
        "more": runs(step, (search.largest or 0) + UNIT, 20),
    }


def filling() -> dict[str, Any]:
    """Search with a step whose buffer is full after 30 steps: the peak is then four times that of the first step."""
    buffer: list[torch.Tensor] = []
    last = 0

    def step(size: int) -> None:
        nonlocal last
        if size != last:
            buffer.clear()
            last = size
        if len(buffer) < 30:
            buffer.append(torch.empty(size * MIB // 10, dtype=torch.uint8, device="cuda"))
        torch.empty(size * MIB, dtype=torch.uint8, device="cuda")

    search = toolkit.find_batch_size(step, start=64)
    short = toolkit.find_batch_size(step, start=64, max_runs=2)
    tries = [[each.size, each.fits, each.runs] for each in search.tries]
    trains = [runs(step, size, 50) for size in (search.size, short.size)]
    return {"size": search.size, "largest": search.largest, "tries": tries, "trains": trains}


def guarded() -> dict[str, Any]:
    """Run out of memory in a guard, after a higher peak than that of any guarded run without an error."""
    step = training_step()
    found = toolkit.find_batch_size(step, start=4 * UNIT, multiple_of=UNIT, margin=0)

    def advised(guard: Any, ran: list[int]) -> int | None:
        train = guard(step)
        for size in ran:
            train(size)
        try:
            train(16 * found.size)
        except torch.OutOfMemoryError:
            return next(each.batch_size for each in guard.diagnosis.advice if each.kind == "smaller_batch")
        return None

    # The line of a guard identifies its block.
    guard = toolkit.oom_guard(batch_size=lambda size: size, free_frames=True)
    proposed = {"after a search": advised(guard, [found.size // 4, found.size // 8])}
    step(found.size)  # leaves a cache into which all smaller batches fit
    guard = toolkit.oom_guard(batch_size=lambda size: size, free_frames=True)
    proposed["with a full cache"] = advised(guard, [found.size // 2, found.size // 4])
    trains = [runs(step, size or 0, 3) for size in proposed.values()]
    return {"found": found.size, "proposed": proposed, "trains": trains}


def ends() -> dict[str, Any]:
    """Searches that do not end between two sizes."""
    results: dict[str, Any] = {}
    sizes: list[int] = []
    wrong = ValueError("no such sample")

    def fails(size: int) -> None:
        sizes.append(size)
        if size > 8:
            raise wrong

    try:
        toolkit.find_batch_size(fails, start=4, runs=1)
    except ValueError as error:
        results["own error"] = [error is wrong, getattr(error, "__notes__", []), list(sizes)]

    def takes(mib: int) -> Callable[[int], None]:
        def step(size: int) -> None:
            held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(size * mib * MIB, dtype=torch.uint8, device="cuda")
            del held

        return step

    try:
        toolkit.find_batch_size(takes(4096), start=4)
    except NoBatchSizeError as error:
        results["none fits"] = [str(error), type(error.__cause__).__name__, *getattr(error.__cause__, "__notes__", [])]
    results["left"] = torch.cuda.memory_allocated()
    results["maximum"] = int(toolkit.find_batch_size(takes(1), start=4, maximum=50, margin=0))
    bounded = toolkit.find_batch_size(takes(1), start=1, max_tries=3, margin=0)
    results["bounded"] = [bounded.size, len(bounded.tries)]
    try:
        toolkit.find_batch_size(takes(4096), start=64, max_tries=2)
    except NoBatchSizeError as error:
        results["bounded, none fits"] = str(error)

    def wraps(size: int) -> None:
        try:
            takes(1)(size)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("in the data loader") from error

    results["wrapped"] = int(toolkit.find_batch_size(wraps, start=4096, maximum=4096, margin=0)) < 4096
    return results


def refusals() -> list[str]:
    results = []
    for arguments in (
        {"start": 64, "maximum": 32},
        {"start": 4, "multiple_of": 8},
        {"margin": 1.0},
        {"max_tries": 0},
    ):
        try:
            toolkit.find_batch_size(lambda size: None, **arguments)  # type: ignore[arg-type]
        except ConfigurationError as error:
            results.append(str(error))
    return results


def without_cuda() -> dict[str, Any]:
    sizes: list[int] = []
    search = toolkit.find_batch_size(sizes.append, start=30, multiple_of=8)
    return {"size": int(search), "sizes": sizes, "printed": str(search), "largest": search.largest}
