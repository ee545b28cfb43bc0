"""Lets in over TCP whom `--web.config.file` names, before anything else looks at a request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.access_rules import Peer, Rule
from gpumem_exporter.server.security.web_access import WebAccess
from gpumem_exporter.wire.protocol import REPORTS_PATH

__all__ = ["BasicAuth"]

_ASK = {"WWW-Authenticate": 'Basic realm="gpumem-exporter", charset="UTF-8"'}
_ASK_AGAIN = {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'}
"""To whoever sent a token: a browser would ask the user for a password, and the page has asked for a token."""


@dataclass(frozen=True, slots=True)
class BasicAuth:
    """The middleware: every route over TCP is for the users alone, as in Prometheus' own exporters.

    The unix socket is not asked: the kernel says who is there. One header carries either a password or a token, so
    whoever brings a token that a route takes needs no password: the token of actions opens every route, since who may
    act may look, and the token of reports the route that takes them. A password opens nothing that needs a token.

    Args:
        app: what the request goes to once it is let in.
        access: the users.
        reports: whose token lets reports in.
        actions: whose token lets everything in.
        on_report_refused: told `unauthorized` for a report that got no further.
    """

    app: ASGIApp
    access: WebAccess
    reports: Rule
    actions: Rule
    on_report_refused: Callable[[str], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a problem."""
        if scope["type"] == "http" and len(self.access.users) and Peer.of(scope).credentials is None:
            try:
                await self._admit(scope["path"], dict(scope["headers"]))
            except ProblemError as problem:
                if scope["path"] == REPORTS_PATH and problem.status == 401:
                    self.on_report_refused("unauthorized")
                await problem.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _admit(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self.actions.opened_by(headers) or (path == REPORTS_PATH and self.reports.opened_by(headers)):
            return
        scheme, _, encoded = headers.get(b"authorization", b"").partition(b" ")
        needed = "a name and a password are needed, by basic authentication"
        if scheme.lower() == b"basic":
            if await self.access.users.admit(_decoded(encoded)):
                return
            needed = "the name or the password is not right"
        if scheme.lower() == b"bearer":
            raise ProblemError(401, "the token is not one that opens this route", _ASK_AGAIN)
        raise ProblemError(401, f"{needed}; the exporter's --web.config.file says whose", _ASK)


def _decoded(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return b""
