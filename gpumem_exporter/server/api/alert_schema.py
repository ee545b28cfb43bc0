"""Alertmanager's webhook message (version 4), and the action that an alert requests.

Unknown fields of the message are ignored, because a later Alertmanager may add some. An alert requests an action with
labels or annotations whose names start with `gpumem_`. An unknown name with this prefix is rejected, because a mistyped
one could widen the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpumem_exporter.actions.request import (
    ACTIONS,
    MAX_REASON_LENGTH,
    OPTIONS,
    ORPHANS,
    SELECTORS,
    ActionRequest,
    RequestOption,
    Target,
    invalid_fields,
)
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.server.http.problems import ProblemError, field_errors

MAX_ALERTS = 1000
DEFAULT_COOLDOWN_SECONDS = 300.0
MAX_COOLDOWN_SECONDS = 30 * 86400.0
PREFIX = "gpumem_"
_TARGET = "target_"


class _Lenient(BaseModel):
    """No string is accepted as a number; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class AlertBody(_Lenient):
    """One alert of a message."""

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str] = Field(default_factory=dict)
    starts_at: Annotated[str, Field(alias="startsAt", pattern=r"^[ -~]{1,64}$", description="the start of the firing")]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="of its labels")]

    @property
    def name(self) -> str:
        """The alert's name for people."""
        return self.labels.get("alertname", self.fingerprint)


class AlertsBody(_Lenient):
    """A message of Alertmanager's webhook."""

    version: Literal["4"]
    alerts: Annotated[list[AlertBody], Field(max_length=MAX_ALERTS)]


class AlertRequestError(ActionRefusedError):
    """The action that an alert requests is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class RequestedAction:
    """The action that an alert requests."""

    request: ActionRequest
    cooldown_seconds: float
    """The exporter does not act on another firing of the same alert for this time."""


def read_alerts(body: bytes) -> AlertsBody:
    """Read a message. Raises ProblemError (422) with each invalid field."""
    try:
        return AlertsBody.model_validate_json(body)
    except ValidationError as error:
        raise ProblemError.invalid(field_errors(error.errors(include_url=False, include_input=False))) from None


def requested_action(alert: AlertBody) -> RequestedAction | None:
    """Return the action that an alert requests; None if it requests none. Raises AlertRequestError if it is invalid."""
    texts = _texts(alert)
    if "action" not in texts:
        return None
    values = {name: _read(name, text) for name, text in texts.items()}
    cooldown_seconds = values.pop("cooldown_seconds", DEFAULT_COOLDOWN_SECONDS)
    target = {name.removeprefix(_TARGET): values.pop(name) for name in tuple(values) if name.startswith(_TARGET)}
    values["reason"] = _reason(alert, values.get("reason", ""))
    request = ActionRequest(target=Target(**target), **values)
    if invalid := invalid_fields(request):
        raise AlertRequestError("; ".join(f"{_key(each.field)}: {each.message}" for each in invalid))
    return RequestedAction(request, cooldown_seconds)


def _texts(alert: AlertBody) -> dict[str, str]:
    """Return the labels and annotations for the exporter, without the prefix.

    A template without a value produces an empty string, so empty strings are left out.

    Raises:
        AlertRequestError: a label and an annotation have different values.
    """
    texts: dict[str, str] = {}
    for source in (alert.labels, alert.annotations):
        for key, text in source.items():
            name = key.removeprefix(PREFIX)
            if name == key or not text.strip():
                continue
            if texts.setdefault(name, text.strip()) != text.strip():
                raise AlertRequestError(f"{key}: the label and the annotation differ")
    return texts


def _read(name: str, text: str) -> Any:
    option = _OPTIONS.get(name)
    if option is None:
        known = ", ".join(f"{PREFIX}{each}" for each in _OPTIONS)
        raise AlertRequestError(f"{PREFIX}{name[:64]} is unknown; the names are {known}")
    try:
        return option.read(text)
    except ValueError:
        raise AlertRequestError(f"{PREFIX}{name}: {text[:64]!r} is invalid: expected {option.expected}") from None


def _reason(alert: AlertBody, given: str) -> str:
    reason = f"alert {alert.name[:128]} ({alert.fingerprint})"
    return (f"{reason}: {given}" if given else reason)[:MAX_REASON_LENGTH]


def _key(field: str) -> str:
    return PREFIX + field.replace(".", "_")


_OPTIONS: Mapping[str, RequestOption] = {
    "action": RequestOption({}, choices=ACTIONS),
    **{_TARGET + name: option for name, option in SELECTORS.items()},
    _TARGET + "orphans": ORPHANS,
    _TARGET + "all": RequestOption({}, kind=bool),
    # The step of a group is known to no alert, and what stays free is shown to no caller of an alert.
    **{name: option for name, option in OPTIONS.items() if name not in ("at_step", "settle_seconds")},
    "cooldown_seconds": RequestOption({}, kind=float, least=0, most=MAX_COOLDOWN_SECONDS, unit="seconds"),
}
"""The values of an alert's request, by name without the prefix."""

ALERT_KEYS = frozenset(f"{PREFIX}{name}" for name in _OPTIONS)
"""The labels and annotations with which an alert requests an action."""
