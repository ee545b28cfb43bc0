"""What a request for an action must look like, and what an action looks like as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.request import ACTIONS, ActionRequest, Target
from gpumem_exporter.server.http.problems import FieldError, ProblemError, field_errors
from gpumem_exporter.server.logs import iso_time
from gpumem_exporter.wire.protocol import MAX_LABEL_LENGTH, MODES

__all__ = ["ActionBody", "TargetBody", "action_document", "read_action"]

MAX_DEADLINE_SECONDS = 3600.0
MAX_WAIT_SECONDS = 60.0

_Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_LENGTH)]
"""An empty one is a variable that was not set, and means nobody."""


def _named_process(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    """One message, not one for each form."""
    try:
        return known(value)
    except ValidationError:
        raise ValueError(
            "must be an integer of 1 or more, or a text such as 1@4026532007 where the pid label is one"
        ) from None


_Pid = Annotated[
    Annotated[int, Field(ge=1, le=2**31 - 1)] | Annotated[str, Field(pattern=r"^[0-9]{1,10}@[0-9]{1,20}$")],
    WrapValidator(_named_process),
]


class _Strict(BaseModel):
    """No text counts as a number, and no key is ignored: a mistyped one would widen what is acted on."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TargetBody(_Strict):
    """Which processes are meant. The keys narrow each other."""

    gpu: _Name | None = Field(None, description="NVML index; `parent:instance` for a MIG device", examples=["0"])
    uuid: _Name | None = Field(None, description="of the device, as NVML spells it")
    pid: _Pid | None = Field(
        None, description="as the metrics' label has it; a text where that has an @", examples=[4711, "1@4026532007"]
    )
    workload: _Label | None = None
    rank: _Label | None = None
    all: bool = Field(False, description="alone: every reporting process")

    @model_validator(mode="after")
    def _not_empty(self) -> TargetBody:
        if not self.all and all(getattr(self, name) is None for name in type(self).model_fields if name != "all"):
            raise ValueError("names nothing; give gpu, uuid, pid, workload or rank, or all: true")
        return self


class ActionBody(_Strict):
    """An action that is asked for."""

    action: str = Field(description=", ".join(ACTIONS), json_schema_extra={"enum": list(ACTIONS)})
    target: TargetBody
    mode: str | None = Field(
        None,
        description="now: at once, on the reporter's thread; step: in the training thread, at the end of a step;"
        " idle: once no step runs and nothing is allocated. Default: now, and step for a group",
        json_schema_extra={"enum": [*MODES, None]},
    )
    group: bool = Field(False, description="every rank of the target's workload, after the same step")
    at_step: int | None = Field(
        None, ge=1, le=2**63 - 1, description="of a group: the step; chosen here if it is not given"
    )
    collect_garbage: bool = Field(False, description="of empty_cache: run Python's garbage collector first")
    fraction: float | None = Field(
        None, gt=0, le=1, description="of set_memory_fraction: what the allocator may reserve of each device"
    )
    force: bool = Field(False, description="of set_memory_fraction: even below what is reserved already")
    deadline_seconds: float = Field(30.0, gt=0, le=MAX_DEADLINE_SECONDS)
    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the answer may take")
    dry_run: bool = Field(False, description="say what would be freed, touch nothing")
    reason: Annotated[str, Field(max_length=1000)] = Field("", description="for the audit log")

    @field_validator("action")
    @classmethod
    def _known_action(cls, value: str) -> str:
        if value not in ACTIONS:
            raise ValueError(f"no action {value[:MAX_LABEL_LENGTH]!r}; there is {', '.join(ACTIONS)}")
        return value

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, value: str | None) -> str | None:
        if value is not None and value not in MODES:
            raise ValueError(f"no mode {value[:MAX_LABEL_LENGTH]!r}; there is {', '.join(MODES)}")
        return value

    def contradictions(self) -> Iterator[FieldError]:
        """What does not go together."""
        if self.group and self.mode not in (None, "step"):
            yield FieldError("mode", f"a group acts at the end of a step: step, or left out, not {self.mode}")
        if self.at_step is not None and not self.group:
            yield FieldError("at_step", "is for a group: group must be true")
        if (self.fraction is None) == (self.action == "set_memory_fraction"):
            missing = "is missing: over 0, at most 1" if self.fraction is None else "is for set_memory_fraction alone"
            yield FieldError("fraction", missing)
        for name, action in (("force", "set_memory_fraction"), ("collect_garbage", "empty_cache")):
            if getattr(self, name) and self.action != action:
                yield FieldError(name, f"is for {action} alone")
        if self.action == "terminate" and (self.group or self.mode not in (None, "now")):
            yield FieldError("mode", "a process is terminated now, or not at all")

    def request(self) -> ActionRequest:
        """What the dispatcher takes."""
        return ActionRequest(
            action=self.action,
            target=Target(**self.target.model_dump()),
            mode=self.mode or ("step" if self.group else "now"),
            group=self.group,
            at_step=self.at_step,
            collect_garbage=self.collect_garbage,
            fraction=self.fraction,
            force=self.force,
            deadline_seconds=self.deadline_seconds,
            dry_run=self.dry_run,
            reason=self.reason,
        )


def read_action(body: bytes) -> ActionBody:
    """Read a request for an action.

    Raises:
        ProblemError: 422, which names each field that is wrong.
    """
    try:
        read = ActionBody.model_validate_json(body)
    except ValidationError as error:
        found = []
        for item in error.errors(include_url=False, include_input=False):
            if item["type"] == "extra_forbidden":
                model = TargetBody if len(item["loc"]) > 1 else ActionBody
                item["msg"] = f"there is no such key; the keys are {', '.join(model.model_fields)}"
            found += field_errors([item])
        raise ProblemError.invalid(found) from None
    contradictions = list(read.contradictions())
    if contradictions:
        raise ProblemError.invalid(contradictions)
    return read


def action_document(action: Action) -> dict[str, Any]:
    """An action as JSON; what was not measured is null."""
    return {
        "id": action.id,
        "action": action.action,
        "state": action.state,
        "requested_by": action.requested_by,
        "created": iso_time(action.created_unix_seconds),
        "target": {name: value for name, value in asdict(action.target).items() if value not in (None, False)},
        "mode": action.mode,
        "group": action.group,
        "at_step": action.at_step,
        "dry_run": action.dry_run,
        "reason": action.reason,
        "duration_seconds": action.duration_seconds,
        "results": [asdict(result) for result in action.results],
        "freed_bytes": action.freed_bytes,
    }
