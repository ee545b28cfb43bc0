"""`POST /api/v1/alerts`: the webhook receiver of Alertmanager (version 4). The request guard has authorized the caller.

An alert names a rule of the policy file with the label or annotation `gpumem_rule`. Its other labels narrow the rule to
the processes of the alert. The reply has an outcome for each alert, and the exporter counts them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from gpumem_exporter.actions.action_options import MAX_REASON_LENGTH, SELECTORS, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.selection import SelectedProcess, nothing_matches, select_reporting
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, problems, retry_after
from gpumem_exporter.edge.replies import iso_time, json_body, json_reply, json_response
from gpumem_exporter.edge.request_guard import ALERTS_PATH, OwnNames
from gpumem_exporter.errors import ActionRefusedError, TargetNotFoundError, TooManyActionsError
from gpumem_exporter.features.policy.policy_values import RESULTS

if TYPE_CHECKING:
    from gpumem_exporter.features.policy.evaluation import Decision
    from gpumem_exporter.features.policy.policy_runner import PolicyRunner

MAX_BODY_BYTES = 1 << 20
"""The largest body from Alertmanager, which sends all alerts of a group in one body, about 1 KiB each."""
MAX_ALERTS = 1000
MAX_REMEMBERED = 4096
RULE = "gpumem_rule"
# With it, alerts for 0.3 requested an action of their own.
_ACTION = "gpumem_action"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_log = logging.getLogger(__name__)


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
    starts_at: Annotated[AwareDatetime, Field(alias="startsAt", description="the start of the firing")]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="of its labels")]

    @property
    def name(self) -> str:
        """The alert's name for people."""
        return self.labels.get("alertname", self.fingerprint)

    @property
    def rule(self) -> str:
        """The rule that the alert names; empty if it requests nothing.

        Raises AlertRequestError if a label and an annotation differ, or another one could be thought to change what the
        rule does.
        """
        # A template without a value produces an empty string.
        given = {
            (name, text.strip())
            for each in (self.labels, self.annotations)
            for name, text in each.items()
            if name.startswith("gpumem_") and text.strip()
        }
        names = {name for name, _ in given}
        if not names & {RULE, _ACTION}:
            return ""
        if others := sorted(names - {RULE}):
            raise AlertRequestError(
                f"{others[0][:64]} has no effect: write a rule of the policy file, and name it with {RULE}"
            )
        if len(given) > 1:
            raise AlertRequestError(f"{RULE}: the label and the annotation differ")
        ((_, rule),) = given
        return rule


class AlertRequestError(ActionRefusedError):
    """An alert requests nothing that can be done; the message says why."""


class AlertsBody(_Lenient):
    """A message of Alertmanager's webhook."""

    version: Literal["4"]
    alerts: Annotated[list[AlertBody], Field(max_length=MAX_ALERTS)]


def read_alerts(body: bytes) -> AlertsBody:
    """Read a message. Raises ProblemError (422) with each invalid field."""
    try:
        return AlertsBody.model_validate_json(body)
    except ValidationError as error:
        raise ProblemError.of_validation(error.errors(include_url=False, include_input=False)) from None


class AlertOutcome(TypedDict):
    """The outcome of one alert: acted, repeated, waiting, refused, resolved or ignored."""

    fingerprint: str
    outcome: str
    reason: str
    action_id: Annotated[str | None, Field(description="the first action")]


class AlertsDocument(TypedDict):
    """The outcomes in the order of the alerts."""

    alerts: list[AlertOutcome]


def alerts_router(receiver: AlertReceiver, *, own_names: OwnNames, count_alert: Callable[[str], None]) -> APIRouter:
    """Return the route of the receiver."""
    router = APIRouter(tags=["alerts"])

    @router.post(
        ALERTS_PATH,
        responses={200: json_reply(AlertsDocument), **problems(401, 403, 413, 415, 422, 503)},
        openapi_extra=json_body(AlertsBody),
    )
    async def receive(request: Request) -> Response:
        """Act once on each firing alert that names a rule; does not wait for the actions.

        503 if an alert was refused for a reason that passes: Alertmanager then repeats the message. The other alerts of
        the message have had their effect, and are not acted on again.
        """
        try:
            message = read_alerts(await request.body())
        except ProblemError:
            count_alert("invalid")
            raise
        address = (request.scope.get("server") or ("",))[0].removeprefix("::ffff:")
        taken = []
        for alert in message.alerts:
            here = own_names.name_this_node(alert.labels.get("instance", ""), address)
            # Without an await in it, so that a second message with the same alert finds its actions.
            taken.append(receiver.take(alert, Exchange.of(request).caller, of_this_node=here))
            count_alert(taken[-1][0]["outcome"])
            await asyncio.sleep(0)  # each alert takes about a millisecond where many processes report
        passing = [(outcome["reason"], seconds) for outcome, seconds in taken if seconds is not None]
        if passing:
            reason, seconds = passing[0]
            detail = f"{len(passing)} of {len(taken)} alerts were refused for a reason that passes: {reason}"
            raise ProblemError(ProblemCode.ALERT_DEFERRED, detail, headers={"Retry-After": retry_after(seconds)})
        return json_response({"alerts": [outcome for outcome, _ in taken]})

    return router


class _Firing(NamedTuple):
    """A firing that became actions."""

    starts_at: datetime
    action_ids: list[str]


@dataclass(slots=True)
class AlertReceiver:
    """Acts on alerts until an action of each firing is done."""

    dispatcher: Dispatcher
    policies: PolicyRunner | None
    snapshot: Callable[[], Snapshot]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    complete_seconds: float = 0.0
    """Before this time, a target that is not known may not have reported yet."""
    firings: OrderedDict[str, _Firing] = field(default_factory=OrderedDict)
    """The last firing of each alert that became actions, by fingerprint, the least recently seen first."""

    def take(self, alert: AlertBody, caller: Caller, *, of_this_node: bool) -> tuple[AlertOutcome, float | None]:
        """Take one alert, whose `instance` may name this node.

        Return its outcome, and for a refusal whose reason passes the seconds until then.
        """
        outcome, reason, action_id, retry_seconds = "resolved", "", None, None
        try:
            if alert.status == "firing":
                outcome, reason, action_id = self._fire(alert, caller, of_this_node)
        except ActionRefusedError as error:
            # An invalid alert does not fail the whole message: Alertmanager would drop the other alerts with it.
            outcome, reason = "refused", str(error)
            fields = {"alert": alert.name, "fingerprint": alert.fingerprint, "requested_by": str(caller)}
            _log.warning("alert refused", extra={"fields": {**fields, "error": reason}})
            if isinstance(error, TooManyActionsError):
                retry_seconds = error.retry_seconds
            elif isinstance(error, TargetNotFoundError) and self.clock() < self.complete_seconds:
                retry_seconds = self.complete_seconds - self.clock()
        shown: AlertOutcome = {
            "fingerprint": alert.fingerprint,
            "outcome": outcome,
            "reason": reason,
            "action_id": action_id,
        }
        return shown, retry_seconds

    def _fire(self, alert: AlertBody, caller: Caller, of_this_node: bool) -> tuple[str, str, str | None]:
        """Return the outcome of a firing alert, its reason, and the id of its first action."""
        rule = alert.rule
        if not rule:
            return "ignored", f"the alert has no label or annotation {RULE}", None
        # Alertmanager sends a firing alert repeatedly. An alert that fires again after it was resolved has another
        # start.
        known = self.firings.get(alert.fingerprint)
        if known is not None:
            self.firings.move_to_end(alert.fingerprint)
            if known.starts_at == alert.starts_at and any(map(self._acted, known.action_ids)):
                return "repeated", "", None
        action_ids, why = self._act(alert, rule, Caller.alert(alert.name, caller), of_this_node)
        if not action_ids:
            return "waiting", why, None
        self.firings[alert.fingerprint] = _Firing(alert.starts_at, action_ids)
        self.firings.move_to_end(alert.fingerprint)
        if len(self.firings) > MAX_REMEMBERED:
            self.firings.popitem(last=False)
        return "acted", "", action_ids[0]

    def _acted(self, action_id: str) -> bool:
        """Return whether an action is done or may still be, or is too old to be known."""
        action = self.dispatcher.get(action_id)
        return action is None or not action.finished or any(is_done(result.outcome) for result in action.results)

    def _act(self, alert: AlertBody, rule: str, requested_by: Caller, of_this_node: bool) -> tuple[list[str], str]:
        """Return the actions that the alert's rule requests, and if there is none, why the rule does not act now."""
        policies = self.policies
        if policies is None:
            raise AlertRequestError(f"{RULE}: the exporter was started without --policy.file")
        names = [each.name for each in policies.evaluator.rules]
        if rule not in names:
            raise AlertRequestError(f"{RULE}: no rule {rule[:64]!r}; the rules are {', '.join(names) or 'none'}")
        admitted = self._admitted(alert, of_this_node)
        action_ids: list[str] = []
        refusals: list[ActionRefusedError] = []

        def act(decision: Decision) -> bool:
            reason = f"alert {alert.name[:128]} ({alert.fingerprint}): {decision.request.reason}"
            request = replace(decision.request, reason=reason[:MAX_REASON_LENGTH])
            try:
                action_ids.append(policies.submit(decision._replace(request=request), requested_by).id)
            except ActionRefusedError as error:
                refusals.append(error)
                return not isinstance(error, TooManyActionsError)  # the alert is repeated before the cooldown ends
            return True

        results = policies.evaluate_alert(rule, lambda seen: (seen.process.key, seen.sample.uuid) in admitted, act)
        if refusals and not action_ids:
            raise refusals[0]
        why = "; ".join(RESULTS[result] for _, result in results)
        why = why or "it is not for this workload, or the last sample is old"
        return action_ids, f"the rule {rule} does not act now: {why}"

    def _admitted(self, alert: AlertBody, of_this_node: bool) -> set[tuple[Any, str]]:
        """Return the processes and devices of an alert that are older than its firing. Raises ActionRefusedError."""
        snapshot, target = self.snapshot(), _target(alert, of_this_node=of_this_node)
        selected = select_reporting(target, snapshot)
        if not selected:
            raise TargetNotFoundError(nothing_matches(target, snapshot.names.reporting))
        older = [one for one in selected if not self._younger(one, alert)]
        if not older:
            raise AlertRequestError(self._younger(selected[0], alert))
        return {(one.process.key, sample.uuid) for one in older for sample in one.samples}

    def _younger(self, one: SelectedProcess, alert: AlertBody) -> str:
        """Return that a process is not known to be older than the firing; empty if it is older."""
        # The alert is about an earlier process with the same pid.
        ticks = one.process.start_time_ticks
        age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_SECOND
        started, starts_at = self.wall_clock() - age_seconds, alert.starts_at.timestamp()
        if ticks and started <= starts_at:
            return ""
        return (
            f"{one} started at {iso_time(started) if ticks else 'an unknown time'}, the alert at {iso_time(starts_at)}"
        )


def _target(alert: AlertBody, *, of_this_node: bool) -> Target:
    """Return the processes of the alert's labels. Raises AlertRequestError if they may be of another node.

    The uuid of a device names its node, too; a pid and an index do not.
    """
    labels: dict[str, Any] = {name: label for name in SELECTORS if (label := alert.labels.get(name))}
    if "uuid" not in labels and not of_this_node:
        instance = alert.labels.get("instance", "")[:64]
        raise AlertRequestError(
            f"the alert may be of another node: it has no label uuid, and its instance {instance!r} is not this node"
        )
    return Target(**labels, all=not labels)
