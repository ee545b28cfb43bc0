"""All claims, in the order in which a report measures and shows them."""

from __future__ import annotations

from collections.abc import Callable

from tests.claims import actions, costs, device, errors, heaps, pools
from tests.claims.figures import Claim, Figures
from tests.claims.place import EXPANDABLE, Bench, Place

__all__ = ["CLAIMS"]


def _on(measure: Callable[[Bench], Figures], settings: str = "") -> Callable[[Place], Figures]:
    """A claim about one process, in the one that is kept for these settings."""
    return lambda place: measure(place.process(settings))


def _two(bench: Bench) -> tuple[int, ...]:
    """Torch's indices of two devices, where there are two."""
    return tuple(range(len(bench.uuids)))[:2]


CLAIMS: tuple[Claim, ...] = (
    Claim("the page and CUDA give a device's memory as the driver does", device.memory_of_the_device),
    Claim("the driver lists a process with its bytes", _on(device.processes_of_the_device)),
    Claim("a process' context is non-torch and goes with it", device.context_of_a_process),
    Claim("segments: classic", _on(device.segments)),
    Claim("segments: expandable", _on(device.segments, EXPANDABLE)),
    Claim(
        "every series is what torch says", _on(lambda bench: heaps.every_series_is_what_torch_says(bench, _two(bench)))
    ),
    Claim(
        "reclaimable is what a clear gives back: classic, three streams",
        _on(lambda bench: heaps.random_heaps_of_streams(bench, 12)),
    ),
    Claim(
        "reclaimable is what a clear gives back: expandable, three streams",
        _on(lambda bench: heaps.random_heaps_of_streams(bench, 12, by_pages=True), EXPANDABLE),
    ),
    Claim("reclaimable is what a clear gives back: max_split_size_mb", heaps.max_split_size),
    Claim("reclaimable is what a clear gives back: a memory fraction", heaps.memory_fraction),
    Claim("a living MemPool is kept, a dead one gone: classic", _on(pools.living_mem_pool)),
    Claim("a living MemPool is kept, a dead one gone: expandable", _on(pools.living_mem_pool, EXPANDABLE)),
    Claim("a dead CUDA graph's memory is reclaimable: classic", _on(pools.graphs_living_and_dead)),
    Claim("a dead CUDA graph's memory is reclaimable: expandable", _on(pools.graphs_living_and_dead, EXPANDABLE)),
    Claim("what is pending on another stream is reclaimable: classic", _on(pools.pending_on_another_stream)),
    Claim(
        "what is pending on another stream is reclaimable: expandable",
        _on(pools.pending_on_another_stream, EXPANDABLE),
    ),
    Claim("pinned host memory is torch's, and on no device", _on(pools.pinned_host_memory)),
    Claim("cudaMallocAsync: what it tells is right, the rest absent", pools.asynchronous_backend),
    Claim("memory past a disabled cache is not torch's", _on(pools.past_the_cache)),
    Claim("ledgers add up in every scrape", device.ledgers_add_up),
    Claim("an out-of-memory error has its figures", _on(errors.figures_of_an_error)),
    Claim("a memory fraction is the limit of an error", _on(errors.limit_of_a_fraction)),
    Claim("an error reaches the exporter though its process dies", errors.told_by_the_dying),
    Claim("clears in the modes now, step and idle: classic", _on(actions.modes)),
    Claim("clears in the modes now, step and idle: expandable", _on(actions.modes, EXPANDABLE)),
    Claim("a dry run touches nothing", _on(actions.dry_run_touches_nothing)),
    Claim("cycles go with a collection", _on(actions.cycles_go_with_a_collection)),
    Claim("peaks are reset", _on(lambda bench: actions.peaks_are_reset(bench, _two(bench)))),
    Claim("a clear waits during a capture, which survives", _on(actions.waits_in_a_capture)),
    Claim("cost of the reporter", costs.of_the_reporter, alone=True),
    Claim("cost of a round trip", costs.of_a_round_trip, alone=True),
)
