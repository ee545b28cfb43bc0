"""The use of the cache of a vLLM with several workers: when it is read, and when it is known."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from gpumem_client.wire.protocol import DeviceSample, EngineState
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.engines import cache_use
from gpumem_exporter.features.engines.cache_use import CacheUse
from gpumem_exporter.features.engines.vllm import EngineRefusedError
from tests.support.builders.builders import report
from tests.support.waiting import patient, wait_for

CACHE = {"kv_cache": 1000, "weights": 500}


class Engine:
    """Stands for one engine, which all processes have; notes which were searched, and how often the use was read."""

    key = name = "the engine"

    def __init__(self) -> None:
        self.use: float | None = 0.25
        self.fails = False
        self.found: list[int | None] = []
        self.reads = 0

    def is_engine(self, _target: SelectedProcess) -> bool:
        return True

    def find(self, target: SelectedProcess) -> Engine:
        self.found.append(target.host_pid)
        return self

    def cache_use(self) -> float | None:
        self.reads += 1
        if self.fails:
            raise EngineRefusedError(ReasonCode.ENGINE_FAILED, "it does not answer")
        return self.use

    def activity(self) -> None:
        raise AssertionError("only the use is read")

    release = resume = activity


class Node:
    """A store of reports, and the thread's rounds without the thread."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sequence = 0
        self.engine = Engine()
        self.store = Store(report_expiry_seconds=1e6, reading_expiry_seconds=5.0, max_processes=10)
        self.cache_use = CacheUse(self.engine, lambda: self.store.snapshot(self.now), clock=lambda: self.now)  # type: ignore[arg-type]

    def send(
        self,
        pid: int = 1,
        sample: DeviceSample | None = None,
        engine: str = "vllm",
        uid: int | None = 7,
        **changes: int,
    ) -> Mapping[str, int]:
        """Take a report as the exporter does, and return the states of its cache as stored."""
        self.sequence += 1
        devices = (sample or DeviceSample("GPU-1", component_bytes=CACHE),)
        sent = report(pid, devices=devices, sequence=self.sequence, engine=EngineState(engine), **changes)
        completed = self.cache_use.complete(sent, ProcessKey(1, pid, uid, HERE))
        stored: ReportingProcess = self.store.put_report(
            completed, host_pid=pid, owner_uid=uid, place=HERE, now_seconds=self.now, now_unix_seconds=self.now
        )
        return stored.report.devices[0].kv_cache_bytes

    def read(self, seconds: float = 0.0) -> int:
        """Let time pass, run a round and return the number of requests."""
        self.now += seconds
        before = self.engine.reads
        self.cache_use.read_due()
        return self.engine.reads - before


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_use_is_the_same_part_on_each_worker_and_read_once_for_an_engine(node: Node) -> None:
    node.send(1)
    node.send(2, DeviceSample("GPU-2", component_bytes={"kv_cache": 401}))
    assert node.read() == 1
    assert node.send(1) == {"used": 250}
    assert node.send(2, DeviceSample("GPU-2", component_bytes={"kv_cache": 401})) == {"used": 100}
    assert node.read(14.9) == 0
    node.engine.use = 0.0
    assert node.read(0.1) == 1
    assert node.send(1) == {"used": 0}
    assert node.engine.found == [1, 2]


def test_a_use_is_known_for_thirty_seconds_and_an_engine_that_fails_is_asked_less_often(node: Node) -> None:
    node.send()
    node.read()
    node.engine.fails = True
    reads = [node.read(1.0) for _ in range(30)]
    assert node.send() == {"used": 250}
    reads += [node.read(1.0) for _ in range(270)]
    assert node.send() == {}
    assert [second for second, count in enumerate(reads, 1) if count] == [15, 45, 105, 225]
    node.engine.fails, node.engine.use = False, None
    assert node.read(120.0) == 1
    assert node.send() == {}
    node.engine.use = 0.5
    assert node.read(120.0) == 1
    assert node.send() == {"used": 500}


def test_a_use_before_a_sleep_is_not_used_after_it(node: Node) -> None:
    node.send()
    node.read()
    assert node.send() == {"used": 250}
    asleep = DeviceSample("GPU-1", component_bytes=CACHE, unmapped_bytes=1, component_unmapped_bytes={"kv_cache": 1})
    assert node.send(sample=asleep) == {}
    assert node.read(100.0) == 0
    assert node.send() == {}
    assert node.read() == 1
    assert node.send() == {"used": 250}


def test_a_later_process_with_the_pid_does_not_get_the_use(node: Node) -> None:
    node.send()
    node.read()
    assert node.send(start_time_ticks=1001) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "sglang"},
        {"uid": None},
        {"sample": DeviceSample("GPU-1", component_bytes={"kv_cache": 0})},
        {"sample": DeviceSample("GPU-1", component_bytes=CACHE, kv_cache_bytes={"used": 1})},
    ],
)
def test_no_other_process_is_searched_for_a_port(node: Node, other: dict[str, object]) -> None:
    before = node.send(**other)  # type: ignore[arg-type]
    node.read()
    assert node.engine.found == []
    assert node.send(**other) == before  # type: ignore[arg-type]


def test_the_engine_of_another_user_is_read_although_one_user_has_slow_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1000))
    slow = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("gpumem_exporter.features.engines.cache_use.time", slow)
    for pid in (1, 2, 3):
        node.send(pid)
    node.send(4, uid=8)
    node.read()
    assert node.engine.found == [1, 4]
    node.read()
    assert node.engine.found == [1, 4, 2]


def test_the_thread_waits_for_a_report_without_a_use_and_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_use, "_LOOK_SECONDS", 0.01)
    node.cache_use = CacheUse(node.engine, lambda: node.store.snapshot(node.now), clock=lambda: node.now)  # type: ignore[arg-type]
    before = set(threading.enumerate())
    node.cache_use.start()
    (thread,) = set(threading.enumerate()) - before
    node.send(1, DeviceSample("GPU-1", kv_cache_bytes={"used": 1}, component_bytes=CACHE))
    assert node.engine.reads == 0
    node.send()
    wait_for(lambda: node.send() == {"used": 250}, "the use")
    node.cache_use.stop()
    thread.join(patient(10))
    assert not thread.is_alive()
