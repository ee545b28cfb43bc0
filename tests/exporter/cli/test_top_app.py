"""The screen of `top`, with prepared readings and a prepared exporter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from textual.coordinate import Coordinate
from textual.pilot import Pilot

from gpumem_client.wire.errors import ExporterAnswerError, GpumemError
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.render.terminal import open_console, show
from gpumem_exporter.cli.top.app import NodeTop, ProcessTable
from gpumem_exporter.cli.top.content import SORTS, View, once
from gpumem_exporter.cli.top.source import Reading
from tests.support.fleet_builders import action as ended
from tests.support.golden import assert_golden
from tests.support.top_documents import GIB, device, event, process, reading, unreported
from tests.support.waiting import patient

pytestmark = pytest.mark.anyio
_RESULT = {
    "pid": 7,
    "workload": "llm",
    "rank": "0",
    "gpu": "0",
    "outcome": "done",
    "freed_bytes": 3 * GIB,
    "still_free_bytes": 3 * GIB,
}
_RANKS = [{**_RESULT, "pid": pid, "rank": str(pid - 7), "still_free_bytes": GIB, "step": 5} for pid in (7, 8)]
_AT_ONCE = {"target": {"pid": 7}, "mode": "now", "group": False, "deadline_seconds": 30.0}
_GROUP = {"target": {"pid": [7, 8]}, "mode": "step", "group": True, "deadline_seconds": 45.0}


class _World:
    """A node and its exporter, which also is the API that `top` opens."""

    def __init__(self, first: Reading | None = None, **view: Any) -> None:
        self.reading = first or _full()
        self.failure: GpumemError | None = None
        self.requests: list[Mapping[str, Any]] = []
        self.results: list[dict[str, Any]] = [dict(_RESULT)]
        self.suggested: dict[str, Any] = _AT_ONCE
        self.error: Exception | None = None
        self.waits = False
        self.engines: list[dict[str, Any]] = []
        self.app = NodeTop(
            self.read,
            self.reading,
            View(**view),
            interval_seconds=0.1,
            open_api=lambda _: self,  # type: ignore[arg-type,return-value]
        )

    def read(self) -> Reading:
        if self.failure is not None:
            raise self.failure
        return self.reading

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, request: Mapping[str, Any], **_: float) -> Any:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if not request.get("dry_run"):
            return self.action("")
        expected = [{**each, "outcome": each["outcome"].replace("done", "would_clear")} for each in self.results]
        return {**ended(*expected, dry_run=True), "suggested": [self.suggested]}

    def action(self, _: str) -> Any:
        sent = self.sent[-1]
        results = [] if self.waits else [{**each, "still_free_bytes": None} for each in self.results]
        action = ended(*results, state="running" if self.waits else "done")
        return {**action, "mode": sent["mode"], "settle_seconds": 0.0, "waits_for": self.engines}

    def cancel(self, _: str) -> Any:
        self.waits = False
        self.results = [{**each, "outcome": "refused", "reason": "cancelled"} for each in self.results]
        return self.action("")

    @asynccontextmanager
    async def on_screen(self, width: int = 80, height: int = 24) -> AsyncIterator[Pilot[None]]:
        async with self.app.run_test(size=(width, height)) as pilot:
            await pilot.pause()
            yield pilot

    @property
    def sent(self) -> list[Mapping[str, Any]]:
        return [request for request in self.requests if not request.get("dry_run")]

    @property
    def text(self) -> str:
        """The screen, line by line."""
        lines = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(line.text.rstrip() for line in lines)

    @property
    def pids(self) -> list[int]:
        """The listed processes."""
        table = self.app.screen_stack[0].query_one(ProcessTable)
        rows = range(table.row_count)
        return [int(str(table.get_cell_at(Coordinate(row, 0)))) for row in rows]

    @property
    def selected(self) -> int | None:
        row = self.app.screen_stack[0].query_one(ProcessTable).selected
        return None if row is None else row["pid"]


def _full(devices: int = 8, processes: int = 20) -> Reading:
    return reading(
        [device(str(i)) for i in range(devices)],
        [process(1000 + i, str(i % devices), used_bytes=(i + 1) * GIB) for i in range(processes)],
    )


def _events(count: int) -> tuple[dict[str, Any], ...]:
    return tuple(event(i, "device_lost", 1e9 + i, detail={"error": f"e{i}"}) for i in range(count))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + patient(5)
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("width", "height", "listed"), [(80, 24, 9), (200, 50, 20)])
async def test_devices_and_processes_have_their_sizes(width: int, height: int, listed: int) -> None:
    world = _World()
    async with world.on_screen(width, height):
        lines = world.text.split("\n")
        assert len(lines) == height
        devices = [line for line in lines if line.endswith("80.0G")]
        assert [line.split()[0] for line in devices] == [str(gpu) for gpu in range(8)]
        assert all("20.0G" in line and "16.0G" in line for line in devices)
        rows = [line.split() for line in lines if " llm " in line]
        assert len(rows) == listed
        assert (rows[0][0], [cell for cell in rows[0] if cell.endswith("G")][:2]) == ("1019", ["20.0G", "6.0G"])
        assert "Idle cache: 10.0 GiB" in world.text
        assert "quit" in lines[-1]
        assert ("python train.py" in world.text) is (width == 200)


async def test_the_screen_follows_the_size_of_the_terminal() -> None:
    def columns(*, wide: bool) -> Callable[[], bool]:
        return lambda: ("python train.py" in world.text) is wide

    world = _World()
    async with world.on_screen() as pilot:
        for width, height in ((200, 50), (100, 30), (40, 8), (80, 24)):
            await pilot.resize_terminal(width, height)
            await _until(columns(wide=width == 200), "the new columns")
        assert world.text.startswith("gpumem-exporter top")


async def test_keys_and_clicks_sort_and_reverse() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        seen = [world.app.view.sort]
        for _ in SORTS[1:]:
            await pilot.press("s")
            seen.append(world.app.view.sort)
        assert seen == list(SORTS)
        assert world.pids == list(range(1000, 1020)), "by pid"
        await pilot.press("r")
        assert world.pids[0] == 1019
        await pilot.press("s")
        assert (world.app.view.sort, world.app.view.reverse) == ("used", False)
        lines = world.text.split("\n")
        heading = next(index for index, line in enumerate(lines) if "pid gpu" in line)
        for reverse in (False, True):
            await pilot.click(offset=(lines[heading].index("pid") + 1, heading))
            assert (world.app.view.sort, world.app.view.reverse) == ("pid", reverse)


async def test_a_filter_applies_while_it_is_typed_and_escape_restores_the_old_one() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("slash", *"100 q", "backspace", *"llm")
        await _until(lambda: world.pids == list(range(1009, 999, -1)), "the rows of the filter")
        await pilot.press("enter", "slash", "x")
        await _until(lambda: world.pids == [], "no row")
        assert "No process matches." in world.text
        await pilot.press("escape")
        await _until(lambda: len(world.pids) == 10, "the rows of the old filter")
        assert "100 llm" in world.text
        await pilot.press("escape")
        await _until(lambda: len(world.pids) == 20, "all rows")


async def test_the_same_process_stays_selected_until_it_exits() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        assert world.selected == 1019
        await pilot.press("j", "down", "k")
        assert world.selected == 1018
        await pilot.press("r")
        assert (world.selected, world.pids[-2]) == (1018, 1018)
        await pilot.press("r", "G", "k")
        assert world.selected == 1001
        listed = [process(pid, "0", used_bytes=pid) for pid in (1000, 1002, 1003)]
        world.reading = reading([device("0")], listed)
        await _until(lambda: world.pids == [1003, 1002, 1000], "the next reading")
        assert world.selected == 1000, "the row at the end, because the list is shorter"


async def test_the_scrolled_list_keeps_its_place_and_its_selection_is_visible() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        table = world.app.query_one(ProcessTable)
        await pilot.press("G")
        await _until(lambda: "1000 " in world.text, "the last row")
        place = table.scroll_y
        assert place > 0
        world.reading = _full(8, 19)
        await _until(lambda: len(world.pids) == 19, "the next reading")
        assert table.scroll_y == pytest.approx(place, abs=1)
        assert world.selected == 1000


@pytest.mark.parametrize(
    ("devices", "processes", "height", "shown"),
    [(8, 20, 24, (0, 0)), (2, 3, 24, (9, 11)), (8, 20, 50, (12, 14)), (8, 200, 50, (7, 8))],
)
async def test_events_are_below_the_processes_if_there_is_space(
    devices: int, processes: int, height: int, shown: tuple[int, int]
) -> None:
    def count() -> int:
        return sum("device lost" in line for line in world.text.split("\n"))

    world = _World(replace(_full(devices, processes), events=_events(40)))
    async with world.on_screen(120, height):
        await _until(lambda: shown[0] <= count() <= shown[1], f"{shown} events")


async def test_e_shows_all_events_and_keys_scroll_them() -> None:
    world = _World(replace(_full(), events=_events(40)))
    async with world.on_screen() as pilot:
        await pilot.press("e")
        await _until(lambda: "e39" in world.text, "the newest event")
        assert " llm " not in world.text
        await pilot.press("s", "c", "G")
        await _until(lambda: "answer: e0" in world.text, "the oldest event")
        assert (world.app.view.sort, world.requests) == ("used", [])
        await pilot.press("escape")
        await _until(lambda: "1019" in world.text, "the processes again")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"no_events": "the exporter refuses to show events: token needed"}, "token needed."),
        ({"events": ()}, "recorded no event yet"),
        ({"events": (), "target": Target(gpu="7")}, "No event matches."),
        ({}, "Waiting for the events."),
        ({"url": ""}, "need an exporter"),
    ],
)
async def test_a_reason_is_shown_instead_of_events(changes: dict[str, Any], shown: str) -> None:
    world = _World(replace(_full(), **changes))
    async with world.on_screen() as pilot:
        await pilot.press("e")
        await _until(lambda: shown in world.text, shown)


async def test_any_key_closes_the_help() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("question_mark")
        await _until(lambda: "cache that a clear cannot free" in world.text, "the help")
        await pilot.press("s")
        await _until(lambda: "any key returns" not in world.text, "the processes")
        assert world.app.view.sort == "used"


async def test_values_of_an_exporter_that_hangs_are_lost() -> None:
    released = threading.Event()
    world = _World()
    world.app._read = lambda: (released.wait(patient(20)), world.reading)[1]
    async with world.on_screen():
        world.app._answered_seconds -= 60.0
        await _until(lambda: "it has not answered for 6" in world.text, "the loss")
        released.set()
        await _until(lambda: "1019" in world.text, "the values again")


async def _question(world: _World, pilot: Pilot[None]) -> str:
    await pilot.press("c")
    await _until(lambda: "y/n" in world.text, "the question")
    return " ".join(world.text.split())


async def test_a_clear_starts_with_a_dry_run_of_the_job_and_a_question() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        text = await _question(world, pilot)
        assert "Clear llm rank 0? Stays free 3.0 GiB. y/n" in text
        (dry_run,) = world.requests
        assert "mode" not in dry_run, "the exporter chooses"
        assert dry_run["target"] == {"workload": "llm", "user": "alice"}
        await pilot.press("n")
        await _until(lambda: "y/n" not in world.text, "the end of the question")
        assert world.sent == []
        await _question(world, pilot)
        await pilot.press("y")
        await _until(lambda: "Freed 3.0 GiB in llm rank 0." in world.text, "the result")
        (sent,) = world.sent
        assert (sent["mode"], sent["target"]) == ("now", {"pid": 7})


async def test_a_process_without_a_workload_is_named_by_its_pid() -> None:
    world = _World(reading([device("0")], [process(9, "0", workload="")]))
    async with world.on_screen() as pilot:
        await _question(world, pilot)
        assert world.requests[0]["target"] == {"pid": 9}


async def test_the_ranks_of_a_job_clear_as_a_group_and_a_wait_can_be_cancelled() -> None:
    world = _World()
    world.results, world.suggested = _RANKS, _GROUP
    async with world.on_screen() as pilot:
        text = await _question(world, pilot)
        sentence = "Stays free 2.0 GiB; 4.0 GiB more would be reserved again in the next step."
        assert f"Clear llm (2 ranks)? {sentence}" in text
        assert "within 45 s" in text
        world.waits = True
        await pilot.press("y")
        await _until(lambda: "at most 45 s. c cancels" in " ".join(world.text.split()), "the wait")
        (sent,) = world.sent
        assert (sent["mode"], sent["group"], sent["target"]) == ("step", True, {"pid": [7, 8]})
        await pilot.press("c")
        await _until(
            lambda: "llm (2 ranks), pid 7, 8: refused: cancelled" in " ".join(world.text.split()),
            "the end of the clear",
        )


async def test_a_clear_that_waits_for_an_engine_names_it() -> None:
    world = _World()
    async with world.on_screen(width=160) as pilot:
        await _question(world, pilot)
        engine = {"pid": 9, "title": "VLLM::EngineCore", "gpu": "0", "uuid": "GPU-0", "until_unix_seconds": 3600.0}
        world.waits, world.engines = True, [engine]
        await pilot.press("y")
        parts = ("pid 9", "VLLM::EngineCore", "GPU 0", "01:00:00", "c cancels")
        await _until(lambda: all(part in world.text for part in parts), "the engine")
        await pilot.press("c")
        await _until(lambda: "llm rank 0, pid 7: refused: cancelled" in world.text, "the end of the clear")


async def test_a_question_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_exporter.cli.top.app._QUESTION_SECONDS", 0.1)
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("c")
        await _until(lambda: world.requests and len(world.app.screen_stack) == 1, "the end of the question")
        await pilot.press("y")
        assert world.sent == []


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"results": [{**_RESULT, "freed_bytes": 0, "still_free_bytes": 0}]}, "A clear would free nothing."),
        (
            {"results": [{**_RESULT, "outcome": "gone", "reason": "process-ended"}]},
            "llm rank 0, pid 7: gone: process-ended",
        ),
        ({"error": ExporterAnswerError(403, "token:\n--action.token-file")}, "token: --action.token-file"),
    ],
)
async def test_a_clear_that_frees_nothing_is_not_offered(changes: dict[str, Any], shown: str) -> None:
    world = _World()
    for name, value in changes.items():
        setattr(world, name, value)
    async with world.on_screen(width=120) as pilot:
        await pilot.press("c")
        await _until(lambda: shown in world.text, shown)
        assert "y/n" not in world.text
        assert world.sent == []


@pytest.mark.parametrize(
    ("processes", "named"),
    [([], "no process"), ([unreported(8, "0", 5)], "pid 8"), ([process(7, "0", actions=["reset_peak"])], "pid 7")],
)
async def test_a_process_that_cannot_clear_gets_no_request(processes: list[dict[str, Any]], named: str) -> None:
    world = _World(reading([device("0")], processes))
    async with world.on_screen(width=120) as pilot:
        await pilot.press("c")
        await _until(lambda: named in world.text.split("\n")[-2], named)
        assert world.requests == []


def _all_events() -> tuple[dict[str, Any], ...]:
    """One event of each type, a second apart."""
    action = {"action": "empty_cache", "requested_by": "loopback", "reason": "requested in top"}
    oom = {
        "requested_bytes": 2 * GIB,
        "device_free_bytes": 3 * GIB,
        "limit_bytes": 40 * GIB,
        "allocator": {"reserved_bytes": 39 * GIB, "fragmented_bytes": GIB},
    }
    done = {
        **action,
        "state": "done",
        "freed_bytes": 3 * GIB,
        "results": [{"pid": 7, "workload": "llm"}, {"pid": 8, "workload": "llm"}],
    }
    types: tuple[tuple[str, Any], ...] = (
        ("oom", oom),
        ("oom", {"requested_bytes": None}),
        ("device_lost", {"error": "GPU is lost"}),
        ("device_returned", {}),
        ("process_started", {}),
        ("process_ended", {"reason": "its reporter stopped"}),
        ("action", done),
        ("action", {**done, "action": "reset_peak", "reason": "", "state": "failed"}),
        ("policy_stopped", {"rule": "hoard", "reason": "in vain"}),
    )
    noon = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    return tuple(event(i, type_, noon + i, detail=detail) for i, (type_, detail) in enumerate(types))


def test_the_output_of_top_once(capsys: pytest.CaptureFixture[str]) -> None:
    busy = [process(1000 + i, str(i % 2), rank=str(i), used_bytes=(i + 1) * GIB) for i in range(3)]
    silent = process(7, "0", state="silent", reporting=False, sample_age_seconds=None)
    lost = device("1", up=False, error="GPU is lost", memory=None, ledger=None, utilization_ratio=None)
    taken = {"taken_unix_seconds": time.mktime((2026, 3, 4, 13, 0, 0, 0, 0, -1))}
    past = {"GPU-0": tuple((1e4 - ago, 40 * GIB) for ago in range(598, -1, -2))}
    listed = [*busy, silent, unreported(8, "0", 5 * GIB)]
    node = reading([device("0"), lost], listed, document=taken, past=past, now=1e4, events=_all_events())
    down = {"nvml": {"up": False, "error": "no libnvidia-ml.so.1"}}
    bare = [unreported(7, "0", 3 * GIB) | {"state": None, "reporting": None}]
    without_exporter = {"url": "", "without_exporter": "no exporter answers at X: refused"}
    cases = {
        "file": (node, View(), 10_000),
        "120 columns, by gpu": (node, View(sort="gpu"), 120),
        "80 columns": (node, View(), 80),
        "no match": (node.select(Target(gpu="99")), View(text="unknown"), 120),
        "demo without devices": (reading([], [], document={"source": "demo"}), View(), 80),
        "no driver": (reading([], [], document=down), View(), 80),
        "NVML alone": (reading([device("0", ledger=None)], bare, **without_exporter), View(), 80),
    }
    shown = []
    for name, (of, view, width) in cases.items():
        show(open_console(), once(of, view, width))
        shown.append(f"== {name}\n{capsys.readouterr().out}")
    assert_golden("top.txt", "\n".join(shown))
