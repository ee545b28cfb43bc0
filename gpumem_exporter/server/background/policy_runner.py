"""Runs the rules of `--policy.file`: evaluates them, submits their actions, logs stops, reloads the file.

Used on the event loop only. A thread reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.evaluation import Decision, PolicyEvaluator
from gpumem_exporter.actions.policy.rules import Rule, read_policy
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import ProcessKey, Snapshot
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.events.log import EventLog
from gpumem_exporter.events.recorder import policy_stopped_event

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
        instruments: Instruments,
        log: EventLog,
        wall_clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._allowed = allowed
        self._dispatcher = dispatcher
        self._snapshot = snapshot
        self._stale_seconds = stale_seconds
        self._instruments = instruments
        self._event_log = log
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
        for (rule, result), count in found.counts.items():
            self._instruments.count_policy(rule, result, count)
        for decision in found.decisions:
            self._instruments.count_policy(decision.rule.name, self._submit(decision), 1)

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
            self._instruments.remove_policy_rule(name)
        for rule in rules:
            self._instruments.add_policy_rule(rule.name)
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

    def _submit(self, decision: Decision) -> str:
        """Submit the action of a decision and return its result, one of `values.RESULTS`."""
        rule = decision.rule
        try:
            action = self._dispatcher.submit(decision.request, requested_by=Caller.policy(rule.name))
        except ActionRefusedError as error:
            fields = {"rule": rule.name, "target": decision.request.target.describe(), "error": str(error)}
            _log.warning("the action of a policy rule was refused", extra={"fields": fields})
            return "refused"
        if action.finished:
            self._finished(decision, action)
        else:
            self._running[action.id] = decision
        return "would_act" if rule.dry_run else "acted"

    def _finished(self, decision: Decision, action: Action) -> None:
        """Log that a rule stops, and record it as an event. The stop of a dry run has no event."""
        stop = self.evaluator.finished(decision, action)
        if stop is None:
            return
        dry_run = stop.rule.dry_run
        fields = {
            "rule": stop.rule.name,
            "target": stop.action.target.describe(),
            "reason": stop.reason,
            "dry_run": str(dry_run).lower(),
        }
        verb = "would stop" if dry_run else "stopped"
        _log.warning(f"a policy rule {verb}, because its action does not help", extra={"fields": fields})
        if not dry_run:
            self._event_log.put((policy_stopped_event(stop, self._wall_clock()),))
