"""The JSON of actions: the body of a request, and the document of an action."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from typing_extensions import NotRequired, TypedDict

from gpumem_client.wire.protocol import MAX_INTEGER, MAX_LABEL_LENGTH
from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.actions.model import Action, ActionResult, EngineWait
from gpumem_exporter.actions.request import (
    ACTIONS,
    OPTIONS,
    ORPHANS,
    SELECTORS,
    ActionRequest,
    RequestOption,
    Target,
    invalid_fields,
)
from gpumem_exporter.server.http.problems import FieldError, ProblemError
from gpumem_exporter.server.http.replies import iso_time
from gpumem_exporter.view import sentences

MAX_WAIT_SECONDS = 60.0
MAX_FIELDS = 64
"""The maximum number of fields of an object in a request."""


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


_Names = Annotated[str | int | list[str | int], BeforeValidator(_names)]
"""A name, a number where a name is expected, or a list of both."""


class KnownFields(BaseModel):
    """Accepts no unknown and not many fields: each may be wrong, and a long problem document takes long to build."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are accepted")
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
        return (
            (not self.action or action.action in self.action)
            and (not self.state or action.state in self.state)
            and self.dry_run in (None, action.dry_run)
            and (
                self.job is None or any(each.workload == self.job or str(each.pid) in of_job for each in action.results)
            )
        )


class _Strict(KnownFields):
    """No string is accepted as a number. An unknown field is rejected because a mistyped one could widen the target.

    The models check types only; `actions.request.invalid_fields` checks values.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def _body(name: str, options: Mapping[str, RequestOption], *, base: type[BaseModel], types: Any = None) -> Any:
    """Return a model with a field for each option, whose values only `invalid_fields` checks."""
    declared: dict[str, Any] = {}
    for key, option in options.items():
        type_ = types or (option.kind if option.default is not None else option.kind | None)
        schema: dict[str, Any] = {
            "enum": [*option.choices, None] if option.choices else None,
            "exclusiveMinimum": option.over,
            "minimum": option.least,
            "maxLength" if option.kind is str else "maximum": option.most,
        }
        known: dict[str, Any] = {keyword: value for keyword, value in schema.items() if value is not None}
        declared[key] = type_, Field(option.default, description=option.description, json_schema_extra=known or None)
    return create_model(name, __base__=base, __module__=__name__, **declared)


class TargetBody(_body("_Selectors", SELECTORS, base=_Strict, types=_Names | None)):  # type: ignore[misc]
    """The target processes. Each field has a value or a list of values; several fields narrow each other."""

    orphans: bool = Field(False, description=ORPHANS.description)
    all: bool = Field(False, description="without other fields: every reporting process that the caller may act on")


class _Required(_Strict):
    action: str = Field(description="the action", json_schema_extra={"enum": list(ACTIONS)})
    target: TargetBody


class ActionBody(_body("_Options", OPTIONS, base=_Required)):  # type: ignore[misc]
    """A request for an action."""

    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the reply may take")

    @property
    def leaves_mode_open(self) -> bool:
        """Whether this is a dry run of a clear for which the exporter suggests modes."""
        return self.dry_run and self.action == "empty_cache" and self.mode is None and not self.group

    @property
    def leaves_deadline_open(self) -> bool:
        """Whether the exporter may suggest a deadline."""
        return "deadline_seconds" not in self.model_fields_set

    def request(self) -> ActionRequest:
        """Return the request. Raises ProblemError (422) with each invalid field."""
        values = self.model_dump(exclude={"target", "wait_seconds"})
        request = ActionRequest(target=Target(**self.target.model_dump()), **values)
        if invalid := invalid_fields(request):
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
    subject: Annotated[str, Field(description="the job of its results, or the number of their processes, for people")]
    sentence: Annotated[
        str, Field(description="what it waits for or did, for people; in a dry run what it would do and stays free")
    ]


_COMPUTED = ("created", "target", "waits_for", "subject", "sentence")
_COPIED = tuple(name for name in _ActionValues.__annotations__ if name not in _COMPUTED)
_RESULT = tuple(field.name for field in fields(ActionResult))


class ActionDocument(_ActionValues):
    """An action. Values that were not measured are null."""

    results: list[ActionResult]
    suggested: Annotated[
        NotRequired[list[SuggestedDocument]],
        Field(description="for a dry run of empty_cache without mode: the requests that clear these processes"),
    ]
    when: Annotated[
        NotRequired[str], Field(description="with `suggested`, which jobs clear at the end of a step, for people")
    ]


class ListedActionDocument(_ActionValues):
    """An action without its results."""

    outcomes: Annotated[dict[str, int], Field(description="the number of results with each outcome")]


class ActionsDocument(TypedDict):
    """The last actions, newest first. Each `GET /api/v1/actions/{id}` has the results."""

    actions: list[ListedActionDocument]


def action_document(action: Action, suggested: Sequence[ActionRequest] = ()) -> dict[str, Any]:
    """Return an action as an `ActionDocument`, with the requests that the exporter suggests for its dry run."""
    document = _values(action)
    if suggested:
        document["suggested"] = [_suggested(request) for request in suggested]
        document["when"] = sentences.when(document)
    return {**document, **_sentences(document)}


def _suggested(request: ActionRequest) -> dict[str, Any]:
    return {
        "target": request.target.document(),
        "mode": request.mode,
        "group": request.group,
        "deadline_seconds": request.deadline_seconds,
    }


def listed_action_document(action: Action) -> dict[str, Any]:
    """Return an action as a `ListedActionDocument`."""
    document = _values(action)
    words = _sentences(document)
    del document["results"]
    return {**document, **words, "outcomes": action.outcomes}


def _sentences(document: Mapping[str, Any]) -> dict[str, str]:
    return {"subject": sentences.subject(document["results"]), "sentence": sentences.sentence(document)}


def _values(action: Action) -> dict[str, Any]:
    return {
        **{name: getattr(action, name) for name in _COPIED},
        "created": iso_time(action.created_unix_seconds),
        "target": action.target.document(),
        "waits_for": [asdict(engine) for engine in action.waits_for],
        "results": [_result(result) for result in action.results],
    }


def _result(result: ActionResult) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in _RESULT}
    if result.snapshot is not None:
        row["snapshot"] = asdict(result.snapshot)
    return row
