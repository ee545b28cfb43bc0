"""The screen of `top`, with prepared documents and a prepared exporter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.render.layout import Order
from gpumem_exporter.cli.render.node_tables import node_tables
from gpumem_exporter.cli.render.rows import View
from gpumem_exporter.cli.top.app import Top
from gpumem_exporter.cli.top.tables import RowTable
from tests.support.golden import assert_golden, printed
from tests.support.live_documents import GIB, NOW, device, event, finding, full_node, history, job, live, process
from tests.support.waiting import patient

pytestmark = pytest.mark.anyio
URL = "unix:///run/gpumem/exporter.sock"
_RESULT = {
    "pid": 50723,
    "workload": "notebook",
    "rank": "",
    "gpu": "7",
    "outcome": "done",
    "freed_bytes": 3 * GIB,
    "still_free_bytes": 3 * GIB,
}


class _World:
    """A node and its exporter, which also is the API that `top` opens."""

    def __init__(self, document: dict[str, Any] | None = None, *, nodes: list[Node] | None = None, **view: Any) -> None:
        self.nodes = nodes or [Node(document or full_node(), URL)]
        self.requests: list[Mapping[str, Any]] = []
        self.paths: list[str] = []
        self.results: list[dict[str, Any]] = [dict(_RESULT)]
        self.error: Exception | None = None
        self.lost: Exception | None = None
        self.waits = False
        self.engines: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self.app = Top(
            self.read,
            self.nodes,
            View(**view),
            interval_seconds=0.1,
            open_api=lambda _: self,  # type: ignore[arg-type,return-value]
        )

    def read(self) -> list[Node]:
        self.hangs.wait()
        if self.lost is not None:
            raise self.lost
        return self.nodes

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def get(self, path: str) -> Any:
        self.paths.append(path)
        if self.error is not None:
            raise self.error
        if path.startswith("/api/v1/history"):
            seconds = int(_query(path, "to")) - int(_query(path, "from"))
            return history(_query(path, "job"), seconds=seconds, step=1 if seconds <= 600 else 60)
        if path.startswith("/api/v1/events"):
            return {"events": self.events}
        assert self.nodes[0].live is not None
        document = {**self.nodes[0].live}
        document["jobs"] = [_detailed(one) if one["id"] in path else one for one in document["jobs"]]
        return document

    def submit(self, request: Mapping[str, Any], *, hold_seconds: float = 0.0) -> Any:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return self.action("")

    def action(self, _: str) -> Any:
        state, results = ("running", []) if self.waits else ("done", self.results)
        mode = self.requests[-1]["mode"]
        return {
            "id": "a",
            "action": "empty_cache",
            "dry_run": False,
            "state": state,
            "mode": mode,
            "results": results,
            "waits_for": self.engines,
            "freed_bytes": 3 * GIB,
            "still_free_bytes": 3 * GIB,
            "settle_seconds": 0.0,
        }

    def cancel(self, _: str) -> Any:
        self.waits = False
        self.results = [{**each, "outcome": "refused", "reason": "cancelled"} for each in self.results]
        return self.action("")

    @asynccontextmanager
    async def on_screen(self, width: int = 80, height: int = 24) -> AsyncIterator[Pilot[None]]:
        async with self.app.run_test(size=(width, height)) as pilot:
            await pilot.pause()
            yield pilot
            self.hangs.set()

    @property
    def text(self) -> str:
        """The screen, line by line."""
        lines = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(line.text.rstrip() for line in lines)

    def table(self, name: str) -> RowTable:
        """A table of the main screen."""
        return self.app.screen_stack[0].query_one(f"#{name}", RowTable)

    @property
    def titles(self) -> list[str]:
        """The listed jobs and processes."""
        return [row["title"].strip() for row in self.table("jobs").rows_shown]

    @property
    def gpus(self) -> list[str]:
        return [row["gpu"] for row in self.table("devices").rows_shown]

    @property
    def selected(self) -> str:
        row = self.table("jobs").selected
        return "" if row is None else row["title"].strip()

    async def place(self, text: str) -> tuple[int, int]:
        """The place of a text on the screen, once it is drawn."""
        await _until(lambda: text in self.text, text)
        lines = self.text.split("\n")
        y = next(y for y, shown in enumerate(lines) if text in shown)
        return (lines[y].index(text) + 1, y)


def _query(path: str, name: str) -> str:
    return dict(part.split("=") for part in path.partition("?")[2].split("&"))[name]


def _detailed(one: dict[str, Any]) -> dict[str, Any]:
    """A job with the values that only details have."""
    places = {"component_bytes": {"parameters": 16 * GIB}, "phase_peak_bytes": {"forward": 30 * GIB}}
    processes = [{**each, "devices": [{**place, **places} for place in each["devices"]]} for each in one["processes"]]
    return {**one, "processes": processes}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
async def test_findings_devices_and_jobs_are_on_the_first_screen(width: int, height: int) -> None:
    world = _World()
    async with world.on_screen(width, height):
        lines = world.text.split("\n")
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("gpu-node-7")
        assert "out of memory" in " ".join(lines[1:3])
        for name, owner, used in (("llm-pretrain", "alice", "274G"), ("rag-indexer", "bob", "41.0G")):
            assert any(name in line and owner in line and used in line for line in lines)
        assert [line.split()[0] for line in lines if line.endswith("93 %")] == [str(gpu) for gpu in range(8)]
        assert "quit" in lines[-1]
        assert ("python -m rag.index" in world.text) is (width == 200)


async def test_the_screen_follows_the_size_of_the_terminal() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        for width, height in ((200, 50), (100, 30), (40, 12), (80, 24)):
            await pilot.resize_terminal(width, height)
            await _until(
                lambda wide=width == 200: ("python -m rag.index" in world.text) is wide,  # type: ignore[misc]
                "the new columns",
            )
        assert world.text.startswith("gpu-node-7")


async def test_keys_and_clicks_sort_the_table_with_the_cursor() -> None:
    world = _World()
    async with world.on_screen(120) as pilot:
        assert world.titles[:2] == ["llm-pretrain", "chat-70b"]
        await pilot.press("r")
        assert world.titles[0] == "tritonserver"
        await pilot.press("r", "s")
        assert world.table("jobs").order == Order("allocated")
        for reverse in (False, True):
            await pilot.click(offset=await world.place("Job"))
            assert world.table("jobs").order == Order("job", reverse)
            assert world.titles == sorted(world.titles, reverse=reverse)
        await pilot.click(offset=await world.place("Free"))
        assert world.table("devices").order == Order("free")
        assert world.gpus[0] == "6"
        await pilot.press("s")
        assert world.table("devices").order == Order("idle_cache")
        assert world.table("jobs").order == Order("job", reverse=True)


async def test_ranks_are_folded_and_unfolded_by_keys_and_the_mouse() -> None:
    world = _World()
    ranks = [f"rank {i} ({50100 + i})" for i in range(4)]
    async with world.on_screen() as pilot:
        jobs = world.titles
        await pilot.press("space")
        assert world.titles == [jobs[0], *ranks, *jobs[1:]]
        assert world.selected == jobs[0]
        await pilot.press("down", "down", "left")
        assert (world.titles, world.selected) == (jobs, jobs[0]), "folded from one of its ranks"
        await pilot.press("right")
        assert world.titles[1:5] == ranks
        await pilot.click(offset=(0, (await world.place("▾"))[1]))
        assert world.titles == jobs
        await pilot.click(offset=(0, (await world.place("▸ moe-finetune"))[1]))
        assert world.titles[5:7] == ["rank 0 (51144)", "rank 1 (51145)"]
        await pilot.press("a")
        assert world.titles == jobs
        await pilot.press("a")
        assert len(world.titles) == 16


async def test_each_job_keeps_its_color_in_both_tables_while_rows_move() -> None:
    def colors() -> dict[str, str]:
        rows = world.table("jobs").rows_shown
        return {
            row["title"]: str(world.table("jobs").get_row_at(at)[0].style)
            for at, row in enumerate(rows)
            if row["color"]
        }

    world = _World()
    async with world.on_screen() as pilot:
        before = colors()
        assert len(set(before.values())) == 6
        await pilot.press("space", "s")
        assert colors() == before
        strips = [row["strip"] for row in world.table("devices").rows_shown]
        assert {f"color(16) on {job['color']}" for strip in strips for job in strip} == set(before.values())


async def test_the_columns_stay_where_they_are_while_jobs_are_unfolded() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        before = await world.place("Used▼")
        await pilot.press("a")
        assert await world.place("Used▼") == before


async def test_a_search_jumps_in_every_table_and_unfolds_a_job() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("slash", *"notebook")
        await _until(lambda: world.selected == "notebook", "the job")
        await pilot.press("enter")
        assert world.app.focused is world.table("jobs")
        assert len(world.titles) == 6, "nothing is hidden"
        await pilot.press("slash", *"51145", "enter")
        await _until(lambda: world.selected == "rank 1 (51145)", "a rank of a folded job")
        await pilot.press("slash", *"llm", "enter", "N")
        seen = []
        for _ in range(5):
            await pilot.press("n")
            focused = world.app.focused
            assert isinstance(focused, RowTable)
            assert focused.selected is not None
            seen.append((focused.id, focused.selected.get("gpu")))
        assert seen == [*(("devices", gpu) for gpu in "0123"), ("jobs", None)]
        await pilot.press("slash", *"no-such-name", "enter")
        await _until(lambda: "No row has no-such-name" in world.text, "the note")


async def test_a_filter_hides_rows_in_every_table_while_it_is_typed() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("f", *"alice finee", "backspace", *"tune")
        await _until(lambda: world.titles == ["moe-finetune"], "the rows of the filter")
        assert world.gpus == ["6", "7"]
        assert len(world.table("findings").rows_shown) == 1
        await pilot.press("enter", "f", "x")
        await _until(lambda: world.titles == [], "no row")
        await pilot.press("escape")
        await _until(lambda: world.titles == ["moe-finetune"], "the rows of the old filter")
        assert "filter: alice finetune" in world.text
        await pilot.press("escape")
        await _until(lambda: len(world.titles) == 6, "all rows")


async def test_the_same_job_stays_selected_until_it_ends() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("j", "down", "k")
        assert world.selected == "chat-70b"
        await pilot.press("r")
        assert (world.selected, world.titles[-2]) == ("chat-70b", "chat-70b")
        await pilot.press("r", "G", "k")
        assert world.selected == "moe-finetune"
        node = full_node()
        node["jobs"] = [one for one in node["jobs"] if one["name"] not in ("moe-finetune", "tritonserver")]
        world.nodes = [Node(node, URL)]
        await _until(lambda: len(world.titles) == 4, "the next reading")
        assert world.selected == "notebook", "the row at the end, because the list is shorter"


async def test_a_long_list_keeps_its_place_and_its_selection_is_visible() -> None:
    def many(count: int) -> list[Node]:
        jobs = [job(f"job-{i:03}", process(i, "0", used_gib=256 - i, workload=f"job-{i:03}")) for i in range(count)]
        return [Node(live([device("0", total_gib=1 << 20)], jobs), URL)]

    world = _World(nodes=many(256))
    async with world.on_screen() as pilot:
        await pilot.press("G")
        await _until(lambda: "job-255" in world.text, "the last row")
        place = world.table("jobs").scroll_y
        assert place > 0
        world.nodes = many(255)
        await _until(lambda: len(world.titles) == 255, "the next reading")
        assert world.table("jobs").scroll_y == pytest.approx(place, abs=1)
        assert world.selected == "job-254"
        assert "job-254" in world.text


async def test_nothing_moves_when_findings_come_and_go() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        before = [await world.place("GPU▲"), await world.place("  Job")]
        world.nodes = [Node({**full_node(), "findings": []}, URL)]
        await _until(lambda: "Nothing needs attention." in world.text, "no finding")
        assert [await world.place("GPU▲"), await world.place("  Job")] == before
        told = [finding("check", "warning", "Exporter", f"check-{i}: failed.") for i in range(50)]
        world.nodes = [Node({**full_node(), "findings": told}, URL)]
        await _until(lambda: "check-0" in world.text, "the findings")
        assert [await world.place("GPU▲"), await world.place("  Job")] == before
        await pilot.press("shift+tab", "shift+tab", "G")
        await _until(lambda: "check-49" in world.text, "the last finding")


async def test_a_lost_exporter_leaves_the_last_values_dimmed_with_their_time() -> None:
    world = _World()
    async with world.on_screen(120) as pilot:
        world.lost = ExporterUnreachableError("no-answer\x1b[2J")
        await _until(lambda: "no-answer?[2J" in world.text, "the reason")
        assert world.text.split("\n")[0].startswith("gpu-node-7  as of 03:42:04")
        assert len(world.titles) == 6
        dimmed = world.table("jobs").get_row_at(1)
        assert any("dim" in str(cell.style) or "dim" in str(cell.spans) for cell in dimmed)
        await pilot.press("c")
        await _until(lambda: "no exporter answers" in world.text, "no question")
        world.lost = None
        await _until(lambda: "as of" not in world.text, "current values")
        assert "no-answer" not in world.text


async def test_an_answer_that_does_not_come_leaves_the_last_values_dimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_exporter.cli.live._LATE_SECONDS", 0.1)
    monkeypatch.setattr("gpumem_exporter.cli.live._TICK_SECONDS", 0.05)
    world = _World()
    async with world.on_screen(120):
        world.hangs.clear()
        await _until(lambda: "as of 03:42:04" in world.text and "no answer for" in world.text, "the age")
        world.hangs.set()
        await _until(lambda: "as of" not in world.text, "current values")


async def test_a_fleet_has_a_column_for_the_node_and_says_why_a_node_has_no_rows() -> None:
    nodes = [
        Node(full_node(), "http://node1", "node1"),
        Node({**full_node(), "devices": [], "jobs": full_node()["jobs"][:1]}, "http://node2", "node2", "refused"),
        Node(None, "http://node3", "node3", "no route to host"),
    ]
    world = _World(nodes=nodes)
    async with world.on_screen(120, 40) as pilot:
        assert world.text.startswith("1 of 3 exporters")
        assert any("node3" in line and "no route to host" in line for line in world.text.split("\n"))
        assert [row["node"] for row in world.table("jobs").rows_shown].count("node2") == 1
        await pilot.press("f", *"node2", "enter")
        await _until(lambda: world.titles == ["llm-pretrain"], "the node's jobs")
        await pilot.press("escape", "g", "c")
        await _until(lambda: "Clear llm-pretrain (alice) on node1?" in world.text, "the question")
        await pilot.press("n", "enter")
        await _until(lambda: world.text.startswith("node1  llm-pretrain"), "the job")


async def test_the_job_screen_has_timeline_ranks_memory_and_events() -> None:
    world = _World()
    world.events = [event(1, "oom", NOW - 300, detail={"requested_bytes": 2 * GIB})]
    async with world.on_screen(100, 50) as pilot:
        await pilot.press("enter")
        await _until(lambda: "parameters" in world.text, "the details")
        text = world.text
        assert text.startswith("llm-pretrain  alice, Slurm 4711  training, since 22:42, step 18204")
        assert "Stays free 27.4 GiB; 27.4 GiB more would be reserved again in the next step." in text
        assert [line for line in text.split("\n") if line.split() == ["03:32", "03:37", "03:42"]]
        assert "!" in next(line for line in text.split("\n") if "└" in line)
        for shown in ("Idle cache", "rank 3 (50103)", "16.0G", "30.0G", "requested 2.0 GiB", "last 10 min"):
            assert shown in text
        assert "/api/v1/live?details=llm-pretrain~1f3a9c0e" in world.paths
        await pilot.press("minus", "minus", "minus")
        await _until(lambda: "last 24 h" in world.text, "the longest span")
        await _until(lambda: any(_span(path) == 86400 for path in world.paths), "its points")
        await pilot.press("plus")
        await _until(lambda: any(_span(path) == 21600 for path in world.paths), "the points of a shorter span")
        await pilot.press("escape")
        assert "fold" in world.text.split("\n")[-1]


def _span(path: str) -> int:
    return int(_query(path, "to")) - int(_query(path, "from")) if "history" in path else 0


async def test_the_job_screen_says_that_the_job_has_ended_and_why_it_has_no_past() -> None:
    world = _World()
    world.error = ExporterAnswerError(403, "needs a token")
    async with world.on_screen() as pilot:
        for _ in range(2):
            await pilot.click(offset=await world.place("dave"))
        await _until(lambda: world.text.startswith("notebook"), "the job")
        await _until(lambda: "needs a token" in world.text, "the reason")
        world.nodes = [Node({**full_node(), "jobs": []}, URL)]
        await _until(lambda: "ended" in world.text.split("\n")[0], "the end")
        world.lost = ExporterUnreachableError("refused")
        await _until(lambda: "as of 03:42:04" in world.text.split("\n")[0], "the loss")


async def test_text_of_a_job_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07[bold]x[/bold]"
    one = job(hostile, process(7, "0", workload=hostile, user=hostile, command=hostile), owner=hostile)
    world = _World(live([device("0", one, name=hostile)], [one], [finding("oom", "warning", hostile, hostile)]))
    async with world.on_screen(200, 50) as pilot:
        assert all(line.isprintable() for line in world.text.split("\n"))
        await pilot.press("enter")
        await _until(lambda: "last 10 min" in world.text, "the job")
        assert world.text.count("[bold]x[/bold]") >= 3
        assert all(line.isprintable() for line in world.text.split("\n"))


async def test_a_finding_and_a_device_open_their_job() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("shift+tab", "G", "enter")
        await _until(lambda: world.text.startswith("notebook"), "the job of device 7")
        await pilot.press("q", "shift+tab", "enter")
        await _until(lambda: world.text.startswith("rag-indexer"), "the job of the first finding")


async def test_a_clear_uses_the_proposed_mode_and_group_after_a_yes() -> None:
    world = _World()
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await _until(lambda: "? " in world.text and "y/n" in world.text, "the question")
        question = " ".join(world.text.split("\n")[-2:])
        assert "Clear llm-pretrain (alice)? Stays free 27.4 GiB; 27.4 GiB more would be reserved again" in question
        assert world.requests == []
        await pilot.press("n")
        await _until(lambda: "y/n" not in world.text, "the end of the question")
        assert world.requests == []
        await pilot.press("c")
        await _until(lambda: "y/n" in world.text, "the question")
        await pilot.press("y")
        await _until(lambda: "Stays free 3.0 GiB" in world.text, "the result")
        (request,) = world.requests
        assert request == {
            "target": {"pid": [50100, 50101, 50102, 50103]},
            "mode": "step",
            "group": True,
            "action": "empty_cache",
            "reason": "requested in top",
            "deadline_seconds": 65.0,
        }


async def test_a_clear_from_the_job_screen_shows_its_result_there() -> None:
    world = _World()
    async with world.on_screen(120) as pilot:
        await pilot.press("enter")
        await _until(lambda: "last 10 min" in world.text, "the job")
        await pilot.press("c")
        await _until(lambda: "y/n" in world.text, "the question")
        await pilot.press("y")
        await _until(lambda: "Stays free 3.0 GiB in notebook" in world.text, "the result")
        assert world.text.startswith("llm-pretrain")


async def test_a_clear_from_a_finding_is_of_the_job_that_has_the_idle_cache() -> None:
    world = _World()
    async with world.on_screen() as pilot:
        await pilot.press("shift+tab", "shift+tab", "down", "down", "c")
        await _until(lambda: "Clear notebook? Stays free 3.2 GiB" in world.text, "the question")
        await pilot.press("y")
        await _until(lambda: world.requests, "the request")
        assert (world.requests[0]["target"], world.requests[0]["mode"]) == ({"pid": 50723}, "now")


async def test_a_clear_that_waits_is_canceled_with_c() -> None:
    world = _World()
    world.waits = True
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await _until(lambda: "y/n" in world.text, "the question")
        await pilot.press("y")
        await _until(lambda: "end of a step" in world.text and "c cancels" in world.text, "the wait")
        await pilot.press("c")
        await _until(lambda: "refused: cancelled" in world.text, "the end")


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ExporterAnswerError(403, "needs-a-token"), "needs-a-token"), (ExporterUnreachableError("gone\x1b"), "gone?")],
)
async def test_a_refused_clear_says_why(error: Exception, shown: str) -> None:
    world = _World()
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await _until(lambda: "y/n" in world.text, "the question")
        world.error = error
        await pilot.press("y")
        await _until(lambda: shown in world.text, "the reason")


@pytest.mark.parametrize(
    ("keys", "url", "shown"),
    [
        (("G",), URL, "tritonserver (carol) has no idle cache"),
        (("shift+tab",), URL, "Select a job"),
        ((), "", "needs an exporter"),
    ],
)
async def test_a_row_that_cannot_clear_gets_no_question(keys: tuple[str, ...], url: str, shown: str) -> None:
    world = _World(nodes=[Node(full_node(), url)])
    async with world.on_screen(120) as pilot:
        await pilot.press(*keys, "c")
        await _until(lambda: shown in world.text, shown)
        assert "y/n" not in world.text


async def test_the_help_has_the_keys_and_the_words_of_the_exporter() -> None:
    world = _World()
    async with world.on_screen(120, 60) as pilot:
        await pilot.press("question_mark")
        await _until(lambda: "any key returns" in world.text, "the help")
        assert "A clear frees it for good." in world.text
        await pilot.press("x")
        await _until(lambda: "any key returns" not in world.text, "the jobs")


def test_the_output_of_top_once() -> None:
    node = full_node()
    demo = {**node, "node": {**node["node"], "source": "demo"}}
    driver_alone = [Node(live([device("0", ledger=None, idle_cache_bytes=None)], []), "")]
    cases = {
        "80 columns": ([Node(node, URL)], View(), 80),
        "demo, by idle cache": ([Node(demo, URL)], View(order=Order("idle_cache")), 120),
        "no match": ([Node(node, URL)], View("unknown"), 80),
        "driver alone": (driver_alone, View(), 80),
        "no exporter": ([], View(), 80),
        "fleet": ([Node(node, "http://a", "a"), Node(None, "http://b", "b", "refused")], View(), 100),
    }
    shown = [
        f"== {name}\n" + "\n".join(printed(*node_tables(nodes, view, width), width=width)) + "\n"
        for name, (nodes, view, width) in cases.items()
    ]
    assert_golden("top.txt", "\n".join(shown))
