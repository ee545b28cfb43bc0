"""`/api/v1/actions`: request, list and cancel actions. `/api/v1/caller`: what the caller may do.

The request guard has authorized the caller of actions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_exporter.actions.caller import Rights
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.registry import retry_after
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import (
    ActionForbiddenError,
    ActionNotAllowedError,
    GroupIncompleteError,
    IdempotencyConflictError,
    TargetNotFoundError,
    TooManyActionsError,
)
from gpumem_exporter.server.api.action_schema import (
    ActionBody,
    ActionDocument,
    ActionsDocument,
    ListParameters,
    action_document,
    listed_action_document,
)
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.http.problems import ProblemError, problems
from gpumem_exporter.server.http.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.server.http.turns import HeldRequests
from gpumem_exporter.server.security.request_guard import ACTIONS_PATH, CALLER_PATH, Callers
from gpumem_exporter.view.jobs import job_of_process

MAX_IDEMPOTENCY_KEY_LENGTH = 255
MAX_LISTED_TEXT = 1 << 20
INLINE_RESULTS = 16
"""The number of results that the event loop encodes itself, in less than 1 ms. Waking the thread takes as long."""

_UNKNOWN_ACTION = "the action is unknown, or too old to be kept"

_IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_IDEMPOTENCY_KEY_LENGTH,
        pattern="^[ -~]*$",
        description="a repeated request with the same key returns the action of the first one",
    ),
]


def _route(running: str, *problem_statuses: int) -> dict[str, Any]:
    """Describe a route that returns an action: 200 if it has ended, 202 with this description if it is running."""
    return {
        "responses": {
            200: json_reply(ActionDocument, "the action has ended"),
            202: json_reply(ActionDocument, running),
            **problems(*problem_statuses),
        }
    }


_SUBMIT = _route("the action is running; `Location` is its path", 401, 403, 404, 409, 413, 415, 422, 429)
_CANCEL = _route("the processes forget their commands", 401, 403, 404)


def actions_router(
    *,
    dispatcher: Dispatcher,
    audit: Audit,
    held_requests: HeldRequests,
    renderer: Renderer,
    snapshot: Callable[[], Snapshot],
) -> APIRouter:
    """Return the routes of actions."""
    routes = ActionRoutes(dispatcher, audit, held_requests, renderer, snapshot)
    path = ACTIONS_PATH + "/{action_id}"
    router = APIRouter(tags=["actions"])
    router.post(ACTIONS_PATH, **_SUBMIT)(routes.submit)
    router.get(ACTIONS_PATH, responses={200: json_reply(ActionsDocument), **problems(401, 403, 422)})(routes.recent)
    router.get(path, responses={200: json_reply(ActionDocument), **problems(401, 403, 404)})(routes.one)
    router.delete(path, **_CANCEL)(routes.cancel)
    return router


class ActionRoutes:
    """The handlers of the routes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        audit: Audit,
        held_requests: HeldRequests,
        renderer: Renderer,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._dispatcher = dispatcher
        self._audit = audit
        self._held_requests = held_requests
        self._renderer = renderer
        self._snapshot = snapshot

    async def submit(self, request: Request, body: ActionBody, idempotency_key: _IdempotencyKey = None) -> Response:
        """Request an action on the target processes and wait up to `wait_seconds` for its results."""
        action_request = body.request()
        suggested: tuple[ActionRequest, ...] = ()
        if idempotency_key is not None:
            await self._audit.wait_until_restored()
        with refusals_as_problems():
            if body.leaves_mode_open:
                suggestion = self._dispatcher.suggest_clears(
                    action_request, requested_by=request.state.caller, free_deadline=body.leaves_deadline_open
                )
                action_request = replace(action_request, target=suggestion.target)
                suggested = suggestion.requests
            action = self._dispatcher.submit(
                action_request, requested_by=request.state.caller, idempotency_key=idempotency_key
            )
        if not action.finished and body.wait_seconds > 0:
            await self._held_requests.hold(action.id, body.wait_seconds, request.receive)
            action = self._dispatcher.get(action.id) or action
        reply = await self._recorded(action, suggested=suggested)
        if not action.finished:
            reply.headers["Location"] = f"{ACTIONS_PATH}/{action.id}"
        return reply

    async def recent(self, request: Request, parameters: Annotated[ListParameters, Query()]) -> Response:
        """The audit log: the last actions without their results, newest first.

        A caller without the rights to all sees its own actions. Long targets shorten the list, to about 1 MiB.
        """
        visible = [action for action in self._dispatcher.recent() if action.visible_to(request.state.caller)]
        names = self._snapshot().names

        def listing() -> bytes:
            of_job = {name for name, process in names.reporting if job_of_process(process) == parameters.job}
            return _listing(islice((each for each in visible if parameters.admit(each, of_job)), parameters.limit))

        return json_response(await self._renderer.render(listing))

    async def one(self, request: Request, action_id: str) -> Response:
        """One action."""
        return await self._recorded(self._visible(request, action_id), running_status=200)

    async def cancel(self, request: Request, action_id: str) -> Response:
        """Cancel the parts of an action that have not started. May be repeated."""
        if self._visible(request, action_id) is None:
            raise ProblemError(404, _UNKNOWN_ACTION)
        return await self._recorded(self._dispatcher.cancel(action_id, requested_by=request.state.caller))

    def _visible(self, request: Request, action_id: str) -> Action | None:
        action = self._dispatcher.get(action_id)
        return action if action is not None and action.visible_to(request.state.caller) else None

    async def _recorded(
        self, action: Action | None, running_status: int = 202, suggested: Sequence[ActionRequest] = ()
    ) -> Response:
        """Return the action. If it has ended, wait until its end is stored."""
        if action is None:
            raise ProblemError(404, _UNKNOWN_ACTION)
        if action.finished:
            await self._audit.wait_until_stored(action)
        status = 200 if action.finished else running_status
        if len(action.results) <= INLINE_RESULTS:
            return json_response(_document(action, suggested), status)
        # A document of many results is built in its turn, and once for all requests that wait: it may take MiB. A
        # suggestion is only in the reply to its dry run.
        if suggested:
            body = await self._renderer.render(lambda: _document(action, suggested))
        else:
            body = await self._renderer.render_shared(("action", id(action)), lambda: _document(action, ()))
        return json_response(body, status)


def _document(action: Action, suggested: Sequence[ActionRequest]) -> bytes:
    return encoded(action_document(action, suggested))


def _listing(actions: Iterable[Action]) -> bytes:
    texts: list[str] = []
    size = 0
    for action in actions:
        texts.append(json.dumps(listed_action_document(action), ensure_ascii=False, allow_nan=False))
        size += len(texts[-1])
        if size > MAX_LISTED_TEXT:
            break
    return f'{{"actions": [{", ".join(texts)}]}}'.encode("utf-8", "replace")


@contextlib.contextmanager
def refusals_as_problems() -> Iterator[None]:
    """Turn the errors of the dispatcher into problems."""
    try:
        yield
    except (ActionNotAllowedError, ActionForbiddenError) as error:
        raise ProblemError(403, str(error)) from None
    except TargetNotFoundError as error:
        raise ProblemError(404, str(error)) from None
    except TooManyActionsError as error:
        raise ProblemError(429, str(error), {"Retry-After": retry_after(error.retry_seconds)}) from None
    except (IdempotencyConflictError, GroupIncompleteError) as error:
        raise ProblemError(409, str(error)) from None


class CallerDocument(TypedDict):
    """What the caller may do."""

    uid: Annotated[int | None, Field(description="the caller's user as the kernel names it; null if it is unknown")]
    rights: Annotated[
        str,
        Field(
            description=(
                "all: every process and the exporter itself; own: the processes of the caller's user, in a container "
                "only the processes of that container; none"
            ),
            json_schema_extra={"enum": [rights.value for rights in Rights]},
        ),
    ]
    actions: Annotated[list[str], Field(description="the actions that the caller may request")]
    allowed_actions: Annotated[
        list[str], Field(description="the actions of --action.allow, which a caller with all rights may request")
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
