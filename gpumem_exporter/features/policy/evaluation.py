"""Evaluates the rules of a policy once a second and decides which actions to request.

Its caller requests the actions and reports their results. All times are times of snapshots. A process whose last
sample is stale meets no condition. A rule's `for` starts again when the process reports again, and for another process
or another program with the same pid.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isinf
from typing import NamedTuple

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.actions.engine_starts import describe, devices_of, starts_on, waits
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.timing import acts_on_jobs, steps_with_ranks
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.features.policy.policy_rules import Rule, StopAfter
from gpumem_exporter.features.policy.policy_values import FIELDS, IdleClock, Observation, observations, shown_quantity

MAX_DECISIONS = 16
"""The maximum number of decisions of one evaluation, for all rules. Further ones wait for the next."""
_FORGET_SECONDS = 60.0

_HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a rule to request an action."""

    rule: Rule
    subject: str
    """The process, or the ranks of its job, that the rule acts on."""
    observation: Observation
    """The observation that met the conditions."""
    request: ActionRequest


@dataclass(frozen=True, slots=True)
class UnhelpfulAction:
    """An action that did not help."""

    action_id: str
    freed_bytes: int | None
    """None if the action was not done."""
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """A rule stops for a process or a workload, because its actions there did not help."""

    rule: Rule
    action: Action
    """The last action that did not help."""
    tries: tuple[UnhelpfulAction, ...]
    resume_seconds: float
    """When the rule may act there again, on the clock of the snapshots."""

    @property
    def reason(self) -> str:
        """The reason in one sentence."""
        times = f"{len(self.tries)} times in a row" if len(self.tries) > 1 else "once"
        return f"{self.action.action} did not help {times}: {self.tries[-1].why}"


@dataclass(slots=True)
class _SubjectState:
    acted_seconds: float
    unhelpful: list[UnhelpfulAction] = field(default_factory=list)
    """The last consecutive actions that did not help."""
    resume_seconds: float = 0.0
    """When the stop of the rule ends; the past if it has not stopped."""


class RuleState:
    """The state of one rule. Seconds are on the clock of the snapshots."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.met_since: dict[str, float] = {}
        """When all conditions became true, by process and device, in the time of the samples."""
        self.presumed: set[str] = set()
        """For a dry run, the subjects on which it would have acted, until their conditions are false."""
        self.held_back: dict[str, str] = {}
        """The engines whose start the rule waits for, by subject; of the last evaluation."""
        # When it acted, by `ProcessKey.share`.
        self._acted: dict[str, deque[float]] = {}
        self._subjects: dict[str, _SubjectState] = {}

    def subject(self, observation: Observation) -> str:
        """Return the subject of the rule: the process on all its devices, or the ranks of its job."""
        return observation.ranks if acts_on_jobs(self.rule.request) else observation.reporter_id

    def objection(self, subject: str, share: str, now: float) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act."""
        known = self._subjects.get(subject)
        if known is not None and now < known.resume_seconds:
            return "stopped"
        if known is not None and now - known.acted_seconds < self.rule.cooldown:
            return "cooling"
        # By share, so that no user can use up the actions of the others.
        acted = self._acted.get(share)
        if acted is not None and len(acted) == acted.maxlen and now - acted[0] < _HOUR_SECONDS:
            return "limited"
        return "cooling" if subject in self.presumed else ""

    def acted(self, subject: str, share: str, now: float) -> None:
        """Record that the rule acts on this subject now, whose process has this share."""
        self._acted.setdefault(share, deque(maxlen=self.rule.max_per_hour)).append(now)
        self._subjects.setdefault(subject, _SubjectState(now)).acted_seconds = now

    def take_back(self, subject: str, share: str) -> None:
        """Forget the last call of `acted`, because the action was refused."""
        self._acted[share].pop()
        self._subjects[subject].acted_seconds = -inf

    def judge(self, subject: str, action: Action) -> Stop | None:
        """Judge an action that has finished and settled. Returns a `Stop` if the rule stops now because of it."""
        stop_after, known = self.rule.stop_after, self._subjects.get(subject)
        freed, done = _freed_bytes(action), any(is_done(result.outcome) for result in action.results)
        little = stop_after is not None and done and freed is not None and freed < stop_after.freed_under
        if action.dry_run and not little:
            self.presumed.add(subject)
        if stop_after is None or known is None or known.acted_seconds < known.resume_seconds:
            return None
        why = _why_unhelpful(action, self.rule, stop_after)
        if why is None:
            return None
        if not why:
            known.unhelpful.clear()
            return None
        known.unhelpful.append(UnhelpfulAction(action.id, freed if done else None, why))
        if len(known.unhelpful) < stop_after.clears:
            return None
        tries, known.unhelpful = tuple(known.unhelpful), []
        known.resume_seconds = known.acted_seconds + stop_after.resume_after
        return Stop(self.rule, action, tries, known.resume_seconds)

    def stopped(self, now: float) -> list[float]:
        """Return when the rule may act again, for each subject for which it has stopped."""
        return [known.resume_seconds for known in self._subjects.values() if now < known.resume_seconds]

    def forget(self, present: Container[str], now: float) -> None:
        """Forget absent subjects after a while."""
        # Not at once: a process that hung and continues is absent meanwhile.
        keep_seconds = max(self.rule.cooldown, _HOUR_SECONDS)
        for subject, known in list(self._subjects.items()):
            if subject not in present and now - known.acted_seconds > keep_seconds:
                del self._subjects[subject]
        self._acted = {
            share: acted for share, acted in self._acted.items() if acted and now - acted[-1] < _HOUR_SECONDS
        }

    def take_over(self, earlier: RuleState) -> None:
        """Take over the state from before a reload. If the rule has changed, only the times of its actions are kept."""
        self._acted = {share: deque(acted, maxlen=self.rule.max_per_hour) for share, acted in earlier._acted.items()}
        if self.rule == earlier.rule:
            self.met_since, self.presumed = earlier.met_since, earlier.presumed
            self._subjects, self.held_back = earlier._subjects, earlier.held_back
        else:
            self._subjects = {key: _SubjectState(known.acted_seconds) for key, known in earlier._subjects.items()}


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    decisions: list[Decision]
    counts: Counter[tuple[str, str]]
    """The number of evaluations by rule and result. Those that led to a decision are not included."""


class PolicyEvaluator:
    """The rules in force, in order of precedence, with their states. Not thread-safe."""

    def __init__(self, rules: Sequence[Rule], *, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        self._states = {rule.name: RuleState(rule) for rule in rules}
        self._clock = IdleClock(stale_seconds)
        self._needs_clock = any(condition.field == "idle_seconds" for rule in rules for condition in rule.when)
        self._forgot_seconds = 0.0
        self._evaluated_seconds = 0.0

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that are evaluated."""
        return tuple(state.rule for state in self._states.values())

    def stopped(self, rule: str) -> list[float]:
        """Return when a rule may act again, for each process or workload for which it has stopped."""
        return self._states[rule].stopped(self._evaluated_seconds)

    def held_back(self, rule: str) -> tuple[str, ...]:
        """Return for which engines a rule waits now, for people."""
        return tuple(dict.fromkeys(self._states[rule].held_back.values()))

    def take_over(self, earlier: PolicyEvaluator) -> None:
        """Continue the state of the evaluator before a reload, for the rules with the same names."""
        self._clock, self._evaluated_seconds = earlier._clock, earlier._evaluated_seconds
        for name, state in self._states.items():
            before = earlier._states.get(name)
            if before is not None:
                state.take_over(before)

    def evaluate(
        self,
        snapshot: Snapshot,
        under_way: Callable[[], AbstractSet[ProcessKey]],
        alerted: tuple[str, Callable[[Observation], bool]] | None = None,
    ) -> Evaluation:
        """Evaluate every rule on every process that it concerns; or for an alert, one rule on what the alert admits.

        `under_way` returns the processes with a running action; it is called only if there is something to decide.
        """
        now = self._evaluated_seconds = snapshot.taken_seconds
        clock = self._clock if self._needs_clock else None
        seen = _Observed(tuple(observations(snapshot, self._stale_seconds, clock)))
        round_ = _Round(snapshot, under_way)
        name, admits = alerted or (None, None)
        for state in self._states.values() if name is None else (self._states[name],):
            before = state.held_back
            state.held_back = {} if admits is None else dict(before)
            self._evaluate_rule(state, seen, round_, admits)
            for subject in state.held_back.keys() - before.keys():
                fields = {"rule": state.rule.name, "reason": state.held_back[subject]}
                _log.info("a policy rule waits until an inference engine has started", extra={"fields": fields})
        if now - self._forgot_seconds >= _FORGET_SECONDS:
            self._forgot_seconds = now
            present = seen.subjects()
            for state in self._states.values():
                state.forget(present, now)
        return Evaluation(round_.decisions, round_.counts)

    def refused(self, decision: Decision) -> None:
        """Let a rule act on the process of a decision again at once, because the exporter refused its action."""
        state, seen = self._states[decision.rule.name], decision.observation
        state.take_back(decision.subject, seen.process.key.share)
        state.met_since[seen.key] = -inf

    def finished(self, decision: Decision, action: Action) -> Stop | None:
        """Take the settled action of a decision; return the stop of its rule, if the rule stops now."""
        state = self._states.get(decision.rule.name)
        # An action from before a change or removal of its rule says nothing about the new one.
        return state.judge(decision.subject, action) if state is not None and state.rule == decision.rule else None

    def _evaluate_rule(
        self, state: RuleState, seen: _Observed, round_: _Round, admits: Callable[[Observation], bool] | None
    ) -> None:
        rule = state.rule
        concerned = seen.concerned(rule)
        met = seen.met(rule, concerned)
        since = state.met_since
        state.met_since = since = {seen.keys[i]: since.get(seen.keys[i], seen.all[i].sampled_seconds) for i in met}
        if state.presumed:
            state.presumed &= {state.subject(seen.all[i]) for i in met}
        if admits is not None:
            concerned, met = ([i for i in each if admits(seen.all[i])] for each in (concerned, met))
        round_.count(rule, "unmet", len(concerned) - len(met))
        waits = admits is None and rule.trigger == "alert"
        ready = [i for i in met if not waits and seen.all[i].sampled_seconds - since[seen.keys[i]] >= rule.for_seconds]
        round_.count(rule, "pending", len(met) - len(ready))
        for i in ready:
            # After an action, the conditions have to be true again for the whole time.
            if round_.decide(state, seen.all[i]):
                since[seen.keys[i]] = seen.all[i].sampled_seconds


class _Observed:
    """The observations of one evaluation, with the values of each field as a list."""

    def __init__(self, all_: tuple[Observation, ...]) -> None:
        self.all = all_
        self.keys = [each.key for each in all_]
        self._by_workload: dict[str, list[int]] = {}
        for index, each in enumerate(all_):
            self._by_workload.setdefault(each.workload, []).append(index)
        self._values: dict[str, list[float]] = {}

    def concerned(self, rule: Rule) -> list[int]:
        """Return the indices of the observations that a rule concerns."""
        matching = [indices for workload, indices in self._by_workload.items() if rule.concerns(workload)]
        return matching[0] if len(matching) == 1 else [index for indices in matching for index in indices]

    def met(self, rule: Rule, indices: list[int]) -> list[int]:
        """Return the indices of the observations for which all conditions of a rule are true."""
        for condition in rule.when:
            values, over, under = self._of(condition.field), condition.over, condition.under
            indices = [i for i in indices if over < values[i] < under]  # never true for NaN
            if not indices:
                break
        return indices

    def subjects(self) -> set[str]:
        """Return every process and workload."""
        return {subject for each in self.all for subject in (each.reporter_id, each.ranks)}

    def _of(self, field: str) -> list[float]:
        values = self._values.get(field)
        if values is None:
            value_of = FIELDS[field].of
            values = self._values[field] = [value_of(each) for each in self.all]
        return values


class _Round:
    """The decisions and counts of one evaluation."""

    def __init__(self, snapshot: Snapshot, under_way: Callable[[], AbstractSet[ProcessKey]]) -> None:
        self.decisions: list[Decision] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._snapshot = snapshot
        self._find_under_way = under_way

    def count(self, rule: Rule, result: str, count: int = 1) -> None:
        if count:
            self.counts[rule.name, result] += count

    def decide(self, state: RuleState, seen: Observation) -> bool:
        """Decide for a rule whose conditions have been true for long enough; return whether it acts."""
        rule, now = state.rule, self._snapshot.taken_seconds
        if len(self.decisions) >= MAX_DECISIONS:
            self.count(rule, "pending")
            return False
        subject, share = state.subject(seen), seen.process.key.share
        objection = state.objection(subject, share, now)
        processes = [] if objection else self._processes(rule, seen)
        if not objection and not self._under_way.isdisjoint(process.key for process in processes):
            objection = "busy"
        if not objection and (engines := self._starting(rule, seen, processes)):
            state.held_back[subject] = engines
            objection = "held_back"
        name = None if objection else self._names.get(seen.process.key)
        if name is None:
            self.count(rule, objection or "unmet")  # the process has exited
            return False
        state.acted(subject, share, now)
        request = replace(rule.request, target=Target(pid=name), dry_run=rule.dry_run, reason=_reason(rule, seen))
        self.decisions.append(Decision(rule, subject, seen, request))
        if not rule.dry_run:  # the next rule of this round must not act on the same processes
            self._under_way.update(process.key for process in processes)
        return True

    @cached_property
    def _under_way(self) -> set[ProcessKey]:
        return set(self._find_under_way())

    def _starting(self, rule: Rule, seen: Observation, processes: Sequence[ReportingProcess]) -> str:
        """Return the engines that the rule waits for; empty if there is none."""
        if not self._snapshot.starting:
            return ""
        uuids = {uuid for process in processes for uuid in devices_of(process, self._snapshot)}
        caller, ended = Caller.policy(rule.name), [seen.process.host_pid]
        starting = starts_on(rule.request, caller, uuids, self._snapshot, ended)
        return describe(waits(starting, self._snapshot)) if starting else ""

    def _processes(self, rule: Rule, seen: Observation) -> Sequence[ReportingProcess]:
        """Return the processes that a rule acts on."""
        if not acts_on_jobs(rule.request) or not steps_with_ranks(seen.process):
            return [seen.process]
        return [each for each in self._snapshot.processes if each.job == seen.process.job and steps_with_ranks(each)]

    @cached_property
    def _names(self) -> dict[ProcessKey, str]:
        return {process.key: name for name, process in self._snapshot.names.reporting}


def _reason(rule: Rule, seen: Observation) -> str:
    """Return the values that met the conditions, for the audit log."""
    texts = []
    for condition in rule.when:
        field = FIELDS[condition.field]
        bounds = " and ".join(
            f"{word} {shown_quantity(bound, field.unit)}"
            for word, bound in (("over", condition.over), ("under", condition.under))
            if not isinf(bound)
        )
        texts.append(f"{condition.field} {shown_quantity(field.of(seen), field.unit)} ({bounds})")
    return ", ".join(texts)


def _freed_bytes(action: Action) -> int | None:
    """Return what an action freed: a garbage collection frees tensors, whose memory stays in the cache."""
    if action.action != "collect_garbage":
        return action.freed_bytes
    sizes = [(result.allocated_before_bytes, result.allocated_after_bytes) for result in action.results]
    freed = [None if before is None or after is None else max(0, before - after) for before, after in sizes]
    return sum_of_known(freed) if freed else None


def _why_unhelpful(action: Action, rule: Rule, stop_after: StopAfter) -> str | None:
    """Return why an action did not help; empty if it helped, None if that is unknown."""
    outcomes = {result.outcome for result in action.results}
    if outcomes <= {"gone"}:
        return None
    if not any(map(is_done, outcomes)):
        if any(result.reason_code in _CHANGED_SINCE for result in action.results):
            return None  # this came after the decision, and says nothing about the rule
        return "; ".join(dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results))
    freed, least = _freed_bytes(action), stop_after.freed_under
    if freed is None:
        return None  # not measured
    if freed < least:
        return f"it released {shown_quantity(freed, 'bytes')}"
    still_free = action.still_free_bytes
    if rule.settle_seconds == 0 or action.dry_run or (still_free is not None and still_free >= least):
        return ""
    if still_free is None:
        return None
    released, left = (shown_quantity(size, "bytes") for size in (freed, still_free))
    after = shown_quantity(rule.settle_seconds, "seconds")
    return f"it released {released}, and {left} of it were still free after {after}"
