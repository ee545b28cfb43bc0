"""Finished actions, and the idempotency keys of all actions, as many as are kept."""

from __future__ import annotations

from collections import OrderedDict

from gpumem_exporter.actions.model import Action, ActionRequest

__all__ = ["ActionHistory"]


class ActionHistory:
    """Remembers finished actions, oldest first, and which request came with which key.

    Args:
        kept: The number of actions, and of keys, that are kept.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._actions: OrderedDict[str, Action] = OrderedDict()
        self._keys: OrderedDict[str, tuple[ActionRequest, str]] = OrderedDict()

    def get(self, action_id: str) -> Action | None:
        """Return a finished action, or None if it is not or no longer known."""
        return self._actions.get(action_id)

    def all(self) -> tuple[Action, ...]:
        """Return all finished actions, oldest first."""
        return tuple(self._actions.values())

    def add(self, action: Action) -> None:
        """Remember an action that has just finished."""
        self._actions[action.id] = action
        while len(self._actions) > self._kept:
            self._actions.popitem(last=False)

    def add_older(self, action: Action) -> bool:
        """Remember an action that finished before all others; False if it is known or there is no room."""
        if action.id in self._actions or len(self._actions) >= self._kept:
            return False
        self._actions[action.id] = action
        self._actions.move_to_end(action.id, last=False)
        return True

    def add_key(self, key: str, request: ActionRequest, action_id: str) -> None:
        """Remember which request came with an idempotency key."""
        self._keys[key] = (request, action_id)
        while len(self._keys) > self._kept:
            self._keys.popitem(last=False)

    def add_older_key(self, key: str, request: ActionRequest, action_id: str) -> None:
        """Remember a key of an earlier run, unless the key is known."""
        self._keys.setdefault(key, (request, action_id))

    def find_key(self, key: str) -> tuple[ActionRequest, str] | None:
        """Return the request that came with a key, and the id of its action."""
        return self._keys.get(key)
