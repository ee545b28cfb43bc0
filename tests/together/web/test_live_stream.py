"""`GET /api/v1/live` on the real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_exporter.server.web.streams import MAX_STREAMS_OF_VIEWER
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import eventually, patient

LIVE = "/api/v1/live"


class Stream:
    """One client of the stream."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(20))
        self._connection.request("GET", LIVE, headers={"Accept": "text/event-stream"})
        self.answer = self._connection.getresponse()

    def event(self) -> tuple[str, Any]:
        """The name and the data of the next event; an empty name at the end of the stream."""
        name = ""
        while line := self.answer.readline():
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                assert self.answer.readline() == b"\n"
                return name, json.loads(value)
        return "", None

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


@contextlib.contextmanager
def following(exporter: RunningExporter) -> Iterator[Stream]:
    stream = Stream(exporter.port)
    try:
        yield stream
    finally:
        stream.close()


def streams_are_free(exporter: RunningExporter) -> bool:
    with following(exporter) as stream:
        return stream.answer.status == 200


def test_a_stream_sends_the_history_then_states(exporter: RunningExporter) -> None:
    with following(exporter) as stream:
        assert stream.answer.headers["content-type"].startswith("text/event-stream")
        assert stream.answer.headers["cache-control"] == "no-store"
        (first, history), (second, state) = stream.event(), stream.event()
        assert (first, second) == ("history", "state")
        assert history["span_seconds"] == 600.0
        assert [device["uuid"] for device in state["state"]["devices"]] == list(UUIDS[:2])
        later = stream.event()
        moment = later[1].get("moment", later[1])
        assert moment["clock_seconds"] > state["moment"]["clock_seconds"]


def test_a_report_appears_in_a_state(exporter: RunningExporter) -> None:
    with following(exporter) as stream:
        exporter.report(report(4711, devices=(sample(UUIDS[0], 30 * MIB, 20 * MIB),)))
        while True:
            name, data = stream.event()
            if name == "state":
                rows = [dict(zip(data["state"]["columns"], row, strict=True)) for row in data["state"]["processes"]]
                if rows:
                    break
        assert [(row["pid"], row["allocated_bytes"], row["reclaimable_bytes"]) for row in rows] == [
            (4711, 30 * MIB, 20 * MIB)
        ]


def test_the_document_has_the_same_content(exporter: RunningExporter) -> None:
    document = eventually(lambda: exporter.document(LIVE), lambda found: found["state"]["newest"] is not None)
    assert set(document) == {"moment", "state", "history"}
    line = document["history"]["devices"][UUIDS[1]]
    assert set(line["in_use"]) == {400}
    assert set(line["allocated"]) == {0}
    assert document["state"]["newest"]["devices"][UUIDS[1]] == [400, 0]
    assert document["state"]["newest"]["seconds"] in document["history"]["seconds"]


def test_streams_over_the_limit_are_refused_until_another_ends() -> None:
    with running_exporter() as exporter, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(following(exporter)) for _ in range(MAX_STREAMS_OF_VIEWER)]
        assert {stream.answer.status for stream in streams} == {200}
        assert all(stream.event()[0] == "history" for stream in streams)
        problem(exporter.get(LIVE, Accept="text/event-stream"), 503)
        assert exporter.get(LIVE).status == 200
        streams[0].close()
        eventually(lambda: streams_are_free(exporter))


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}])
def test_another_sites_page_is_refused(exporter: RunningExporter, headers: dict[str, str]) -> None:
    problem(exporter.get(LIVE, Accept="text/event-stream", **headers), 403)
    problem(exporter.get(LIVE, **headers), 403)


def test_streams_end_when_the_exporter_stops() -> None:
    ended = threading.Event()
    with running_exporter() as exporter:
        stream = Stream(exporter.port)
        stream.event()

        def read() -> None:
            while stream.event()[0]:
                pass
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
    assert ended.wait(patient(30))
    reader.join(patient(30))
    stream.close()
