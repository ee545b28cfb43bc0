"""`POST /api/v1/alerts`: the webhook receiver of Alertmanager (version 4). The request guard has authorized the caller.

An alert requests an action with labels or annotations whose names start with `gpumem_`. The reply has an outcome for
each alert, and the exporter counts them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.declarations import (
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
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.errors import ActionRefusedError, IdempotencyConflictError
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.http.problems import ProblemError, field_errors, problems
from gpumem_exporter.server.http.replies import json_reply, json_response
from gpumem_exporter.server.security.request_guard import ALERTS_PATH

MAX_ALERTS = 1000
MAX_REMEMBERED = 4096
DEFAULT_COOLDOWN_SECONDS = 300.0
MAX_COOLDOWN_SECONDS = 30 * 86400.0
PREFIX = "gpumem_"
_TARGET = "target_"

_log = logging.getLogger(__name__)

# The values of an alert's request, by name without the prefix.
_OPTIONS: Mapping[str, RequestOption] = {
    "action": RequestOption({}, choices=ACTIONS),
    **{_TARGET + name: option for name, option in SELECTORS.items()},
    _TARGET + "orphans": ORPHANS,
    _TARGET + "all": RequestOption({}, kind=bool),
    # The step of a group is known to no alert, and what stays free is shown to no caller of an alert.
    **{name: option for name, option in OPTIONS.items() if name not in ("at_step", "settle_seconds")},
    "cooldown_seconds": RequestOption({}, kind=float, least=0, most=MAX_COOLDOWN_SECONDS, unit="seconds"),
}
ALERT_KEYS = frozenset(f"{PREFIX}{name}" for name in _OPTIONS)
"""The labels and annotations with which an alert requests an action."""
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AlertsBody"}}},
    }
}


class _Lenient(BaseModel):
    """No string is accepted as a number; unknown fields are ignored."""

    # A later Alertmanager may add fields.
    # Built with the first message, because few exporters receive one.
    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)


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


class RequestedAction(NamedTuple):
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
    reason = f"alert {alert.name[:128]} ({alert.fingerprint})"
    given = values.pop("reason", "")
    values["reason"] = (f"{reason}: {given}" if given else reason)[:MAX_REASON_LENGTH]
    request = ActionRequest(target=Target(**target), **values)
    if invalid := invalid_fields(request):
        raise AlertRequestError(
            "; ".join(f"{PREFIX}{each.field.replace('.', '_')}: {each.message}" for each in invalid)
        )
    return RequestedAction(request, cooldown_seconds)


def _texts(alert: AlertBody) -> dict[str, str]:
    """Return the labels and annotations for the exporter, without the prefix.

    Raises AlertRequestError if a label and an annotation have different values.
    """
    texts: dict[str, str] = {}
    for source in (alert.labels, alert.annotations):
        for key, text in source.items():
            name = key.removeprefix(PREFIX)
            # A template without a value produces an empty string.
            if name == key or not text.strip():
                continue
            if texts.setdefault(name, text.strip()) != text.strip():
                raise AlertRequestError(f"{key}: the label and the annotation differ")
    return texts


def _read(name: str, text: str) -> Any:
    option = _OPTIONS.get(name)
    # Rejected, because a mistyped name could widen the target.
    if option is None:
        known = ", ".join(f"{PREFIX}{each}" for each in _OPTIONS)
        raise AlertRequestError(f"{PREFIX}{name[:64]} is unknown; the names are {known}")
    try:
        return option.read(text)
    except ValueError:
        raise AlertRequestError(f"{PREFIX}{name}: {text[:64]!r} is invalid: expected {option.expected}") from None


class AlertOutcome(TypedDict):
    """The outcome of one alert: acted, repeated, cooling, refused, resolved or ignored."""

    fingerprint: str
    outcome: str
    reason: str
    action_id: str | None


class AlertsDocument(TypedDict):
    """The outcomes in the order of the alerts."""

    alerts: list[AlertOutcome]


def alerts_router(
    *,
    dispatcher: Dispatcher,
    audit: Audit,
    count_alert: Callable[[str], None],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> APIRouter:
    """Return the route of the receiver."""
    router = APIRouter(tags=["alerts"])
    receiver = AlertReceiver(dispatcher, clock, wall_clock)

    @router.post(
        ALERTS_PATH,
        responses={200: json_reply(AlertsDocument), **problems(401, 403, 413, 415, 422)},
        openapi_extra=_BODY,
    )
    async def receive(request: Request) -> Response:
        """Act once on each firing alert that requests an action; does not wait for the actions."""
        try:
            message = read_alerts(await request.body())
        except ProblemError:
            count_alert("invalid")
            raise
        await audit.wait_until_restored()  # otherwise an alert that was acted on before a restart would count as new
        # Without an await from here on, a second message with the same alerts finds these actions.
        outcomes = [receiver.take(alert, request.state.caller) for alert in message.alerts]
        for each in outcomes:
            count_alert(each["outcome"])
        return json_response({"alerts": outcomes})

    return router


class _Acted(NamedTuple):
    """A firing that became an action."""

    starts_at: str
    seconds: float
    cooldown_seconds: float


@dataclass(slots=True)
class AlertReceiver:
    """Acts on alerts once per firing."""

    dispatcher: Dispatcher
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    acted: OrderedDict[str, _Acted] = field(default_factory=OrderedDict)
    """The last firing of each alert that became an action, by fingerprint, the least recently seen first."""

    def take(self, alert: AlertBody, caller: Caller) -> AlertOutcome:
        """Take one alert and return its outcome."""
        fields = {"alert": alert.name, "fingerprint": alert.fingerprint, "requested_by": str(caller)}
        reason, action_id = "", None
        try:
            if alert.status == "firing":
                outcome, reason, action_id = self._fire(alert, caller)
            else:
                outcome = "resolved"
                if alert.fingerprint in self.acted:
                    _log.info("alert resolved", extra={"fields": fields})
        except ActionRefusedError as error:
            # An invalid alert does not fail the whole message: Alertmanager would drop the other alerts with it.
            outcome, reason = "refused", str(error)
            _log.warning("alert refused", extra={"fields": {**fields, "error": reason}})
        return {"fingerprint": alert.fingerprint, "outcome": outcome, "reason": reason, "action_id": action_id}

    def _fire(self, alert: AlertBody, caller: Caller) -> tuple[str, str, str | None]:
        """Return the outcome of a firing alert, its reason, and the id of its action."""
        now = self.clock()
        requested = requested_action(alert)
        if requested is None:
            return "ignored", "the alert has no label or annotation gpumem_action", None
        # Alertmanager sends a firing alert repeatedly. An alert that fires again after it was resolved has another
        # start.
        known = self.acted.get(alert.fingerprint)
        if known is not None:
            self.acted.move_to_end(alert.fingerprint)
            if known.starts_at == alert.starts_at:
                return "repeated", "", None
            if now - known.seconds < known.cooldown_seconds:
                return "cooling", "", None
        started_unix_seconds = self.wall_clock()
        try:
            action = self.dispatcher.submit(
                requested.request,
                requested_by=Caller.alert(alert.name, caller),
                idempotency_key=f"{alert.fingerprint}:{alert.starts_at}",
            )
        except IdempotencyConflictError:
            action = None  # the alert's template now produces another request
        self.acted[alert.fingerprint] = _Acted(alert.starts_at, now, requested.cooldown_seconds)
        self.acted.move_to_end(alert.fingerprint)
        while len(self.acted) > MAX_REMEMBERED:
            self.acted.popitem(last=False)
        if action is None or action.created_unix_seconds < started_unix_seconds:
            return "repeated", "", None  # an earlier run of the exporter acted on it
        return "acted", "", action.id
