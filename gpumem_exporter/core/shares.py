"""The rule of shares: of something limited, the owner with the most loses first.

An owner is a user, a container or a machine: the part of a name that its client cannot choose, such as
`ProcessKey.share`. So no owner can take from others what they need. This module says who loses; what the owner loses
(its oldest, its latest, its largest) is the caller's decision.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """What each owner has of something limited: a number of items, or their bytes. Not thread-safe.

    Count a new item first, then let `over()` lose items until it is None:

        shares.put(owner, size)
        while (loser := shares.over()) is not None:
            ...  # remove an item of the loser
            shares.drop(loser, its_size)

    An owner that has at most an equal part of the limit loses nothing. With `of_owner`, each owner also has a limit of
    its own. `owners` has the owner of each item that is there already. With a limit of 0, `over()` is the owner with
    the most.
    """

    def __init__(self, limit: int, owners: Iterable[str] = (), *, of_owner: int | None = None) -> None:
        self._limit = limit
        self._of_owner = limit if of_owner is None else of_owner
        # The owner that put last is the last one.
        self._sizes: dict[str, int] = {}
        self.total = 0
        """What all owners have."""
        for owner in owners:
            self.put(owner)

    def __getitem__(self, owner: str) -> int:
        """Return what an owner has."""
        return self._sizes.get(owner, 0)

    def put(self, owner: str, size: int = 1) -> None:
        """Count an item of an owner."""
        self._sizes[owner] = self._sizes.pop(owner, 0) + size
        self.total += size

    def drop(self, owner: str, size: int = 1) -> None:
        """Count an item of an owner no longer."""
        self._sizes[owner] -= size
        self.total -= size
        if not self._sizes[owner]:
            del self._sizes[owner]

    def over(self) -> str | None:
        """Return the owner that loses; None if nothing has to be lost."""
        if not self._sizes or (self.total <= self._limit and max(self._sizes.values()) <= self._of_owner):
            return None
        # Of equal owners, the one that put last loses. Otherwise two owners would take the last place from each other
        # for ever.
        return max(reversed(self._sizes), key=self._sizes.__getitem__)
