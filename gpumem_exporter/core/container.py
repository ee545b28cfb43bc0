"""Where a process runs: beside the exporter, or in a container. Pure; `host.places` reads it from /proc.

Rights, groups and shares compare the place as well as the uid: two pods that run as uid 1000 have different users.
"""

from __future__ import annotations

from typing import NamedTuple

# The characters of a container's id that are shown, as docker shows them.
_SHOWN = 12


class Place(NamedTuple):
    """Where a process runs, as the kernel shows it. No report has a part in it."""

    known: bool
    """False if the exporter cannot see the process."""
    container: str = ""
    """The ids of its containers, the outermost first, joined by dots; empty in the exporter's own namespaces.

    A container without an id is named after its namespaces.
    """
    user: int | None = None
    """The user of the host that can make places like this without end; None if only root can."""

    @property
    def here(self) -> bool:
        """Whether the process runs in the exporter's PID and user namespace, and in no container of its own."""
        return self.known and not self.container

    def reaches(self, other: Place) -> bool:
        """Return whether a process here may act on processes of its user there, as with kill(2).

        A process of the host reaches its user's processes in containers. A container reaches only itself.
        """
        return self.here or (self.known and self == other)

    def share(self, uid: int | None) -> str:
        """Return the holder of one share of every limit for a process of this user in this place."""
        # The container, not its users: its root can become every uid. A container that a user can make without end
        # counts for that user.
        if self.container and self.user is None:
            return f"container:{self.container}"
        user = uid if self.user is None else self.user
        return "unattested" if user is None else f"uid:{user}"

    def __str__(self) -> str:
        if not self.known:
            return "unknown"
        shown = [each[:_SHOWN] if len(each) == 64 else each for each in self.container.split(".")]
        # A user chooses the names of its containers, and may choose the name of another container.
        return ".".join(shown if self.user is None else [*shown, str(self.user)])


HERE = Place(known=True)
"""The exporter's own namespaces."""
UNKNOWN = Place(known=False)
"""A process that the exporter cannot see. It reaches nothing."""
