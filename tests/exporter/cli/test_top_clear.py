"""A clear in `top`: the question, the request, and its result."""

from __future__ import annotations

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.cli.node_view import Node
from tests.support.live_documents import full_node
from tests.support.top_screen import TopScreen, until


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
