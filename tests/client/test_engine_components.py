"""Components, key-value cache and state of an engine, from what the client has read of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpumem_client.allocator.components import with_cache_use, with_components
from gpumem_client.allocator.heap_sum import PoolSegment
from gpumem_client.engines.engine_state import CacheUse, EngineClock, EngineFacts
from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.protocol import DeviceSample, EngineState
from tests.support.builders.builders import identity
from tests.support.builders.fake_allocator import FakeAllocator


def segment(address: int, size: int, allocated: int, pool: tuple[int, int] = (0, 1)) -> PoolSegment:
    return PoolSegment(address, size, allocated, pool)


def split(sample: DeviceSample, **changes: Any) -> DeviceSample:
    given: dict[str, Any] = {"held": {}, "tags": {}, "segments": (), "unmapped": (), "graph_pools": ()}
    return with_components(sample, **{**given, **changes})


def test_components_add_up_to_the_allocated_bytes() -> None:
    sample = DeviceSample("GPU-0", allocated_bytes=100, component_bytes={"parameters": 90, "other": 10})
    assert split(sample) == sample, "without an engine, the components of the user's code stay"
    found = split(
        sample,
        held={"weights": 40, "kv_cache": 30},
        segments=[segment(1, 20, 7, (0, 5)), segment(2, 20, 9, (0, 6))],
        graph_pools=[(0, 5)],
    )
    assert found.component_bytes == {"weights": 40, "kv_cache": 30, "cuda_graphs": 7, "other": 23}
    assert found.component_unmapped_bytes == {}
    assert split(sample, held={"weights": 101}).component_bytes == {}, "more than is allocated"


def test_a_sleeping_engine_has_mapped_and_unmapped_components() -> None:
    segments = [segment(1, 22, 20), segment(2, 50, 50), segment(3, 2, 1), segment(4, 2, 1), segment(5, 8, 3)]
    tags = {1: "weights", 2: "kv_cache", 3: "runtime", 4: "other"}
    sample = DeviceSample("GPU-0", allocated_bytes=30)
    found = split(sample, held={"weights": 99}, tags=tags, segments=segments, unmapped=[segments[1], segments[3]])
    assert found.component_bytes == {"weights": 20, "kv_cache": 0, "runtime": 1, "other": 9}
    assert found.component_unmapped_bytes == {"kv_cache": 50, "other": 2}


def test_the_components_of_tensors_without_tags_are_unknown_while_some_are_unmapped() -> None:
    asleep = segment(1, 50, 50)
    sample = DeviceSample("GPU-0", allocated_bytes=60, unmapped_bytes=50)
    assert split(sample, held={"weights": 20}, segments=[asleep], unmapped=[asleep]).component_bytes == {}


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (CacheUse(0.25, 0.5), {"used": 25, "evictable": 50, "free": 25}),
        (CacheUse(1 / 3, 2 / 3), {"used": 33, "evictable": 67, "free": 0}),
        (CacheUse(0.25), {"used": 25}),
        (None, {}),
    ],
)
def test_the_states_of_the_cache_add_up(use: CacheUse | None, found: dict[str, int]) -> None:
    sample = DeviceSample("GPU-0", component_bytes={"kv_cache": 100})
    assert with_cache_use(sample, use).kv_cache_bytes == found
    assert with_cache_use(DeviceSample("GPU-0", component_bytes={"kv_cache": 0}), use).kv_cache_bytes == {}


# States


def test_the_state_follows_requests_allocations_and_sleep() -> None:
    now = 0.0
    engine = EngineClock(lambda: now)
    allocations = itertools.count()

    def state(at: float, *, asleep: bool = False, allocated: Any = 0, **changes: Any) -> tuple[str, float | None]:
        nonlocal now
        now = at
        facts = EngineFacts("vllm", **{"measures": False, "ready": True, "requests": 0, **changes})
        found = engine.state(facts, asleep=asleep, allocations=allocated)
        assert found is not None
        return found.state, found.idle_seconds

    assert engine.state(None, asleep=False, allocations=None) is None
    assert state(1, measures=True) == ("starting", None)
    assert state(50, ready=False) == ("starting", None)
    assert state(52) == ("serving", 2)
    assert state(60) == ("idle", 10)
    assert state(70, requests=1) == ("serving", 0)
    assert state(90, allocated=next(allocations) + 1) == ("serving", 0), "a request that ended between two reports"
    assert state(95, allocated=1, asleep=True) == ("asleep", 5)
    assert state(96, asleep=True, allocated=None) == ("asleep", 6), "the allocator is flushing"
    assert state(97, asleep=True, allocated=1) == ("asleep", 7)
    assert state(100, allocated=None, ready=None, requests=None) == ("", None)


def test_a_report_has_the_engine_and_an_error_of_it_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    allocator: Any = FakeAllocator()
    loop = ReportLoop(identity(1), allocator, ErrorLog())
    report = loop.next_report()
    assert (report.engine, report.engine_starting) == (None, None)
    allocator.facts = EngineFacts("vllm", "0.32.0", "chat", measures=True)
    report = loop.next_report()
    assert (report.engine, report.engine_starting) == (EngineState("vllm", "0.32.0", "chat", "starting"), True)
    allocator.facts = EngineFacts("vllm", "0.32.0", "chat", measures=False, ready=True, requests=1)
    report = loop.next_report()
    assert report.engine is not None
    assert (report.engine.state, report.engine.idle_seconds, report.engine_starting) == ("serving", 0.0, False)
    allocator.facts, allocator.allocated_blocks = EngineFacts("vllm", measures=False, ready=True), None
    report = loop.next_report()
    assert report.engine is not None
    assert report.engine.idle_seconds is None, "neither requests nor allocations are counted"
    allocator.engine = lambda: 1 / 0
    report = loop.next_report()
    assert (report.engine, [device.uuid for device in report.devices]) == (None, ["GPU-0"])
    assert caplog.messages == ["cannot read the inference engine: division by zero"]
