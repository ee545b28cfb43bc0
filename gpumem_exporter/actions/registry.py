"""The known actions and their idempotency keys, the limits of actions per minute, and what stays free after clears."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from gpumem_client.wire.protocol import CommandResult, StillFree
from gpumem_exporter.actions.lifecycle import CommandPart, RunningAction
from gpumem_exporter.actions.model import Action, SubmittedAction
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.errors import IdempotencyConflictError, TooManyActionsError

_DRY_RUNS_SHARE = 4
"""One dry run is kept for this number of actions."""
MAX_BYTES = 16 << 20
MAX_UNDER_WAY = 4096
"""The maximum number of processes in the running actions of one share."""
SETTLING_GRACE_SECONDS = 5.0
"""A process's value may arrive this long after the settling time, and two steps later: steps delay its samples."""
_MAX_BUCKETS = 4096
_MINUTE_SECONDS = 60.0


class ActionRegistry:
    """Finds actions by id and by idempotency key. A key belongs to its caller and is known as long as its action.

    `max_finished` and `MAX_BYTES` limit the finished actions that are kept, besides dry runs.
    """

    def __init__(self, max_finished: int) -> None:
        self.running: dict[str, RunningAction] = {}
        """The actions that have not ended by id, oldest first."""
        self._finished = _Kept(max_finished, MAX_BYTES)
        self._dry_runs = _Kept(max(1, max_finished // _DRY_RUNS_SHARE), MAX_BYTES // _DRY_RUNS_SHARE)
        self._keys: dict[tuple[str, str], tuple[ActionRequest, str]] = {}
        """The request and the id of an action, by its caller and key."""

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        running = self.running.get(action_id)
        return running.action if running is not None else self._finished.get(action_id) or self._dry_runs.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """Return all known actions, newest first."""
        known = [*self._finished, *self._dry_runs, *(running.action for running in self.running.values())]
        actions = [action for action in known if not action.unlisted]
        return tuple(sorted(actions, key=lambda action: action.created_unix_seconds, reverse=True))

    def with_key(self, caller: str, key: str, request: ActionRequest) -> Action | None:
        """Return the action that a caller has started with this key, if it is still known.

        Raises IdempotencyConflictError if the caller used the key with another request.
        """
        first, action_id = self._keys.get((caller, key), (None, ""))
        known = self.get(action_id)
        if known is not None and first != request:
            raise IdempotencyConflictError(f"Idempotency-Key {key!r} was used for another request (action {action_id})")
        return known

    def require_room(self, share: str, processes: int) -> None:
        """Raise `TooManyActionsError` if the running actions of a share have too many processes."""
        under_way = sum(running.size for running in self.running.values() if running.share == share)
        if under_way and under_way + processes > MAX_UNDER_WAY:
            raise TooManyActionsError(f"{share} has running actions on {under_way} processes; cancel some", 1.0)

    def start(self, running: RunningAction, request: ActionRequest, key: str | None) -> None:
        """Add a new action."""
        self.running[running.action.id] = running
        if key is not None:
            self._keys[running.action.caller, key] = request, running.action.id

    def finish(self, action: Action) -> None:
        """Add a finished action, or move it from the running ones."""
        self.running.pop(action.id, None)
        forgotten = (self._dry_runs if action.dry_run or action.unlisted else self._finished).add(action)
        if forgotten and self._keys:
            self._keys = {key: known for key, known in self._keys.items() if known[1] not in forgotten}

    def replace(self, action: Action) -> None:
        """Replace a finished action by a later state of it, unless it is forgotten."""
        self._finished.replace(action)

    def restore(self, action: Action, submitted: SubmittedAction | None) -> None:
        """Add an action of an earlier run of the exporter, and the request that started it.

        Called with the newest first. An action of an earlier run never displaces one of this run.
        """
        if self.get(action.id) is not None or not self._finished.add_oldest(action):
            return
        if submitted is not None and submitted.idempotency_key is not None:
            self._keys.setdefault((action.caller, submitted.idempotency_key), (submitted.request, action.id))


class _Kept:
    """Actions of a limited number and size. The share with the most actions, or most bytes, loses its oldest one."""

    def __init__(self, maximum: int, max_bytes: int) -> None:
        self._maximum = maximum
        self._max_bytes = max_bytes
        self._actions: OrderedDict[str, Action] = OrderedDict()
        self._of_share: Counter[str] = Counter()
        self._bytes_of_share: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions.values())

    def get(self, action_id: str) -> Action | None:
        return self._actions.get(action_id)

    def replace(self, action: Action) -> None:
        if action.id in self._actions:
            self._actions[action.id] = action

    def add(self, action: Action) -> set[str]:
        """Add the newest action, and return the ids of forgotten ones."""
        self._actions[action.id] = action
        self._count(action, 1)
        forgotten = set()
        while len(self._actions) > self._maximum:
            forgotten.add(self._forget_oldest_of(self._of_share))
        while self._bytes_of_share.total() > self._max_bytes and len(self._actions) > 1:
            forgotten.add(self._forget_oldest_of(self._bytes_of_share))
        return forgotten

    def add_oldest(self, action: Action) -> bool:
        """Add an action before all others; return False if there is no room."""
        if len(self._actions) >= self._maximum:
            return False
        if self._bytes_of_share.total() + action.kept_bytes > self._max_bytes:
            return False
        self.add(action)
        self._actions.move_to_end(action.id, last=False)
        return True

    def _forget_oldest_of(self, shares: Counter[str]) -> str:
        share = max(shares, key=shares.__getitem__)
        oldest = next(action for action in self._actions.values() if action.share == share)
        del self._actions[oldest.id]
        self._count(oldest, -1)
        return oldest.id

    def _count(self, action: Action, number: int) -> None:
        share = action.share
        self._of_share[share] += number
        self._bytes_of_share[share] += number * action.kept_bytes
        if not self._of_share[share]:
            del self._of_share[share], self._bytes_of_share[share]


class RateLimits:
    """Counts the actions per minute of each caller, and on each process from all callers. Not thread-safe.

    A caller may use the limit of a whole minute at once. `what` names what is counted, for messages.
    """

    def __init__(self, *, per_caller: int, per_process: int, clock: Callable[[], float], what: str = "actions") -> None:
        self._clock = clock
        self._what = what
        self._callers = _Buckets(per_caller)
        self._processes = _Buckets(per_process)

    def take(self, caller: str, processes: Iterable[tuple[Hashable, str]]) -> None:
        """Count one action on these processes, given as keys and names for messages.

        Raises TooManyActionsError if a limit is reached; then nothing is counted.
        """
        now = self._clock()
        wait = self._callers.wait_seconds(caller, now)
        if wait > 0:
            raise TooManyActionsError(f"{caller} has requested {self._callers.size} {self._what} within a minute", wait)
        keys = []
        for key, name in processes:
            wait = self._processes.wait_seconds(key, now)
            if wait > 0:
                raise TooManyActionsError(f"{name} has had {self._processes.size} {self._what} within a minute", wait)
            keys.append(key)
        self._callers.take(caller, now)
        for key in keys:
            self._processes.take(key, now)


class _Buckets:
    """A bucket for each key that was used recently."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """The level of each bucket, and when it had that level."""

    def wait_seconds(self, key: Hashable, now: float) -> float:
        """Return the seconds until an action is permitted; 0 if one is permitted now."""
        missing = 1.0 - self._level(key, now)
        return max(0.0, missing * _MINUTE_SECONDS / self.size) if missing > 1e-9 else 0.0

    def take(self, key: Hashable, now: float) -> None:
        self._levels[key] = self._level(key, now) - 1.0, now
        self._levels.move_to_end(key)
        while len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)

    def _level(self, key: Hashable, now: float) -> float:
        level, since = self._levels.get(key, (float(self.size), now))
        return min(float(self.size), level + max(0.0, now - since) * self.size / _MINUTE_SECONDS)


def retry_after(seconds: float) -> str:
    """Return the value of the header `Retry-After`: whole seconds, at least 1."""
    return str(max(1, math.ceil(seconds)))


@dataclass(slots=True)
class _Settlement:
    """One process's part in a clear that is done, until the value of each device has arrived."""

    running: RunningAction
    part: CommandPart
    uuids: set[str]
    """The devices without a value."""
    gives_up_seconds: float


class Settlements:
    """Completes the results of done clears with what stayed free, as the processes report it after the settling time.

    `changed` is called with each action that has changed.
    """

    def __init__(self, changed: Callable[[Action], None]) -> None:
        self._changed = changed
        self._waiting: dict[tuple[str, ProcessKey], _Settlement] = {}

    def start(self, running: RunningAction, part: CommandPart, result: CommandResult, now: float) -> None:
        """Wait for values of a process, if the action requests them and the process has released memory."""
        settle_seconds = part.command.settle_seconds
        uuids = {device.uuid for device in result.devices if device.freed_bytes is not None}
        if settle_seconds > 0 and result.outcome == "done" and uuids:
            late_seconds = SETTLING_GRACE_SECONDS + 2 * (part.selected.process.report.step_seconds or 0.0)
            settlement = _Settlement(running, part, uuids, now + settle_seconds + late_seconds)
            self._waiting[running.action.id, part.key] = settlement
            running.action = replace(running.action, settling=True)

    def take(self, process: ReportingProcess) -> None:
        """Take the values in a report. Unknown ids are ignored."""
        for value in process.report.still_free:
            settlement = self._waiting.get((value.id, process.key))
            if settlement is not None and settlement.part.belongs_to(process) and value.uuid in settlement.uuids:
                self._set(settlement, value)

    def gone(self, key: ProcessKey) -> None:
        """Stop waiting for values of a process that has exited."""
        for waiting in [waiting for waiting in self._waiting if waiting[1] == key]:
            self._end(self._waiting[waiting])

    def expire(self, now: float) -> None:
        """Stop waiting for values that are too late."""
        for settlement in [each for each in self._waiting.values() if now >= each.gives_up_seconds]:
            self._end(settlement)

    def _set(self, settlement: _Settlement, value: StillFree) -> None:
        running, pid = settlement.running, settlement.part.selected.pid
        results = tuple(
            replace(result, still_free_bytes=value.still_free_bytes)
            if (result.pid, result.uuid) == (pid, value.uuid)
            else result
            for result in running.action.results
        )
        running.action = replace(running.action, results=results)
        settlement.uuids.discard(value.uuid)
        if not settlement.uuids:
            self._end(settlement)

    def _end(self, settlement: _Settlement) -> None:
        running = settlement.running
        del self._waiting[running.action.id, settlement.part.key]
        if not any(action_id == running.action.id for action_id, _ in self._waiting):
            running.action = replace(running.action, settling=False)
        self._changed(running.action)
