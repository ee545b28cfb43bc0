"""`POST /api/v1/alerts`: Alertmanager's webhook receiver. The guard has decided who may.

An alert that is not right is no reason to answer the whole message with an error: Alertmanager would drop it, the
others with it. Each is answered for itself, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.errors import ActionRefusedError, IdempotencyConflictError
from gpumem_exporter.server.api.alert_memory import AlertMemory
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.http.replies import json_response
from gpumem_exporter.server.security.request_guard import ALERTS_PATH

if TYPE_CHECKING:
    from gpumem_exporter.server.api.alert_schema import AlertBody

__all__ = ["alerts_router"]

_log = logging.getLogger(__name__)

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "what became of each alert: acted, repeated, cooling, refused, resolved or ignored",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    401: {"description": "no token, or a wrong one", "content": _PROBLEM},
    403: {"description": "not from here", "content": _PROBLEM},
    413: {"description": "the body is too long: give the receiver max_alerts", "content": _PROBLEM},
    422: {"description": "the body is no message of Alertmanager's", "content": _PROBLEM},
}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AlertsBody"}}},
    }
}
_WHO_TERMINATES = (
    "terminate needs to know who asks: start the exporter with --action.token-file, and give Alertmanager that token"
)


def alerts_router(
    *,
    dispatcher: Dispatcher,
    audit: Audit,
    count_alert: Callable[[str], None],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    has_action_token: bool,
) -> APIRouter:
    """The route of the receiver."""
    router = APIRouter(tags=["alerts"])
    receiver = _Receiver(dispatcher, clock, wall_clock, has_action_token)

    @router.post(ALERTS_PATH, response_class=Response, responses=_RESPONSES, openapi_extra=_BODY)
    async def receive(request: Request) -> Response:
        """Act on the firing alerts that ask for it, each once; does not wait for the actions."""
        from gpumem_exporter.server.api.alert_schema import read_alerts  # only whoever uses it pays for the models

        try:
            message = read_alerts(await request.body())
        except ProblemError:
            count_alert("invalid")
            raise
        await audit.recalled()  # or an alert that was acted upon before a restart would be new
        # From here on nothing is awaited: a second message with the same alerts finds what this one did.
        told = [receiver.take(alert, request.state.caller) for alert in message.alerts]
        for each in told:
            count_alert(each["outcome"])
        return json_response({"alerts": told})

    return router


class _Receiver:
    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        has_action_token: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._wall_clock = wall_clock
        self._has_action_token = has_action_token
        self._memory = AlertMemory()

    def take(self, alert: AlertBody, caller: Caller) -> dict[str, Any]:
        """Take one alert; gives what became of it."""
        from gpumem_exporter.server.api.alert_schema import AlertRequestError

        action_id: str | None = None
        try:
            outcome, reason, action_id = self._act(alert, caller)
        except (ActionRefusedError, AlertRequestError) as error:
            outcome, reason = "refused", str(error)
            fields = {
                "alert": alert.name,
                "fingerprint": alert.fingerprint,
                "requested_by": str(caller),
                "error": reason,
            }
            _log.warning("an alert's action was refused", extra={"fields": fields})
        return {"fingerprint": alert.fingerprint, "outcome": outcome, "reason": reason, "action_id": action_id}

    def _act(self, alert: AlertBody, caller: Caller) -> tuple[str, str, str | None]:
        """Outcome, reason and the action's id.

        Raises:
            AlertRequestError: what it asks for is not right.
            ActionRefusedError: the exporter does not do it.
        """
        from gpumem_exporter.server.api.alert_schema import AlertRequestError, wanted_action

        now = self._clock()
        if alert.status == "resolved":
            if self._memory.knows(alert.fingerprint):
                fields = {"alert": alert.name, "fingerprint": alert.fingerprint, "requested_by": str(caller)}
                _log.info("an alert that was acted on is resolved", extra={"fields": fields})
            return "resolved", "", None
        wanted = wanted_action(alert)
        if wanted is None:
            return "ignored", "it has no label or annotation gpumem_action", None
        objection = self._memory.objection(alert.fingerprint, alert.starts_at, now)
        if objection:
            return objection, "", None
        if wanted.action.action == "terminate" and not self._has_action_token:
            raise AlertRequestError(_WHO_TERMINATES)
        asked_unix_seconds = self._wall_clock()
        try:
            action = self._dispatcher.submit(
                wanted.action.request(),
                requested_by=Caller.alert(alert.name[:128], caller),
                idempotency_key=f"alert:{alert.fingerprint}:{alert.starts_at}",
            )
        except IdempotencyConflictError:
            action = None  # a template has another value in it by now
        self._memory.acted(alert.fingerprint, alert.starts_at, wanted.cooldown_seconds, now)
        if action is None or action.created_unix_seconds < asked_unix_seconds:
            return "repeated", "", None  # it was acted on before this memory began
        return "acted", "", action.id
