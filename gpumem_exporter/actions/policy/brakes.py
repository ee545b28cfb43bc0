"""What holds a rule back: a rest after each action, a limit for each hour, and an end where it does not help."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from gpumem_exporter.actions.policy.model import Rule

__all__ = ["Brakes", "Try"]

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Try:
    """An action that did not help."""

    action_id: str
    freed_bytes: int | None
    """None where it was not done."""
    why: str


@dataclass(slots=True)
class _Held:
    """What is remembered of one process, or of one workload where the rule is for groups."""

    asked_seconds: float
    in_vain: list[Try] = field(default_factory=list)
    """The last ones in a row that did not help."""
    stopped: bool = False


class Brakes:
    """The brakes of one rule. Seconds are those of the caller's clock.

    Args:
        rule: whose.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._asked: deque[float] = deque(maxlen=rule.max_per_hour)
        self._held: dict[str, _Held] = {}

    def objection(self, whom: str, now: float) -> str:
        """Why the rule does not act now, as one of `RESULTS`; empty where nothing speaks against it."""
        held = self._held.get(whom)
        if held is not None and held.stopped:
            return "stopped"
        if held is not None and now - held.asked_seconds < self._rule.cooldown_seconds:
            return "cooling"
        if len(self._asked) == self._asked.maxlen and now - self._asked[0] < HOUR_SECONDS:
            return "limited"
        return ""

    def asked(self, whom: str, now: float) -> None:
        """The rule acts."""
        self._asked.append(now)
        self._held.setdefault(whom, _Held(now)).asked_seconds = now

    def helped(self, whom: str) -> None:
        """What it did has helped: those before it no longer count."""
        held = self._held.get(whom)
        if held is not None:
            held.in_vain.clear()

    def in_vain(self, whom: str, tried: Try) -> tuple[Try, ...]:
        """What it did has not helped; gives all those in a row where it stops now, else none."""
        stop_after = self._rule.stop_after
        held = self._held.get(whom)
        if stop_after is None or held is None or held.stopped:
            return ()
        held.in_vain.append(tried)
        held.stopped = len(held.in_vain) >= stop_after.clears
        return tuple(held.in_vain) if held.stopped else ()

    def stopped(self) -> int:
        """In how many processes, or workloads, it has stopped."""
        return sum(held.stopped for held in self._held.values())

    def forget(self, present: Container[str], now: float) -> None:
        """Forget whoever is not there and was not asked for long: one that hung, and returns, is still held back."""
        keep_seconds = max(self._rule.cooldown_seconds, HOUR_SECONDS)
        for whom, held in list(self._held.items()):
            if whom not in present and now - held.asked_seconds > keep_seconds:
                del self._held[whom]

    def take_over(self, earlier: Brakes) -> None:
        """Go on from the same rule before a reload; of a rule that was changed, from when it acted alone."""
        same = self._rule == earlier._rule
        self._asked.extend(earlier._asked)
        for whom, held in earlier._held.items():
            self._held[whom] = held if same else _Held(held.asked_seconds)
