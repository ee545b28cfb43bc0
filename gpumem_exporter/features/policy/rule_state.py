"""What a rule of the policy has seen and done: it decides whether the rule acts, and whether its actions help.

All times are times of snapshots, except how long conditions have been true: that is the time between samples. It starts
again when the process reports again after its samples were stale, and for another process with the same pid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.timing import acts_on_jobs, is_rank
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import ProcessKey
from gpumem_exporter.features.policy.policy_rules import Rule
from gpumem_exporter.features.policy.policy_values import Observation, shown_quantity

RESULTS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""The results of evaluating a rule for one process on one device, once a second and for each alert."""

_HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)


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
    presumed: bool = False
    """A dry run has shown that its action would help, and its conditions have not been false since."""


@dataclass(slots=True)
class RuleState:
    """The state of one rule in force."""

    rule: Rule
    subjects: dict[Hashable, Subject] = field(default_factory=dict)
    # When all conditions became true, by process and device, in the time of the samples.
    _met_since: dict[Hashable, float] = field(default_factory=dict)
    # The number of actions within the last hour, by `ProcessKey.share`: no user can use up the actions of others.
    _used: Counter[str] = field(default_factory=Counter)

    def continued(self, rule: Rule) -> RuleState:
        """Return the state of the rule in a file that was read again. A changed rule keeps the times of its actions."""
        acted = {name: Subject(each.process, each.acted) for name, each in self.subjects.items()}
        return self if rule == self.rule else RuleState(rule, acted)

    def subject_of(self, seen: Observation) -> Hashable:
        """Return the key of what the rule acts on: a process on all its devices, or the ranks of its job."""
        return seen.ranks if acts_on_jobs(self.rule.request) else seen.reporter

    def _subjects_of(self, seen: Observation) -> set[Hashable]:
        """Return the keys of what the rule may have acted on with a process."""
        # While a rank makes no steps, as in a validation, the rule acts on it alone, and on its job before and after.
        job = seen.process.job if is_rank(seen.process) else seen.reporter
        return {self.subject_of(seen), seen.reporter, job}

    def observe(self, concerned: Sequence[Observation], now: float) -> None:
        """Note which of the processes that the rule concerns meet all conditions now."""
        met = [each for each in concerned if self.rule.when.is_met(each.values)]
        since = self._met_since
        self._met_since = {each.key: since.get(each.key, each.process.sampled_seconds) for each in met}
        present = {name for each in concerned for name in self._subjects_of(each)}
        held = {self.subject_of(each) for each in met}
        # An absent subject is kept for a while: a process that hung and continues is absent meanwhile.
        keep_seconds = max(self.rule.cooldown, _HOUR_SECONDS)
        for name in self.subjects.keys() - present:
            if now - self.subjects[name].acted[-1] > keep_seconds:
                del self.subjects[name]
        self._used.clear()
        for name, each in self.subjects.items():
            each.presumed = each.presumed and name in held
            self._used[each.process.share] += sum(now - acted < _HOUR_SECONDS for acted in each.acted)

    def objection(self, seen: Observation, now: float, *, alerted: bool) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act."""
        since = self._met_since.get(seen.key)
        if since is None:
            return "unmet"
        too_early = seen.process.sampled_seconds - since < self.rule.for_seconds
        if too_early or (self.rule.trigger == "alert" and not alerted):
            return "pending"
        subjects = [self.subjects[name] for name in self._subjects_of(seen) if name in self.subjects]
        if any(now < self.resume_seconds(subject) for subject in subjects):
            return "stopped"
        if any(subject.presumed or now - subject.acted[-1] < self.rule.cooldown for subject in subjects):
            return "cooling"
        return "limited" if self._used[seen.process.key.share] >= self.rule.max_per_hour else ""

    def put_acted(self, seen: Observation, now: float, action_id: str | None) -> None:
        """Note that the rule acts now where it has seen this; `action_id` is None if the action was refused."""
        # The conditions have to be true again for the whole time.
        self._met_since[seen.key] = seen.process.sampled_seconds
        key = seen.process.key
        subject = self.subjects.setdefault(self.subject_of(seen), Subject(key))
        if self._tired(subject):
            subject.unhelpful.clear()
        subject.process, subject.action_id = key, action_id
        subject.acted = [*(acted for acted in subject.acted if now - acted < _HOUR_SECONDS), now]
        self._used[key.share] += 1

    def judge(self, subject: Subject, action: Action) -> str:
        """Judge the subject's action, which has settled. Returns the reason if the rule stops there because of it."""
        stop_after = self.rule.stop
        why = _why_unhelpful(action, stop_after.freed_under) if stop_after is not None else None
        subject.presumed = action.dry_run and not why
        if why == "":
            subject.unhelpful.clear()
        if not why:
            return ""
        done = any(is_done(result.outcome) for result in action.results)
        freed = _freed_bytes(action) if done else None
        subject.unhelpful.append({"action_id": action.id, "freed_bytes": freed, "why": why})
        times = f"{len(subject.unhelpful)} times in a row" if len(subject.unhelpful) > 1 else "once"
        return f"{action.action} did not help {times}: {why}" if self._tired(subject) else ""

    def stops(self, now: float) -> list[float]:
        """Return when the rule may act again, for each subject for which it has stopped."""
        return [until for each in self.subjects.values() if now < (until := self.resume_seconds(each))]

    def resume_seconds(self, subject: Subject) -> float:
        """Return when the stop of the rule for a subject ends; the past if the rule has not stopped there."""
        wait_seconds = self.rule.stop.resume_after if self.rule.stop is not None and self._tired(subject) else 0.0
        return subject.acted[-1] + wait_seconds

    def _tired(self, subject: Subject) -> bool:
        """Return whether the last actions on a subject did not help."""
        return self.rule.stop is not None and len(subject.unhelpful) >= self.rule.stop.clears


def _freed_bytes(action: Action) -> int | None:
    """Return what an action freed: a garbage collection frees tensors, whose memory stays in the cache."""
    if action.action != "collect_garbage":
        return action.freed_bytes
    sizes = [(result.allocated_before_bytes, result.allocated_after_bytes) for result in action.results]
    freed = [None if before is None or after is None else max(0, before - after) for before, after in sizes]
    return sum_of_known(freed) if freed else None


def _why_unhelpful(action: Action, least: float) -> str | None:
    """Return why an action did not free this number of bytes for good; empty if it did, None if that is unknown."""
    outcomes = {result.outcome for result in action.results}
    if outcomes <= {"gone"}:
        return None
    if not any(map(is_done, outcomes)):
        if any(result.reason_code in _CHANGED_SINCE for result in action.results):
            return None  # this came after the decision, and says nothing about the rule
        return "; ".join(dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results))
    freed, settled = _freed_bytes(action), action.settle_seconds > 0
    left = action.still_free_bytes if settled else freed
    if freed is not None and freed < least:
        return f"it released {shown_quantity(freed, 'bytes')}"
    if freed is None or left is None:
        return None  # not measured
    if left >= least:
        return ""
    released, still_free = (shown_quantity(size, "bytes") for size in (freed, left))
    after = shown_quantity(action.settle_seconds, "seconds")
    return f"it released {released}, and {still_free} of it were still free after {after}"
