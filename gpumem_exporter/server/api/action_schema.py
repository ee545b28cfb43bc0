"""The JSON of actions: the body of a request, and the document of an action."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import NotRequired, TypedDict

from gpumem_client.wire.protocol import MAX_INTEGER, MODES
from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.actions.model import Action, ActionResult, EngineWait
from gpumem_exporter.actions.request import (
    ACTIONS,
    DEFAULT_DEADLINE_SECONDS,
    MAX_DEADLINE_SECONDS,
    MAX_REASON_LENGTH,
    MAX_SETTLE_SECONDS,
    ActionRequest,
    Target,
    invalid_fields,
    mode_for,
)
from gpumem_exporter.server.http.problems import FieldError, ProblemError, few_fields
from gpumem_exporter.server.logs import iso_time

__all__ = [
    "ActionBody",
    "ActionDocument",
    "ActionsDocument",
    "TargetBody",
    "action_document",
    "listed_action_document",
    "suggested_document",
]

MAX_WAIT_SECONDS = 60.0


def _names(value: object) -> object:
    """Reject other types with one error, where a union would have one error for each of its types.

    An empty list is rejected, because a target without the key would be wider.
    """
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) or _is_number(each) for each in values):
        raise ValueError("must be a string, a number from 0, or a list of them that is not empty")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


_Names = Annotated[
    str | int | list[str | int],
    BeforeValidator(_names),
]
"""A name, a number where a name is expected, or a list of both."""


class _Strict(BaseModel):
    """No string is accepted as a number, and no unknown field: a mistyped one could widen the target.

    The models check types only; `actions.request.invalid_fields` checks values.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        return few_fields(value)


class TargetBody(_Strict):
    """The target processes. Each field has a value or a list of values; several fields narrow each other."""

    gpu: _Names | None = Field(
        None, description="NVML index; `parent:instance` for a MIG device", examples=["0", 0, ["0", "1"]]
    )
    uuid: _Names | None = Field(None, description="of the device, as NVML spells it")
    pid: _Names | None = Field(
        None, description="the `pid` label; a string if it has an @", examples=[4711, "1@4026532007:1001"]
    )
    workload: _Names | None = None
    rank: _Names | None = None
    user: _Names | None = Field(None, description="name or uid of the process's user", examples=["alice", 1001])
    all: bool = Field(False, description="without other fields: every reporting process that the caller may act on")


class ActionBody(_Strict):
    """A request for an action."""

    action: str = Field(description="the action", json_schema_extra={"enum": list(ACTIONS)})
    target: TargetBody
    mode: str | None = Field(
        None,
        description="now: immediately, on the reporter's thread; step: in the training thread, at the end of a step;"
        " idle: once no step runs and nothing is allocated. Default: now, and step for a group",
        json_schema_extra={"enum": [*MODES, None]},
    )
    group: bool = Field(False, description="every rank of the target's workload, after the same step")
    at_step: int | None = Field(
        None, description="the step of a group; chosen by the exporter if missing", json_schema_extra={"minimum": 1}
    )
    collect_garbage: bool = Field(False, description="for empty_cache: run Python's garbage collector first")
    fraction: float | None = Field(
        None,
        description="for set_memory_fraction: the share of each device that the allocator may reserve",
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
    )
    force: bool = Field(
        False,
        description="for set_memory_fraction: even if more is reserved already; for empty_cache and terminate: even"
        " while an inference engine starts on a device of the process",
    )
    deadline_seconds: float = Field(
        DEFAULT_DEADLINE_SECONDS,
        description="a process that has not started by then does not act",
        json_schema_extra={"exclusiveMinimum": 0, "maximum": MAX_DEADLINE_SECONDS},
    )
    settle_seconds: float = Field(
        0.0,
        description="for empty_cache: measure after this time how much of the freed memory is still free; 0 does not",
        json_schema_extra={"minimum": 0, "maximum": MAX_SETTLE_SECONDS},
    )
    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the reply may take")
    dry_run: bool = Field(False, description="return the expected results, change nothing")
    reason: str = Field("", description="for the audit log", json_schema_extra={"maxLength": MAX_REASON_LENGTH})

    @property
    def leaves_mode_open(self) -> bool:
        """Whether this is a dry run of a clear for which the exporter suggests modes."""
        return self.dry_run and self.action == "empty_cache" and self.mode is None and not self.group

    @property
    def leaves_deadline_open(self) -> bool:
        """Whether the exporter may suggest a deadline."""
        return "deadline_seconds" not in self.model_fields_set

    def request(self) -> ActionRequest:
        """Return the request.

        Raises:
            ProblemError: 422, with each invalid field.
        """
        values = self.model_dump(exclude={"target", "mode", "wait_seconds"})
        target = Target(**self.target.model_dump())
        request = ActionRequest(target=target, mode=mode_for(self.mode, group=self.group), **values)
        invalid = invalid_fields(request)
        if invalid:
            raise ProblemError.invalid([FieldError(each.field, each.message) for each in invalid])
        return request


class SuggestedDocument(TypedDict):
    """The keys of a request that clears some processes of a dry run when it harms them least."""

    target: dict[str, str | int | bool | list[str | int]]
    mode: str
    group: bool
    deadline_seconds: float


class _ActionValues(TypedDict):
    id: str
    action: str
    state: Annotated[str, Field(json_schema_extra={"enum": [state.value for state in ActionState]})]
    requested_by: Annotated[
        str, Field(description="the caller: unix:uid=…, loopback:uid=…, token:FILE@…, policy:RULE or alert:NAME")
    ]
    created: Annotated[str, Field(description="RFC 3339")]
    target: dict[str, str | int | bool | list[str | int]]
    mode: str
    group: bool
    at_step: int | None
    dry_run: bool
    reason: str
    duration_seconds: float | None
    freed_bytes: int | None
    settle_seconds: float
    settling: Annotated[bool, Field(description="still_free_bytes may still become known")]
    still_free_bytes: Annotated[
        int | None, Field(description="of freed_bytes, after settle_seconds; in a dry run the idle cache")
    ]
    waits_for: Annotated[
        list[EngineWait], Field(description="the starting inference engines that it waits for; in a dry run, would")
    ]


_COPIED = tuple(name for name in _ActionValues.__annotations__ if name not in ("created", "target", "waits_for"))
_RESULT = tuple(field.name for field in fields(ActionResult))


class ActionDocument(_ActionValues):
    """An action. Values that were not measured are null."""

    results: list[ActionResult]
    suggested: Annotated[
        NotRequired[list[SuggestedDocument]],
        Field(description="for a dry run of empty_cache without mode: the requests that clear these processes"),
    ]


class ListedActionDocument(_ActionValues):
    """An action without its results."""

    outcomes: Annotated[dict[str, int], Field(description="the number of results with each outcome")]


class ActionsDocument(TypedDict):
    """The last actions, newest first. Each `GET /api/v1/actions/{id}` has the results."""

    actions: list[ListedActionDocument]


def action_document(action: Action) -> dict[str, Any]:
    """Return an action as an `ActionDocument`."""
    return {**_values(action), "results": [_result(result) for result in action.results]}


def suggested_document(request: ActionRequest) -> dict[str, Any]:
    """Return a suggested request as a `SuggestedDocument`."""
    return {
        "target": request.target.document(),
        "mode": request.mode,
        "group": request.group,
        "deadline_seconds": request.deadline_seconds,
    }


def listed_action_document(action: Action) -> dict[str, Any]:
    """Return an action as a `ListedActionDocument`."""
    return {**_values(action), "outcomes": action.outcomes}


def _values(action: Action) -> dict[str, Any]:
    return {
        **{name: getattr(action, name) for name in _COPIED},
        "created": iso_time(action.created_unix_seconds),
        "target": action.target.document(),
        "waits_for": [asdict(engine) for engine in action.waits_for],
    }


def _result(result: ActionResult) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in _RESULT}
    if result.snapshot is not None:
        row["snapshot"] = asdict(result.snapshot)
    return row
