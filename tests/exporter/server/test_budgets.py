from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from gpumem_exporter.server.http.connections import (
    PIECE_BYTES,
    Connection,
    Limits,
    Owner,
    RequestBodies,
    UnreadReplies,
)
from gpumem_exporter.server.http.peer import Peer
from gpumem_exporter.server.http.turns import FairRequests


def connection(owner: Owner, closed: list[Connection]) -> Connection:
    made = Connection(Peer(), owner)
    made.close = lambda: closed.append(made)
    return made


def test_the_longest_body_of_the_owner_with_the_most_is_rejected() -> None:
    bodies, rejected = RequestBodies(100), []
    several = [Connection(Peer(), 1) for _ in range(3)]
    one = Connection(Peer(), 2)

    def reject(each: Connection) -> None:
        rejected.append(each)
        bodies.free(each)

    for each in (*several, one):
        each.reject_bodies = partial(reject, each)
    bodies.add(one, 40)
    for each, size in zip(several, (10, 30, 15), strict=True):
        bodies.add(each, size)
    assert not rejected
    bodies.add(several[0], 6)
    assert rejected == [several[1]]
    bodies.add(one, 29)
    assert rejected == [several[1]]


def test_a_page_counts_once_for_all_its_readers() -> None:
    closed: list[Connection] = []
    unread = UnreadReplies(100)
    page = b"x" * 90
    readers = [connection(number, closed) for number in range(20)]
    for each in readers:
        unread.send(each, page)
    assert unread.total_bytes == 90
    for each in readers:
        unread.sent(each)
    assert unread.total_bytes == 0
    assert not closed


def test_the_owner_with_the_most_unread_bytes_loses_first() -> None:
    closed: list[Connection] = []
    unread = UnreadReplies(100)
    first, second, other = (connection(owner, closed) for owner in (1, 1, 2))
    unread.buffer(first, 30)
    unread.buffer(second, 25)
    unread.send(other, b"x" * 40)
    assert not closed
    unread.buffer(second, 35)
    assert closed == [second]
    assert unread.total_bytes == 70
    unread.buffer(second, 0)
    unread.sent(second)
    unread.forget(other)
    unread.forget(first)
    assert unread.total_bytes == 0


def test_a_long_reply_is_sent_in_pieces() -> None:
    body = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"
    unread, sent, counted = UnreadReplies(1 << 30), [], []

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def send(message: dict[str, Any]) -> None:
        counted.append(unread.total_bytes)
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/metrics",
        "headers": [],
        "state": {"connection": Connection(Peer(), 1)},
    }
    asyncio.run(FairRequests(app, Limits(8), unread)(scope, send, send))  # type: ignore[arg-type]
    _, *pieces = sent
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES
    assert [piece["more_body"] for piece in pieces] == [True, True, True, False]
    assert counted == [0, *[len(body)] * 4]
    assert unread.total_bytes == 0
