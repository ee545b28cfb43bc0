"""Whether a process grows on a device, from the smallest allocated bytes of each minute, and when it fails. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from gpumem_exporter.core.samples import PartKey
from gpumem_exporter.page.documents import Part
from gpumem_exporter.page.jobs import Job

MIN_SECONDS = 600
"""A shorter rise is a start: a model loads, and its optimizer creates its state."""
_MIN_BYTES = 64 << 20
# A rise of a smaller share of the allocated bytes is noise: batches of different sizes, caches of libraries.
_MIN_SHARE = 0.02
_PARTS = 5
# The share of an even rise that each part of the time must have. So a few steps up are no growth, such as the stages of
# a curriculum, and a growth that has stopped is none after a quarter of its time.
_MIN_STEADINESS = 0.5


class Growth(NamedTuple):
    """A rise of the allocated memory that lasts."""

    bytes_per_hour: int
    since_seconds: float
    """The start of the rise."""


class GrowingPart(NamedTuple):
    """A process that grows on a device."""

    part: Part
    growth: Growth
    full_in_seconds: float | None
    """When the process has no memory left if the growth on its device goes on; None if that is not known."""


def growth(minima: Sequence[tuple[float, int]]) -> Growth | None:
    """Return the growth of a process on a device; None if it does not grow, or is not known for long enough.

    `minima` are times in seconds and the smallest allocated bytes until then since the time before: memory that is free
    at any time has not leaked.
    """
    # What has been kept since each time: memory that is free later does not count.
    kept = list(accumulate((size for _, size in reversed(minima)), min))[:0:-1]
    times = [seconds for seconds, _ in minima[:-1]]  # the last minute may be within one step
    last = len(kept) - 1
    # The longest rise that is even. A start before it, which is steeper, does not count.
    for start in range(last % _PARTS, last, _PARTS):
        seconds, rise = times[-1] - times[start], kept[-1] - kept[start]
        if round(seconds) < MIN_SECONDS or rise < max(_MIN_BYTES, _MIN_SHARE * kept[start]):
            break
        marks = list(zip(times, kept, strict=True))[start :: (last - start) // _PARTS]
        rates = [(size - before) / (end - begin) for (begin, before), (end, size) in pairwise(marks)]
        if min(rates) >= _MIN_STEADINESS * rise / seconds:
            return Growth(round(median(rates) * 3600), times[start])
    return None


def growing_parts(
    jobs: Iterable[Job], growths: Mapping[PartKey, Growth], free: Mapping[str, int]
) -> dict[str, list[GrowingPart]]:
    """Return the processes of each job that grow, by the job's id, the fastest first.

    `free` are the free bytes of devices by uuid. All that grows on a device shares them.
    """
    by_device: dict[str, list[tuple[str, Part, Growth]]] = {}
    for job in jobs:
        for part in job.parts:
            reporter = part.process.reporter
            if reporter is not None and (grows := growths.get(reporter.part(part.uuid))) is not None:
                by_device.setdefault(part.uuid, []).append((job.id, part, grows))
    found: dict[str, list[GrowingPart]] = {}
    for uuid, there in by_device.items():
        # What each uses before it needs free memory: its idle cache. The job needs the rest of its cache in each step.
        caches = [(part.sample.idle_cache_bytes if part.sample else None) or 0 for _, part, _ in there]
        rates = [grows.bytes_per_hour / 3600 for _, _, grows in there]
        full = _full_in_seconds(free[uuid], caches, rates) if uuid in free else None
        for (job_id, part, grows), cache, rate in zip(there, caches, rates, strict=True):
            left, sample = full, part.sample
            if left is not None and sample is not None:
                left = max(left, cache / rate)
                if sample.memory_limit_bytes is not None and sample.reserved_bytes is not None:
                    left = min(left, max(0, sample.memory_limit_bytes - sample.reserved_bytes + cache) / rate)
            found.setdefault(job_id, []).append(GrowingPart(part, grows, left))
    return {job_id: sorted(parts, key=lambda each: -each.growth.bytes_per_hour) for job_id, parts in found.items()}


def _full_in_seconds(free_bytes: int, caches: Sequence[int], rates: Sequence[float]) -> float:
    """Return when a device has no free memory if each process first uses its own cache, and then what is free."""
    # The processes whose caches end first grow into the free memory first: the earliest time counts.
    first = sorted(zip(caches, rates, strict=True), key=lambda each: each[0] / each[1])
    available = accumulate((cache for cache, _ in first), initial=max(0, free_bytes))
    return min(size / rate for size, rate in zip([*available][1:], accumulate(rate for _, rate in first), strict=True))
