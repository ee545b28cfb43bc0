"""Runs the rules of `--policy.file`: evaluates them, submits their actions, logs stops, reloads the file.

Used on the event loop only. A thread reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_events import place_of
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.samples import ProcessKey, Snapshot
from gpumem_exporter.edge.replies import iso_time
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.policy.evaluation import Decision, PolicyEvaluator
from gpumem_exporter.features.policy.policy_metrics import PolicyMetrics
from gpumem_exporter.features.policy.policy_rules import Rule, read_policy
from gpumem_exporter.features.policy.policy_values import Observation

_log = logging.getLogger(__name__)


class PolicyRunner:
    """The policy in force. It reads the file immediately, which may raise `ConfigurationError`."""

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
        self._metrics = metrics
        self._record = record
        self._wall_clock = wall_clock
        # The decisions whose actions have not finished, settled and been judged, by the id of the action.
        self._running: dict[str, Decision] = {}
        self._reading = asyncio.Lock()
        self.evaluator = PolicyEvaluator((), stale_seconds=stale_seconds, held_back=dispatcher.held_back)
        """The rules in force with their state."""
        self._put_in_force(read_policy(path, allowed=allowed), "start")

    def tick(self) -> None:
        """Judge what has ended, evaluate the rules and submit their actions; called once a second."""
        for action_id, decision in list(self._running.items()):
            action = self._dispatcher.get(action_id)
            if action is None or (action.finished and not action.settling):
                del self._running[action_id]
                if action is not None:
                    self._judge(decision, action)

        def act(decision: Decision) -> bool:
            # `submit` has logged the error, and the rule acts again after its cooldown.
            with contextlib.suppress(ActionRefusedError):
                self.submit(decision, Caller.policy(decision.rule.name))
            return True

        self._count(self.evaluator.evaluate(self._snapshot(), self._under_way(), act))

    def evaluate_alert(
        self, rule: str, admits: Callable[[Observation], bool], act: Callable[[Decision], bool]
    ) -> Counter[tuple[str, str]]:
        """Let a rule decide on what an alert admits: see `PolicyEvaluator.evaluate`."""
        counts = self.evaluator.evaluate(self._snapshot(), self._under_way(), act, (rule, admits))
        self._count(counts)
        return counts

    def submit(self, decision: Decision, requested_by: Caller) -> Action:
        """Submit the action of a decision, and count it. Raises ActionRefusedError, which is logged."""
        rule = decision.rule
        try:
            action = self._dispatcher.submit(decision.request, requested_by=requested_by)
        except ActionRefusedError as error:
            fields = {"rule": rule.name, "target": decision.request.target.describe(), "error": str(error)}
            _log.warning("the action of a policy rule was refused", extra={"fields": fields})
            self._metrics.count_policy(rule.name, "refused", 1)
            raise
        self._running[action.id] = decision
        self._metrics.count_policy(rule.name, "would_act" if rule.dry_run else "acted", 1)
        return action

    def stopped_until(self, rule: str) -> str | None:
        """Return when the last stop of a rule ends, as ISO 8601; None if the rule has not stopped."""
        resume_seconds = max(self.evaluator.stopped(rule), default=None)
        return None if resume_seconds is None else self._iso_time(resume_seconds)

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
        for name in {rule.name for rule in self.evaluator.rules} - {rule.name for rule in rules}:
            self._metrics.remove_policy_rule(name)
        for rule in rules:
            self._metrics.add_policy_rule(rule.name)
        self.evaluator.put_in_force(rules)
        fields = {
            "file": str(self._path),
            "requested_by": requested_by,
            "acting": ",".join(rule.name for rule in rules if not rule.dry_run),
            "dry_run": ",".join(rule.name for rule in rules if rule.dry_run),
        }
        _log.info("policy in force", extra={"fields": fields})

    def _under_way(self) -> set[ProcessKey]:
        # The dispatcher knows nothing of the time in which a clear settles.
        own = {decision.observation.process.key for decision in self._running.values() if not decision.rule.dry_run}
        return self._dispatcher.under_way() | own

    def _count(self, counts: Counter[tuple[str, str]]) -> None:
        for (rule, result), count in counts.items():
            self._metrics.count_policy(rule, result, count)

    def _judge(self, decision: Decision, action: Action) -> None:
        """Log that a rule stops, and record it as an event. The stop of a dry run has no event."""
        stop = self.evaluator.finished(decision, action)
        if stop is None:
            return
        rule, until = decision.rule, self._iso_time(stop.resume_seconds)
        fields = {
            "rule": rule.name,
            "target": action.target.describe(),
            "reason": stop.reason,
            "until": until,
            "dry_run": str(rule.dry_run).lower(),
        }
        verb = "would stop" if rule.dry_run else "stopped"
        _log.warning(f"a policy rule {verb}, because its action does not help", extra={"fields": fields})
        if not rule.dry_run:
            tries = [tried._asdict() for tried in stop.tries]
            detail = {
                "rule": rule.name,
                "action": action.action,
                "reason": stop.reason,
                "until": until,
                "tries": tries,
            }
            place = place_of(action.results)
            self._record(Event("policy_stopped", self._wall_clock(), **place, owner=action.share, detail=detail))

    def _iso_time(self, seconds: float) -> str:
        """Return a time on the clock of the snapshots as ISO 8601."""
        return iso_time(self._wall_clock() + seconds - self._snapshot().taken_seconds)
