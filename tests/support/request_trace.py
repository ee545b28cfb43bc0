"""The modules and functions of the exporter that one request runs through, in their true order.

    python -m tests.support.request_trace [report|scrape|submission|delivery] [--calls]

prints them for the exporter of this checkout. A module is entered again each time that a function of it starts after a
function of another module. A coroutine that continues does not start. The work of background threads and of the work
that is due once a second is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.paths import REPOSITORY
from tests.support.running_exporter import ACTIONS, running_exporter
from tests.support.waiting import patient

BESIDE = (
    "nvml/poller.py",
    "server/background/housekeeping.py",
    "server/security/tokens.py:FileRefresher._run",
    "events/log.py:EventLog._run",
)
"""What is on the stack of the work that goes on beside requests: modules, or functions."""
PID = 4711


@dataclass(frozen=True)
class Call:
    """A function that started: its module, relative to its package, and its qualified name."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


class Trace:
    """The calls while `recording()`. Only threads that start while it is `installed()` are seen."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._recording = False
        self._started: set[FrameType] = set()
        self._known: dict[CodeType, Call | None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all threads that start meanwhile."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls, and forget the calls of an earlier recording."""
        self.calls, self._started = [], set()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @property
    def entries(self) -> list[str]:
        """The modules in the order in which the request enters them."""
        return [module for module, _ in groupby(call.module for call in self.calls)]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._recording or frame in self._started:
            return
        call = self._call(frame.f_code)
        if call is None or _is_beside(frame, self._call):
            return
        self._started.add(frame)  # a coroutine has one frame from its start to its end
        self.calls.append(call)

    def _call(self, code: CodeType) -> Call | None:
        if code not in self._known:
            self._known[code] = _call_of(code)
        return self._known[code]


def _call_of(code: CodeType) -> Call | None:
    try:
        parts = Path(code.co_filename).relative_to(REPOSITORY).parts
    except ValueError:
        return None
    package = next((place for place, part in enumerate(parts) if part.startswith("gpumem_")), None)
    if package is None:
        return None
    return Call("/".join(parts[package + 1 :]), getattr(code, "co_qualname", code.co_name))


def _is_beside(frame: FrameType | None, call_of: Callable[[CodeType], Call | None]) -> bool:
    while frame is not None:
        call = call_of(frame.f_code)
        if call is not None and (call.module in BESIDE or str(call) in BESIDE):
            return True
        frame = frame.f_back
    return False


def trace_requests() -> dict[str, Trace]:
    """Return the trace of one request of each kind, on a connection and an exporter that have answered some before."""
    traces = {kind: Trace() for kind in _REQUESTS}
    trace = Trace()
    with (
        tempfile.TemporaryDirectory() as folder,
        trace.installed(),
        running_exporter(unix=Path(folder) / "socket", report_interval=60.0, report_expiry=600.0),
    ):
        client = Connection(f"unix://{folder}/socket", timeout_seconds=patient(30.0))
        for number in range(3):
            for kind, (method, path, document) in _REQUESTS.items():
                body = json.dumps(document(number)).encode() if document is not None else None
                with trace.recording():
                    answer = client.request(method, path, body, {"Content-Type": "application/json"})
                    time.sleep(0.05)  # what the exporter does after its reply
                assert answer.status in (200, 202), answer
                traces[kind].calls = trace.calls
        client.close()
    return traces


def _report(number: int) -> dict[str, Any]:
    device = sample(UUIDS[0], allocated=10 * MIB + number, reclaimable=5 * MIB)
    return to_wire(report(PID, devices=(device,), sequence=10 + number))


def _submission(_: int) -> dict[str, Any]:
    return {"action": "empty_cache", "target": {"pid": PID}, "wait_seconds": 0}


_REQUESTS: dict[str, tuple[str, str, Callable[[int], dict[str, Any]] | None]] = {
    "report": ("POST", REPORTS_PATH, _report),
    "scrape": ("GET", "/metrics", None),
    "submission": ("POST", ACTIONS, _submission),
}


def main() -> None:
    """Print the traces of one request of each kind, or of the kinds that are named."""
    kinds = [word for word in sys.argv[1:] if not word.startswith("-")]
    for kind, trace in trace_requests().items():
        if kinds and kind not in kinds:
            continue
        entered = Counter(trace.entries)
        print(f"{kind}: {len(entered)} modules, {len(set(trace.calls))} functions, {len(trace.calls)} calls")
        for module, times in entered.items():
            print(f"  {times:2d} {module}")
        if "--calls" in sys.argv:
            for call in trace.calls:
                print(f"     {call}")


if __name__ == "__main__":
    main()
