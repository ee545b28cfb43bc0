"""What benchmarks measure inside the observed process; runs there, beside torch and the reporter."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gpumem_exporter.client._allocator import Allocator

__all__ = ["busy", "reporter_thread", "sample_costs"]


def sample_costs(devices: int, rounds: int, pause_seconds: float) -> dict[str, list[float]]:
    """CPU time in µs of a sample of all devices, of `torch.cuda.memory_stats()` on each, and of nothing, in turns.

    With a pause before each, caches are as cold as they are once a second in a program that computes; with no pause
    each runs many times in a row.
    """
    allocator = Allocator.attach()
    if allocator is None:
        raise RuntimeError("CUDA is not initialised")

    def sample() -> None:
        allocator.samples()
        allocator.pinned_host_bytes()

    def memory_stats() -> None:
        for device in range(devices):
            torch.cuda.memory_stats(device)

    works: dict[str, Callable[[], None]] = {"sample": sample, "memory_stats": memory_stats, "nothing": lambda: None}
    costs: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times = 1 if pause_seconds else 20
            time.sleep(pause_seconds)
            begun = time.thread_time_ns()
            for _ in range(times):
                work()
            costs[name].append((time.thread_time_ns() - begun) / times / 1e3)
    allocator.detach()
    return costs


def reporter_thread() -> int | None:
    """The kernel's number of the reporter's thread, once it runs."""
    return next((thread.native_id for thread in threading.enumerate() if thread.name == "gpumem-reporter"), None)


def busy(seconds: float) -> dict[str, Any]:
    """A main thread that computes in pure Python and never lets go of the GIL by itself.

    Answers how many rounds it did a second and the gaps in ms between two of them that were far from usual: all that
    were longer than 1 ms, those in which the thread had waited for the GIL (it slept: a voluntary context switch), and
    those in which it had not (the kernel ran something else).
    """
    waited: list[float] = []
    elsewhere: list[float] = []
    rounds = 0
    clock, usage, thread = time.perf_counter, resource.getrusage, resource.RUSAGE_THREAD
    begun = last = clock()
    sleeps = usage(thread).ru_nvcsw
    end = begun + seconds
    while last < end:
        x = 0
        for i in range(200):
            x += i * i
        rounds += 1
        slept = usage(thread).ru_nvcsw
        now = clock()
        if now - last > 0.001:
            (waited if slept != sleeps else elsewhere).append(1e3 * (now - last))
        sleeps, last = slept, now
    return {"rounds_a_second": rounds / (last - begun), "waited_ms": waited, "elsewhere_ms": elsewhere}
