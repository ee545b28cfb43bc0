"""Runs the rules of `--policy.file`: evaluates them, submits their actions, logs stops, reloads the file.

Used on the event loop only. A thread reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.declarations import MAX_REASON_LENGTH
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.model import Action
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.samples import ProcessKey, Snapshot
from gpumem_exporter.edge.replies import iso_time
from gpumem_exporter.errors import ActionRefusedError, TooManyActionsError
from gpumem_exporter.features.policy.evaluation import Decision, Evaluation, PolicyEvaluator
from gpumem_exporter.features.policy.policy_events import policy_stopped_event
from gpumem_exporter.features.policy.policy_metrics import PolicyMetrics
from gpumem_exporter.features.policy.policy_rules import Rule, read_policy
from gpumem_exporter.features.policy.policy_values import RESULTS, Observation

_log = logging.getLogger(__name__)


class PolicyRunner:
    """The policy in force. It reads the file immediately, which may raise `ConfigurationError`.

    The caller of an action is `policy:` and the name of the rule. A stale sample meets no condition.
    """

    def __init__(
        self,
        path: Path,
        *,
        allowed: frozenset[str],
        dispatcher: Dispatcher,
        snapshot: Callable[[], Snapshot],
        stale_seconds: float,
        metrics: PolicyMetrics,
        record: Callable[[Event], object],
        wall_clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._allowed = allowed
        self._dispatcher = dispatcher
        self._snapshot = snapshot
        self._stale_seconds = stale_seconds
        self._metrics = metrics
        self._record = record
        self._wall_clock = wall_clock
        # The decisions whose actions have not finished or settled, by the id of the action.
        self._running: dict[str, Decision] = {}
        self._reading = asyncio.Lock()
        self.evaluator = PolicyEvaluator((), stale_seconds=stale_seconds)
        """The rules in force with their state."""
        self._put_in_force(read_policy(path, allowed=allowed), "start")

    def tick(self) -> None:
        """Evaluate the rules and submit their actions; called once a second."""
        for action_id, decision in list(self._running.items()):
            action = self._dispatcher.get(action_id)
            if action is None or (action.finished and not action.settling):
                del self._running[action_id]
                if action is not None:
                    self._finished(decision, action)
        found = self.evaluator.evaluate(self._snapshot(), self._under_way)
        self._count(found)
        for decision in found.decisions:
            # `_submit` has logged the error, and the rule acts again after its cooldown.
            with contextlib.suppress(ActionRefusedError):
                self._submit(decision, Caller.policy(decision.rule.name))

    def act_on_alert(
        self, rule: str, admits: Callable[[Observation], bool], *, requested_by: Caller, reason: str
    ) -> tuple[list[Action], str]:
        """Let a rule act on the processes that an alert admits and that meet the rule's conditions now.

        Return the actions, and if there is none, why the rule does not act. Raises ActionRefusedError if the exporter
        refuses all actions.
        """
        found = self.evaluator.evaluate(self._snapshot(), self._under_way, (rule, admits))
        self._count(found)
        actions: list[Action] = []
        refusals: list[ActionRefusedError] = []
        for decision in found.decisions:
            request = replace(decision.request, reason=f"{reason}: {decision.request.reason}"[:MAX_REASON_LENGTH])
            try:
                actions.append(self._submit(replace(decision, request=request), requested_by))
            except ActionRefusedError as error:
                refusals.append(error)
                if isinstance(error, TooManyActionsError):
                    self.evaluator.refused(decision)  # the alert is repeated before the cooldown ends
        if refusals and not actions:
            raise refusals[0]
        why = "; ".join(RESULTS[result] for _, result in found.counts)
        why = why or "it is not for this workload, or the last sample is old"
        return actions, "" if actions else f"the rule {rule} does not act now: {why}"

    def stopped_until(self, rule: str) -> str | None:
        """Return when the last stop of a rule ends, as ISO 8601; None if the rule has not stopped."""
        resume_seconds = max(self.evaluator.stopped(rule), default=None)
        return None if resume_seconds is None else iso_time(self._unix_seconds(resume_seconds))

    def _unix_seconds(self, seconds: float) -> float:
        return self._wall_clock() + seconds - self._snapshot().taken_seconds

    def _count(self, found: Evaluation) -> None:
        for (rule, result), count in found.counts.items():
            self._metrics.count_policy(rule, result, count)

    async def reload(self, requested_by: str) -> tuple[Rule, ...]:
        """Read the file again. If it is invalid, raise ConfigurationError; then the earlier rules stay in force."""
        async with self._reading:
            try:
                rules = await asyncio.to_thread(read_policy, self._path, allowed=self._allowed)
            except ConfigurationError as error:
                fields = {"requested_by": requested_by, "error": str(error)}
                _log.error("policy not reloaded; the earlier rules stay in force", extra={"fields": fields})
                raise
            self._put_in_force(rules, requested_by)
            return rules

    async def reload_on_hangup(self) -> None:
        """Read the file again after SIGHUP."""
        # `reload` has logged the error, and a signal has no reply.
        with contextlib.suppress(ConfigurationError):
            await self.reload("SIGHUP")

    def _put_in_force(self, rules: Sequence[Rule], requested_by: str) -> None:
        evaluator = PolicyEvaluator(rules, stale_seconds=self._stale_seconds)
        evaluator.take_over(self.evaluator)
        for name in {rule.name for rule in self.evaluator.rules} - {rule.name for rule in rules}:
            self._metrics.remove_policy_rule(name)
        for rule in rules:
            self._metrics.add_policy_rule(rule.name)
        self.evaluator = evaluator
        fields = {
            "file": str(self._path),
            "requested_by": requested_by,
            "acting": ",".join(rule.name for rule in rules if not rule.dry_run),
            "dry_run": ",".join(rule.name for rule in rules if rule.dry_run),
        }
        _log.info("policy in force", extra={"fields": fields})

    def _under_way(self) -> set[ProcessKey]:
        own = {decision.observation.process.key for decision in self._running.values()}
        return {*self._dispatcher.under_way(), *own}

    def _submit(self, decision: Decision, requested_by: Caller) -> Action:
        """Submit the action of a decision, and count it. Raises ActionRefusedError, which is logged."""
        rule = decision.rule
        try:
            action = self._dispatcher.submit(decision.request, requested_by=requested_by)
        except ActionRefusedError as error:
            fields = {"rule": rule.name, "target": decision.request.target.describe(), "error": str(error)}
            _log.warning("the action of a policy rule was refused", extra={"fields": fields})
            self._metrics.count_policy(rule.name, "refused", 1)
            raise
        if action.finished:
            self._finished(decision, action)
        else:
            self._running[action.id] = decision
        self._metrics.count_policy(rule.name, "would_act" if rule.dry_run else "acted", 1)
        return action

    def _finished(self, decision: Decision, action: Action) -> None:
        """Log that a rule stops, and record it as an event. The stop of a dry run has no event."""
        stop = self.evaluator.finished(decision, action)
        if stop is None:
            return
        dry_run, until = stop.rule.dry_run, iso_time(self._unix_seconds(stop.resume_seconds))
        fields = {
            "rule": stop.rule.name,
            "target": stop.action.target.describe(),
            "reason": stop.reason,
            "until": until,
            "dry_run": str(dry_run).lower(),
        }
        verb = "would stop" if dry_run else "stopped"
        _log.warning(f"a policy rule {verb}, because its action does not help", extra={"fields": fields})
        if not dry_run:
            self._record(policy_stopped_event(stop, self._wall_clock(), until))
