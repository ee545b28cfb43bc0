"""`POST /api/v1/reports`: receives a report and replies with commands.

Plain ASGI: each process calls this route once a second, and reading a body through FastAPI takes three times as long
as the work on it.
"""

from __future__ import annotations

import logging

from starlette.responses import Response
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
        response: Response | None
        if scope["method"] != "POST":
            response = problem_response(405, "reports are sent with POST", headers={"Allow": "POST"})
        else:
            try:
                reply = await self._ingest.take(scope, (await receive())["body"], receive)
            except ProblemError as problem:
                _log.debug("report refused", extra={"fields": {"status": problem.status, "detail": problem.detail}})
                response = problem.response()
            else:
                response = Response(reply, media_type="application/json") if reply is not None else None
        if response is not None:
            await response(scope, receive, send)
