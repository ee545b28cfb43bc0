"""The known actions: the running ones, the last finished ones, and the idempotency keys of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from gpumem_exporter.actions.lifecycle import RunningAction
from gpumem_exporter.actions.model import Action, SubmittedAction
from gpumem_exporter.actions.request import ActionRequest
from gpumem_exporter.errors import IdempotencyConflictError

__all__ = ["ActionRegistry"]


class ActionRegistry:
    """Finds actions by id and by idempotency key.

    Args:
        max_finished: the number of finished actions, and of keys, that are kept.
    """

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._running: dict[str, RunningAction] = {}
        self._finished: OrderedDict[str, Action] = OrderedDict()
        self._keys: OrderedDict[str, tuple[ActionRequest, str]] = OrderedDict()

    def __iter__(self) -> Iterator[RunningAction]:
        """Iterate over a copy of the running actions, oldest first."""
        return iter(tuple(self._running.values()))

    def running(self, action_id: str) -> RunningAction | None:
        """Return an action that has not ended; None for any other."""
        return self._running.get(action_id)

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        running = self._running.get(action_id)
        return running.action if running is not None else self._finished.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """Return all known actions, newest first."""
        actions = [*self._finished.values(), *(running.action for running in self._running.values())]
        return tuple(sorted(actions, key=lambda action: action.created_unix_seconds, reverse=True))

    def with_key(self, key: str, request: ActionRequest) -> Action | None:
        """Return the action that this request has started with this key, if it is still known.

        Raises:
            IdempotencyConflictError: the key was used with another request.
        """
        first, action_id = self._keys.get(key, (None, ""))
        known = self.get(action_id)
        if known is not None and first != request:
            raise IdempotencyConflictError(f"Idempotency-Key {key!r} was used for another request (action {action_id})")
        return known

    def start(self, running: RunningAction, request: ActionRequest, key: str | None) -> None:
        """Add a new action."""
        self._running[running.action.id] = running
        if key is not None:
            self._keys[key] = (request, running.action.id)
            while len(self._keys) > self._max_finished:
                self._keys.popitem(last=False)

    def finish(self, action: Action) -> None:
        """Add a finished action, or move it from the running ones."""
        self._running.pop(action.id, None)
        self._finished[action.id] = action
        while len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def recall(self, action: Action, submitted: SubmittedAction | None) -> None:
        """Add an action of an earlier run of the exporter, and the request that started it.

        Called with the newest first. An action of an earlier run never displaces one of this run.
        """
        if self.get(action.id) is not None or len(self._finished) >= self._max_finished:
            return
        self._finished[action.id] = action
        self._finished.move_to_end(action.id, last=False)
        if submitted is not None and submitted.idempotency_key is not None:
            self._keys.setdefault(submitted.idempotency_key, (submitted.request, action.id))
