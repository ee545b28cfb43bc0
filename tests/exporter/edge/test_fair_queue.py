from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpumem_exporter.edge import fair_queue as module
from gpumem_exporter.edge.connections import PIECE_BYTES, Connection, Limits
from gpumem_exporter.edge.fair_queue import FairRequests, Held, HeldRequests, Turns, cut
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.protocol import UnreadReplies


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_take_turns_whatever_one_of_them_asks_for() -> None:
    turns = Turns(1)
    order: list[str] = []
    await turns.start("first")

    async def work(owner: str) -> None:
        async with turns.of(owner):
            order.append(owner)
            await asyncio.sleep(0)

    tasks = []
    for owner in ("a", "a", "a", "b", "b", "c"):
        tasks.append(asyncio.ensure_future(work(owner)))
        await settle()
    turns.end("first")
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_an_owner_has_its_share_of_the_turns() -> None:
    turns = Turns(3, running_of_owner=2)
    await turns.start("a")
    await turns.start("a")
    third = asyncio.ensure_future(turns.start("a"))
    await settle()
    assert not third.done()
    await turns.start("b")
    turns.end("a")
    await third


async def test_a_cancelled_wait_passes_its_turn_on() -> None:
    turns = Turns(1)
    await turns.start("a")
    waiting = [asyncio.ensure_future(turns.start("b")) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    turns.end("a")
    waiting[1].cancel()  # it has its turn already, and has not run yet
    await asyncio.wait_for(waiting[2], 10)


async def test_a_bounded_number_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFUSAL_SECONDS", 0.0)

    turns = Turns(1, waiting_of_owner=2, waiting=3)
    await turns.start("a")
    waiting = [asyncio.ensure_future(turns.start(owner)) for owner in ("b", "c", "d")]
    await settle()
    for owner in ("b", "e"):
        with pytest.raises(ProblemError) as refused:
            await turns.start(owner)
        assert refused.value.status == 503
        assert refused.value.headers["Retry-After"]
    assert not any(each.done() for each in waiting)
    for each in waiting:
        each.cancel()


async def test_owners_that_fill_the_queue_make_room_for_others() -> None:
    turns = Turns(1, waiting_of_owner=2, waiting=4)
    await turns.start("a")
    waiting = [asyncio.ensure_future(turns.start(owner)) for owner in ("b", "b", "c", "c")]
    await settle()
    new = asyncio.ensure_future(turns.start("d"))
    await settle()
    (refused,) = [each for each in waiting if each.done()]
    assert isinstance(refused.exception(), ProblemError)
    for owner in ("a", "b", "c"):
        turns.end(owner)
        await settle()
    assert new.done()
    assert new.exception() is None
    for each in waiting:
        each.cancel()


def scope(path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    state = {"connection": Connection(Peer(), "a")}
    return {"type": "http", "method": method, "path": path, "headers": sent, "state": state}


async def ignored(message: Any) -> None:
    del message


async def empty() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def fair(app: Any) -> FairRequests:
    """An application in which one request reads, and one long body arrives, at a time."""
    return FairRequests(app, Limits(8, reads=1, bodies=1), UnreadReplies(1 << 20))


async def test_a_read_has_a_turn_until_its_reply_starts() -> None:
    started: list[str] = []
    may_reply = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        started.append(scope["path"])
        await may_reply.wait()
        may_reply.clear()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(10)  # a client that reads slowly

    served = fair(app)
    requests = [asyncio.ensure_future(served(scope(path), empty, ignored)) for path in ("/api/a", "/api/b", "/metrics")]
    await settle()
    assert started == ["/api/a", "/metrics"]
    may_reply.set()
    await settle()
    assert started == ["/api/a", "/metrics", "/api/b"]
    for request in requests:
        request.cancel()


@pytest.mark.parametrize(("length", "waits"), [("1000", False), ("100000", True), ("", True)])
async def test_only_long_bodies_wait_for_a_turn(length: str, waits: bool) -> None:
    read: list[str] = []

    async def app(scope: Any, receive: Any, __: Any) -> None:
        await receive()
        read.append(scope["path"])
        if scope["path"] == "/first":
            await asyncio.sleep(10)

    served = fair(app)
    first = asyncio.ensure_future(served(scope("/first", "POST"), empty, ignored))
    await settle()
    headers = {"content_length": length} if length else {}
    second = asyncio.ensure_future(served(scope("/second", "POST", **headers), empty, ignored))
    await settle()
    assert (read == ["/first"]) is waits
    first.cancel()
    await second
    assert read == ["/first", "/second"]


@pytest.mark.parametrize("shared", [False, True])
async def test_a_long_reply_is_sent_in_pieces(shared: bool) -> None:
    body = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"
    unread, sent, counted = UnreadReplies(1 << 30), [], []

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", **({"pieces": tuple(cut(body))} if shared else {"body": body})})

    async def send(message: dict[str, Any]) -> None:
        counted.append(unread.total_bytes)
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/metrics",
        "headers": [],
        "state": {"connection": Connection(Peer(), "1")},
    }
    await FairRequests(app, Limits(8), unread)(scope, send, send)  # type: ignore[arg-type]
    _, *pieces = sent
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES
    assert [piece["more_body"] for piece in pieces] == [True, True, True, False]
    assert counted == [0, *[len(body)] * 4]
    assert unread.total_bytes == 0


async def test_a_request_is_held_until_it_is_woken_or_late_or_its_client_or_the_exporter_goes() -> None:
    requests, gone, forever = HeldRequests(), asyncio.Event(), asyncio.Event()

    def hold(key: str, seconds: float = 1000.0, until: asyncio.Event = forever) -> asyncio.Task[Held]:
        async def receive() -> Any:
            await until.wait()
            return {"type": "http.disconnect"}

        return asyncio.ensure_future(requests.hold(key, seconds, receive))

    woken = [hold("action"), hold("action")]
    leaving, other = hold("process", until=gone), hold("process")
    assert [await hold("action", seconds) for seconds in (0.0, 0.001)] == [Held.LATE] * 2
    assert len(requests) == 4
    requests.wake("action")
    requests.wake("unknown")
    assert await asyncio.gather(*woken) == [Held.WOKEN] * 2
    gone.set()
    assert await leaving is Held.GONE
    assert len(requests) == 1
    requests.stop()
    assert await other is Held.STOPPING
    assert await hold("late") is Held.STOPPING
    assert len(requests) == 0
