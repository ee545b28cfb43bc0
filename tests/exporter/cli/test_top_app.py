"""The tables of `top`: their rows, order, search, filter and selection, and what is shown of a lost exporter."""

from __future__ import annotations

import pytest
from textual import events

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.render.layout import Order
from tests.support.builders.live_documents import GIB, NOW, event, finding, full_node
from tests.support.processes.top_screen import URL, TopScreen, until


async def test_findings_devices_and_jobs_are_on_the_first_screen_of_any_size() -> None:
    world = TopScreen()
    async with world.on_screen(80, 24) as pilot:
        lines = world.text.split("\n")
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("gpu-node-7")
        assert "out of memory" in " ".join(lines[1:3])
        for name, owner, used in (("llm-pretrain", "alice", "274G"), ("rag-indexer", "bob", "41.0G")):
            assert any(name in line and owner in line and used in line for line in lines)
        assert [line.split()[0] for line in lines if line.endswith("93 %")] == [str(gpu) for gpu in range(8)]
        assert "quit" in lines[-1]
        await pilot.resize_terminal(200, 50)
        await until(lambda: "python -m rag.index" in world.text, "the column of a wide screen")
        await pilot.press("question_mark")
        await until(lambda: "any key returns" in world.text, "the help")
        assert "It stays free after a clear." in world.text, "the words of the exporter"
        await pilot.press("x")
        await until(lambda: "any key returns" not in world.text, "the jobs")


async def test_a_tall_screen_has_the_last_hour_and_the_events_of_the_selected_job_or_device() -> None:
    world = TopScreen()
    world.events = [event(1, "oom", NOW - 300, detail={"requested_bytes": 2 * GIB})]
    async with world.on_screen(120, 44) as pilot:
        await until(lambda: "llm-pretrain" in world.text, "the jobs")
        assert "last 1 h" not in world.text
        assert world.paths == [], "what is not shown is not read"
        await pilot.resize_terminal(120, 45)
        await until(lambda: "rank 3 requested 2.0 GiB" in world.text, "the events")
        lines = world.text.split("\n")
        at = lines.index("last 1 h")
        assert lines[at - 2] == "llm-pretrain (alice)"
        assert (lines[at + 1].split()[0], lines[at + 4].split()) == ("Used", ["02:42", "03:42"])
        assert "/api/v1/events?job=llm-pretrain~1f3a9c0e&limit=8&fold=true" in world.paths
        await pilot.press("down")
        await until(lambda: "\nchat-70b (carol)" in world.text, "the next job")
        await pilot.press("shift+tab", "G")
        await until(lambda: "\nGPU 7  NVIDIA H100" in world.text, "the device")
        await until(lambda: "/api/v1/events?device=GPU-7&limit=8&fold=true" in world.paths, "its events")
    world = TopScreen(nodes=[Node(full_node())])
    async with world.on_screen(120, 45):
        await until(lambda: "The past needs an exporter; none answers." in world.text, "the driver alone")


async def test_keys_and_clicks_sort_the_table_with_the_cursor() -> None:
    def colors() -> dict[str, str]:
        table = world.table("jobs")
        return {row["title"]: str(table.get_row_at(at)[0].style) for at, row in enumerate(table.rows_shown)}

    world = TopScreen()
    async with world.on_screen(120) as pilot:
        assert world.titles[:2] == ["llm-pretrain", "chat-70b"]
        before = colors()
        assert len(set(before.values())) == 6
        strips = [row["strip"] for row in world.table("devices").rows_shown]
        assert {f"bold {job['color']}" for strip in strips for job in strip} == set(before.values())
        await pilot.press("r")
        assert world.titles[0] == "tritonserver"
        assert colors() == before, "each job keeps its color"
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


async def test_the_ranks_of_a_job_or_of_all_jobs_are_folded_and_unfolded() -> None:
    world = TopScreen()
    ranks = [f"rank {i} ({50100 + i})" for i in range(4)]
    async with world.on_screen() as pilot:
        jobs, columns = world.titles, await world.place("Used▼")
        await pilot.press("space")
        assert world.titles == [jobs[0], *ranks, *jobs[1:]]
        assert world.selected == jobs[0]
        await pilot.press("down", "down", "space")
        assert (world.titles, world.selected) == (jobs, jobs[0]), "folded from one of its ranks"
        await pilot.press("a")
        assert len(world.titles) == 16
        assert await world.place("Used▼") == columns, "the columns stay"
        await pilot.press("a")
        assert world.titles == jobs


async def test_the_filter_of_the_command_line_is_in_force_from_the_start() -> None:
    world = TopScreen(text="moe")
    async with world.on_screen(120):
        await until(lambda: world.titles == ["moe-finetune"], "the rows of the filter")


async def test_a_filter_hides_rows_in_every_table_while_it_is_typed() -> None:
    world = TopScreen()
    async with world.on_screen() as pilot:
        await pilot.press("slash", *"al fie", "backspace", "n")
        await until(lambda: world.titles == ["moe-finetune"], "the rows of the filter")
        assert world.gpus == ["6", "7"]
        assert len(world.table("findings").rows_shown) == 1
        await pilot.press("enter")
        await until(lambda: world.text.split("\n")[-2] == "al fin", "the filter")
        await pilot.press("f", "x")
        await until(lambda: world.titles == [], "no row")
        await pilot.press("escape")
        await until(lambda: len(world.titles) == 6, "all rows")


async def test_a_question_takes_the_first_of_two_keys() -> None:
    world = TopScreen()
    async with world.on_screen(120) as pilot:
        await pilot.press("question_mark")
        await until(lambda: "any key returns" in world.text, "the help")
        for _ in range(2):
            world.app.screen.post_message(events.Key("x", "x"))
        await until(lambda: "any key returns" not in world.text, "the jobs")
        await pilot.pause()


async def test_a_table_without_rows_has_no_selected_row() -> None:
    world = TopScreen()
    async with world.on_screen(120) as pilot:
        await pilot.press("slash", *"nothing", "enter")
        await until(lambda: "No job matches." in world.text, "no rows")
        await pilot.press(*("tab", "end") * 4)
        assert world.table("devices").selected is None
        assert "No job matches." in world.text


async def test_the_same_job_stays_selected_until_it_ends() -> None:
    world = TopScreen()
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
        await until(lambda: len(world.titles) == 4, "the next reading")
        assert world.selected == "notebook", "the row at the end, because the list is shorter"


async def test_nothing_moves_when_findings_come_and_go() -> None:
    world = TopScreen()
    async with world.on_screen() as pilot:
        before = [await world.place("GPU▲"), await world.place("Job  ")]
        world.nodes = [Node({**full_node(), "findings": []}, URL)]
        await until(lambda: "Nothing needs attention." in world.text, "no finding")
        assert [await world.place("GPU▲"), await world.place("Job  ")] == before
        told = [finding("check", "warning", "Exporter", f"check-{i}: failed.") for i in range(50)]
        world.nodes = [Node({**full_node(), "findings": told}, URL)]
        await until(lambda: "check-0" in world.text, "the findings")
        assert [await world.place("GPU▲"), await world.place("Job  ")] == before
        await pilot.press("shift+tab", "shift+tab", "G")
        await until(lambda: "check-49" in world.text, "the last finding")
        world.nodes = [Node(full_node(), URL)]
        await until(lambda: "out of memory" in world.text.split("\n")[1], "the findings about jobs")
        await pilot.press("g", "enter")
        await until(lambda: world.text.startswith("rag-indexer"), "the job of the first finding")


async def test_a_lost_exporter_leaves_the_last_values_dimmed_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_exporter.cli.top.app._LATE_SECONDS", 0.1)
    world = TopScreen()
    async with world.on_screen(120) as pilot:
        world.hangs.clear()
        await until(lambda: "as of 03:42:04" in world.text and "no answer for" in world.text, "the age")
        world.hangs.set()
        await until(lambda: "as of" not in world.text, "current values")
        world.lost = ExporterUnreachableError("no-answer\x1b[2J")
        await until(lambda: "no-answer?[2J" in world.text, "the reason")
        assert world.text.split("\n")[0].startswith("gpu-node-7  as of 03:42:04")
        assert len(world.titles) == 6
        dimmed = world.table("jobs").get_row_at(1)
        assert any("dim" in str(cell.style) or "dim" in str(cell.spans) for cell in dimmed)
        await pilot.press("c")
        await until(lambda: "no exporter answers" in world.text, "no question")
        world.lost = None
        await until(lambda: "as of" not in world.text, "current values")
        assert "no-answer" not in world.text
