"""The rules of a policy: when they request which action, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf

from gpumem_exporter.actions.request import ActionRequest

__all__ = [
    "DEFAULT_COOLDOWN_SECONDS",
    "DEFAULT_STILL_FREE_SECONDS",
    "FREEING",
    "RESULTS",
    "Condition",
    "Rule",
    "StopAfter",
]

FREEING = ("empty_cache", "collect_garbage")
"""The actions that free memory: a rule may find that they do not help."""

DEFAULT_COOLDOWN_SECONDS = 300.0
DEFAULT_STILL_FREE_SECONDS = 10.0

RESULTS = ("unmet", "pending", "acted", "would_act", "refused", "cooling", "busy", "held_back", "limited", "stopped")
"""The result of evaluating a rule for one process on one device, once a second.

`unmet`: a condition is false or its value is unknown. `pending`: all conditions are true, but not for long enough.
`acted`, or `would_act` in a dry run: the rule requested its action. `refused`: the exporter rejected the action.
`cooling`: the rule waits after its last action there; in a dry run also until the conditions have been false once,
because the action would have changed them. `busy`: another action is running or settling there. `held_back`: an
inference engine starts on a device there, and released memory would spoil its start. `limited`: the rule
has reached its number of actions per hour. `stopped`: the rule has stopped there because its actions did not help.
"""


@dataclass(frozen=True, slots=True)
class Condition:
    """A value is strictly between two bounds. An unknown value never is."""

    field: str
    """A key of `values.FIELDS`."""
    over: float = -inf
    under: float = inf


@dataclass(frozen=True, slots=True)
class StopAfter:
    """When a rule stops for a process: after several consecutive actions that did not help."""

    clears: int = 3
    freed_under_bytes: float = 64 << 20
    """An action that released less than this did not help."""
    still_free_seconds: float = 0.0
    """Of a clear, only what is still free after this settling time counts. 0: everything that it released counts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. It is evaluated for each process on each device."""

    name: str
    when: tuple[Condition, ...]
    """All of them must be true."""
    request: ActionRequest
    """The requested action; its target is replaced by the process, or for a group by the workload."""
    workloads: tuple[str, ...]
    """The workloads of the rule, as shell patterns."""
    for_seconds: float = 0.0
    """All conditions must have been true for this time, without a break."""
    cooldown_seconds: float = DEFAULT_COOLDOWN_SECONDS
    """The time between two actions on a process, whatever the result of the first one."""
    max_per_hour: int = 12
    """The number of actions per hour on this node."""
    stop_after: StopAfter | None = None
    dry_run: bool = True
    line: int = field(default=0, compare=False)
    """The line in the file."""

    def concerns(self, workload: str) -> bool:
        """Return whether the rule is for this workload. Only `*` matches processes without one, and no group does."""
        if not workload:
            return "*" in self.workloads and not self.request.group
        return any(fnmatchcase(workload, pattern) for pattern in self.workloads)
