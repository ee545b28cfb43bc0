"""The past of a job or a device in `top`: its timeline and its latest events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from rich.console import Group
from rich.text import Text
from textual.widgets import Static

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.render.columns import event_line
from gpumem_exporter.cli.render.layout import Row
from gpumem_exporter.cli.render.rows import called
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.plot import legend, timeline
from gpumem_exporter.cli.top.source import in_daemon_thread

_SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
# The character of an event on the timeline, and its style.
_MARKS = {"oom": ("!", "bold red"), "action": ("c", "bold yellow")}


class _Subject(NamedTuple):
    url: str
    query: str
    name: str
    seconds: int


class Past(Static):
    """Reads the exporter again every two seconds, as long as it is drawn."""

    def __init__(self, open_api: Callable[[str], ExporterApi], *, events: int, span: int = 0) -> None:
        super().__init__(id="past")
        self._open_api, self._most, self._span = open_api, events, span
        self._subject = _Subject("", "", "", 0)
        self._history: Mapping[str, Any] | None = None
        self._events: Sequence[Mapping[str, Any]] = ()
        self._problem, self._due_seconds = "", 0.0
        self._drawn: tuple[Row, Row, int] = ({}, {}, 0)

    def zoom(self, step: int) -> None:
        """Show a longer or a shorter time."""
        self._span = max(0, min(len(_SPANS) - 1, self._span + step))
        self.show(*self._drawn)

    def show(self, row: Row, words: Row, bars: int) -> None:
        """Draw the job of a row, otherwise its device, as it was read last. The timeline has `bars` lines."""
        self._drawn, job = (row, words, bars), row["job"]
        query = f"job={quote(job['id'], safe='')}" if job else f"device={quote(row['uuid'], safe='')}"
        name = called(job) if job else f"GPU {row['gpu']}"
        subject = _Subject(row["from"].url, query, name, _SPANS[self._span][1])
        if subject != self._subject:
            self._subject, self._history, self._events, self._due_seconds = subject, None, (), 0.0
        if subject.url and time.monotonic() >= self._due_seconds:
            self._due_seconds = time.monotonic() + _REFRESH_SECONDS
            # A function: a worker that ends before it starts would leave a coroutine that was never awaited.
            self.run_worker(partial(self._update, subject, row["now"]), exclusive=True)  # type: ignore[arg-type]
        self.update(Group(*self._lines(words, row["now"], bars)))

    async def _update(self, subject: _Subject, now: float) -> None:
        try:
            self._history, self._events = await in_daemon_thread(partial(self._read, subject, now))
            self._problem = ""
        except GpumemError as error:
            self._problem = str(error)
        self.show(*self._drawn)

    def _read(self, subject: _Subject, now: float) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        span = f"from={now - subject.seconds:.0f}&to={now:.0f}&points=2000"
        with self._open_api(subject.url) as api:
            history = api.get(f"/api/v1/history?{subject.query}&{span}")
            return history, api.get(f"/api/v1/events?{subject.query}&limit={self._most}&fold=true")["events"]

    def _lines(self, words: Row, now: float, bars: int) -> Iterator[Text]:
        marks = [(event["unix_seconds"], *_MARKS[event["type"]]) for event in self._events if event["type"] in _MARKS]
        line = plain(f"{self._subject.name}  last {_SPANS[self._span][0]}  ", "bold").append_text(legend(words))
        yield line.append("! out of memory  c action  " if marks else "").append_text(plain(self._problem, "red"))
        if self._history is None:
            yield plain("Reading …" if self._subject.url else "The past needs an exporter; none answers.", "dim")
            return
        yield from timeline(self._history, self.size.width, bars, marks)
        for event in sorted(self._events, key=lambda event: -float(event["unix_seconds"])):
            yield event_line(event, now, self.size.width)
