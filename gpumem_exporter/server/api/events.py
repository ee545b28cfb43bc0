"""`GET /api/v1/events`: what happened on the node."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from gpumem_exporter.errors import StorageError
from gpumem_exporter.events import EVENT_TYPES
from gpumem_exporter.server.api.event_query import DEFAULT_LISTED, MAX_LISTED, events_document, read_query
from gpumem_exporter.server.api.event_writes import read_events
from gpumem_exporter.server.api.state import json_response
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.runtime import Runtime
from gpumem_exporter.server.security.request_guard import EVENTS_PATH

__all__ = ["events_router"]


def events_router(runtime: Runtime) -> APIRouter:
    """The route of events."""
    router = APIRouter(tags=["events"])

    @router.get(EVENTS_PATH, response_class=Response, responses=_ANSWERS, openapi_extra=_QUERY)
    async def events(request: Request) -> Response:
        """What happened, in the order in which the exporter learnt of it.

        Without `after` and `since` these are the last `limit` events; with one of them, the first `limit` that match.
        `after=<next_after>` goes on where an answer ended, whether `more` says that there is something or it is yet to
        happen. Who may read this is who may read the audit log.

        What is shown here is on the disk, where `--storage.path` names a folder: it is here again after the exporter
        was killed. A report that tells of an out-of-memory error is answered when that is on the disk as well, or after
        a second, if the disk fails: `/health` says so then, and the event waits in memory.
        """
        query = read_query(request.query_params.multi_items())
        try:
            page = await read_events(runtime.events.log, query)
        except StorageError as error:
            raise ProblemError(503, f"the events cannot be read: {error}", {"Retry-After": "1"}) from None
        return json_response(events_document(page))

    return router


def _problem(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


_TEXT = {"type": ["string", "null"]}
_EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "time", "unix_seconds", "gpu", "uuid", "pid", "workload", "rank", "detail"],
    "properties": {
        "id": {"type": "integer", "description": "rises from event to event, also over a restart; says nothing else"},
        "type": {"type": "string", "enum": list(EVENT_TYPES)},
        "time": {"type": "string", "format": "date-time", "description": "when it happened"},
        "unix_seconds": {"type": "number", "description": "the same, exactly"},
        "gpu": _TEXT,
        "uuid": _TEXT,
        "pid": {"type": ["integer", "string", "null"], "description": "the pid that the process' series carry"},
        "workload": _TEXT,
        "rank": _TEXT,
        "detail": {
            "type": "object",
            "description": "by type. oom: what was requested, what was free, and in `allocator` the device's allocator "
            "at that moment, in PyTorch's words. process_ended: `reason`, and in `devices` the last row of the ledger "
            "for each device. device_lost: `error`. action: `id`, and what became of each process in `results`.",
        },
    },
}
_PAGE = {
    "type": "object",
    "required": ["events", "next_after", "more"],
    "properties": {
        "events": {"type": "array", "items": _EVENT},
        "next_after": {"type": "integer", "description": "`after` of the next request"},
        "more": {"type": "boolean", "description": "the next request will find something"},
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "a page of events", "content": {"application/json": {"schema": _PAGE}}},
    401: _problem("no token, or a wrong one"),
    403: _problem("not from here"),
    422: _problem("a parameter is not right"),
    503: _problem("the disk does not answer"),
}


def _parameter(name: str, schema: dict[str, Any], description: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description, **more}


_QUERY: dict[str, Any] = {
    "parameters": [
        _parameter("after", {"type": "integer", "minimum": 0}, "those that were learnt of after the one with this id"),
        _parameter("since", {"type": "string"}, "those that happened then or later: Unix seconds, or RFC 3339"),
        _parameter(
            "type",
            {"type": "array", "items": {"type": "string", "enum": list(EVENT_TYPES)}},
            "of these types, with commas between them",
            style="form",
            explode=False,
        ),
        _parameter(
            "pid",
            {"type": "string"},
            "about this process, as its `pid` label has it; an action is about each that it was meant for",
        ),
        _parameter(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
            "how many at most; fewer come where they are large",
        ),
    ]
}
