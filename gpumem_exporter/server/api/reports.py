"""`POST /api/v1/reports`: receives a report and replies with commands.

Plain ASGI: each process calls this route once a second, and reading a body through FastAPI takes three times as long
as the work on it.
"""

from __future__ import annotations

import logging

from starlette.types import Receive, Scope, Send

from gpumem_exporter.server.http.problems import ProblemError, problem_response
from gpumem_exporter.server.ingest import Ingest

__all__ = ["ReportsRoute"]

_log = logging.getLogger(__name__)


class ReportsRoute:
    """Receives reports. The guard has admitted the sender and read the body."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a report, unless the client has closed the connection."""
        if scope["method"] != "POST":
            response = problem_response(405, "reports are sent with POST", headers={"Allow": "POST"})
            await response(scope, receive, send)
            return
        try:
            reply = await self._ingest.take(scope, (await receive())["body"], receive)
        except ProblemError as problem:
            _log.debug("report refused", extra={"fields": {"status": problem.status, "detail": problem.detail}})
            await problem.response()(scope, receive, send)
            return
        if reply is not None:
            headers = [(b"content-length", b"%d" % len(reply)), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": reply})
