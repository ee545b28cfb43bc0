"""What `top` does with a job or a device: its screens, and a clear with its question, request and result."""

from __future__ import annotations

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.cli.node_view import Node
from tests.support.builders.live_documents import GIB, NOW, event, full_node
from tests.support.processes.top_screen import URL, TopScreen, query_value, until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a job or a device again without a pause of seconds."""
    monkeypatch.setattr("gpumem_exporter.cli.top.detail._REFRESH_SECONDS", 0.2)


async def test_the_job_screen_has_timeline_ranks_memory_and_events() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07[bold]x[/bold]"
    node = full_node()
    node["jobs"][0]["processes"][3]["command"] = hostile
    world = TopScreen(node)
    world.events = [event(1, "oom", NOW - 300, detail={"requested_bytes": 2 * GIB}), event(2, hostile, NOW - 200)]
    async with world.on_screen(100, 50) as pilot:
        await pilot.press("enter")
        await until(lambda: "parameters" in world.text, "the details")
        text = world.text
        assert all(line.isprintable() for line in text.split("\n"))
        assert text.startswith("llm-pretrain (alice)")
        assert "Stays free 27.4 GiB; 27.4 GiB more would be reserved again in the next step." in text
        assert [line for line in text.split("\n") if line.split() == ["03:32", "03:42"]]
        for shown in ("Idle cache", "rank 3 (50103)", "16.0G", "30.0G", "requested 2.0 GiB", "last 10 min"):
            assert shown in text
        assert "/api/v1/live?details=llm-pretrain~1f3a9c0e" in world.paths
        await pilot.press("minus", "minus", "minus")
        await until(lambda: "last 24 h" in world.text, "the longest span")
        await until(lambda: any(_span(path) == 86400 for path in world.paths), "its points")
        await pilot.press("plus")
        await until(lambda: any(_span(path) == 21600 for path in world.paths), "the points of a shorter span")
        await pilot.press("escape")
        assert "fold" in world.text.split("\n")[-1]


def _span(path: str) -> int:
    return int(query_value(path, "to")) - int(query_value(path, "from")) if "history" in path else 0


async def test_the_job_screen_says_that_the_job_has_ended_and_why_it_has_no_past() -> None:
    world = TopScreen()
    world.error = ExporterAnswerError(403, "needs a token")
    async with world.on_screen() as pilot:
        for _ in range(2):
            await pilot.click(offset=await world.place("dave"))
        await until(lambda: world.text.startswith("notebook"), "the job")
        await until(lambda: "needs a token" in world.text, "the reason")
        world.nodes = [Node({**full_node(), "jobs": []}, URL)]
        await until(lambda: "ended" in world.text.split("\n")[0], "the end")
        world.lost = ExporterUnreachableError("refused")
        await until(lambda: "as of 03:42:04" in world.text.split("\n")[0], "the loss")


async def test_the_device_screen_has_timeline_ledger_processes_and_events() -> None:
    world = TopScreen()
    world.events = [event(1, "oom", NOW - 300, detail={"requested_bytes": 2 * GIB})]
    async with world.on_screen(160, 50) as pilot:
        await pilot.press("shift+tab", "G", "enter")
        await until(lambda: "last 10 min" in world.text, "the past")
        lines = world.text.split("\n")
        assert lines[0] == "GPU 7  NVIDIA H100 80GB HBM3  GPU-7"
        assert "moe-finetune (alice) rank 1 requested" in world.text
        assert any(path.startswith("/api/v1/events?device=GPU-7&") for path in world.paths)
        (heading,) = (index for index, line in enumerate(lines) if "Other processes" in line)
        assert lines[heading + 1].split()[0] == "7"
        listed = [
            line.split()[0] for line in lines[:heading] if line.startswith(("notebook", "moe-", "  rank", "  pid"))
        ]
        assert sorted(listed) == ["moe-finetune", "notebook", "pid", "rank"]
        assert "rank 1 (51145)" in world.text
        assert "(51144)" not in world.text, "the rank on another device"
        world.nodes = [Node({**full_node(), "devices": full_node()["devices"][:7]}, URL)]
        await until(lambda: "removed" in world.text.split("\n")[0], "the end")
        await pilot.press("escape")
        assert "fold" in world.text.split("\n")[-1]


async def test_a_clear_of_the_whole_job_follows_a_yes() -> None:
    world = TopScreen()
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await until(lambda: "? " in world.text and "y/n" in world.text, "the question")
        question = " ".join(world.text.split("\n")[-2:])
        assert "Clear llm-pretrain (alice)? Stays free 27.4 GiB; 27.4 GiB more would be reserved again" in question
        assert "at the end of a step" in question
        assert world.requests == []
        await pilot.press("n")
        await until(lambda: "y/n" not in world.text, "the end of the question")
        assert world.requests == []
        await pilot.press("c")
        await until(lambda: "y/n" in world.text, "the question")
        await pilot.press("y")
        await until(lambda: "Stays free 3.0 GiB" in world.text, "the result")
        (request,) = world.requests
        assert request == {
            "target": {"pid": [50100, 50101, 50102, 50103]},
            "action": "empty_cache",
            "reason": "requested in top",
        }


async def test_a_clear_that_waits_is_canceled_with_c_on_the_screen_of_the_job() -> None:
    world = TopScreen()
    world.waits = True
    async with world.on_screen(120) as pilot:
        await pilot.press("enter")
        await until(lambda: "last 10 min" in world.text, "the job")
        await pilot.press("c")
        await until(lambda: "y/n" in world.text, "the question")
        await pilot.press("y")
        await until(lambda: "end of a step" in world.text and "c cancels" in world.text, "the wait")
        await pilot.press("c")
        await until(lambda: "refused: cancelled" in world.text, "the end")
        assert world.text.startswith("llm-pretrain")


async def test_a_clear_that_is_refused_or_impossible_says_why() -> None:
    world = TopScreen()
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await until(lambda: "y/n" in world.text, "the question")
        world.error = ExporterAnswerError(403, "needs-a-token\x1b")
        await pilot.press("y")
        await until(lambda: "needs-a-token?" in world.text, "the reason")
        await pilot.press("G", "c")
        await until(lambda: "tritonserver (carol) has no idle cache" in world.text, "no question")
        await pilot.press("shift+tab", "c")
        await until(lambda: "Select a job" in world.text, "no question")
        assert len(world.requests) == 1
    world = TopScreen(nodes=[Node(full_node(), "")])
    async with world.on_screen(120) as pilot:
        await pilot.press("c")
        await until(lambda: "needs an exporter" in world.text, "no question")


async def test_a_clear_from_a_finding_is_of_the_job_that_has_the_idle_cache() -> None:
    world = TopScreen()
    async with world.on_screen() as pilot:
        await pilot.press("shift+tab", "shift+tab", "down", "down", "c")
        await until(lambda: "Clear notebook? Stays free 3.2 GiB" in world.text, "the question")
        await pilot.press("y")
        await until(lambda: world.requests, "the request")
        assert world.requests[0]["target"] == {"pid": 50723}
