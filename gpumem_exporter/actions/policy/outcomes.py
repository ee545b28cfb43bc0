"""Judges whether the actions of rules helped: clears by what stayed free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumem_client.wire.protocol import ReasonCode
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.quantities import shown_quantity
from gpumem_exporter.actions.policy.rule_state import Decision, RuleState, UnhelpfulAction

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


class Outcomes:
    """The outcomes of all rules' actions.

    Args:
        states: the rules in force, by name.
    """

    def __init__(self, states: Mapping[str, RuleState]) -> None:
        self._states = states

    def finished(self, decision: Decision, action: Action) -> Stop | None:
        """Judge an action that has finished and settled. Returns a `Stop` if its rule stops now because of it."""
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
            if any(result.reason_code == ReasonCode.ENGINE_STARTING for result in action.results):
                return None  # an engine started after the decision, which says nothing about the rule
            reasons = dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results)
            return self._did_not_help(state, decision, action, None, "; ".join(reasons))
        freed = action.freed_bytes
        if freed is None:
            return None  # not measured, so it counts neither as helpful nor as unhelpful
        if freed < stop_after.freed_under_bytes:
            state.presumed.discard(decision.subject)
            why = f"it released {shown_quantity(freed, 'bytes')}"
            return self._did_not_help(state, decision, action, freed, why)
        if stop_after.still_free_seconds == 0 or action.dry_run:
            state.helped(decision.subject)
            return None
        still_free = action.still_free_bytes
        if still_free is None:
            return None
        if still_free >= stop_after.freed_under_bytes:
            state.helped(decision.subject)
            return None
        sizes = [shown_quantity(size, "bytes") for size in (freed, still_free)]
        after = shown_quantity(stop_after.still_free_seconds, "seconds")
        why = f"it released {sizes[0]}, and {sizes[1]} of it were still free after {after}"
        return self._did_not_help(state, decision, action, freed, why)

    def _did_not_help(
        self, state: RuleState, decision: Decision, action: Action, freed_bytes: int | None, why: str
    ) -> Stop | None:
        tries = state.did_not_help(decision.subject, UnhelpfulAction(action.id, freed_bytes, why))
        return Stop(state.rule, action, tries) if tries else None

    def _state(self, decision: Decision) -> RuleState | None:
        """Return the state of a decision's rule; None if the rule was changed or removed."""
        state = self._states.get(decision.rule.name)
        return state if state is not None and state.rule == decision.rule else None
