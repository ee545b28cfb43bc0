"""The poller's thread: its schedule, its errors, and its status when the driver hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.node.poller import Poller
from tests.support.builders.builders import NobodyHost
from tests.support.servers.running_exporter import ScriptedProvider
from tests.support.waiting import patient

SOON = patient(30.0)
"""A timeout that a passing test never reaches."""


class Driver(ScriptedProvider):
    """A driver that notes the threads of its calls, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def _call(self) -> None:
        self.threads.add(threading.current_thread().name)
        super()._call()

    def close(self) -> None:
        self._call()
        self.closed.set()


Start = Callable[..., Poller]


@pytest.fixture
def readings() -> SimpleQueue[NodeReading]:
    """The readings that are published."""
    return SimpleQueue()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def start(driver: Driver, readings: SimpleQueue[NodeReading]) -> Iterator[Start]:
    pollers: list[Poller] = []

    def started(publish: Callable[[NodeReading], None] = readings.put, **options: object) -> Poller:
        settings = {"interval_seconds": 0.001, **options}
        poller = Poller(driver, NobodyHost(), publish, **settings)  # type: ignore[arg-type]
        pollers.append(poller)
        poller.start()
        return poller

    yield started
    driver.released.set()
    for poller in pollers:
        assert poller.stop(SOON)


def test_readings_are_published_until_the_poller_is_stopped(
    start: Start, driver: Driver, readings: SimpleQueue[NodeReading]
) -> None:
    poller = start()
    published = [readings.get(timeout=SOON) for _ in range(5)]
    assert poller.stop(SOON)
    assert poller.status(0.0).polls == len(published) + readings.qsize()
    assert not poller.status(0.0).alive
    assert all(reading.up and reading.devices[0].memory for reading in published)
    assert driver.threads == {"gpumem-poller"}


def test_an_unexpected_exception_does_not_end_the_thread(
    start: Start, readings: SimpleQueue[NodeReading], caplog: pytest.LogCaptureFixture
) -> None:
    failures = 3

    def publish(reading: NodeReading) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ZeroDivisionError("unforeseen")
        readings.put(reading)

    with caplog.at_level(logging.INFO):
        poller = start(publish)
        readings.get(timeout=SOON)
        poller.stop(SOON)
    assert poller.status(0.0).error == ""
    failed, recovered = caplog.records
    assert (failed.levelname, recovered.levelname) == ("WARNING", "INFO")
    assert "ZeroDivisionError: unforeseen" in failed.message
