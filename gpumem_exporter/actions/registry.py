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
        self._key_of: dict[str, tuple[str, str]] = {}
        """The key of an action, by its id."""

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
        under_way = sum(running.size for running in self._running.values() if running.action.share == share)
        if under_way and under_way + processes > MAX_UNDER_WAY:
            raise TooManyActionsError(f"{share} has running actions on {under_way} processes; cancel some", 1.0)

    def start(self, running: RunningAction, request: ActionRequest, key: str | None) -> None:
        """Add a new action."""
        self._running[running.action.id] = running
        if key is not None:
            self._remember_key(running.action, request, key)

    def finish(self, action: Action) -> None:
        """Add a finished action, or move it from the running ones."""
        self._running.pop(action.id, None)
        for forgotten in (self._dry_runs if action.dry_run else self._finished).add(action):
            key = self._key_of.pop(forgotten.id, None)
            if key is not None and self._keys[key][1] == forgotten.id:
                del self._keys[key]

    def replace(self, action: Action) -> None:
        """Replace a finished action by a later state of it, unless it is forgotten."""
        self._finished.replace(action)

    def restore(self, action: Action, submitted: SubmittedAction | None) -> None:
        """Add an action of an earlier run of the exporter, and the request that started it.

        Called with the newest first. An action of an earlier run never displaces one of this run.
        """
        if self.get(action.id) is not None or not self._finished.add_oldest(action):
            return
        key = submitted.idempotency_key if submitted is not None else None
        if submitted is not None and key is not None and (action.caller, key) not in self._keys:
            self._remember_key(action, submitted.request, key)

    def _remember_key(self, action: Action, request: ActionRequest, key: str) -> None:
        owned = (action.caller, key)
        self._keys[owned] = (request, action.id)
        self._key_of[action.id] = owned


class _Kept:
    """Actions of a limited number and size. The share with the most actions, or most bytes, loses its oldest one."""

    def __init__(self, maximum: int, max_bytes: int) -> None:
        self._maximum = maximum
        self._max_bytes = max_bytes
        self._actions: OrderedDict[str, Action] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """By id."""
        self._of_share: Counter[str] = Counter()
        self._bytes_of_share: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Action]:
        return iter(self._actions.values())

    def get(self, action_id: str) -> Action | None:
        return self._actions.get(action_id)

    def replace(self, action: Action) -> None:
        if action.id in self._actions:
            self._actions[action.id] = action

    def add(self, action: Action) -> list[Action]:
        """Add the newest action, and return those that are forgotten."""
        self._actions[action.id] = action
        size = self._sizes[action.id] = action.kept_bytes
        self._count(action.share, 1, size)
        forgotten = []
        while len(self._actions) > self._maximum:
            forgotten.append(self._forget_oldest_of(self._of_share))
        while self._bytes_of_share.total() > self._max_bytes and len(self._actions) > 1:
            forgotten.append(self._forget_oldest_of(self._bytes_of_share))
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

    def _forget_oldest_of(self, shares: Counter[str]) -> Action:
        share = max(shares, key=shares.__getitem__)
        oldest = next(action for action in self._actions.values() if action.share == share)
        del self._actions[oldest.id]
        self._count(share, -1, -self._sizes.pop(oldest.id))
        return oldest

    def _count(self, share: str, number: int, size: int) -> None:
        self._of_share[share] += number
        self._bytes_of_share[share] += size
        if not self._of_share[share]:
            del self._of_share[share], self._bytes_of_share[share]
