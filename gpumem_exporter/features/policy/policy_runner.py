"""Runs the rules of `--policy.file`: evaluates them, submits their actions, judges what these freed, reloads the file.

Used on the event loop only. A thread reads the file. All times are times of snapshots, except how long conditions have
been true: that is the time between samples. It starts again when the process reports again after its samples were
stale, and for another process with the same pid.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import MAX_REASON_LENGTH, Target
from gpumem_exporter.actions.audit import place_of
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.timing import acts_on_jobs, is_rank, steps_with_ranks
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.edge.replies import iso_time
from gpumem_exporter.errors import ActionRefusedError
from gpumem_exporter.features.policy.policy_rules import Observation, Rule, observations, read_policy
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter

EVALUATIONS = Metric(
    "gpumem_policy_evaluations_total",
    "counter",
    "Evaluations of the rules in the policy file, one per process and device, by rule and result.",
    ("result", "rule"),
)
RESULTS: Mapping[str, str] = {
    "unmet": "a condition is false or its value is unknown",
    "pending": "all conditions are true; the rule waits for the time of `for`, or for an alert",
    "acted": "the rule requested its action",
    "would_act": "the rule requested its action as a dry run",
    "refused": "the exporter refused the action",
    "cooling": "the rule waits after its last action there; a dry run also until the conditions were false once",
    "busy": "another action is running or settling there",
    "held_back": "an inference engine starts on a device there, and released memory would spoil its start",
    "limited": "the rule has reached its number of actions per hour",
    "stopped": "the rule has stopped there for a while, because its actions did not help",
}
"""The results of evaluating a rule for one process on one device, once a second and for each alert."""
MAX_DECISIONS = 16
"""The maximum number of actions of one evaluation, for all rules. Further ones wait for the next."""

_HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Subject:
    """A process on all its devices, or the ranks of a job, on which a rule has acted."""

    process: ProcessKey
    """The last process that met the conditions."""
    acted: list[float] = field(default_factory=list)
    """When the rule has acted: the last time, and all times within an hour before."""
    action_id: str | None = None
    """The last action, until it has settled and been judged."""
    unhelpful: list[dict[str, Any]] = field(default_factory=list)
    """The last consecutive actions that did not help, as the event `policy_stopped` has them."""
    stopped_until: float = 0.0
    presumed: bool = False
    """A dry run would have acted, which has no result, and its conditions have not been false since."""


@dataclass(slots=True)
class RuleState:
    """The state of one rule in force."""

    rule: Rule
    subjects: dict[Hashable, Subject] = field(default_factory=dict)
    # When all conditions became true, by process and device, in the time of the samples.
    _met_since: dict[tuple[Hashable, str], float] = field(default_factory=dict)

    def continued(self, rule: Rule) -> RuleState:
        """Return the state of the rule in a file that was read again. A changed rule keeps the times of its actions."""
        acted = {name: Subject(each.process, each.acted) for name, each in self.subjects.items()}
        return self if rule == self.rule else RuleState(rule, acted)

    def subject_of(self, seen: Observation) -> Hashable:
        """Return the key of what the rule acts on: a process on all its devices, or the ranks that train with it."""
        together = acts_on_jobs(self.rule.request) and steps_with_ranks(seen.process)
        return seen.process.job if together else seen.reporter

    def _subjects_of(self, seen: Observation) -> set[Hashable]:
        """Return the keys of what the rule may have acted on with a process."""
        # While a rank makes no steps, as in a validation, the rule acts on it alone, and on its job before and after.
        return {seen.reporter, seen.process.job} if is_rank(seen.process) else {seen.reporter}

    def observe(self, concerned: Sequence[Observation], now: float) -> None:
        """Note which of the processes that the rule concerns meet all conditions now."""
        met = {(each.reporter, each.uuid): each for each in concerned if self.rule.met(each.values)}
        since = self._met_since
        self._met_since = {key: since.get(key, each.process.sampled_seconds) for key, each in met.items()}
        present = {name for each in concerned for name in self._subjects_of(each)}
        held = {name for each in met.values() for name in self._subjects_of(each)}
        # An absent subject is kept for a while: a process that hung and continues is absent meanwhile.
        keep_seconds = max(self.rule.cooldown, _HOUR_SECONDS)
        kept = self.subjects.items()
        self.subjects = {k: each for k, each in kept if k in present or now - each.acted[-1] <= keep_seconds}
        for name, each in self.subjects.items():
            each.presumed = each.presumed and name in held

    def objection(self, seen: Observation, now: float, *, alerted: bool) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act."""
        since = self._met_since.get((seen.reporter, seen.uuid))
        if since is None:
            return "unmet"
        too_early = seen.process.sampled_seconds - since < self.rule.for_seconds
        if too_early or (self.rule.trigger == "alert" and not alerted):
            return "pending"
        subjects = [self.subjects[name] for name in self._subjects_of(seen) if name in self.subjects]
        if any(now < subject.stopped_until for subject in subjects):
            return "stopped"
        if any(subject.presumed or now - subject.acted[-1] < self.rule.cooldown for subject in subjects):
            return "cooling"
        # No user can use up the actions of others.
        share = seen.process.key.share
        acted = [at for each in self.subjects.values() if each.process.share == share for at in each.acted]
        return "limited" if sum(now - at < _HOUR_SECONDS for at in acted) >= self.rule.max_per_hour else ""

    def put_acted(self, seen: Observation, now: float, action_id: str | None) -> None:
        """Note that the rule acts now where it has seen this; `action_id` is None if the action was refused."""
        # The conditions have to be true again for the whole time.
        self._met_since[seen.reporter, seen.uuid] = seen.process.sampled_seconds
        subject = self.subjects.setdefault(self.subject_of(seen), Subject(seen.process.key))
        subject.process, subject.action_id = seen.process.key, None if self.rule.dry_run else action_id
        subject.presumed = self.rule.dry_run and action_id is not None
        subject.acted = [*(acted for acted in subject.acted if now - acted < _HOUR_SECONDS), now]


def _freed_bytes(action: Action) -> int | None:
    """Return what an action freed: a garbage collection frees tensors, whose memory stays in the cache."""
    if action.request.action != "collect_garbage":
        return action.freed_bytes
    sizes = [(result.allocated_before_bytes, result.allocated_after_bytes) for result in action.results]
    freed = [None if before is None or after is None else max(0, before - after) for before, after in sizes]
    return sum_of_known(freed)


def _why_unhelpful(action: Action, least: float) -> str | None:
    """Return why an action did not free this number of bytes for good; empty if it did, None if that is unknown."""
    outcomes = {result.outcome for result in action.results}
    if outcomes <= {"gone"}:
        return None
    if not any(map(is_done, outcomes)):
        if any(result.reason_code in _CHANGED_SINCE for result in action.results):
            return None  # this came after the decision, and says nothing about the rule
        return "; ".join(dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results))
    freed = _freed_bytes(action)
    left = freed if freed is None or freed < least or not action.request.settle_seconds else action.still_free_bytes
    if left is None:
        return None  # not measured
    after = f", and {human_bytes(left)} of it were still free after {human_seconds(action.request.settle_seconds)}"
    return "" if left >= least else f"it released {human_bytes(freed)}" + (after if left != freed else "")


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

    def judge(self) -> None:
        """Judge the actions that have settled since."""
        for state in self.states.values():
            for subject in state.subjects.values():
                action = None if subject.action_id is None else self.dispatcher.get(subject.action_id)
                if action is None or (action.finished and not action.settling):
                    subject.action_id = None
                    if action is not None:
                        self._judge(state.rule, subject, action)

    def _judge(self, rule: Rule, subject: Subject, action: Action) -> None:
        """Note whether an action helped. If the rule stops there because of it, log and record that."""
        stop = rule.stop
        why = None if stop is None else _why_unhelpful(action, stop.freed_under)
        if why == "":
            subject.unhelpful.clear()
        if not why or stop is None:
            return
        subject.unhelpful.append({"action_id": action.id, "freed_bytes": _freed_bytes(action), "why": why})
        if len(subject.unhelpful) < stop.clears:
            return
        tries, subject.unhelpful = subject.unhelpful, []
        subject.stopped_until = subject.acted[-1] + stop.resume_after
        times = f"{len(tries)} times in a row" if len(tries) > 1 else "once"
        until = self.iso_time(subject.stopped_until)
        reason = f"{action.request.action} did not help {times}: {why}; the rule acts there again at {until}"
        fields = {"rule": rule.name, "action": action.request.action, "reason": reason, "until": until}
        logged = {**fields, "target": action.request.target.describe()}
        _log.warning("a policy rule stopped, because its action does not help", extra={"fields": logged})
        place, detail = place_of(action.results), {**fields, "tries": tries}
        self.record(Event("policy_stopped", self.wall_clock(), **place, owner=action.share, detail=detail))

    def evaluate(self, alert: NamingAlert | None = None) -> Mapping[tuple[str, str], Sequence[str]]:
        """Evaluate every rule on every process that it concerns; or for an alert, one rule on what the alert admits.

        Called once a second, and for each alert. Return a text for each process and device by rule and result: the id
        of the action, or why it was refused.
        """
        self.judge()
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
        named = ",".join(rule.name + (" (dry run)" if rule.dry_run else "") for rule in rules)
        fields = {"file": self.path, "requested_by": requested_by, "rules": named}
        _log.info("policy in force", extra={"fields": fields})

    def _under_way(self) -> AbstractSet[ProcessKey]:
        """Return the processes with a running action, or where an action of a rule settles."""
        acting = (state.subjects.values() for state in self.states.values())
        return self.dispatcher.under_way() | {each.process for some in acting for each in some if each.action_id}

    def _act(self, state: RuleState, seen: Observation, now: float, alert: NamingAlert | None) -> tuple[str, str]:
        """Submit the action of a rule. Return the result, and the id of the action or why it was refused."""
        rule, caller, reason = state.rule, Caller.policy(state.rule.name), state.rule.met(seen.values)
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
