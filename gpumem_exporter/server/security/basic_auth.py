"""Basic authentication over TCP with the users of `--web.config.file`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from gpumem_client.wire.protocol import REPORTS_PATH
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.access_rules import Rule
from gpumem_exporter.server.security.peer import Peer
from gpumem_exporter.server.security.web_access import WebAccess

__all__ = ["BasicAuth"]

_CHALLENGE_BASIC = {"WWW-Authenticate": 'Basic realm="gpumem-exporter", charset="UTF-8"'}
_CHALLENGE_BEARER = {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'}
"""The reply to a wrong token. With a Basic challenge, a browser would show its password dialog."""


@dataclass(frozen=True, slots=True)
class BasicAuth:
    """Middleware that restricts every route over TCP to the users, as Prometheus' own exporters do.

    The unix socket is exempt: the kernel identifies its clients. A request has either a password or a token in its
    one `Authorization` header. The token of actions opens every route, the token of reports only their route. A
    password does not replace a token.

    Args:
        app: the next application.
        access: the users.
        reports: the rule whose token admits reports.
        actions: the rule whose token admits every request.
        on_report_refused: called with `unauthorized` for a refused report.
    """

    app: ASGIApp
    access: WebAccess
    reports: Rule
    actions: Rule
    on_report_refused: Callable[[str], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an admitted request; answer others with a problem."""
        if scope["type"] == "http" and len(self.access.users) and not Peer.of(scope).on_unix_socket:
            try:
                await self._admit(scope["path"], dict(scope["headers"]))
            except ProblemError as problem:
                if scope["path"] == REPORTS_PATH and problem.status == 401:
                    self.on_report_refused("unauthorized")
                await problem.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _admit(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self.actions.matches_token(headers) or (path == REPORTS_PATH and self.reports.matches_token(headers)):
            return
        scheme, _, encoded = headers.get(b"authorization", b"").partition(b" ")
        reason = "basic authentication with a name and a password is required"
        if scheme.lower() == b"basic":
            if await self.access.users.admit(_decoded(encoded)):
                return
            reason = "wrong name or password"
        if scheme.lower() == b"bearer":
            raise ProblemError(401, "the token does not open this route", _CHALLENGE_BEARER)
        raise ProblemError(401, f"{reason}; the users are those of the exporter's --web.config.file", _CHALLENGE_BASIC)


def _decoded(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return b""
