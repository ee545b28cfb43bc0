from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import EVENT_TYPES, Event, Page, Query
from gpumem_exporter.features.events import event_log
from gpumem_exporter.features.events.event_log import EventLog
from gpumem_exporter.features.events.event_storage import Storage
from gpumem_exporter.metrics.instruments import Registry
from tests.support.waiting import patient, wait_for

WAIT = patient(30.0)


class ScriptedDisk(Storage):
    """Stores events in memory, and fails, hangs or raises as the test requires."""

    def __init__(self) -> None:
        super().__init__(None, retention_seconds=1e10, max_bytes=64 << 20, wall_clock=time.time)
        self.error = ""
        self.hanging = False
        self.stuck = threading.Event()
        self.released = threading.Event()
        self.attempts = 0
        self.closed_in = ""
        self.kind: type[Exception] = StorageError

    def _trouble(self) -> None:
        self.attempts += 1
        if self.hanging:
            self.stuck.set()
            assert self.released.wait(WAIT)
        if self.error:
            raise self.kind(self.error)

    def append(self, events: Sequence[Event]) -> list[bool | None]:
        self._trouble()
        return super().append(events)

    def read(self, query: Query) -> Page:
        self._trouble()
        return super().read(query)

    def close(self) -> None:
        self.closed_in = threading.current_thread().name
        super().close()


class Bench:
    def __init__(self, max_waiting: int = 100) -> None:
        self.disk = ScriptedDisk()
        self.registry = Registry()
        self.log = EventLog(self.disk, self.registry, max_waiting=max_waiting)

    def put(self, name: str, **changes: Any) -> Future[bool]:
        return self.log.put(Event("oom", 1.0, workload=name, **changes))

    @property
    def counted(self) -> dict[str, float]:
        """The number of events by type, without types that have none."""
        value = self.registry.get_sample_value
        return {type_: count for type_ in EVENT_TYPES if (count := value("gpumem_events_total", {"type": type_}))}

    @property
    def dropped(self) -> float | None:
        return self.registry.get_sample_value("gpumem_events_dropped_total")

    def stored(self) -> list[str | None]:
        return [event.workload for event in self.log.read(Query(after=0, limit=1000)).result(WAIT).events]

    def until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, f"a change of {self.log.check()}")

    def state(self) -> str:
        check = self.log.check()
        return f"{check['status']} {check['detail']}"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "RETRY_SECONDS", 0.01)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.disk.released.set()
    assert bench.log.stop(WAIT)


def test_each_new_event_is_counted_once_after_the_commit(bench: Bench) -> None:
    bench.disk.error = "disk full"
    bench.log.start()
    bench.until(lambda: bench.state() == "degraded disk full")
    bench.put("a", subject="s")
    committed = bench.put("b")
    assert bench.state() == "degraded disk full; 2 waiting"
    assert bench.counted == {}
    bench.disk.error = ""
    assert committed.result(WAIT)
    assert bench.put("again", subject="s").result(WAIT)
    assert bench.log.put(Event("device_lost", 2.0, workload="other", subject="s")).result(WAIT)
    assert bench.counted == {"oom": 2, "device_lost": 1}
    assert bench.stored() == ["a", "b", "other"]


def test_a_hung_disk_blocks_no_caller_and_the_check_shows_the_duration(bench: Bench) -> None:
    bench.disk.hanging = True
    bench.log.start()
    assert bench.disk.stuck.wait(WAIT)
    committed = bench.put("a")
    page = bench.log.read(Query())
    assert not committed.done()
    assert not page.done()
    bench.until(lambda: bench.state() == "degraded memory has not answered for 1 s; 1 waiting")
    bench.disk.hanging = False
    bench.disk.released.set()
    assert committed.result(WAIT)
    assert bench.stored() == ["a"]
    assert bench.state() == "ok stored in memory"


def test_queries_do_not_delay_the_retries_of_a_failing_disk(bench: Bench) -> None:
    bench.disk.error = "disk full"
    bench.log.start()
    bench.until(lambda: "disk full" in bench.state())
    before = bench.disk.attempts
    reads = 0

    def tried_again() -> bool:
        nonlocal reads
        reads += 1
        with pytest.raises(StorageError):
            bench.log.read(Query()).result(WAIT)
        return bench.disk.attempts > before + reads

    bench.until(tried_again)


def test_the_owner_that_fills_the_queue_loses_its_latest_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench(max_waiting=40)
    first = bench.log.put(Event("oom", 0.0, owner="uid:2"))
    flood = [bench.log.put(Event("oom", 0.0, owner="uid:1")) for _ in range(60)]
    large = bench.log.put(Event("action", 0.0, owner="uid:1", detail={"results": [{}] * 160}))
    others = [bench.log.put(Event("oom", 0.0, owner=f"uid:{number}")) for number in range(3, 13)]
    assert not any(future.done() for future in (first, large, *others))
    assert [future.done() for future in flood] == [False] * 18 + [True] * 42
    assert bench.state() == "degraded the event log has stopped; 30 waiting"
    assert bench.dropped == 42
    bench.log.start()
    assert all(future.result(WAIT) for future in (first, large, *others, *flood[:18]))
    assert bench.log.stop(WAIT)
    levels = [record.levelname for record in caplog.records if "event queue" in record.getMessage()]
    assert levels == ["WARNING", "INFO"], "once when events start to be dropped, once when that ends"


def test_an_event_that_cannot_be_stored_does_not_block_the_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    invalid: dict[str, Any] = {"poison": {"x": {1, 2}}, "large": {"x": "y" * 100_000}, "odd": {"results": 7}}
    one_batch = [bench.put(name, detail=invalid.get(name, {})) for name in ("a", "poison", "b", "large", "odd", "c")]
    bench.log.start()
    assert [future.result(WAIT) for future in one_batch] == [True, False, True, False, False, True]
    assert bench.put("d").result(WAIT)
    assert bench.stored() == ["a", "b", "c", "d"]
    assert (bench.counted, bench.dropped) == ({"oom": 4}, 3)
    assert "not JSON serializable" in caplog.text


def test_an_unexpected_error_at_the_start_does_not_end_the_thread(bench: Bench) -> None:
    bench.disk.error = "unexpected"
    bench.disk.kind = RecursionError
    bench.log.start()
    bench.until(lambda: "unexpected" in bench.state())
    bench.disk.error = ""
    assert bench.put("a").result(WAIT)
    bench.until(lambda: bench.state().startswith("ok"))


def test_queued_events_are_stored_and_the_storage_is_closed_on_stop() -> None:
    bench = Bench()
    bench.log.start()
    committed = [bench.put(str(number)) for number in range(50)]
    assert bench.log.stop(WAIT)
    assert all(future.result(0) for future in committed)
    assert bench.disk.closed_in == "gpumem-events"


def test_queries_beyond_the_limit_are_rejected_and_may_be_cancelled(bench: Bench) -> None:
    pages = [bench.log.read(Query()) for _ in range(20)]
    assert pages[0].cancel()
    assert not bench.put("a").cancel()
    bench.log.start()
    assert [page.exception(WAIT) is None for page in pages[1:]] == [True] * 15 + [False] * 4
    assert bench.stored() == ["a"]


def test_queries_without_end_do_not_delay_the_commits(bench: Bench) -> None:
    committed: list[bool] = []
    event: list[Future[bool]] = []

    def read_again(_: Query) -> Page:
        event.append(bench.put("a") if not event else event[0])
        committed.append(event[0].done())
        if len(committed) < 10:
            bench.log.read(Query())  # as several owners do that take turns
        return Page((), 0, more=False)

    bench.disk.read = read_again  # type: ignore[assignment,method-assign]
    bench.log.read(Query())
    bench.log.start()
    bench.until(lambda: len(committed) == 10)
    assert committed == [False, *[True] * 9]


async def test_pages_returns_all_events_or_those_of_the_last_pages_once_the_storage_can_be_read(bench: Bench) -> None:
    bench.disk.error = "another exporter uses it"
    bench.log.start()
    committed = [bench.put(str(number)) for number in range(25)]
    query = Query(after=0, limit=10)
    waiting = asyncio.ensure_future(bench.log.pages(query))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    bench.disk.error = ""
    await waiting
    assert all(each.result(WAIT) for each in committed)
    everything = [str(number) for number in range(25)]
    assert [event.workload for event in await bench.log.pages(query)] == everything
    assert [event.workload for event in await bench.log.pages(query, last=2)] == everything[10:]
