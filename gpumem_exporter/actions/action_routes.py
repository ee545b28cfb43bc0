"""`/api/v1/actions`: request, list and cancel actions. `/api/v1/caller`: what the caller may do.

The request guard has authorized the caller of actions. `actions.action_options` declares the fields of a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from gpumem_client.wire.protocol import MAX_INTEGER, MAX_LABEL_LENGTH
from gpumem_exporter.actions import sentences
from gpumem_exporter.actions.action import Action, ActionResult, EngineWait, PendingPart
from gpumem_exporter.actions.action_options import (
    ACTIONS,
    GROUP_IS_DEPRECATED,
    OPTIONS,
    ORPHANS,
    SELECTORS,
    ActionRequest,
    RequestOption,
    Target,
    invalid_fields,
)
from gpumem_exporter.actions.audit import Audit
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.core.caller import Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import HeldRequests
from gpumem_exporter.edge.problems import FieldError, ProblemCode, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, iso_time, json_reply, json_response
from gpumem_exporter.edge.request_guard import ACTIONS_PATH, CALLER_PATH, Callers
from gpumem_exporter.errors import (
    ActionForbiddenError,
    ActionNotAllowedError,
    ActionRefusedError,
    IdempotencyConflictError,
    TargetNotFoundError,
    TooManyActionsError,
)
from gpumem_exporter.node.job_ids import job_of_process

_log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 60.0


def _names(value: object) -> object:
    """Accept a string, a number from 0, or a list of them that is not empty."""
    # Here, not by pydantic, whose error of a union has one entry for each of the types. An empty list is an error: an
    # action without this part of its target would act on more.
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str) or (type(one) is int and 0 <= one <= MAX_INTEGER) for one in values):
        raise ValueError("must be a string, a number from 0, or a list of them that is not empty")
    return value


# A name, a number where a name is expected, or a list of both.
_Names = Annotated[str | int | list[str | int], BeforeValidator(_names)]


class KnownFields(BaseModel):
    """Accepts no unknown field. Only the first one is an error: a long problem document takes long to build."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: object) -> object:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                advice = did_you_mean(name, known) or f"the known ones are {', '.join(known)}"
                error = PydanticCustomError("name", "{why}", {"why": f"is unknown; {advice}"})
                details = InitErrorDetails(type=error, loc=(name,), input=None)
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return value


def words(values: object) -> object:
    """Return the values of a repeatable parameter, each of which may be a list with commas."""
    return [part.strip() for value in values for part in str(value).split(",")] if isinstance(values, list) else values


_STATES = tuple(state.value for state in ActionState)


class ListParameters(KnownFields):
    """The parameters of a list of actions."""

    limit: int = Field(100, ge=1, le=1000, description="the maximum number of actions")
    action: Annotated[tuple[Literal[ACTIONS], ...], BeforeValidator(words)] = Field(  # type: ignore[valid-type]
        (), description="only these actions, separated by commas"
    )
    state: Annotated[tuple[Literal[_STATES], ...], BeforeValidator(words)] = Field(  # type: ignore[valid-type]
        (), description="only actions in these states, separated by commas"
    )
    job: str | None = Field(
        None,
        min_length=1,
        max_length=2 * MAX_LABEL_LENGTH,
        description="only actions on processes of this job: its workload, or the id of a running job in `/api/v1/live`",
    )
    dry_run: bool | None = Field(None, description="only dry runs; or only other actions")

    def admit(self, action: Action, of_job: Collection[str]) -> bool:
        """Return whether the list has an action; `of_job` are the pids of the job."""
        jobs = [self.job is None, *(each.workload == self.job or str(each.pid) in of_job for each in action.results)]
        return (
            (not self.action or action.request.action in self.action)
            and (not self.state or action.state in self.state)
            and self.dry_run in (None, action.request.dry_run)
            and any(jobs)
        )


class _Strict(KnownFields):
    """Checks types only; `actions.action_options.invalid_fields` checks values."""

    # Unknown fields are errors, as in all `KnownFields`: without a mistyped part, the target could be wider.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def _body(name: str, options: Mapping[str, RequestOption], *, base: type[BaseModel], types: Any = None) -> Any:
    """Return a model with a field for each option, whose values only `invalid_fields` checks."""
    declared: dict[str, Any] = {}
    for key, option in options.items():
        type_ = types or (option.kind if option.default is not None else option.kind | None)
        known: dict[str, Any] = {
            "enum": [*option.choices, None] if option.choices else None,
            "exclusiveMinimum": option.over,
            "minimum": option.least,
            "maxLength" if option.kind is str else "maximum": option.most,
        }
        schema = {keyword: value for keyword, value in known.items() if value is not None}
        declared[key] = type_, Field(option.default, description=option.description, json_schema_extra=schema)
    return create_model(name, __base__=base, __module__=__name__, **declared)


class TargetBody(_body("_Selectors", SELECTORS, base=_Strict, types=_Names | None)):  # type: ignore[misc]
    """The target processes. Each field has a value or a list of values; several fields narrow each other."""

    orphans: bool = Field(False, description=ORPHANS.description)
    all: bool = Field(False, description="without other fields: every reporting process that the caller may act on")


class _Required(_Strict):
    action: str = Field(description=f"one of {', '.join(ACTIONS)}", json_schema_extra={"enum": list(ACTIONS)})
    target: TargetBody = Field(description=f"an object with {', '.join(SELECTORS)}, orphans: true or all: true")


class ActionBody(_body("_Options", OPTIONS, base=_Required)):  # type: ignore[misc]
    """A request for an action."""

    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the reply may take")

    def request(self) -> ActionRequest:
        """Return the request. Raises ProblemError (422) with each invalid field."""
        if self.group:
            _log.warning(GROUP_IS_DEPRECATED)
        values = self.model_dump(exclude={"target", "wait_seconds"})
        request = ActionRequest(target=Target(**self.target.model_dump()), **values)
        if invalid := invalid_fields(request):
            raise ProblemError.invalid([FieldError(each.field, each.message) for each in invalid])
        return request


class ActionDocument(TypedDict):
    """An action. Values that were not measured are null. A list has the number of outcomes instead of the results."""

    id: str
    action: str
    state: Annotated[str, Field(json_schema_extra={"enum": list(_STATES)})]
    requested_by: str
    created: str
    target: dict[str, str | int | bool | list[str | int]]
    mode: str
    group: bool
    at_step: int | None
    deadline_seconds: float
    dry_run: bool
    reason: str
    duration_seconds: float | None
    freed_bytes: int | None
    wait_idle_seconds: float
    settle_seconds: float
    settling: bool
    still_free_bytes: int | None
    waits_for: list[EngineWait]
    subject: str
    sentence: str
    results: NotRequired[list[ActionResult]]
    pending: NotRequired[list[PendingPart]]
    outcomes: NotRequired[dict[str, int]]


class ActionsDocument(TypedDict):
    """The last actions, newest first. Each `GET /api/v1/actions/{id}` has the results."""

    actions: list[ActionDocument]


_COMPUTED = ("created", "target", "waits_for", "subject", "sentence", "results", "pending", "outcomes")
_COPIED = tuple(name for name in ActionDocument.__annotations__ if name not in _COMPUTED)
_RESULT = tuple(field.name for field in fields(ActionResult))


def action_document(action: Action) -> dict[str, Any]:
    """Return an action as an `ActionDocument`."""
    document = {
        **action.values(_COPIED),
        "created": iso_time(action.created_unix_seconds),
        "target": action.request.target.document(),
        "waits_for": [asdict(engine) for engine in action.waits_for],
        "results": [_result(result) for result in action.results],
        "pending": [asdict(part) for part in action.pending],
    }
    document["subject"] = sentences.subject(document["results"])
    document["sentence"] = sentences.sentence(document)
    return document


def _result(result: ActionResult) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in _RESULT}
    if result.snapshot is not None:
        row["snapshot"] = asdict(result.snapshot)
    return row


class CallerDocument(TypedDict):
    """What the caller may do."""

    uid: int | None
    rights: Annotated[str, Field(json_schema_extra={"enum": [rights.value for rights in Rights]})]
    actions: list[str]
    allowed_actions: list[str]
    processes: int
    reason: str | None


MAX_LISTED_TEXT = 1 << 20
INLINE_RESULTS = 16
"""The number of results that the event loop encodes itself, in less than 1 ms. Waking the thread takes as long."""

_IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern="^[ -~]*$",
        description="a repeated request with the same key returns the action of the first one",
    ),
]


@dataclass(frozen=True, slots=True)
class ActionRoutes:
    """The routes of actions, and their handlers."""

    dispatcher: Dispatcher
    audit: Audit
    held_requests: HeldRequests
    renderer: Renderer
    snapshot: Callable[[], Snapshot]
    callers: Callers

    def router(self) -> APIRouter:
        """Return the routes."""
        path, router = ACTIONS_PATH + "/{action_id}", APIRouter(tags=["actions"])
        ended = json_reply(ActionDocument, "the action has ended")
        runs = json_reply(ActionDocument, "the action is running; `Location` is its path")
        either: dict[int | str, dict[str, Any]] = {200: ended, 202: runs}
        posted = {**either, **problems(401, 403, 404, 409, 413, 415, 422, 429)}
        router.post(ACTIONS_PATH, responses=posted)(self.submit)
        router.get(ACTIONS_PATH, responses={200: json_reply(ActionsDocument), **problems(401, 403, 422)})(self.recent)
        router.get(path, responses={200: json_reply(ActionDocument), **problems(401, 403, 404)})(self.one)
        router.delete(path, responses={**either, **problems(401, 403, 404)})(self.cancel)
        router.get(CALLER_PATH, responses={200: json_reply(CallerDocument), **problems(403)})(self.caller)
        return router

    async def submit(self, request: Request, body: ActionBody, idempotency_key: _IdempotencyKey = None) -> Response:
        """Request an action on the target processes and wait up to `wait_seconds` for its results."""
        if idempotency_key is not None:
            await self.audit.wait_until_restored()
        with refusals_as_problems():
            action = self.dispatcher.submit(
                body.request(), requested_by=Exchange.of(request).caller, idempotency_key=idempotency_key
            )
        if not action.finished and body.wait_seconds > 0:
            await self.held_requests.hold(action.id, body.wait_seconds, request.receive)
            action = self.dispatcher.get(action.id) or action
        return await self._recorded(action)

    async def recent(self, request: Request, parameters: Annotated[ListParameters, Query()]) -> Response:
        """The audit log: the last actions without their results, newest first.

        A caller without the rights to all sees its own actions. Long targets shorten the list, to about 1 MiB.
        """
        visible = [
            action for action in self.dispatcher.actions.recent() if action.visible_to(Exchange.of(request).caller)
        ]
        names = self.snapshot().names

        def listing() -> bytes:
            of_job = {name for name, process in names.reporting if job_of_process(process) == parameters.job}
            return _listing(islice((each for each in visible if parameters.admit(each, of_job)), parameters.limit))

        return json_response(await self.renderer.render(listing))

    async def one(self, request: Request, action_id: str) -> Response:
        """One action."""
        return await self._recorded(self._visible(request, action_id), running_status=200)

    async def cancel(self, request: Request, action_id: str) -> Response:
        """Cancel the parts of an action that have not started. May be repeated."""
        action = self._visible(request, action_id)
        cancelled = self.dispatcher.cancel(action_id, requested_by=Exchange.of(request).caller)
        return await self._recorded(cancelled or action)

    async def caller(self, request: Request) -> Response:
        """The rights of the caller, and the number of processes that it may act on."""
        found, refusal = await self.callers.examine(request.scope)
        allowed = [action for action in ACTIONS if action in self.dispatcher.allowed]
        document: CallerDocument = {
            "uid": found.uid,
            "rights": found.rights.value,
            "actions": list(found.permitted_actions(allowed)),
            "allowed_actions": allowed,
            "processes": sum(found.may_act_on(process) for _, process in self.snapshot().names.reporting),
            "reason": refusal.detail if refusal is not None else None,
        }
        return json_response(document)

    def _visible(self, request: Request, action_id: str) -> Action:
        action = self.dispatcher.get(action_id)
        if action is None or not action.visible_to(Exchange.of(request).caller):
            why = f"it is another user's, too old to be kept, or was never here; GET {ACTIONS_PATH} lists the others"
            raise ProblemError(ProblemCode.UNKNOWN_ACTION, f"no action {action_id[:64]!r}: {why}")
        return action

    async def _recorded(self, action: Action, running_status: int = 202) -> Response:
        """Return the action. If it has ended, wait until its end is stored."""
        if action.finished:
            await self.audit.wait_until_stored(action)
        body: bytes
        if len(action.results) + len(action.planned) <= INLINE_RESULTS:
            body = _document(action)
        else:  # in its turn, and once for all requests that wait: it may take MiB
            body = await self.renderer.render_shared(("action", id(action)), lambda: _document(action))
        reply = json_response(body, 200 if action.finished else running_status)
        if reply.status_code == 202:
            reply.headers["Location"] = f"{ACTIONS_PATH}/{action.id}"
        return reply


def _document(action: Action) -> bytes:
    return encoded(action_document(action))


def _listing(actions: Iterable[Action]) -> bytes:
    texts: list[str] = []
    size = 0
    for action in actions:
        document = {**action_document(action), "outcomes": action.outcomes}
        del document["results"], document["pending"]
        texts.append(json.dumps(document, ensure_ascii=False, allow_nan=False))
        size += len(texts[-1])
        if size > MAX_LISTED_TEXT:
            break
    return f'{{"actions": [{", ".join(texts)}]}}'.encode("utf-8", "replace")


_PROBLEMS: Mapping[type[ActionRefusedError], ProblemCode] = {
    ActionNotAllowedError: ProblemCode.ACTION_NOT_ALLOWED,
    ActionForbiddenError: ProblemCode.NOT_PERMITTED,
    TargetNotFoundError: ProblemCode.UNKNOWN_TARGET,
    IdempotencyConflictError: ProblemCode.KEY_REUSED,
}


@contextlib.contextmanager
def refusals_as_problems() -> Iterator[None]:
    """Turn the errors of the dispatcher into problems."""
    try:
        yield
    except TooManyActionsError as error:
        raise ProblemError.too_many(str(error), error.retry_seconds) from None
    except ActionRefusedError as error:
        raise ProblemError(_PROBLEMS[type(error)], str(error)) from None
