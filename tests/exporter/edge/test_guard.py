from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.protocol import PROFILES_PATH
from gpumem_exporter.core.container import HERE
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.request_guard import (
    ACTIONS_PATH,
    ALERTS_PATH,
    EVENTS_PATH,
    JOBS_PATH,
    MAX_BODY_BYTES,
    NVML_PATH,
    PROCESSES_PATH,
    Callers,
    Guard,
    OwnNames,
    Rule,
)
from gpumem_exporter.edge.watched_files import TokenFile
from tests.support.builders.builders import state_from

REPORTS = "/api/v1/reports"
LIMITS = {REPORTS: 1 << 20, PROFILES_PATH: 2 << 20}
JSON = (b"content-type", b"application/json")
HOST = (b"host", b"localhost:9844")


@dataclass
class Exchange:
    """One request through the guard, and its outcome."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)
    seen_method: str = ""
    after_body: str = ""
    received: int = 0
    outcomes: list[str] = field(default_factory=list)


def pass_through(
    path: str,
    *,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (HOST, JSON),
    chunks: Sequence[bytes] = (b"{}",),
    client: str = "127.0.0.1",
    token: Path | None = None,
    uid: int = 1000,
    cut_off: bool = False,
    loopback_only: bool = False,
) -> Exchange:
    exchange = Exchange()

    async def route(scope: Any, receive: Any, send: Any) -> None:
        exchange.seen_method = scope["method"]
        exchange.seen.append((await receive())["body"] if method == "POST" else b"")
        exchange.after_body = (await receive())["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    messages = [
        {"type": "http.request", "body": chunk, "more_body": cut_off or i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        if messages and (method == "POST"):
            exchange.received += 1
            return messages.pop(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            exchange.headers = dict(message["headers"])
        elif message["body"]:
            exchange.problem = json.loads(message["body"])

    token_file = TokenFile("--x.token-file", token) if token else None
    rule = Rule("things", "--x.token-file", token_file)
    callers = Callers(rule, 1000)
    guard = Guard(route, {}, OwnNames(["node-7"]), rule, callers, exchange.outcomes.append, LIMITS, loopback_only)
    peer = Peer(client, uid=uid if client in ("127.0.0.1", "") else None, place=HERE)
    length = (b"content-length", b"%d" % sum(map(len, chunks)))
    sent = [length, *headers] if method == "POST" else list(headers)
    scope = {"type": "http", "path": path, "method": method, "headers": sent, "state": state_from(peer)}
    asyncio.run(guard(scope, receive, send))
    return exchange


@pytest.mark.parametrize("path", [REPORTS, ACTIONS_PATH])
def test_an_admitted_request_reaches_its_route_with_its_whole_body(path: str) -> None:
    headers = [HOST, (b"content-type", b"Application/JSON; charset=utf-8")]
    exchange = pass_through(path, headers=headers, chunks=(b'{"a"', b":1}", b""), uid=1001)
    assert exchange.status == 200
    assert exchange.seen == [b'{"a":1}']
    assert exchange.after_body == "http.disconnect"


@pytest.mark.parametrize(
    "path", [REPORTS, ACTIONS_PATH, ACTIONS_PATH + "/some-id", ALERTS_PATH, NVML_PATH + "/release"]
)
@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"client": "10.0.0.5"}, 403),
        ({"headers": [(b"host", b"evil.example"), JSON]}, 403),
        ({"headers": [HOST, JSON, (b"origin", b"http://evil.example")]}, 403),
        ({"headers": [HOST]}, 415),
        ({"headers": [HOST, (b"content-type", b"text/plain")]}, 415),
        ({"headers": [HOST, (b"content-type", b"application/x-www-form-urlencoded")]}, 415),
        ({"headers": [HOST, JSON, (b"content-encoding", b"gzip")]}, 415),
    ],
)
def test_a_request_of_a_web_page_or_another_machine_is_refused_before_its_body_is_read(
    path: str, changed: dict[str, Any], status: int
) -> None:
    exchange = pass_through(path, **changed)
    assert exchange.status == status
    assert exchange.headers[b"content-type"] == b"application/problem+json"
    assert exchange.problem["status"] == status
    assert exchange.problem["detail"]
    assert exchange.seen == []
    assert exchange.received == 0


@pytest.mark.parametrize("client", ["127.0.0.1", ""])
@pytest.mark.parametrize("header", [b"x-forwarded-for", b"forwarded", b"via", b"x-real-ip"])
def test_a_request_through_a_local_proxy_has_no_user(header: bytes, client: str) -> None:
    for path in (REPORTS, ACTIONS_PATH):
        assert pass_through(path, client=client, headers=[HOST, JSON, (header, b"10.0.0.5")]).status == 403


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"origin", b"http://localhost:9844", 200),
        *((b"origin", value, 403) for value in (b"http://localhost:3000", b"null", b"", b"file://localhost:9844")),
        (b"sec-fetch-site", b"same-site", 403),
        (b"sec-fetch-site", b"same-origin", 200),
        (b"sec-fetch-site", b"none", 200),
    ],
)
def test_a_browser_may_send_requests_only_from_the_exporters_page(name: bytes, value: bytes, status: int) -> None:
    assert pass_through(ACTIONS_PATH, headers=[HOST, JSON, (name, value)]).status == status


def test_a_profile_is_compressed_json() -> None:
    gzip = (b"content-encoding", b"gzip")
    assert pass_through(PROFILES_PATH, headers=[HOST, JSON, gzip]).status == 200
    for headers in ([HOST, JSON], [HOST, gzip], [HOST, JSON, (b"content-encoding", b"br")]):
        assert pass_through(PROFILES_PATH, headers=headers).status == 415
    assert pass_through(PROFILES_PATH, headers=[HOST, JSON, gzip], client="10.0.0.5").status == 403


@pytest.mark.parametrize("path", ["/metrics", "/health", "/", "/api/v1/devices"])
def test_readable_routes_are_open_to_every_client_under_any_name(path: str) -> None:
    headers = [(b"host", b"gpumem.monitoring.svc:9844"), (b"origin", b"http://grafana.example")]
    assert pass_through(path, method="GET", headers=headers, client="10.0.0.5").status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (name, 200)
            for name in (b"LOCALHOST:9844", b"localhost.", b"[::1]:9844", b"[::1]", b"10.1.2.3", b"node-7:1")
        ),
        *((name, 403) for name in (b"evil.example:9844", b"localhost.evil.example", b"127.0.0.1.evil.example")),
        *((name, 403) for name in (b"node-77", b"[", b":1")),
    ],
)
def test_an_exporter_on_loopback_alone_has_only_its_own_names(host: bytes, status: int, tmp_path: Path) -> None:
    assert pass_through(ACTIONS_PATH, headers=[(b"host", host), JSON]).status == status, "also of any exporter"
    for path in ("/metrics", "/", "/api/v1/processes"):
        answer = pass_through(path, method="GET", headers=[(b"host", host)], loopback_only=True)
        assert (answer.status, len(answer.seen)) == (status, status == 200)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("right")
    headers = [(b"host", host), (b"authorization", b"Bearer right")]
    assert pass_through("/metrics", method="GET", headers=headers, token=token, loopback_only=True).status == 200


@pytest.mark.parametrize(
    "path",
    [
        *(ACTIONS_PATH, EVENTS_PATH, f"{EVENTS_PATH}/9", f"{JOBS_PATH}/4711"),
        *(PROFILES_PATH, f"{PROFILES_PATH}/{'a' * 32}", f"{PROCESSES_PATH}/7/profile"),
    ],
)
def test_the_audit_log_the_events_and_the_profiles_are_guarded_like_the_actions(path: str) -> None:
    assert pass_through(path, method="GET", headers=[HOST], client="10.0.0.5").status == 403
    assert pass_through(path, method="GET", headers=[(b"host", b"evil.example")]).status == 403
    assert pass_through(path, method="GET", headers=[HOST]).status == 200


def test_a_client_with_the_token_may_use_any_host_name(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("right")
    host = (b"host", b"node-7.cluster.example:9844")
    bearer = (b"authorization", b"Bearer right")
    assert pass_through(ACTIONS_PATH, headers=[host, JSON, bearer], client="10.0.0.5", token=token).status == 200
    assert pass_through(ACTIONS_PATH, headers=[host, JSON], client="10.0.0.5", token=token).status == 401
    page = (b"origin", b"http://evil.example")
    assert pass_through(ACTIONS_PATH, headers=[host, JSON, bearer, page], token=token).status == 403


@pytest.mark.parametrize(("path", "limit"), [(REPORTS, LIMITS[REPORTS]), (ACTIONS_PATH, MAX_BODY_BYTES)])
def test_a_body_at_its_limit_passes_and_one_byte_more_does_not(path: str, limit: int) -> None:
    assert pass_through(path, chunks=(b"x" * limit,)).status == 200
    longer = pass_through(path, chunks=(b"x" * limit, b"x"))
    assert (longer.status, longer.received, longer.seen) == (413, 0, [])


def test_a_client_that_disconnects_while_sending_reaches_no_route() -> None:
    exchange = pass_through(REPORTS, chunks=(b'{"a"',), cut_off=True)
    assert exchange.seen == []
    assert exchange.status == 0


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"client": "10.0.0.5"}, "unauthorized"),
        ({"headers": [HOST]}, "invalid"),
        ({"chunks": (b"x" * (LIMITS[REPORTS] + 1),)}, "too_large"),
    ],
)
def test_refused_reports_are_counted_and_refused_actions_are_not_reports(changed: dict[str, Any], outcome: str) -> None:
    assert pass_through(REPORTS, **changed).outcomes == [outcome]
    assert pass_through(ACTIONS_PATH, **changed).outcomes == []
