"""The functions and folders that docs/architecture.md names exist, and requests take the paths that it shows."""

from __future__ import annotations

import ast
import json
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import PROFILES_PATH, REPORTS_PATH, CommandResult, DeviceResult, to_wire
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.builders.profile_documents import body, profile
from tests.support.packages import PACKAGES, Package
from tests.support.paths import REPOSITORY
from tests.support.servers.running_exporter import ACTIONS, running_exporter
from tests.support.waiting import patient, wait_for

POLLER = "gpumem-poller"
SECOND = "gpumem-second"
THREADS_BESIDE = (POLLER, "gpumem-events", "gpumem-files", SECOND)
CALLS_BESIDE = re.compile(r"housekeeping\.py:.*|edge/\w+\.py:(.*\.)?(main_loop|end_late)")
"""What goes on beside requests: threads, and calls that the event loop makes by itself."""
VALUES = (
    "core/naming.py",
    "core/container.py",
    "core/readings.py",
    "core/samples.py",
    "actions/action.py",
    "core/event.py",
    "metrics/collector_types.py",
    "wire/protocol.py",
    "wire/units.py",
)
"""The modules of immutable values and their names, and of their text."""
PID = 4711


@dataclass(frozen=True)
class Call:
    """A function that started: its module, relative to its package, and its qualified name."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


class Trace:
    """The calls of requests, or of one thread, while `recording()`.

    Only threads that start while the trace is `installed()` are seen.
    """

    def __init__(self, thread: str = "") -> None:
        self.calls: list[Call] = []
        self.threads_in_store: defaultdict[str, set[str]] = defaultdict(set)
        """The threads that have called each method of the store, also beside requests."""
        self._thread = thread
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

    def wait_until_quiet(self) -> None:
        """Wait until no call has been recorded for some time."""
        recorded = -1
        while recorded < len(self.calls):
            recorded = len(self.calls)
            time.sleep(patient(0.05))

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        thread, call = threading.current_thread().name, self._call(frame)
        if call is not None and call.module == "core/store.py":
            self.threads_in_store[call.function].add(thread)
        if not self._recording or frame in self._started or call is None:
            return
        if thread != self._thread if self._thread else self._is_beside(thread, frame):
            return
        self._started.add(frame)  # a coroutine has one frame from its start to its end
        self.calls.append(call)

    def _is_beside(self, thread: str, frame: FrameType | None) -> bool:
        if thread in THREADS_BESIDE:
            return True
        while frame is not None:
            call, frame = self._call(frame), frame.f_back
            if call is not None and CALLS_BESIDE.fullmatch(str(call)):
                return True
        return False

    def _call(self, frame: FrameType) -> Call | None:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = _call_of(code)
        return self._known[code]


def _call_of(code: CodeType) -> Call | None:
    try:
        parts = Path(code.co_filename).relative_to(REPOSITORY).parts
    except ValueError:
        return None
    package = next((place for place, part in enumerate(parts) if part.startswith("gpumem_")), None)
    if package is None or code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
        return None
    module = "/".join(parts[package + 1 :])
    return None if module in VALUES else Call(module, getattr(code, "co_qualname", code.co_name))


def trace_requests() -> dict[str, Trace]:
    """Return the trace of one request of each kind, on a connection and an exporter that have answered some before."""
    traces = {kind: Trace() for kind in ("report", "scrape", "submission", "command", "result", "profile")}
    trace = Trace()
    with (
        tempfile.TemporaryDirectory() as folder,
        trace.installed(),
        running_exporter(unix=Path(folder) / "socket", report_interval=60.0, report_expiry=600.0),
    ):
        client = Connection(f"unix://{folder}/socket", timeout_seconds=patient(30.0))

        def request(kind: str, path: str, document: Any = None, **headers: str) -> Any:
            content = document if isinstance(document, bytes | None) else json.dumps(document).encode()
            method = "GET" if content is None else "POST"
            with trace.recording():
                answer = client.request(method, path, content, {"Content-Type": "application/json", **headers})
                trace.wait_until_quiet()  # the exporter also works after its reply
            assert answer.status in (200, 201, 202), answer
            traces.setdefault(kind, Trace()).calls = trace.calls
            return answer.body

        # Housekeeping adds these series a second after the start, and the next scrape renders them from nothing.
        wait_for(
            lambda: b"gpumem_health_check_ok{" in client.request("GET", "/metrics").body, "the checks of the health"
        )
        for sequence in range(3):
            request("report", REPORTS_PATH, _report(sequence))
            request("scrape", "/metrics")
        for sequence in range(3, 9, 2):
            submitted = {"action": "empty_cache", "target": {"pid": PID}, "wait_seconds": 0}
            action_id = json.loads(request("submission", ACTIONS, submitted))["id"]
            (command,) = json.loads(request("command", REPORTS_PATH, _report(sequence)))["commands"]
            assert command["id"] == action_id
            result = CommandResult(action_id, "done", devices=(DeviceResult(UUIDS[0], 12, 5, freed_bytes=7),))
            request("result", REPORTS_PATH, _report(sequence + 1, results=(result,)))
        for sequence in (20, 30):
            submitted = {"action": "profile", "target": {"pid": PID}, "wait_seconds": 0}
            action_id = json.loads(request("submission of a profile", ACTIONS, submitted))["id"]
            request("command of a profile", REPORTS_PATH, _report(sequence, actions=("profile",)))
            sent = body(report(PID).process, profile(action_id))
            request("profile", PROFILES_PATH, sent, **{"Content-Encoding": "gzip"})
            result = CommandResult(action_id, "done")
            request("result of a profile", REPORTS_PATH, _report(sequence + 1, results=(result,)))
        client.close()
    traces["report"].threads_in_store = trace.threads_in_store
    reading = trace_thread(POLLER, "node/poller.py:Poller._poll")
    finding = trace_thread(SECOND, "runtime.py:Runtime.note_health")
    # The thread notes whether it failed, and waits for the next second.
    finding.calls = list(takewhile(lambda call: call.module != "node/failures.py", finding.calls))
    return {**traces, "reading": reading, "finding": finding}


def trace_thread(name: str, first: str) -> Trace:
    """Return the trace of one round of a thread, from one call of the function `first` to the next."""
    trace = Trace(name)

    def starts() -> list[int] | None:
        found = [place for place, call in enumerate(trace.calls) if str(call) == first]
        return found if len(found) > 2 else None

    with trace.installed(), running_exporter() as exporter:
        exporter.report(report(PID, devices=(sample(UUIDS[0], allocated=10 * MIB),)))
        with trace.recording():  # the first round looks for the growth of the process, the next ones do not
            _, start, end = wait_for(starts, f"three rounds of {name}")[:3]
    trace.calls = trace.calls[start:end]
    return trace


def _report(number: int, **changes: Any) -> dict[str, Any]:
    device = sample(UUIDS[0], allocated=10 * MIB + number, reclaimable=5 * MIB)
    return to_wire(report(PID, devices=(device,), sequence=10 + number, **changes))


PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PACKAGE = REPOSITORY / "gpumem_exporter"
STEP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def test_each_named_function_exists() -> None:
    steps = STEP.findall(PAGE)
    assert len(steps) > 30
    for module, name in steps:
        body = ast.parse(_path(module).read_text()).body
        for part in name.split("."):
            found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
            assert found, f"{module} has no {name}"
            body = found[0].body


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return trace_requests()


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("A report", "report"),
        ("A reading of the driver", "reading"),
        ("A scrape", "scrape"),
        ("An action", "submission"),
        ("A command", "command"),
        ("A result", "result"),
        ("A profile", "profile"),
        ("A finding", "finding"),
    ],
)
def test_a_request_runs_through_the_modules_in_the_order_of_the_page(
    title: str, kind: str, traces: dict[str, Trace]
) -> None:
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n##")[0]
    rows = [row for row in STEP.findall(section) if not row[0].startswith(("gpumem_client/", "cli/"))]
    known = set(traces["report"].calls) if kind in ("command", "result", "profile") else set()
    calls = [call for call in traces[kind].calls if call not in known]
    assert [module for module, _ in rows] == list(dict.fromkeys(call.module for call in calls))
    for module, name in rows:
        assert any(call.module == module and f"{call.function}.".startswith(f"{name}.") for call in calls), name


def test_the_poller_and_the_event_loop_alone_write_to_the_store(traces: dict[str, Trace]) -> None:
    readers = {"Store.snapshot", "Store.find", "Store.newest_reading"}
    threads = traces["report"].threads_in_store
    assert POLLER in threads["Store.put_reading"]
    assert SECOND in threads["Store.snapshot"]
    loop = {name for name in threads if re.fullmatch(r"Store\.[a-z]\w*", name)} - readers - {"Store.put_reading"}
    assert {"Store.put_report", "Store.beat", "Store.take_displaced"} <= loop
    assert {name: threads[name] for name in loop} == {name: {"exporter"} for name in loop}
    assert threads["Store.put_reading"] == {POLLER}


def test_each_named_folder_and_file_exists() -> None:
    roots = (REPOSITORY, *(folder for each in PACKAGES for folder in (each.root, each.root.parent)))
    for path in re.findall(r"`([a-z_]+/(?:[\w/]+\.py)?|deploy/[\w/]+)`", PAGE):
        assert any((root / path).exists() for root in roots), path


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_folder_is_described(package: Package) -> None:
    folders = {path.parent.name for path in package.root.glob("*/__init__.py")}
    section = PAGE.partition(f"Folders of `{package.name}`:")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert folders <= set(re.findall(r"`(\w+)/`", section))


def _path(module: str) -> Path:
    """Return the file of a module that the page names: relative to the exporter, or with the name of its package."""
    roots = {package.name: package.root for package in PACKAGES}
    first, _, rest = module.partition("/")
    return roots[first] / rest if first in roots else PACKAGE / module


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
