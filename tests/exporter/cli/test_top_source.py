from __future__ import annotations

import re
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError, ExporterUnreachableError
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.top.source import Source
from gpumem_exporter.cli.top.watcher import Known
from gpumem_exporter.errors import NvmlUnavailableError, TargetNotFoundError
from tests.support.top_documents import device, event, live, process, reading

_DEVICES = {"source": "nvml", "taken_unix_seconds": 1e9, "nvml": {"up": True}, "devices": [device("0")]}
_PROCESSES = {"source": "nvml", "processes": [process(7, "0")]}
_NODE = "/api/v1/live?processes=documents"


class _Api:
    """An exporter that answers or raises an error."""

    def __init__(self) -> None:
        self.url = "unix:///e.sock"
        self.error: Exception | None = None
        self.read_count = 0
        self.closed = 0
        self.devices: Any = _DEVICES
        self.processes: Any = _PROCESSES
        self.past: Any = {}
        self.events: Any = ExporterAnswerError(404, "no such route")
        self.paths: list[str] = []

    def get(self, path: str) -> Any:
        self.read_count += 1
        self.paths.append(path)
        if self.error is not None:
            raise self.error
        if path == _NODE:
            return {**self.past, "state": {**self.devices, **self.processes, "version": "1"}}
        assert path.startswith("/api/v1/events")
        if isinstance(self.events, Exception):
            raise self.events
        return self.events

    def close(self) -> None:
        self.closed += 1


class _Driver:
    """A driver that answers or raises an error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opened = 0
        self.released = 0
        self.devices: Any = _DEVICES

    def open(self) -> _Driver:
        self.opened += 1
        return self

    def read(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.devices, _PROCESSES

    def release(self) -> None:
        self.released += 1


class _World:
    """A source with a clock that the test moves."""

    def __init__(self, *, named: bool = False) -> None:
        self.api, self.driver, self.now = _Api(), _Driver(), 100.0
        self.source = Source(
            ("unix:///e.sock",),
            driver=None if named else self.driver.open,
            open_api=lambda: self.api,  # type: ignore[arg-type,return-value]
            clock=lambda: self.now,
        )


def test_with_an_exporter_the_driver_is_not_opened() -> None:
    world = _World()
    read = world.source.read()
    assert (read.url, read.without_exporter, [row.pid for row in read.rows]) == ("unix:///e.sock", "", [7])
    assert world.driver.opened == 0


@pytest.mark.parametrize("error", [ExporterUnreachableError("no-answer"), ExporterAnswerError(404, "no-answer")])
def test_the_driver_replaces_an_exporter_that_does_not_answer(error: ExporterError) -> None:
    world = _World()
    world.api.error = error
    read = world.source.read()
    assert read.url == ""
    assert "no-answer" in read.without_exporter


def test_the_exporter_is_tried_again_and_replaces_the_driver() -> None:
    world = _World()
    world.api.error = ExporterUnreachableError("no-answer")
    world.source.read()
    world.api.error = None
    world.now += 2.9
    assert world.source.read().url == ""
    assert world.api.read_count == 1
    world.now += 0.1
    assert world.source.read().url == "unix:///e.sock"
    assert (world.driver.opened, world.driver.released) == (1, 1)


def test_the_driver_does_not_replace_a_named_exporter() -> None:
    world = _World(named=True)
    world.api.error = ExporterUnreachableError("no-answer")
    with pytest.raises(ExporterUnreachableError, match="no-answer"):
        world.source.read()
    world.api.error = None
    assert world.source.read().url == "unix:///e.sock"


def test_the_error_names_exporter_and_driver_and_releases_nvml() -> None:
    world = _World()
    world.api.error = ExporterUnreachableError("no-answer")
    world.driver.error = NvmlUnavailableError("no library")
    with pytest.raises(ExporterUnreachableError, match=r"no-answer.*no library"):
        world.source.read()
    assert world.driver.released == 1


@pytest.mark.parametrize("processes", [{"processes": [{}]}, {"processes": ["x"]}, {"processes": 7}])
def test_a_document_of_another_server_is_an_error(processes: Any) -> None:
    world = _World(named=True)
    world.api.processes = processes
    with pytest.raises(ExporterUnreachableError, match="gpumem-exporter"):
        world.source.read()


def test_a_reading_is_lost_after_a_failure_or_without_an_answer() -> None:
    known = Known(reading([], []), answered_seconds=100.0)
    assert known.lost(100.9, 1.0) == ""
    assert known.lost(104.9, 1.0) == ""
    assert re.search(r"\b5 s\b", known.lost(105.1, 1.0))
    assert known.lost(130.0, 60.0) == ""
    assert Known(reading([], []), 100.0, failure="refused").lost(100.1, 1.0) == "refused"


_PAST = live({"GPU-0": [1, 2]}, [90.0, 95.0], clock_seconds=96.0)
_EVENTS = {"events": [event(3, "oom", 1e9)], "next_after": 3, "more": False}


def test_a_reading_is_one_request_and_the_events_are_read_every_three_seconds() -> None:
    world = _World()
    world.api.past, world.api.events = _PAST, _EVENTS
    read = world.source.read()
    assert [seconds for seconds, _ in read.past["GPU-0"]] == [94.0, 99.0, 100.0]
    assert (len(read.events or ()), read.no_events) == (1, "")
    world.api.paths.clear()
    for _ in range(30):
        world.now += 1.0
        before = len(world.api.paths)
        world.api.devices = {**_DEVICES, "taken_unix_seconds": world.now}
        world.source.read()
        assert world.api.paths[before] == _NODE
    assert world.api.paths.count(_NODE) == 30
    more = [path for path in world.api.paths if path != _NODE]
    assert more == ["/api/v1/events?limit=100&after=3"] * 10


@pytest.mark.parametrize(
    "error", [ExporterAnswerError(404, "no such route"), ExporterAnswerError(403, "no"), ExporterUnreachableError("x")]
)
def test_an_exporter_without_events_is_a_source(error: ExporterError) -> None:
    world = _World()
    world.api.events = error
    for _ in range(5):
        read = world.source.read()
        assert ([row.pid for row in read.rows], read.events) == ([7], None)
        world.now += 1.0
    assert len(world.api.paths) == 5 + 1, "no new attempt follows immediately"


def test_the_driver_continues_the_past_and_has_no_events() -> None:
    world = _World()
    world.api.past, world.api.events = _PAST, _EVENTS
    world.source.read()
    world.api.error = ExporterUnreachableError("no-answer")
    world.now += 10.0
    world.driver.devices = {**_DEVICES, "taken_unix_seconds": world.now}
    read = world.source.read()
    assert (read.events, read.past["GPU-0"][-1][0], len(read.past["GPU-0"])) == (None, 110.0, 4)


def test_a_name_must_exist_in_the_first_reading_only() -> None:
    api = _Api()
    source = Source((), open_api=lambda: api, target=Target(workload="llm"))  # type: ignore[arg-type,return-value]
    api.processes = {"source": "nvml", "processes": [process(7, "0", workload="eval")]}
    with pytest.raises(TargetNotFoundError, match="no such workload 'llm'"):
        source.read()
    api.processes = _PROCESSES
    assert [row.pid for row in source.read().rows] == [7]
    api.processes = {"source": "nvml", "processes": []}
    later = source.read()
    assert (later.rows, list(later.devices["devices"])) == ((), [])


def test_an_exporter_that_is_too_old_is_named_with_its_version() -> None:
    world = _World(named=True)
    world.api.processes = {**_PROCESSES, "columns": ["pid"], "processes": [[7]]}
    with pytest.raises(ExporterUnreachableError, match=r"version 1\b"):
        world.source.read()
