"""The JSON of actions: the body of a request, and the document of an action."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.actions.model import Action, ActionResult
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
from gpumem_exporter.server.http.problems import FieldError, ProblemError
from gpumem_exporter.server.logs import iso_time
from gpumem_exporter.wire.protocol import MAX_INTEGER, MODES

__all__ = ["ActionBody", "ActionDocument", "ActionsDocument", "TargetBody", "action_document"]

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
    force: bool = Field(False, description="for set_memory_fraction: even if more is reserved already")
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


class ActionDocument(TypedDict):
    """An action. Values that were not measured are null."""

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
    results: list[ActionResult]
    freed_bytes: int | None
    settle_seconds: float
    settling: Annotated[bool, Field(description="still_free_bytes may still become known")]
    still_free_bytes: Annotated[int | None, Field(description="of freed_bytes, after settle_seconds")]


class ActionsDocument(TypedDict):
    """The last actions, newest first."""

    actions: list[ActionDocument]


def action_document(action: Action) -> dict[str, Any]:
    """Return an action as an `ActionDocument`."""
    document = asdict(action)
    del document["caller"]  # `requested_by` is for readers
    document["created"] = iso_time(document.pop("created_unix_seconds"))
    document["target"] = action.target.document()
    document["freed_bytes"] = action.freed_bytes
    document["still_free_bytes"] = action.still_free_bytes
    return document
