"""What a rule of the policy has seen and done: it decides whether the rule acts, and whether its actions help.

All times are times of snapshots, except how long conditions have been true: that is the time between samples. It starts
again when the process reports again after its samples were stale, and for another process with the same pid.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.actions.timing import acts_on_jobs, is_rank, steps_with_ranks
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.features.policy.policy_rules import Rule, values_of

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

_HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)


class Observation(NamedTuple):
    """One process on one device, at the time of its last sample."""

    process: ReportingProcess
    reporter: Hashable
    """The session of the reporter. A later process with the same pid differs, and so does another program."""
    uuid: str
    values: Mapping[str, float | None]
    """The value of each of `policy_rules.FIELDS`."""

    @property
    def key(self) -> Hashable:
        """The process on the device."""
        return self.reporter, self.uuid


def observations(snapshot: Snapshot, stale_seconds: float) -> Iterator[Observation]:
    """Yield every process on each of its devices, except processes whose last sample is older than `stale_seconds`.

    A process that has exited may have the pid of another process: only the one that the pid names now is there.
    """
    node = snapshot.node
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None and node.up else {}
    for _, process in snapshot.names.reporting:
        if process.sampled_seconds < snapshot.taken_seconds - stale_seconds:
            continue
        identity = process.report.process
        reporter = process.key, identity.start_time_ticks, identity.session
        last_seconds = snapshot.last_active_seconds(process, process.host_pid)
        inactive_seconds = None if last_seconds is None else max(0.0, snapshot.taken_seconds - last_seconds)
        for sample in process.report.devices:
            values = values_of(sample, devices.get(sample.uuid), process.report.engine, inactive_seconds)
            yield Observation(process, reporter, sample.uuid, values)


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
    """A dry run has shown that its action would help, and its conditions have not been false since."""


@dataclass(slots=True)
class RuleState:
    """The state of one rule in force."""

    rule: Rule
    subjects: dict[Hashable, Subject] = field(default_factory=dict)
    # When all conditions became true, by process and device, in the time of the samples.
    _met_since: dict[Hashable, float] = field(default_factory=dict)

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
        met = [each for each in concerned if self.rule.when.met(each.values)]
        since = self._met_since
        self._met_since = {each.key: since.get(each.key, each.process.sampled_seconds) for each in met}
        present = {name for each in concerned for name in self._subjects_of(each)}
        held = {self.subject_of(each) for each in met}
        # An absent subject is kept for a while: a process that hung and continues is absent meanwhile.
        keep_seconds = max(self.rule.cooldown, _HOUR_SECONDS)
        kept = self.subjects.items()
        self.subjects = {k: each for k, each in kept if k in present or now - each.acted[-1] <= keep_seconds}
        for name, each in self.subjects.items():
            each.presumed = each.presumed and name in held

    def objection(self, seen: Observation, now: float, *, alerted: bool) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act."""
        since = self._met_since.get(seen.key)
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
        self._met_since[seen.key] = seen.process.sampled_seconds
        subject = self.subjects.setdefault(self.subject_of(seen), Subject(seen.process.key))
        subject.process, subject.action_id = seen.process.key, action_id
        subject.acted = [*(acted for acted in subject.acted if now - acted < _HOUR_SECONDS), now]

    def judge(self, subject: Subject, action: Action) -> dict[str, Any] | None:
        """Judge the subject's action, which has settled. Return why, if the rule stops there because of it."""
        stop = self.rule.stop
        why = _why_unhelpful(action, stop.freed_under) if stop is not None else None
        subject.presumed = action.dry_run and not why
        if why == "":
            subject.unhelpful.clear()
        if not why or stop is None:
            return None
        subject.unhelpful.append({"action_id": action.id, "freed_bytes": _freed_bytes(action), "why": why})
        if len(subject.unhelpful) < stop.clears:
            return None
        tries, subject.unhelpful = subject.unhelpful, []
        subject.stopped_until = subject.acted[-1] + stop.resume_after
        times = f"{len(tries)} times in a row" if len(tries) > 1 else "once"
        return {"reason": f"{action.action} did not help {times}: {why}", "tries": tries}


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
    freed = _freed_bytes(action)
    left = freed if freed is None or freed < least or not action.settle_seconds else action.still_free_bytes
    if left is None:
        return None  # not measured
    after = f", and {human_bytes(left)} of it were still free after {human_seconds(action.settle_seconds)}"
    return "" if left >= least else f"it released {human_bytes(freed)}" + (after if left != freed else "")
