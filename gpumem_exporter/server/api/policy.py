"""`POST /-/reload`: the policy file is read again. The guard has decided who may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.http.replies import json_response
from gpumem_exporter.server.security.request_guard import RELOAD_PATH

if TYPE_CHECKING:
    from gpumem_exporter.server.background.policy_runner import PolicyRunner

__all__ = ["policy_router"]

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the rules that are in force now",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    401: {"description": "no token, or a wrong one", "content": _PROBLEM},
    403: {"description": "not from here", "content": _PROBLEM},
    404: {"description": "there is nothing to reload", "content": _PROBLEM},
    422: {"description": "the file is not right; nothing has changed", "content": _PROBLEM},
}


def policy_router(policies: PolicyRunner | None) -> APIRouter:
    """The route that reloads."""
    router = APIRouter(tags=["policy"])

    @router.post(RELOAD_PATH, response_class=Response, responses=_RESPONSES)
    async def reload(request: Request) -> Response:
        """Read the policy file again; one that is not right changes nothing."""
        if policies is None:
            raise ProblemError(404, "there is nothing to reload: the exporter was started without --policy.file")
        try:
            rules = await policies.reload(str(request.state.caller))
        except ConfigurationError as error:
            raise ProblemError(422, f"nothing has changed: {error}") from None
        listed = [
            {"name": rule.name, "dry_run": rule.dry_run, "stopped": policies.engine.stopped(rule.name)}
            for rule in rules
        ]
        return json_response({"rules": listed})

    return router
