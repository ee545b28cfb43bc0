"""The poller's thread: its schedule, its errors, and its status when the driver hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from gpumem_exporter.core.samples import NodeReading
from gpumem_exporter.nvml.poller import Poller
from gpumem_exporter.nvml.provider import DeviceIdentity
from tests.support.builders import NobodyHost
from tests.support.running_exporter import ScriptedProvider
from tests.support.waiting import patient

SOON = patient(30.0)
"""A timeout that a passing test never reaches."""


class OneGpu(ScriptedProvider):
    """A driver with one GPU, whose listing runs `hook` first."""

    def __init__(self, hook: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.hook = hook
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def open(self) -> None:
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed.set()

    def devices(self) -> tuple[DeviceIdentity, ...]:
        self.threads.add(threading.current_thread().name)
        self.hook()
        return super().devices()[:1]


class Published:
    """Stores readings, and lets a test wait for the nth."""

    def __init__(self) -> None:
        self.readings: list[NodeReading] = []
        self._changed = threading.Condition()

    def __call__(self, reading: NodeReading) -> None:
        with self._changed:
            self.readings.append(reading)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.readings) >= count, SOON)


Start = Callable[..., Poller]


@pytest.fixture
def start() -> Iterator[Start]:
    pollers: list[Poller] = []

    def started(provider: OneGpu, publish: Callable[[NodeReading], None], **options: object) -> Poller:
        settings = {"interval_seconds": 0.001, **options}
        poller = Poller(provider, NobodyHost(), publish, **settings)  # type: ignore[arg-type]
        pollers.append(poller)
        poller.start()
        return poller

    yield started
    for poller in pollers:
        assert poller.stop(SOON)


def test_readings_are_published_until_the_poller_is_stopped(start: Start) -> None:
    provider, published = OneGpu(), Published()
    poller = start(provider, published)
    published.wait_for(5)
    assert poller.stop(SOON)
    count = len(published.readings)
    assert poller.status(0.0).polls == count
    assert not poller.status(0.0).alive
    assert all(reading.up and reading.devices[0].memory for reading in published.readings)
    assert provider.threads == {"gpumem-poller"}


def test_an_unexpected_exception_does_not_end_the_thread(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    published = Published()
    failures = 3

    def publish(reading: NodeReading) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ZeroDivisionError("unforeseen")
        published(reading)

    with caplog.at_level(logging.INFO):
        poller = start(OneGpu(), publish)
        published.wait_for(1)
        poller.stop(SOON)
    assert poller.status(0.0).error == ""
    failed, recovered = caplog.records
    assert (failed.levelname, recovered.levelname) == ("WARNING", "INFO")
    assert "ZeroDivisionError: unforeseen" in failed.message


def test_a_hung_driver_shows_as_stuck_and_does_not_block_status_or_stop(start: Start) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        assert release.wait(SOON)

    published = Published()
    poller = start(OneGpu(hang), published, interval_seconds=1.0, clock=lambda: 100.0)
    assert hanging.wait(SOON)
    just_busy, stuck = poller.status(105.0), poller.status(105.1)
    assert (just_busy.busy_seconds, just_busy.stuck, just_busy.alive) == (5.0, False, True)
    assert (stuck.stuck, stuck.alive, stuck.polls) == (True, True, 0)
    assert poller.stop(0.0) is False
    release.set()
    assert poller.stop(SOON)
    assert published.readings == []


def test_a_poll_can_be_requested_before_the_interval_ends(start: Start) -> None:
    provider, published = OneGpu(), Published()
    poller = start(provider, published, interval_seconds=3600.0)
    for polls in (1, 2, 3):
        published.wait_for(polls)
        assert len(published.readings) == polls
        poller.poll_soon()
    assert poller.stop(SOON)
    assert provider.closed.is_set()
