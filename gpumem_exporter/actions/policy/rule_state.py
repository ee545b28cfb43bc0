"""The state of one rule: since when its conditions are true, what prevents it from acting, and whether it helped."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.model import Action, is_done
from gpumem_exporter.actions.policy.rules import Rule, StopAfter
from gpumem_exporter.actions.policy.values import Observation, shown_quantity
from gpumem_exporter.actions.request import ActionRequest

HOUR_SECONDS = 3600.0
_CHANGED_SINCE = (ReasonCode.ENGINE_STARTING, ReasonCode.ENGINE_BUSY, ReasonCode.ENGINE_ASLEEP)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a rule to request an action."""

    rule: Rule
    subject: str
    """The process, or for a group its workload, that the rule acts on."""
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
    stopped: bool = False


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
        self._acted: dict[str, deque[float]] = {}
        """When it acted, by `ProcessKey.share`."""
        self._subjects: dict[str, _SubjectState] = {}

    def subject(self, observation: Observation) -> str:
        """Return the subject of the rule: the process on all its devices, or the ranks of its workload."""
        return observation.group if self.rule.request.group else observation.reporter_id

    def objection(self, subject: str, share: str, now: float) -> str:
        """Return why the rule does not act now, as one of `RESULTS`; empty if it may act.

        `max_per_hour` counts for each `ProcessKey.share`, so that no user can use up the actions of the others.
        """
        known = self._subjects.get(subject)
        if known is not None and known.stopped:
            return "stopped"
        if known is not None and now - known.acted_seconds < self.rule.cooldown:
            return "cooling"
        acted = self._acted.get(share)
        if acted is not None and len(acted) == acted.maxlen and now - acted[0] < HOUR_SECONDS:
            return "limited"
        return "cooling" if subject in self.presumed else ""

    def acted(self, subject: str, share: str, now: float) -> None:
        """Record that the rule acts on this subject now, whose process has this share."""
        self._acted.setdefault(share, deque(maxlen=self.rule.max_per_hour)).append(now)
        self._subjects.setdefault(subject, _SubjectState(now)).acted_seconds = now

    def judge(self, subject: str, action: Action) -> Stop | None:
        """Judge an action that has finished and settled. Returns a `Stop` if the rule stops now because of it."""
        stop_after, known = self.rule.stop_after, self._subjects.get(subject)
        freed, done = action.freed_bytes, any(is_done(result.outcome) for result in action.results)
        little = stop_after is not None and done and freed is not None and freed < stop_after.freed_under
        if action.dry_run and not little:
            self.presumed.add(subject)
        if stop_after is None or known is None or known.stopped:
            return None
        why = _why_unhelpful(action, self.rule, stop_after)
        if why is None:
            return None
        if not why:
            known.unhelpful.clear()
            return None
        known.unhelpful.append(UnhelpfulAction(action.id, freed if done else None, why))
        known.stopped = len(known.unhelpful) >= stop_after.clears
        return Stop(self.rule, action, tuple(known.unhelpful)) if known.stopped else None

    def stopped(self) -> int:
        """Return the number of subjects for which the rule has stopped."""
        return sum(known.stopped for known in self._subjects.values())

    def forget(self, present: Container[str], now: float) -> None:
        """Forget absent subjects after a while. A process that hung and continues is remembered."""
        keep_seconds = max(self.rule.cooldown, HOUR_SECONDS)
        for subject, known in list(self._subjects.items()):
            if subject not in present and now - known.acted_seconds > keep_seconds:
                del self._subjects[subject]
        self._acted = {share: acted for share, acted in self._acted.items() if now - acted[-1] < HOUR_SECONDS}

    def take_over(self, earlier: RuleState) -> None:
        """Take over the state from before a reload. If the rule has changed, only the times of its actions are kept."""
        self._acted = {share: deque(acted, maxlen=self.rule.max_per_hour) for share, acted in earlier._acted.items()}
        if self.rule == earlier.rule:
            self.met_since, self.presumed = earlier.met_since, earlier.presumed
            self._subjects, self.held_back = earlier._subjects, earlier.held_back
        else:
            self._subjects = {key: _SubjectState(known.acted_seconds) for key, known in earlier._subjects.items()}


def _why_unhelpful(action: Action, rule: Rule, stop_after: StopAfter) -> str | None:
    """Return why an action did not help; empty if it helped, None if that is unknown."""
    outcomes = {result.outcome for result in action.results}
    if outcomes <= {"gone"}:
        return None
    if not any(map(is_done, outcomes)):
        if any(result.reason_code in _CHANGED_SINCE for result in action.results):
            return None  # this came after the decision, and says nothing about the rule
        return "; ".join(dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results))
    freed, least = action.freed_bytes, stop_after.freed_under
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
