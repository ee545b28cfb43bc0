"""The known actions: the running ones, the last finished ones, and the idempotency keys of both."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from gpumem_exporter.actions.lifecycle import RunningAction
from gpumem_exporter.actions.model import Action, SubmittedAction
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.errors import IdempotencyConflictError, TooManyActionsError

_DRY_RUNS_SHARE = 4
"""One dry run is kept for this number of actions."""
MAX_BYTES = 16 << 20
MAX_UNDER_WAY = 4096
"""The maximum number of processes in the running actions of one share."""


class ActionRegistry:
    """Finds actions by id and by idempotency key. A key belongs to its caller and is known as long as its action.

    `max_finished` and `max_bytes` limit the finished actions that are kept, besides dry runs.
    """

    def __init__(self, max_finished: int, max_bytes: int = MAX_BYTES) -> None:
        self._running: dict[str, RunningAction] = {}
        self._finished = _Kept(max_finished, max_bytes)
        self._dry_runs = _Kept(max(1, max_finished // _DRY_RUNS_SHARE), max_bytes // _DRY_RUNS_SHARE)
        self._keys: dict[tuple[str, str], tuple[ActionRequest, str]] = {}
        """The request and the id of an action, by its caller and key."""

    def __iter__(self) -> Iterator[RunningAction]:
        """Iterate over a copy of the running actions, oldest first."""
        return iter(tuple(self._running.values()))

    def running(self, action_id: str) -> RunningAction | None:
        """Return an action that has not ended; None for any other."""
        return self._running.get(action_id)

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        running = self._running.get(action_id)
        return running.action if running is not None else self._finished.get(action_id) or self._dry_runs.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """Return all known actions, newest first."""
        actions = [*self._finished, *self._dry_runs, *(running.action for running in self._running.values())]
        return tuple(sorted(actions, key=lambda action: action.created_unix_seconds, reverse=True))

    def with_key(self, caller: str, key: str, request: ActionRequest) -> Action | None:
        """Return the action that a caller has started with this key, if it is still known.

        Raises:
            IdempotencyConflictError: the caller used the key with another request.
        """
        first, action_id = self._keys.get((caller, key), (None, ""))
        known = self.get(action_id)
        if known is not None and first != request:
            raise IdempotencyConflictError(f"Idempotency-Key {key!r} was used for another request (action {action_id})")
        return known

    def require_room(self, share: str, processes: int) -> None:
        """Raise `TooManyActionsError` if the running actions of a share have too many processes."""
        under_way = sum(running.size for running in self._running.values() if running.share == share)
        if under_way and under_way + processes > MAX_UNDER_WAY:
            raise TooManyActionsError(f"{share} has running actions on {under_way} processes; cancel some", 1.0)

    def start(self, running: RunningAction, request: ActionRequest, key: str | None) -> None:
        """Add a new action."""
        self._running[running.action.id] = running
        if key is not None:
            self._keys[running.action.caller, key] = request, running.action.id

    def finish(self, action: Action) -> None:
        """Add a finished action, or move it from the running ones."""
        self._running.pop(action.id, None)
        forgotten = (self._dry_runs if action.dry_run else self._finished).add(action)
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
