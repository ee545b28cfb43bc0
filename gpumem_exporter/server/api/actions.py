"""`/api/v1/actions`: asking for an action, taking it back, and the audit log. The guard has decided who may.

Parameters are read by hand: the first one that FastAPI reads itself makes it import all of pydantic's version 1, which
is a tenth of the exporter's start and two of its megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.limits import retry_after
from gpumem_exporter.actions.model import Action
from gpumem_exporter.errors import (
    ActionNotAllowedError,
    GroupIncompleteError,
    IdempotencyConflictError,
    TargetNotFoundError,
    TooManyActionsError,
)
from gpumem_exporter.server.api.action_schema import action_document, read_action
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.http.held_requests import Holds
from gpumem_exporter.server.http.problems import FieldError, ProblemError
from gpumem_exporter.server.http.replies import json_response
from gpumem_exporter.server.security.request_guard import ACTIONS_PATH

__all__ = ["actions_router"]

MAX_IDEMPOTENCY_KEY_LENGTH = 255
MAX_LISTED = 1000
DEFAULT_LISTED = 100

_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


_WHO_TERMINATES = (
    "terminate needs to know who asks: send the token of --action.token-file, or ask over --web.listen-socket; loopback"
    " is every user's"
)


_NO_SUCH_ACTION = "there is no such action, or it is so old that it was forgotten"


def _problems(**details: str) -> dict[int | str, dict[str, Any]]:
    return {int(key[1:]): {"description": text, "content": _PROBLEM} for key, text in details.items()}


_ASKED: dict[int | str, dict[str, Any]] = {
    200: {"description": "finished", "content": _OBJECT},
    202: {"description": "under way; `Location` is where to ask again", "content": _OBJECT},
    **_problems(
        _401="no token, or a wrong one",
        _403="not from here, or the action is not allowed",
        _404="nothing that reports matches the target",
        _409="the Idempotency-Key came before with another request, or not every rank of a group can take part",
        _422="the request is not right",
        _429="the caller, or a process, has had its share of actions; `Retry-After` says when there is one more",
    ),
}
_ASKING: dict[str, Any] = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "a repeated request with the same key gets the first one's action back",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ActionBody"}}},
    },
}
_LISTING: dict[str, Any] = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "description": "how many at most",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
        }
    ]
}
_ONE: dict[str, Any] = {
    "parameters": [{"name": "action_id", "in": "path", "required": True, "schema": {"type": "string"}}]
}


def actions_router(*, dispatcher: Dispatcher, audit: Audit, holds: Holds) -> APIRouter:
    """The routes of actions."""
    router = APIRouter(tags=["actions"])

    @router.post(ACTIONS_PATH, response_class=Response, responses=_ASKED, openapi_extra=_ASKING)
    async def ask(request: Request) -> Response:
        """Ask for an action on chosen processes and wait for its results, for `wait_seconds` at most."""
        key = _idempotency_key(request.headers.get("idempotency-key"))
        body = read_action(await request.body())
        if body.action == "terminate" and request.state.caller.anonymous:
            raise ProblemError(403, _WHO_TERMINATES)
        if key is not None:
            await audit.recalled()
        action = _submit(
            lambda: dispatcher.submit(body.request(), requested_by=request.state.caller, idempotency_key=key)
        )
        if not action.finished and body.wait_seconds > 0:
            await holds.until(dispatcher.wait(action.id, body.wait_seconds), request.receive)
            action = dispatcher.get(action.id) or action
        if action.finished:
            await audit.kept(action)
            return json_response(action_document(action))
        response = json_response(action_document(action), 202)
        response.headers["Location"] = f"{ACTIONS_PATH}/{action.id}"
        return response

    @router.get(ACTIONS_PATH, response_class=Response, responses={200: {"content": _OBJECT}}, openapi_extra=_LISTING)
    async def recent(request: Request) -> Response:
        """The audit log: the latest actions, newest first."""
        limit = _limit(request.query_params.get("limit"))
        return json_response({"actions": [action_document(action) for action in dispatcher.recent()[:limit]]})

    @router.get(
        ACTIONS_PATH + "/{action_id}",
        response_class=Response,
        responses={200: {"content": _OBJECT}, **_problems(_404="no such action")},
        openapi_extra=_ONE,
    )
    async def one(request: Request) -> Response:
        """One action as it stands."""
        action = dispatcher.get(request.path_params["action_id"])
        if action is None:
            raise ProblemError(404, _NO_SUCH_ACTION)
        if action.finished:
            await audit.kept(action)
        return json_response(action_document(action))

    @router.delete(
        ACTIONS_PATH + "/{action_id}",
        response_class=Response,
        responses={
            200: {"description": "as it ended", "content": _OBJECT},
            202: {"description": "told to those who wait; ask again for its end", "content": _OBJECT},
            **_problems(_401="no token, or a wrong one", _403="not from here", _404="no such action"),
        },
        openapi_extra=_ONE,
    )
    async def cancel(request: Request) -> Response:
        """Take back what has not begun of an action; what has begun or ended stays as it is. Safe to repeat."""
        action = dispatcher.cancel(request.path_params["action_id"], requested_by=request.state.caller)
        if action is None:
            raise ProblemError(404, _NO_SUCH_ACTION)
        if action.finished:
            await audit.kept(action)
        return json_response(action_document(action), 200 if action.finished else 202)

    return router


def _submit(submit: Callable[[], Action]) -> Action:
    try:
        return submit()
    except ActionNotAllowedError as error:
        raise ProblemError(403, str(error)) from None
    except TargetNotFoundError as error:
        raise ProblemError(404, str(error)) from None
    except TooManyActionsError as error:
        raise ProblemError(429, str(error), {"Retry-After": retry_after(error.retry_seconds)}) from None
    except (IdempotencyConflictError, GroupIncompleteError) as error:
        raise ProblemError(409, str(error)) from None


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_LISTED
    if not (value.isascii() and value.isdecimal() and len(value) < 9 and 1 <= int(value) <= MAX_LISTED):
        raise ProblemError.invalid([FieldError("limit", f"must be a number from 1 to {MAX_LISTED}")])
    return int(value)


def _idempotency_key(value: str | None) -> str | None:
    if value is None:
        return None
    if not 1 <= len(value) <= MAX_IDEMPOTENCY_KEY_LENGTH or not (value.isascii() and value.isprintable()):
        message = f"must be 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} printable ASCII characters"
        raise ProblemError.invalid([FieldError("Idempotency-Key", message)])
    return value
