"""`GET /api/v1/caller`: what the caller may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_exporter.actions.caller import Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.http.problems import problems
from gpumem_exporter.server.http.replies import json_reply, json_response
from gpumem_exporter.server.security.callers import Callers
from gpumem_exporter.server.security.request_guard import CALLER_PATH


class CallerDocument(TypedDict):
    """What the caller may do."""

    uid: Annotated[int | None, Field(description="the caller's user as the kernel names it; null if it is unknown")]
    rights: Annotated[
        str,
        Field(
            description=(
                "all: every process and the exporter itself; own: the processes of the caller's user, in a container "
                "those in the same container; none"
            ),
            json_schema_extra={"enum": [rights.value for rights in Rights]},
        ),
    ]
    actions: Annotated[list[str], Field(description="the actions that the caller may request")]
    allowed_actions: Annotated[
        list[str], Field(description="the actions of --action.allow: those of a caller with all rights")
    ]
    processes: Annotated[int, Field(description="the number of reporting processes that the caller may act on")]
    reason: Annotated[str | None, Field(description="why the caller has no rights; null if it has some")]


def caller_router(*, callers: Callers, allowed: tuple[str, ...], snapshot: Callable[[], Snapshot]) -> APIRouter:
    """Return the route that shows the rights of its caller; `allowed` are the actions of `--action.allow`."""
    router = APIRouter(tags=["actions"])

    @router.get(CALLER_PATH, responses={200: json_reply(CallerDocument), **problems(403)})
    async def caller(request: Request) -> Response:
        """The rights of the caller, and the number of processes that it may act on."""
        found = await callers.of(request.scope)
        refusal = callers.refusal(found, request.scope)
        document: CallerDocument = {
            "uid": found.uid,
            "rights": found.rights.value,
            "actions": list(found.permitted_actions(allowed)),
            "allowed_actions": list(allowed),
            "processes": sum(found.may_act_on(process) for _, process in snapshot().names.reporting),
            "reason": refusal.detail if refusal is not None else None,
        }
        return json_response(document)

    return router
