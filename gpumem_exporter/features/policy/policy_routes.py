"""`POST /api/v1/alerts`, the webhook receiver of Alertmanager (version 4), and `POST /-/reload`.

The request guard has authorized the caller. An alert names a rule of the policy file with the label or annotation
`gpumem_rule`, and the rule is evaluated on the processes of the alert's other labels. If Alertmanager repeats an alert,
the rule is evaluated again: its cooldown decides whether it acts again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action_options import SELECTORS, Target
from gpumem_exporter.actions.selection import matches, nothing_matches, processes_of
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import ProcessKey
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, problems, retry_after
from gpumem_exporter.edge.replies import iso_time, json_body, json_reply, json_response
from gpumem_exporter.edge.request_guard import ALERTS_PATH, RELOAD_PATH, OwnNames
from gpumem_exporter.errors import ActionRefusedError, TargetNotFoundError
from gpumem_exporter.features.policy.policy_runner import EVALUATIONS, RESULTS, NamingAlert, PolicyRunner
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter, Registry

MAX_BODY_BYTES = 1 << 20
"""The largest body from Alertmanager, which sends all alerts of a group in one body, about 1 KiB each."""
RULE = "gpumem_rule"
_ACTION_OF_0_3 = "gpumem_action"
ALERT_OUTCOMES = ("acted", "waiting", "refused", "resolved", "ignored", "invalid")
ALERTS = Metric(
    "gpumem_alerts_total",
    "counter",
    "Alerts that Alertmanager sent, by outcome. A body that is not a valid message counts once, as invalid.",
    ("outcome",),
)
METRICS = (EVALUATIONS, ALERTS)
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_log = logging.getLogger(__name__)


# A later Alertmanager may add fields. The models are built with the first message, because few exporters receive one.
_CONFIG = ConfigDict(strict=True, extra="ignore", defer_build=True)


class AlertBody(BaseModel):
    """One alert of a message."""

    model_config = _CONFIG
    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str] = Field(default_factory=dict)
    starts_at: Annotated[AwareDatetime, Field(alias="startsAt", description="the start of the firing")]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="of its labels")]

    @property
    def name(self) -> str:
        """The alert's name for people."""
        return self.labels.get("alertname", self.fingerprint)


class AlertsBody(BaseModel):
    """A message of Alertmanager's webhook."""

    model_config = _CONFIG
    version: Literal["4"]
    alerts: Annotated[list[AlertBody], Field(max_length=1000)]


class AlertOutcome(TypedDict):
    """The outcome of one alert: acted, waiting, refused, resolved or ignored."""

    fingerprint: str
    outcome: str
    reason: str
    action_id: Annotated[str | None, Field(description="the first action")]


class AlertsDocument(TypedDict):
    """The outcomes in the order of the alerts."""

    alerts: list[AlertOutcome]


class RuleDocument(TypedDict):
    """A rule in force; `stopped` is the number of processes or workloads where it has stopped."""

    name: str
    dry_run: bool
    stopped: int
    stopped_until: Annotated[str | None, Field(description="when the last of these stops ends")]


class RulesDocument(TypedDict):
    """The rules in force."""

    rules: list[RuleDocument]


def policy_router(
    policies: PolicyRunner, registry: Registry, *, own_names: OwnNames, complete_seconds: float
) -> APIRouter:
    """Return the routes. Until `complete_seconds`, a process may not have reported yet since the exporter started."""
    router, counted = APIRouter(), Counter.of(ALERTS, registry)
    for each in ALERT_OUTCOMES:  # the series start at 0
        counted.labels(each)

    @router.post(
        ALERTS_PATH,
        tags=["alerts"],
        responses={200: json_reply(AlertsDocument), **problems(401, 403, 413, 415, 422, 503)},
        openapi_extra=json_body(AlertsBody),
    )
    async def receive(request: Request) -> Response:
        """Let the rule of each firing alert act on the processes of the alert; does not wait for the actions.

        503 if the exporter has just started and does not know the processes of an alert yet: Alertmanager then repeats
        the message.
        """
        try:
            message = AlertsBody.model_validate_json(await request.body())
        except ValidationError as error:
            counted.labels("invalid").inc()
            raise ProblemError.of_validation(error.errors(include_url=False, include_input=False)) from None
        wait_seconds = complete_seconds - policies.snapshot().taken_seconds
        address = (request.scope.get("server") or ("",))[0].removeprefix("::ffff:")
        outcomes = []
        for alert in message.alerts:
            here = own_names.name_this_node(alert.labels.get("instance", ""), address)
            outcomes.append(take_alert(policies, alert, Exchange.of(request).caller, here, wait_seconds))
            counted.labels(outcomes[-1]["outcome"]).inc()
            await asyncio.sleep(0)  # each alert takes about a millisecond where many processes report
        return json_response({"alerts": outcomes})

    @router.post(
        RELOAD_PATH, tags=["policy"], responses={200: json_reply(RulesDocument), **problems(401, 403, 404, 422)}
    )
    async def reload(request: Request) -> Response:
        """Read the policy file again. An invalid file changes nothing."""
        if not policies.path:
            detail = "nothing to reload: the exporter was started without --policy.file; restart it with that option"
            raise ProblemError(ProblemCode.NO_POLICY, detail)
        try:
            await policies.reload(str(Exchange.of(request).caller))
        except ConfigurationError as error:
            raise ProblemError(ProblemCode.INVALID_POLICY, f"nothing has changed: {error}") from None
        now, listed = policies.snapshot().taken_seconds, []
        for name, state in policies.states.items():
            stops = [each.stopped_until for each in state.subjects.values() if now < each.stopped_until]
            until = policies.iso_time(max(stops)) if stops else None
            listed.append({"name": name, "dry_run": state.rule.dry_run, "stopped": len(stops), "stopped_until": until})
        return json_response({"rules": listed})

    return router


def take_alert(
    policies: PolicyRunner, alert: AlertBody, caller: Caller, of_this_node: bool, wait_seconds: float = 0.0
) -> AlertOutcome:
    """Take one alert, whose `instance` may name this node, and return its outcome.

    Raises ProblemError if no process of the alert is known, and one may still report within `wait_seconds`.
    """
    try:
        outcome, reason, action_id = _evaluate(policies, alert, caller, of_this_node)
    except ActionRefusedError as error:
        if isinstance(error, TargetNotFoundError) and wait_seconds > 0:
            detail = f"the exporter has just started, and processes may not have reported yet: {error}"
            headers = {"Retry-After": retry_after(wait_seconds)}
            raise ProblemError(ProblemCode.ALERT_DEFERRED, detail, headers=headers) from None
        # An invalid alert does not fail the whole message: Alertmanager would drop the other alerts with it.
        outcome, reason, action_id = "refused", str(error), None
        fields = {"alert": alert.name, "fingerprint": alert.fingerprint, "requested_by": str(caller), "error": reason}
        _log.warning("alert refused", extra={"fields": fields})
    return {"fingerprint": alert.fingerprint, "outcome": outcome, "reason": reason, "action_id": action_id}


def _evaluate(
    policies: PolicyRunner, alert: AlertBody, caller: Caller, of_this_node: bool
) -> tuple[str, str, str | None]:
    """Return the outcome of an alert, its reason, and the id of its first action. Raises ActionRefusedError."""
    if alert.status == "resolved":
        return "resolved", "", None
    # A template without a value produces an empty string.
    given = (*alert.annotations.items(), *alert.labels.items())
    texts = {name: text.strip() for name, text in given if text.strip()}
    rule = texts.pop(RULE, "")
    if not rule and _ACTION_OF_0_3 not in texts:
        return "ignored", f"the alert has no label or annotation {RULE}", None
    if option := min((name for name in texts if name.startswith("gpumem_")), default=""):
        advice = f"write a rule of the policy file, and name it with {RULE}"
        raise ActionRefusedError(f"{option[:64]} has no effect: {advice}")
    if rule not in policies.states:
        known = ", ".join(policies.states) or "none: see --policy.file"
        raise ActionRefusedError(f"{RULE}: no rule {rule[:64]!r}; the rules are {known}")
    admitted = _admitted(policies, alert, of_this_node)
    reason = f"alert {alert.name[:128]} ({alert.fingerprint})"
    evaluated = policies.evaluate(NamingAlert(rule, admitted, Caller.alert(alert.name, caller), reason))
    found = {result: texts for (_, result), texts in evaluated.items()}
    if action_ids := [*found.get("acted", ()), *found.get("would_act", ())]:
        return "acted", "", action_ids[0]
    if refusals := found.get("refused"):
        return "refused", refusals[0], None
    why = "; ".join(map(RESULTS.__getitem__, found)) or "it is not for this workload, or the last sample is old"
    return "waiting", f"the rule {rule} does not act now: {why}", None


def _admitted(policies: PolicyRunner, alert: AlertBody, of_this_node: bool) -> set[tuple[ProcessKey, str]]:
    """Return the processes and devices of an alert that are older than its firing. Raises ActionRefusedError.

    The uuid of a device names its node, too; a pid and an index do not.
    """
    labels: dict[str, Any] = {name: label for name in SELECTORS if (label := alert.labels.get(name))}
    if "uuid" not in labels and not of_this_node:
        instance = alert.labels.get("instance", "")[:64]
        raise ActionRefusedError(
            f"the alert may be of another node: it has no label uuid, and its instance {instance!r} is not this node"
        )
    target, snapshot = Target(**labels, all=not labels), policies.snapshot()
    reporting = [one for one in processes_of(snapshot).values() if one.reporter is not None]
    if not (selected := matches(target, snapshot, reporting)):
        raise TargetNotFoundError(nothing_matches(target, reporting))
    # A younger process is not the one of the alert, and has its pid by now. Without a start time, it may be younger.
    age_seconds = policies.wall_clock() - alert.starts_at.timestamp()
    latest_ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - age_seconds) * _TICKS_PER_SECOND
    older = [one for one in selected if 0 < one.process.start_time_ticks <= latest_ticks]
    if not older:
        at = iso_time(alert.starts_at.timestamp())
        raise ActionRefusedError(f"{selected[0]} is not known to have started before the alert, which started at {at}")
    return {(one.process.key, sample.uuid) for one in older for sample in one.samples}
