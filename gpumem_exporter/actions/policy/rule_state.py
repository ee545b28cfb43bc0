"""The state of one rule: since when its conditions are true, and what prevents it from acting."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.values import Observation
from gpumem_exporter.actions.request import ActionRequest

__all__ = ["Decision", "RuleState", "UnhelpfulAction"]

HOUR_SECONDS = 3600.0


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


@dataclass(slots=True)
class _SubjectState:
    acted_seconds: float
    unhelpful: list[UnhelpfulAction] = field(default_factory=list)
    """The last consecutive actions that did not help."""
    stopped: bool = False


class RuleState:
    """The state of one rule. Seconds are those of the caller's clock.

    Attributes:
        rule: the rule.
        met_since: when all conditions became true, by process and device, in the time of the samples.
        held_back: the engines whose start the rule waits for, by subject; of the last evaluation.
        presumed: for a dry run, the subjects on which it would have acted, until their conditions are false.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.met_since: dict[str, float] = {}
        self.presumed: set[str] = set()
        self.held_back: dict[str, str] = {}
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
        if known is not None and now - known.acted_seconds < self.rule.cooldown_seconds:
            return "cooling"
        acted = self._acted.get(share)
        if acted is not None and len(acted) == acted.maxlen and now - acted[0] < HOUR_SECONDS:
            return "limited"
        return "cooling" if subject in self.presumed else ""

    def acted(self, subject: str, share: str, now: float) -> None:
        """Record that the rule acts on this subject now, whose process has this share."""
        self._acted.setdefault(share, deque(maxlen=self.rule.max_per_hour)).append(now)
        self._subjects.setdefault(subject, _SubjectState(now)).acted_seconds = now

    def helped(self, subject: str) -> None:
        """Record that the last action helped: earlier ones no longer count."""
        known = self._subjects.get(subject)
        if known is not None:
            known.unhelpful.clear()

    def did_not_help(self, subject: str, action: UnhelpfulAction) -> tuple[UnhelpfulAction, ...]:
        """Record that an action did not help; return all consecutive ones if the rule stops now, otherwise none."""
        stop_after = self.rule.stop_after
        known = self._subjects.get(subject)
        if stop_after is None or known is None or known.stopped:
            return ()
        known.unhelpful.append(action)
        known.stopped = len(known.unhelpful) >= stop_after.clears
        return tuple(known.unhelpful) if known.stopped else ()

    def stopped(self) -> int:
        """Return the number of subjects for which the rule has stopped."""
        return sum(known.stopped for known in self._subjects.values())

    def forget(self, present: Container[str], now: float) -> None:
        """Forget absent subjects after a while. A process that hung and continues is remembered."""
        keep_seconds = max(self.rule.cooldown_seconds, HOUR_SECONDS)
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
            self._subjects = {
                subject: _SubjectState(known.acted_seconds) for subject, known in earlier._subjects.items()
            }
