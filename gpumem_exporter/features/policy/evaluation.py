"""Evaluates the rules of a policy and decides which actions to request.

All times are times of snapshots. A process whose last sample is stale meets no condition. A rule's `for` starts again
when the process reports again, and for another process or another program with the same pid.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.timing import acts_on_jobs, steps_with_ranks
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.features.policy.policy_rules import Rule, StopAfter
from gpumem_exporter.features.policy.policy_values import Observation, observations, shown_quantity

MAX_DECISIONS = 16
"""The maximum number of decisions of one evaluation, for all rules. Further ones wait for the next."""

_HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)


class Decision(NamedTuple):
    """The decision of a rule to request an action."""

    rule: Rule
    observation: Observation
    """The observation that met the conditions."""
    request: ActionRequest


class UnhelpfulAction(NamedTuple):
    """An action that did not help."""

    action_id: str
    freed_bytes: int | None
    """None if the action was not done."""
    why: str


class Stop(NamedTuple):
    """A rule stops for a process or a workload, because its actions there did not help."""

    reason: str
    """The reason in one sentence."""
    tries: tuple[UnhelpfulAction, ...]
    resume_seconds: float
    """When the rule may act there again, on the clock of the snapshots."""


@dataclass(slots=True)
class _SubjectState:
    acted_seconds: float
    unhelpful: list[UnhelpfulAction] = field(default_factory=list)
    """The last consecutive actions that did not help."""
    resume_seconds: float = 0.0
    """When the stop of the rule ends; the past if it has not stopped."""
    presumed: bool = False
    """A dry run would have acted, and its conditions have not been false since."""


class RuleState:
    """The state of one rule. Seconds are on the clock of the snapshots."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        # When all conditions became true, by process and device, in the time of the samples.
        self._met_since: dict[str, float] = {}
        # When it acted, by `ProcessKey.share`.
        self._acted: dict[str, deque[float]] = {}
        self._subjects: dict[str, _SubjectState] = {}

    def subject(self, seen: Observation) -> str:
        """Return the subject of the rule: the process on all its devices, or the ranks of its job."""
        return seen.ranks if acts_on_jobs(self.rule.request) else seen.reporter_id

    def put_met(self, met: Sequence[Observation]) -> None:
        """Note where all conditions are true now."""
        since = self._met_since
        self._met_since = {each.key: since.get(each.key, each.process.sampled_seconds) for each in met}
        subjects = {self.subject(each) for each in met}
        for subject, known in self._subjects.items():
            known.presumed = known.presumed and subject in subjects

    def objection(self, seen: Observation, now: float, *, alerted: bool) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act."""
        since = self._met_since.get(seen.key)
        if since is None:
            return "unmet"
        if seen.process.sampled_seconds - since < self.rule.for_seconds:
            return "pending"
        if self.rule.trigger == "alert" and not alerted:
            return "pending"
        known = self._subjects.get(self.subject(seen), _SubjectState(-inf))
        if now < known.resume_seconds:
            return "stopped"
        if now - known.acted_seconds < self.rule.cooldown:
            return "cooling"
        # By share, so that no user can use up the actions of the others.
        acted = self._acted.get(seen.process.key.share)
        if acted is not None and len(acted) == acted.maxlen and now - acted[0] < _HOUR_SECONDS:
            return "limited"
        return "cooling" if known.presumed else ""

    def put_acted(self, seen: Observation, now: float) -> None:
        """Note that the rule acts now where it has seen this."""
        # The conditions have to be true again for the whole time.
        self._met_since[seen.key] = seen.process.sampled_seconds
        self._acted.setdefault(seen.process.key.share, deque(maxlen=self.rule.max_per_hour)).append(now)
        self._subjects.setdefault(self.subject(seen), _SubjectState(now)).acted_seconds = now

    def judge(self, subject: str, action: Action) -> Stop | None:
        """Judge an action that has finished and settled. Returns a `Stop` if the rule stops now because of it."""
        stop_after, known = self.rule.stop_after, self._subjects.get(subject)
        if known is None:
            return None
        why = _why_unhelpful(action, self.rule, stop_after) if stop_after is not None else None
        known.presumed = known.presumed or (action.dry_run and not why)
        if stop_after is None or why is None:
            return None
        if not why:
            known.unhelpful.clear()
            return None
        done = any(is_done(result.outcome) for result in action.results)
        known.unhelpful.append(UnhelpfulAction(action.id, _freed_bytes(action) if done else None, why))
        if len(known.unhelpful) < stop_after.clears:
            return None
        tries, known.unhelpful = tuple(known.unhelpful), []
        known.resume_seconds = known.acted_seconds + stop_after.resume_after
        times = f"{len(tries)} times in a row" if len(tries) > 1 else "once"
        return Stop(f"{action.action} did not help {times}: {why}", tries, known.resume_seconds)

    def stopped(self, now: float) -> list[float]:
        """Return when the rule may act again, for each subject for which it has stopped."""
        return [known.resume_seconds for known in self._subjects.values() if now < known.resume_seconds]

    def forget(self, present: Container[str], now: float) -> None:
        """Forget absent subjects after a while."""
        # Not at once: a process that hung and continues is absent meanwhile.
        keep_seconds = max(self.rule.cooldown, _HOUR_SECONDS)
        self._subjects = {
            subject: known
            for subject, known in self._subjects.items()
            if subject in present or now - known.acted_seconds <= keep_seconds
        }
        self._acted = {share: acted for share, acted in self._acted.items() if now - acted[-1] < _HOUR_SECONDS}

    def after_reload(self, rule: Rule) -> RuleState:
        """Return the state of the rule in a file that was read again. A changed rule keeps the times of its actions."""
        if rule == self.rule:
            return self
        changed = RuleState(rule)
        changed._acted = {share: deque(acted, maxlen=rule.max_per_hour) for share, acted in self._acted.items()}
        changed._subjects = {key: _SubjectState(known.acted_seconds) for key, known in self._subjects.items()}
        return changed


class PolicyEvaluator:
    """The rules in force, in order of precedence, with their states. Not thread-safe."""

    def __init__(self, rules: Sequence[Rule], *, stale_seconds: float, held_back: Callable[..., bool]) -> None:
        self._stale_seconds = stale_seconds
        self._held_back = held_back  # as `Dispatcher.held_back`
        self._states: dict[str, RuleState] = {}
        self._evaluated_seconds = 0.0
        self.put_in_force(rules)

    def put_in_force(self, rules: Sequence[Rule]) -> None:
        """Evaluate these rules from now on. Rules with the name of an earlier one continue it."""
        before = self._states
        self._states = {
            rule.name: before[rule.name].after_reload(rule) if rule.name in before else RuleState(rule)
            for rule in rules
        }

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that are evaluated."""
        return tuple(state.rule for state in self._states.values())

    def stopped(self, rule: str) -> list[float]:
        """Return when a rule may act again, for each process or workload for which it has stopped."""
        return self._states[rule].stopped(self._evaluated_seconds)

    def evaluate(
        self,
        snapshot: Snapshot,
        under_way: AbstractSet[ProcessKey],
        act: Callable[[Decision], bool],
        alerted: tuple[str, Callable[[Observation], bool]] | None = None,
    ) -> Counter[tuple[str, str]]:
        """Evaluate every rule on every process that it concerns; or for an alert, one rule on what the alert admits.

        `under_way` are the processes with a running action. `act` takes a decision, and returns False if the rule is to
        decide again at once. Return the number of evaluations by rule and result, without the decisions.
        """
        now = self._evaluated_seconds = snapshot.taken_seconds
        seen = tuple(observations(snapshot, self._stale_seconds))
        present = {subject for each in seen for subject in (each.reporter_id, each.ranks)}
        busy = set(under_way)
        counts: Counter[tuple[str, str]] = Counter()
        decided = 0
        alerted_rule, admits = alerted or (None, None)
        for name, state in self._states.items():
            if alerted_rule not in (None, name):
                continue
            rule = state.rule
            concerned = [each for each in seen if rule.concerns(each.workload)]
            state.put_met([each for each in concerned if rule.is_met(each)])
            state.forget(present, now)
            for each in concerned:
                if admits is not None and not admits(each):
                    continue
                result = state.objection(each, now, alerted=admits is not None)
                if not result and decided == MAX_DECISIONS:
                    result = "pending"
                # Of a job, these are searched among all processes: only where the rule would act.
                processes = [] if result else _processes(rule, each, snapshot)
                if result := result or _obstacle(rule, each, processes, snapshot, busy, self._held_back):
                    counts[name, result] += 1
                    continue
                decided += 1
                if not rule.dry_run:  # the next rule of this round must not act on the same processes
                    busy.update(process.key for process in processes)
                target, reason = Target(pid=each.process.name), rule.reason(each)
                request = replace(rule.request, target=target, dry_run=rule.dry_run, reason=reason)
                if act(Decision(rule, each, request)):
                    state.put_acted(each, now)
        return counts

    def finished(self, decision: Decision, action: Action) -> Stop | None:
        """Take the settled action of a decision; return the stop of its rule, if the rule stops now."""
        state = self._states.get(decision.rule.name)
        # An action from before a change or removal of its rule says nothing about the new one.
        if state is None or state.rule != decision.rule:
            return None
        return state.judge(state.subject(decision.observation), action)


def _obstacle(
    rule: Rule,
    seen: Observation,
    processes: Sequence[ReportingProcess],
    snapshot: Snapshot,
    busy: AbstractSet[ProcessKey],
    held_back: Callable[..., bool],
) -> str:
    """Return why a rule cannot act on processes now, as one of `RESULTS`; empty if it can."""
    if not busy.isdisjoint(process.key for process in processes):
        return "busy"
    if any(held_back(rule.request, Caller.policy(rule.name), each, snapshot) for each in processes):
        return "held_back"
    # The name of a process that has exited may be that of another one.
    named = dict(snapshot.names.reporting).get(seen.process.name)
    return "" if named is not None and named.key == seen.process.key else "unmet"


def _processes(rule: Rule, seen: Observation, snapshot: Snapshot) -> Sequence[ReportingProcess]:
    """Return the processes that a rule acts on."""
    if not acts_on_jobs(rule.request) or not steps_with_ranks(seen.process):
        return [seen.process]
    return [each for each in snapshot.processes if each.job == seen.process.job and steps_with_ranks(each)]


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
