"""What a policy is: rules that ask for actions by themselves, and what holds each of them back."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf

from gpumem_exporter.actions.request import ActionRequest

__all__ = ["DEFAULT_COOLDOWN_SECONDS", "FREEING", "RESULTS", "Condition", "Rule", "StopAfter"]

FREEING = ("empty_cache", "collect_garbage")
"""The actions that are for giving memory back: those that may turn out not to help."""

DEFAULT_COOLDOWN_SECONDS = 300.0

RESULTS = ("unmet", "pending", "acted", "would_act", "refused", "cooling", "busy", "limited", "stopped")
"""What becomes of a rule for one process on one device, once a second.

`unmet`: a condition does not hold, or its figure is not known. `pending`: all hold, and have not for long enough. The
rule then acts (`would_act`: a dry run), unless the exporter refuses the action, the process rests after the last one
(`cooling`; of a dry run, also until the conditions, which an action would have ended, have ended by themselves), an
action is under way there (`busy`), the rule has acted enough for an hour (`limited`), or it has stopped
there because it did not help (`stopped`).
"""


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure lies strictly between two bounds. What is not known lies nowhere."""

    field: str
    """A key of `policy_figures.FIELDS`."""
    over: float = -inf
    under: float = inf


@dataclass(frozen=True, slots=True)
class StopAfter:
    """When a rule leaves a process alone for good: so many tries in a row have not helped."""

    clears: int = 3
    freed_under_bytes: float = 64 << 20
    """One that gave back less has not helped."""
    still_free_seconds: float | None = None
    """Nor has one of which less than that was still given back so long after it. None: this is not looked at."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, for each process on each device of its own."""

    name: str
    when: tuple[Condition, ...]
    """All of them must hold."""
    asks: ActionRequest
    """What it asks for; the target is filled in with the process, or for a group with the workload."""
    workloads: tuple[str, ...]
    """Patterns, as a shell's: the rule is for the workloads that match one of them."""
    for_seconds: float = 0.0
    """For how long, without a break, all conditions must have held."""
    cooldown_seconds: float = DEFAULT_COOLDOWN_SECONDS
    """How long a process is left alone after it was asked, whatever came of that."""
    max_per_hour: int = 12
    """How often it acts on this node."""
    stop_after: StopAfter | None = None
    dry_run: bool = True
    line: int = field(default=0, compare=False)
    """Where it stands in the file."""

    def concerns(self, workload: str) -> bool:
        """The rule is for this workload. A process without a name is meant by `*` alone, and is in no group."""
        if not workload:
            return "*" in self.workloads and not self.asks.group
        return any(fnmatchcase(workload, pattern) for pattern in self.workloads)
