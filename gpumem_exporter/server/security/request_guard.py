"""What a request passes before a route that acts sees it: who asks, from which page, with what body.

The other routes only show what is known, to whoever can reach them. Pure ASGI. A body is read here, whole and bounded,
so that no route can be made to buffer more than its limit; the route finds it in its first `receive()`, and
`http.disconnect` after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.access_rules import OwnNames, Peer, Rule
from gpumem_exporter.wire.protocol import REPORTS_PATH

__all__ = [
    "ACTIONS_PATH",
    "ALERTS_PATH",
    "EVENTS_PATH",
    "MAX_ALERTS_BYTES",
    "MAX_BODY_BYTES",
    "MAX_REPORT_BYTES",
    "NVML_PATH",
    "RELOAD_PATH",
    "Guard",
]

ACTIONS_PATH = "/api/v1/actions"
ALERTS_PATH = "/api/v1/alerts"
EVENTS_PATH = "/api/v1/events"
NVML_PATH = "/api/v1/nvml"
RELOAD_PATH = "/-/reload"

MAX_REPORT_BYTES = 1 << 20
"""64 devices with 64 phases and components each take about a third of it."""
MAX_ALERTS_BYTES = 1 << 20
"""Alertmanager sends a group's alerts in one body, at about a KiB each."""
MAX_BODY_BYTES = 64 << 10
"""For a request for an action."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The middleware.

    Args:
        app: what the request goes to once it has passed.
        own_names: what `Host` and `Origin` may say.
        reports: who may report.
        actions: who may act, and read the audit log and the events.
        on_report_refused: told the outcome (`unauthorized`, `too_large`, `invalid`) of a report that got no further.
    """

    app: ASGIApp
    own_names: OwnNames
    reports: Rule
    actions: Rule
    on_report_refused: Callable[[str], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a problem."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        is_report = path == REPORTS_PATH
        try:
            rule = self.reports if is_report else self.actions if _needs_leave(path) else None
            if rule is not None:
                self._admit(scope, rule)
                if method == "POST":
                    receive = _replay(await _read_body(scope, receive, _LIMITS.get(path, MAX_BODY_BYTES)), receive)
        except ProblemError as problem:
            if is_report:
                self.on_report_refused(_OUTCOMES.get(problem.status, "invalid"))
            await problem.response()(scope, receive, send)
            return
        except _GoneError:
            return
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the server knows that it sends no body
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope, rule: Rule) -> None:
        headers = dict(scope["headers"])
        self.own_names.require_own_page(headers)
        if rule.token is None:
            # Whoever has the token is no web page, and may call the exporter by a name that only its network knows.
            self.own_names.require_own_host(headers)
        scope.setdefault("state", {})["caller"] = rule.admit(Peer.of(scope), headers)
        # A reload takes no body, whatever a client calls the one that it does not send.
        if scope["method"] == "POST" and scope["path"] != RELOAD_PATH:
            media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if media_type != b"application/json":
                raise ProblemError(415, "send JSON, with `Content-Type: application/json`")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ProblemError(415, "send the body as it is, without Content-Encoding")


_LIMITS = {REPORTS_PATH: MAX_REPORT_BYTES, ALERTS_PATH: MAX_ALERTS_BYTES}
_OUTCOMES = {401: "unauthorized", 403: "unauthorized", 413: "too_large"}


class _GoneError(Exception):
    """The client went away while it was sending."""


def _needs_leave(path: str) -> bool:
    return path in (ACTIONS_PATH, ALERTS_PATH, EVENTS_PATH, RELOAD_PATH) or path.startswith(
        (ACTIONS_PATH + "/", NVML_PATH + "/")
    )


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read the whole body, but never more than its limit."""
    too_large = ProblemError(413, f"the body is longer than {limit} bytes, which is the most that this route takes")
    for name, value in scope["headers"]:
        # The server has checked that the figure is one; a body that is longer than it says is cut off by the parser.
        if name == b"content-length" and (not value.isdigit() or len(value) > 18 or int(value) > limit):
            raise too_large
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False) and len(message["body"]) <= limit:
        return bytes(message["body"])
    body = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise _GoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)
        message = await receive()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, then whatever the connection says."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
