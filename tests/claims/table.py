"""All claims."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.claims import actions, device, heaps
from tests.claims.place import EXPANDABLE, Bench, Place
from tests.claims.values import Claim, NotAvailableError, Values, require


def _on(measure: Callable[[Bench], Values], settings: str = "") -> Callable[[Place], Values]:
    """Measure a claim in the shared process with these allocator settings."""
    return lambda place: measure(place.process(settings))


def _two(bench: Bench) -> tuple[int, ...]:
    """Return the indexes of the first two devices, or of the only one."""
    return tuple(range(len(bench.uuids)))[:2]


CLAIMS: tuple[Claim, ...] = (
    Claim("the memory of a device is that of the driver and of CUDA", device.memory_of_the_device),
    Claim("the context of a process is non-torch memory until the process exits", device.context_of_a_process),
    Claim("segments: classic", _on(device.segments)),
    Claim("segments: expandable", _on(device.segments, EXPANDABLE)),
    Claim(
        "every series equals torch's statistics",
        _on(lambda bench: heaps.every_series_is_what_torch_says(bench, _two(bench))),
    ),
    Claim(
        "a clear frees the reclaimable bytes: classic, three streams",
        _on(lambda bench: heaps.random_heaps_of_streams(bench)),
    ),
    Claim(
        "a clear frees the reclaimable bytes: expandable, three streams",
        _on(lambda bench: heaps.random_heaps_of_streams(bench, by_pages=True), EXPANDABLE),
    ),
    Claim("a clear frees the reclaimable bytes: max_split_size_mb", heaps.max_split_size),
    Claim("a clear frees the reclaimable bytes: a memory fraction", heaps.memory_fraction),
    Claim("a clear frees a MemPool only after it is deleted: classic", _on(heaps.living_mem_pool)),
    Claim("a clear frees a MemPool only after it is deleted: expandable", _on(heaps.living_mem_pool, EXPANDABLE)),
    Claim("a dead CUDA graph's memory is reclaimable: classic", _on(heaps.graphs_living_and_dead)),
    Claim("a dead CUDA graph's memory is reclaimable: expandable", _on(heaps.graphs_living_and_dead, EXPANDABLE)),
    Claim("memory that another stream uses is reclaimable: classic", _on(heaps.pending_on_another_stream)),
    Claim(
        "memory that another stream uses is reclaimable: expandable",
        _on(heaps.pending_on_another_stream, EXPANDABLE),
    ),
    Claim("pinned host memory equals torch's value and is on no device", _on(heaps.pinned_host_memory)),
    Claim("cudaMallocAsync: values are right or absent", heaps.asynchronous_backend),
    Claim("memory allocated past a disabled cache is non-torch", _on(heaps.past_the_cache)),
    Claim("ledgers add up in every scrape", device.ledgers_add_up),
    Claim("an out-of-memory error has its memory values", _on(actions.values_of_an_error)),
    Claim("a memory fraction is the limit of an error", _on(actions.limit_of_a_fraction)),
    Claim("a dry run changes nothing", _on(actions.dry_run_touches_nothing)),
    Claim("a garbage collection frees reference cycles", _on(actions.cycles_go_with_a_collection)),
    Claim("peaks are reset", _on(lambda bench: actions.peaks_are_reset(bench, _two(bench)))),
    Claim("a clear waits during a capture, which survives", _on(actions.waits_in_a_capture)),
)


def check(claim: Claim, place: Place) -> None:
    """Require the values of a claim, and skip the test if they cannot be measured in this place."""
    try:
        values = claim.measure(place)
    except NotAvailableError as reason:
        pytest.skip(str(reason))
    except BaseException:
        place.rest()
        raise
    require(values)
