from __future__ import annotations

from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError, ExporterUnreachableError
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.top.source import Source
from gpumem_exporter.errors import NvmlUnavailableError, TargetNotFoundError
from tests.support.top_documents import device, event, live, process

_DEVICES = {"source": "nvml", "taken_unix_seconds": 1e9, "nvml": {"up": True}, "devices": [device("0")]}
_PROCESSES = {"source": "nvml", "processes": [process(7, "0")]}
_NODE = "/api/v1/live-rows?processes=documents"


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

    def open(self) -> _Driver:
        self.opened += 1
        return self

    def read(self) -> Any:
        if self.error is not None:
            raise self.error
        return Node(_DEVICES, _PROCESSES)

    def release(self) -> None:
        self.released += 1


class _World:
    """A source with a clock that the test moves."""

    def __init__(self, *, named: bool = False) -> None:
        self.api, self.driver, self.now = _Api(), _Driver(), 100.0
        self.source = Source(
            lambda: self.api,  # type: ignore[arg-type,return-value]
            open_driver=None if named else self.driver.open,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )


def test_with_an_exporter_the_driver_is_not_opened() -> None:
    world = _World()
    read = world.source.read()
    assert (read.url, read.without_exporter, [row["pid"] for row in read.rows]) == ("unix:///e.sock", "", [7])
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


_PAST = live({"GPU-0": [1, 2]}, [90.0, 95.0], clock_seconds=96.0)
_EVENTS = {"events": [event(3, "oom", 1e9)], "next_after": 3, "more": False}


def test_a_reading_is_one_request_and_the_events_are_read_every_three_seconds() -> None:
    world = _World()
    world.api.past, world.api.events = _PAST, _EVENTS
    read = world.source.read()
    assert (read.past, read.now) == ({"GPU-0": ((90.0, 1 << 20), (95.0, 2 << 20))}, 96.0)
    assert (len(read.events or ()), read.no_events) == (1, "")
    world.api.paths.clear()
    for _ in range(30):
        world.now += 1.0
        world.source.read()
    assert world.api.paths.count(_NODE) == 30
    assert [path for path in world.api.paths if path != _NODE] == ["/api/v1/events?limit=100"] * 10


def test_a_past_in_another_format_is_unknown() -> None:
    for past in ({"moment": 1}, {"moment": {"clock_seconds": 1}, "history": {"seconds": [1], "devices": 7}}):
        world = _World()
        world.api.past = past
        assert world.source.read().past == {}


@pytest.mark.parametrize(
    "error", [ExporterAnswerError(404, "no such route"), ExporterAnswerError(403, "no"), ExporterUnreachableError("x")]
)
def test_an_exporter_without_events_is_a_source(error: ExporterError) -> None:
    world = _World()
    world.api.events = error
    for _ in range(5):
        read = world.source.read()
        assert ([row["pid"] for row in read.rows], read.events) == ([7], None)
        world.now += 1.0
    assert len(world.api.paths) == 5 + 1, "no new attempt follows immediately"


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_refused_events_are_unknown_and_queried_again_after_a_minute(status: int) -> None:
    world = _World()
    world.api.events = _EVENTS
    world.source.read()
    world.api.events = ExporterAnswerError(status, "token-needed")
    world.now += 3.0
    read = world.source.read()
    assert read.events is None
    assert ("token-needed" in read.no_events) is (status in (401, 403))
    world.api.events = _EVENTS
    world.now += 60.0
    assert world.source.read().events is None
    world.now += 3.0
    read = world.source.read()
    assert (len(read.events or ()), read.no_events) == (1, "")


def test_known_events_survive_a_server_error_and_not_the_loss_of_the_exporter() -> None:
    world = _World()
    world.api.past, world.api.events = _PAST, _EVENTS
    world.source.read()
    world.api.events = ExporterAnswerError(503, "disk")
    world.now += 3.0
    assert len(world.source.read().events or ()) == 1
    world.api.error = ExporterUnreachableError("no-answer")
    world.now += 10.0
    read = world.source.read()
    assert (read.events, read.past) == (None, {})


def test_a_name_must_exist_in_the_first_reading_only() -> None:
    api = _Api()
    source = Source(lambda: api, target=Target(workload="llm"))  # type: ignore[arg-type,return-value]
    api.processes = {"source": "nvml", "processes": [process(7, "0", workload="eval")]}
    with pytest.raises(TargetNotFoundError, match="no such workload 'llm'"):
        source.read()
    api.processes = _PROCESSES
    assert [row["pid"] for row in source.read().rows] == [7]
    api.processes = {"source": "nvml", "processes": []}
    later = source.read()
    assert (later.rows, later.devices) == ((), [])


def test_an_exporter_that_is_too_old_is_named_with_its_version() -> None:
    world = _World(named=True)
    world.api.processes = {**_PROCESSES, "columns": ["pid"], "processes": [[7]]}
    with pytest.raises(ExporterUnreachableError, match=r"version 1\b"):
        world.source.read()
