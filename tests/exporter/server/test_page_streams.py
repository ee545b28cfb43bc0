from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

from gpumem_exporter.server.web.streams import MAX_STREAMS, MAX_STREAMS_OF_VIEWER, Streams, TooManyStreamsError


class State:
    """A state that counts how often it is rendered."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {"value": 0}
        self.renderings = 0
        self.now = 100.0
        self.broken = False

    async def render(self) -> bytes:
        self.renderings += 1
        if self.broken:
            raise RuntimeError("broken")
        return json.dumps(self.document).encode()

    def streams(self, **options: Any) -> Streams:
        return Streams(
            self.render, clock=lambda: self.now, wall_clock=lambda: 5.0, **{"interval_seconds": 0.001, **options}
        )


def test_nothing_is_rendered_without_a_follower() -> None:
    async def scenario() -> None:
        state = State()
        streams = state.streams(interval_seconds=60.0)
        with streams.follow("me") as follower:
            await follower()
        assert state.renderings == 1
        await asyncio.sleep(0)  # until the cancelled task ends
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_all_followers_get_the_same_rendering() -> None:
    async def scenario() -> None:
        state = State()
        streams = state.streams(interval_seconds=60.0)
        with streams.follow("me") as one, streams.follow("me") as other:
            first, second = await one(), await other()
        assert first[0] is second[0]
        assert first[1]
        assert state.renderings == 1
        assert json.loads(first[0].state) == {"value": 0}
        assert json.loads(first[0].moment) == {"clock_seconds": 100.0, "unix_seconds": 5.0}

    asyncio.run(scenario())


def test_only_a_changed_state_is_marked_as_changed() -> None:
    async def scenario() -> None:
        state = State()
        with state.streams().follow("me") as follower:
            assert (await follower())[1]
            assert not (await follower())[1]
            state.document = {"value": 1}
            changes = [await follower() for _ in range(2)]
        assert [json.loads(rendering.state)["value"] for rendering, changed in changes if changed] == [1]

    asyncio.run(scenario())


def test_a_slow_follower_misses_states_and_gets_the_newest() -> None:
    async def scenario() -> None:
        state = State()
        streams = state.streams()
        with streams.follow("me") as slow, streams.follow("me") as quick:
            await slow()
            for value in (1, 2, 3):
                state.document = {"value": value}
                while not (await quick())[1]:
                    pass
            while (await quick())[1]:
                pass
            rendering, changed = await slow()
        assert changed
        assert json.loads(rendering.state) == {"value": 3}

    asyncio.run(scenario())


def test_the_first_follower_after_a_pause_gets_a_new_state() -> None:
    async def scenario() -> None:
        state = State()
        streams = state.streams(interval_seconds=60.0)
        with streams.follow("me") as follower:
            await follower()
        state.document = {"value": 1}
        with streams.follow("me") as follower:
            assert json.loads((await follower())[0].state) == {"value": 1}

    asyncio.run(scenario())


def test_a_single_request_shares_a_recent_rendering() -> None:
    async def scenario() -> None:
        state = State()
        streams = state.streams(interval_seconds=1.0)
        assert await streams.latest() is await streams.latest()
        state.now += 0.5
        assert await streams.latest() is await streams.latest()
        assert state.renderings == 2
        with streams.follow("me") as follower:
            rendering, _ = await follower()
            state.now += 0.9
            assert await streams.latest() is rendering
        assert state.renderings == 3

    asyncio.run(scenario())


def test_a_failed_rendering_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        state = State()
        state.broken = True
        with state.streams().follow("me") as follower:
            waiting = asyncio.ensure_future(follower())
            while state.renderings < 3:
                await asyncio.sleep(0)
            assert not waiting.done()
            state.broken = False
            assert (await waiting)[1]

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert caplog.records
    assert all(record.exc_info for record in caplog.records)


def test_streams_have_a_maximum_for_each_viewer_and_in_total() -> None:
    async def scenario() -> None:
        streams = State().streams()
        with contextlib.ExitStack() as stack:
            for number in range(MAX_STREAMS):
                stack.enter_context(streams.follow(number // MAX_STREAMS_OF_VIEWER))
                if number == MAX_STREAMS_OF_VIEWER:
                    with pytest.raises(TooManyStreamsError), streams.follow(0):
                        pass
            with pytest.raises(TooManyStreamsError), streams.follow("another"):
                pass
        with streams.follow(0):
            assert len(streams) == 1

    asyncio.run(scenario())
