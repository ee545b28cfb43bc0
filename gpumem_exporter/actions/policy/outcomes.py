"""Judges whether the actions of rules helped: when they finish, and some time later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.quantities import shown_quantity
from gpumem_exporter.actions.policy.rule_state import Decision, RuleState, UnhelpfulAction
from gpumem_exporter.actions.policy.values import Observation

__all__ = ["Outcomes", "Stop"]


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


@dataclass(frozen=True, slots=True)
class _LaterCheck:
    """An action whose freed memory is checked again later."""

    decision: Decision
    action: Action
    freed_bytes: int
    reserved_before_bytes: int
    due_seconds: float


class Outcomes:
    """The outcomes of all rules' actions.

    Args:
        states: the rules in force, by name.
    """

    def __init__(self, states: Mapping[str, RuleState]) -> None:
        self._states = states
        self._later: list[_LaterCheck] = []

    def take_over(self, earlier: Outcomes) -> None:
        """Continue the checks of the rules that are unchanged after a reload."""
        self._later = [check for check in earlier._later if self._state(check.decision) is not None]

    def finished(self, decision: Decision, action: Action, now: float) -> Stop | None:
        """Judge a finished action; return the stop of its rule, if the rule stops now."""
        state = self._state(decision)
        stop_after = decision.rule.stop_after
        if state is None:
            return None
        if action.dry_run:
            state.presumed.add(decision.subject)
        if stop_after is None:
            return None
        outcomes = {result.outcome for result in action.results}
        if outcomes <= {"gone"}:
            return None
        if "done" not in outcomes:
            reasons = dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results)
            return self._did_not_help(state, decision, action, None, "; ".join(reasons))
        freed = action.freed_bytes
        if freed is None:
            return None  # not measured, so it counts neither as helpful nor as unhelpful
        if freed < stop_after.freed_under_bytes:
            state.presumed.discard(decision.subject)
            why = f"it released {shown_quantity(freed, 'bytes')}"
            return self._did_not_help(state, decision, action, freed, why)
        reserved = [result.reserved_before_bytes for result in action.results]
        if stop_after.still_free_seconds is None or action.dry_run or None in reserved:
            state.helped(decision.subject)
        else:
            before = sum(each for each in reserved if each is not None)
            self._later.append(_LaterCheck(decision, action, freed, before, now + stop_after.still_free_seconds))
        return None

    def check(self, observations: Iterable[Observation]) -> tuple[Stop, ...]:
        """Check the actions that are due: has the process reserved the released memory again?"""
        if not self._later:
            return ()
        reserved, sampled = _reserved_by_subject(observations)
        waiting: list[_LaterCheck] = []
        stops: list[Stop | None] = []
        for check in self._later:
            subject, state = check.decision.subject, self._state(check.decision)
            now_reserved = reserved.get(subject)
            if state is None or now_reserved is None:
                continue  # the process has exited, or its reserved memory is unknown
            if sampled[subject] < check.due_seconds:
                waiting.append(check)
            else:
                stops.append(self._judge_later(state, check, now_reserved))
        self._later = waiting
        return tuple(stop for stop in stops if stop is not None)

    def _judge_later(self, state: RuleState, check: _LaterCheck, now_reserved: int) -> Stop | None:
        stop_after = state.rule.stop_after
        still_free = check.reserved_before_bytes - now_reserved
        if stop_after is None or still_free >= stop_after.freed_under_bytes:
            state.helped(check.decision.subject)
            return None
        freed, still = (shown_quantity(size, "bytes") for size in (check.freed_bytes, max(0, still_free)))
        after = shown_quantity(stop_after.still_free_seconds or 0.0, "seconds")
        why = f"it released {freed}, and {still} of it were still free after {after}"
        return self._did_not_help(state, check.decision, check.action, check.freed_bytes, why)

    def _did_not_help(
        self, state: RuleState, decision: Decision, action: Action, freed_bytes: int | None, why: str
    ) -> Stop | None:
        tries = state.did_not_help(decision.subject, UnhelpfulAction(action.id, freed_bytes, why))
        return Stop(state.rule, action, tries) if tries else None

    def _state(self, decision: Decision) -> RuleState | None:
        """Return the state of a decision's rule; None if the rule was changed or removed."""
        state = self._states.get(decision.rule.name)
        return state if state is not None and state.rule == decision.rule else None


def _reserved_by_subject(observations: Iterable[Observation]) -> tuple[dict[str, int | None], dict[str, float]]:
    """Return the reserved bytes of each process and workload, None if unknown, and the time of its oldest sample."""
    reserved: dict[str, int | None] = {}
    sampled: dict[str, float] = {}
    for each in observations:
        for subject in (each.reporter_id, each.group):
            known, more = reserved.get(subject, 0), each.sample.reserved_bytes
            reserved[subject] = None if known is None or more is None else known + more
            sampled[subject] = min(sampled.get(subject, each.sampled_seconds), each.sampled_seconds)
    return reserved, sampled
