"""Runs the rules of `--policy.file`: evaluates them, submits their actions, logs stops, reloads the file.

Used on the event loop only. A thread reads the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field, replace

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action_options import MAX_REASON_LENGTH, Target
from gpumem_exporter.actions.audit import place_of
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.timing import steps_with_ranks
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.edge.replies import iso_time
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.policy.policy_rules import Rule, read_policy
from gpumem_exporter.features.policy.rule_state import RESULTS, Observation, RuleState, observations
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter

EVALUATIONS = Metric(
    "gpumem_policy_evaluations_total",
    "counter",
    "Evaluations of the rules in the policy file, one per process and device, by rule and result.",
    ("result", "rule"),
)
MAX_DECISIONS = 16
"""The maximum number of actions of one evaluation, for all rules. Further ones wait for the next."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamingAlert:
    """An alert that names a rule: the rule is evaluated on these processes and devices only, and acts for the alert."""

    rule: str
    admitted: AbstractSet[tuple[ProcessKey, str]]
    requested_by: Caller
    reason: str


@dataclass(slots=True, eq=False)
class PolicyRunner:
    """The policy in force. The constructor reads the file, and may raise ConfigurationError."""

    path: str
    """Empty without a file."""
    _: KW_ONLY
    dispatcher: Dispatcher
    snapshot: Callable[[], Snapshot]
    stale_seconds: float
    evaluations: Counter
    """Of `EVALUATIONS`."""
    record: Callable[[Event], object]
    wall_clock: Callable[[], float]
    states: dict[str, RuleState] = field(init=False, default_factory=dict)
    """The rules in force with their state, by name, in order of precedence."""
    _reading: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        if self.path:
            self.put_in_force(read_policy(self.path, allowed=self.dispatcher.allowed), "start")

    def tick(self) -> None:
        """Judge what has ended, evaluate the rules and submit their actions; called once a second."""
        self.judge()
        self.evaluate()

    def judge(self) -> None:
        """Judge the actions that have settled since."""
        for state in self.states.values():
            for subject in state.subjects.values():
                action = None if subject.action_id is None else self.dispatcher.get(subject.action_id)
                if action is not None and (not action.finished or action.settling):
                    continue
                subject.action_id = None
                stop = None if action is None else state.judge(subject, action)
                if action is None or stop is None:
                    continue
                rule, until = state.rule, self.iso_time(subject.stopped_until)
                fields = {"rule": rule.name, "action": action.action, "reason": stop["reason"], "until": until}
                logged = {**fields, "target": action.target.describe(), "dry_run": rule.dry_run}
                _log.warning("a policy rule stopped, because its action does not help", extra={"fields": logged})
                if not rule.dry_run:
                    place, detail = place_of(action.results), {**fields, "tries": stop["tries"]}
                    self.record(Event("policy_stopped", self.wall_clock(), **place, owner=action.share, detail=detail))

    def evaluate(self, alert: NamingAlert | None = None) -> Mapping[tuple[str, str], Sequence[str]]:
        """Evaluate every rule on every process that it concerns; or for an alert, one rule on what the alert admits.

        Return a text for each process and device by rule and result: the id of the action, or why it was refused.
        """
        snapshot, busy, decided = self.snapshot(), self._under_way(), 0
        now = snapshot.taken_seconds
        seen = tuple(observations(snapshot, self.stale_seconds))
        ranks: defaultdict[Hashable, list[ReportingProcess]] = defaultdict(list)
        for process in filter(steps_with_ranks, snapshot.processes):
            ranks[process.job].append(process)
        found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        states = self.states if alert is None else {alert.rule: self.states[alert.rule]}
        for name, state in states.items():
            concerned = [each for each in seen if state.rule.concerns(each.process.report.process.workload)]
            state.observe(concerned, now)
            for each in concerned:
                if alert is not None and (each.process.key, each.uuid) not in alert.admitted:
                    continue
                processes = ranks.get(state.subject_of(each), [each.process])
                result, text = state.objection(each, now, alerted=alert is not None), ""
                if not result and decided == MAX_DECISIONS:
                    result = "pending"
                if not result and not busy.isdisjoint(process.key for process in processes):
                    result = "busy"
                request, caller = state.rule.request, Caller.policy(name)
                if not result and any(self.dispatcher.held_back(request, caller, one, snapshot) for one in processes):
                    result = "held_back"
                if not result:
                    result, text = self._act(state, each, now, alert)
                    busy = self._under_way()
                    decided += 1
                found[name, result].append(text)
        for (name, result), texts in found.items():
            self.evaluations.labels(result, name).inc(len(texts))
        return found

    async def reload(self, requested_by: str) -> None:
        """Read the file again. If it is invalid, raise ConfigurationError; then the earlier rules stay in force."""
        async with self._reading:
            rules = await asyncio.to_thread(read_policy, self.path, allowed=self.dispatcher.allowed)
            self.put_in_force(rules, requested_by)

    async def reload_on_hangup(self) -> None:
        """Read the file again after SIGHUP, which has no reply: the log has the error."""
        try:
            await self.reload("SIGHUP")
        except ConfigurationError as error:
            _log.error("policy not reloaded; the earlier rules stay in force: %s", error)

    def put_in_force(self, rules: Sequence[Rule], requested_by: str) -> None:
        """Evaluate these rules from now on. Rules with the name of an earlier one continue it."""
        before = self.states
        self.states = {rule.name: before.get(rule.name, RuleState(rule)).continued(rule) for rule in rules}
        for result in RESULTS:
            for name in before.keys() - self.states.keys():
                self.evaluations.remove(result, name)
            for name in self.states:  # its series start at 0
                self.evaluations.labels(result, name)
        fields = {
            "file": self.path,
            "requested_by": requested_by,
            "acting": ",".join(rule.name for rule in rules if not rule.dry_run),
            "dry_run": ",".join(rule.name for rule in rules if rule.dry_run),
        }
        _log.info("policy in force", extra={"fields": fields})

    def _under_way(self) -> AbstractSet[ProcessKey]:
        """Return the processes with a running action, or where an action of a rule settles."""
        acting = (state.subjects.values() for state in self.states.values() if not state.rule.dry_run)
        return self.dispatcher.under_way() | {each.process for some in acting for each in some if each.action_id}

    def _act(self, state: RuleState, seen: Observation, now: float, alert: NamingAlert | None) -> tuple[str, str]:
        """Submit the action of a rule. Return the result, and the id of the action or why it was refused."""
        rule, caller, reason = state.rule, Caller.policy(state.rule.name), state.rule.when.met(seen.values)
        if alert is not None:
            caller, reason = alert.requested_by, f"{alert.reason}: {reason}"[:MAX_REASON_LENGTH]
        request = replace(rule.request, target=Target(pid=seen.process.name), reason=reason)
        try:
            action_id = self.dispatcher.submit(request, requested_by=caller).id
        except ActionRefusedError as error:  # the rule acts again after its cooldown
            fields = {"rule": rule.name, "target": request.target.describe(), "error": str(error)}
            _log.warning("the action of a policy rule was refused", extra={"fields": fields})
            state.put_acted(seen, now, None)
            return "refused", str(error)
        state.put_acted(seen, now, action_id)
        return "would_act" if rule.dry_run else "acted", action_id

    def iso_time(self, seconds: float) -> str:
        """Return a time on the clock of the snapshots as ISO 8601."""
        return iso_time(self.wall_clock() + seconds - self.snapshot().taken_seconds)
