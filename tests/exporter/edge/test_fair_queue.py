from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpumem_exporter.edge.connections import Connection, Connections, Exchange, Limits
from gpumem_exporter.edge.fair_queue import FairRequests, Held, HeldRequests, Turns
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.problems import ProblemError


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass
class Request:
    """A request that has or waits for a turn."""

    turns: Turns
    owner: str
    _may_end: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] = field(init=False)
    has_turn: bool = False

    def __post_init__(self) -> None:
        self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        async with self.turns.of(self.owner):
            self.has_turn = True
            await self._may_end.wait()

    def end(self) -> None:
        self._may_end.set()

    def cancel(self) -> None:
        self._task.cancel()


async def test_owners_take_turns_whatever_one_of_them_asks_for() -> None:
    turns = Turns(1)
    order: list[str] = []

    async def work(owner: str) -> None:
        async with turns.of(owner):
            order.append(owner)
            await asyncio.sleep(0)

    first = Request(turns, "first")
    tasks = []
    for owner in ("a", "a", "a", "b", "b", "c"):
        tasks.append(asyncio.ensure_future(work(owner)))
        await settle()
    first.end()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_an_owner_has_its_share_of_the_turns() -> None:
    turns = Turns(3, running_of_owner=2)
    requests = [Request(turns, owner) for owner in ("a", "a", "a", "b")]
    await settle()
    assert [each.has_turn for each in requests] == [True, True, False, True]
    requests[0].end()
    await settle()
    assert requests[2].has_turn


async def test_a_bounded_number_of_an_owner_waits() -> None:
    turns = Turns(1, waiting_of_owner=2)
    running, *waiting = (Request(turns, owner) for owner in ("b", "b", "b", "c"))
    await settle()
    assert running.has_turn
    with pytest.raises(ProblemError) as refused:
        async with turns.of("b"):
            pass
    assert refused.value.status == 503
    assert refused.value.headers["Retry-After"]
    assert not any(each.has_turn for each in waiting)
    for each in (running, *waiting):
        each.cancel()


LIMITS = Limits(8, reads=1, bodies=1)


def scope(path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    exchange = Exchange(Connection(Peer(), LIMITS), Peer())
    return {"type": "http", "method": method, "path": path, "headers": sent, "state": {"exchange": exchange}}


async def ignored(message: Any) -> None:
    del message


async def empty() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def fair(app: Any) -> FairRequests:
    """An application in which one request reads, and one long body arrives, at a time."""
    return FairRequests(app, Connections(LIMITS))


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


async def test_a_read_has_no_turn_while_its_unwanted_body_arrives() -> None:
    started: list[str] = []

    async def app(scope: Any, _: Any, send: Any) -> None:
        started.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def never() -> None:
        await asyncio.Event().wait()

    served = fair(app)
    slow = asyncio.ensure_future(served(scope("/api/a", content_length="10"), never, ignored))  # type: ignore[arg-type]
    await settle()
    await asyncio.wait_for(served(scope("/api/b"), empty, ignored), 10)
    assert started == ["/api/a", "/api/b"]
    slow.cancel()


@pytest.mark.parametrize(("length", "waits"), [("1000", False), ("100000", True)])
async def test_only_long_bodies_wait_for_a_turn(length: str, waits: bool) -> None:
    read: list[str] = []

    async def app(scope: Any, receive: Any, __: Any) -> None:
        await receive()
        read.append(scope["path"])
        if scope["path"] == "/first":
            await asyncio.sleep(10)

    served = fair(app)
    first = asyncio.ensure_future(served(scope("/first", "POST", content_length="100000"), empty, ignored))
    await settle()
    second = asyncio.ensure_future(served(scope("/second", "POST", content_length=length), empty, ignored))
    await settle()
    assert (read == ["/first"]) is waits
    first.cancel()
    await second
    assert read == ["/first", "/second"]


async def test_a_long_reply_waits_for_its_reader_between_its_pieces() -> None:
    body = bytes(range(256)) * (3 << 10) + b"end"
    sent: list[dict[str, Any]] = []
    request = scope("/metrics")
    connection = Exchange.of(request).connection

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def send(message: Any) -> None:
        assert connection.due_seconds - connection.clock() > LIMITS.unread_seconds - 1
        sent.append(message)

    await fair(app)(request, empty, send)
    _, *pieces = sent
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) <= 64 << 10
    assert [piece["more_body"] for piece in pieces] == [*[True] * (len(pieces) - 1), False]


async def test_a_body_of_unknown_length_is_refused_unread() -> None:
    request = scope("/", "POST", transfer_encoding="chunked")
    steps: list[Any] = []
    Exchange.of(request).connection.close = lambda: steps.append("close")

    async def send(message: Any) -> None:
        steps.append(message.get("status"))

    await fair(ignored)(request, empty, send)  # type: ignore[arg-type]
    assert steps == [411, None, "close"]


async def test_nothing_is_sent_to_a_connection_that_has_ended() -> None:
    request = scope("/metrics")
    sent: list[Any] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        Exchange.of(request).connection.is_open = False
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    await fair(app)(request, empty, send)
    assert sent == []


@pytest.mark.parametrize(
    ("headers", "received", "closed"),
    [({}, 10, False), ({"expect": "100-continue"}, 0, True), ({"content_length": "900000000"}, 5, True)],
)
async def test_the_rest_of_an_unwanted_body_is_read_before_the_reply(
    headers: dict[str, str], received: int, closed: bool
) -> None:
    request = scope("/", "POST", **{"content_length": "10485760", **headers})
    steps: list[str] = []
    Exchange.of(request).connection.close = lambda: steps.append("close")
    parts = 1 << 20 if "content_length" in headers else 400 << 10

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 415, "headers": []})

    async def receive() -> dict[str, Any]:
        steps.append("receive")
        more = steps.count("receive") < 10
        return {"type": "http.request", "body": b"x" * parts, "more_body": more}

    async def send(message: Any) -> None:
        steps.append(message["type"])

    await fair(app)(request, receive, send)
    assert steps == ["receive"] * received + ["http.response.start"] + ["close"] * closed


async def test_a_request_is_held_until_it_is_woken_or_late_or_its_client_or_the_exporter_goes() -> None:
    requests, gone, forever = HeldRequests(), asyncio.Event(), asyncio.Event()

    def hold(key: str, seconds: float = 1000.0, until: asyncio.Event = forever) -> asyncio.Task[Held]:
        async def receive() -> Any:
            await until.wait()
            return {"type": "http.disconnect"}

        return asyncio.ensure_future(requests.hold(key, seconds, receive))

    woken = [hold("action"), hold("action")]
    leaving, other = hold("process", until=gone), hold("process")
    assert [await hold("action", seconds) for seconds in (0.0, 0.001)] == ["late"] * 2
    assert len(requests) == 4
    requests.wake("action")
    requests.wake("unknown")
    assert await asyncio.gather(*woken) == ["woken"] * 2
    gone.set()
    assert await leaving == "gone"
    assert len(requests) == 1
    requests.stop()
    assert await other == "woken"
    assert await hold("late") == "woken"
    assert len(requests) == 0
