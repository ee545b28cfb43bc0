"""What Alertmanager's webhook sends (version 4 of its message), and which action an alert of it asks for.

Everything is read that makes a difference; what a later Alertmanager adds is left alone. What an alert says to the
exporter stands in its labels or annotations whose names begin with `gpumem_`: there, a name that is not known is
refused, since a mistyped one would widen what is acted on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpumem_exporter.server.api.action_schema import ActionBody
from gpumem_exporter.server.http.problems import ProblemError, field_errors

__all__ = ["ALERT_KEYS", "AlertBody", "AlertRequestError", "AlertsBody", "WantedAction", "read_alerts", "wanted_action"]

MAX_ALERTS = 1000
DEFAULT_COOLDOWN_SECONDS = 300.0
MAX_COOLDOWN_SECONDS = 30 * 86400.0
MAX_REASON_LENGTH = 1000
PREFIX = "gpumem_"


class _Read(BaseModel):
    """No text counts as a number; what is not known is left alone."""

    model_config = ConfigDict(strict=True, extra="ignore")


class AlertBody(_Read):
    """One alert of a message."""

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str] = Field(default_factory=dict)
    starts_at: Annotated[str, Field(alias="startsAt", pattern=r"^[ -~]{1,64}$", description="when it began to fire")]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="of its labels")]

    @property
    def name(self) -> str:
        """What people call it."""
        return self.labels.get("alertname", self.fingerprint)


class AlertsBody(_Read):
    """A message of Alertmanager's webhook."""

    version: Literal["4"]
    alerts: Annotated[list[AlertBody], Field(max_length=MAX_ALERTS)]


class AlertRequestError(Exception):
    """What an alert asks for is not right; says why."""


@dataclass(frozen=True, slots=True)
class WantedAction:
    """What an alert asks for."""

    action: ActionBody
    cooldown_seconds: float
    """For how long another firing of the same alert is not acted on."""


def read_alerts(body: bytes) -> AlertsBody:
    """Read a message.

    Raises:
        ProblemError: 422, which names each field that is wrong.
    """
    try:
        return AlertsBody.model_validate_json(body)
    except ValidationError as error:
        raise ProblemError.invalid(field_errors(error.errors(include_url=False, include_input=False))) from None


def wanted_action(alert: AlertBody) -> WantedAction | None:
    """The action that an alert asks for; None for one that asks for none.

    Raises:
        AlertRequestError: it asks for something that is not right.
    """
    said = _said(alert)
    if "action" not in said:
        return None
    document: dict[str, Any] = {"target": {}, "wait_seconds": 0.0}
    cooldown_seconds = DEFAULT_COOLDOWN_SECONDS
    for name, text in said.items():
        read = _READERS.get(name)
        if read is None:
            known = ", ".join(f"{PREFIX}{each}" for each in _READERS)
            raise AlertRequestError(f"{PREFIX}{name[:64]} is not known; there is {known}")
        try:
            value = read(text)
        except ValueError as error:
            raise AlertRequestError(f"{PREFIX}{name}: {text[:64]!r} is not right: expected {error}") from None
        if name == "cooldown_seconds":
            cooldown_seconds = value
        elif name.startswith("target_"):
            document["target"][name.removeprefix("target_")] = value
        else:
            document[name] = value
    reason = f"alert {alert.name[:128]} ({alert.fingerprint})"
    if "reason" in document:
        reason = f"{reason}: {document['reason']}"
    document["reason"] = reason[:MAX_REASON_LENGTH]
    try:
        body = ActionBody.model_validate(document)
    except ValidationError as error:
        errors = field_errors(error.errors(include_url=False, include_input=False))
    else:
        errors = list(body.contradictions())
        if not errors:
            return WantedAction(body, cooldown_seconds)
    raise AlertRequestError("; ".join(f"{PREFIX}{each.field.replace('.', '_')}: {each.message}" for each in errors))


def _said(alert: AlertBody) -> dict[str, str]:
    """What the alert says to the exporter, without the prefix; empty texts are what a template without a value gives.

    Raises:
        AlertRequestError: a label and an annotation say different things.
    """
    said: dict[str, str] = {}
    for where in (alert.labels, alert.annotations):
        for key, text in where.items():
            name = key.removeprefix(PREFIX)
            if name == key or not text.strip():
                continue
            if said.setdefault(name, text.strip()) != text.strip():
                raise AlertRequestError(f"{key}: the label and the annotation differ")
    return said


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _cooldown(text: str) -> float:
    seconds = _number(text)
    if not 0 <= seconds <= MAX_COOLDOWN_SECONDS:
        raise ValueError(f"seconds, at most {MAX_COOLDOWN_SECONDS:.0f}")
    return seconds


def _pid(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else text


_READERS: Mapping[str, Callable[[str], Any]] = {
    "action": str,
    "mode": str,
    "group": _flag,
    "reason": str,
    "target_gpu": str,
    "target_uuid": str,
    "target_pid": _pid,
    "target_workload": str,
    "target_rank": str,
    "target_all": _flag,
    "collect_garbage": _flag,
    "fraction": _number,
    "force": _flag,
    "deadline_seconds": _number,
    "dry_run": _flag,
    "cooldown_seconds": _cooldown,
}

ALERT_KEYS = frozenset(f"{PREFIX}{name}" for name in _READERS)
"""The labels and annotations by which an alert says what it asks for."""
