"""`POST /api/v1/alerts`: the webhook receiver of Alertmanager. The request guard has authorized the caller.

An invalid alert does not fail the whole message, because Alertmanager would drop the other alerts with it. The reply
has an outcome for each alert, and the exporter counts them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.errors import ActionRefusedError, IdempotencyConflictError
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.http.problems import ProblemError, problems
from gpumem_exporter.server.http.replies import json_reply, json_response
from gpumem_exporter.server.security.request_guard import ALERTS_PATH

if TYPE_CHECKING:
    from gpumem_exporter.server.api.alert_schema import AlertBody

MAX_REMEMBERED = 4096

_log = logging.getLogger(__name__)

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AlertsBody"}}},
    }
}


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
        from gpumem_exporter.server.api.alert_schema import read_alerts  # builds models that few exporters need

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
    """Acts on alerts once per firing.

    Alertmanager sends a firing alert repeatedly. An alert that fires again after it was resolved starts at another
    time, so it counts as new.
    """

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
            outcome, reason = "refused", str(error)
            _log.warning("alert refused", extra={"fields": {**fields, "error": reason}})
        return {"fingerprint": alert.fingerprint, "outcome": outcome, "reason": reason, "action_id": action_id}

    def _fire(self, alert: AlertBody, caller: Caller) -> tuple[str, str, str | None]:
        """Return the outcome of a firing alert, its reason, and the id of its action."""
        from gpumem_exporter.server.api.alert_schema import requested_action

        now = self.clock()
        requested = requested_action(alert)
        if requested is None:
            return "ignored", "the alert has no label or annotation gpumem_action", None
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
