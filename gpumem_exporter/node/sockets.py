"""Finds the processes that have a TCP socket open, by the descriptors in /proc/PID/fd.

Reading descriptors needs the right to trace the process: an exporter reads the processes of its own user, and with
CAP_SYS_PTRACE the processes of all users.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from gpumem_client.wire.peer import SocketOwner
from gpumem_exporter.core.container import UNKNOWN, Place
from gpumem_exporter.node.containers import CgroupIds, Places
from gpumem_exporter.node.proc_entries import ProcEntries


class SocketHolders:
    """Finds the places of the processes that hold sockets; `places` finds the place of each process. Thread-safe."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._entries = ProcEntries(Path("/proc"))
        self._cgroup_ids = CgroupIds(self._entries)

    def created_in(self, owner: SocketOwner) -> int | None:
        """Return the cgroup (version 2) in which a socket was created; None if kernel or mounts do not show it."""
        return owner.cgroup_id if self._cgroup_ids else None

    def places(self, wanted: Collection[SocketOwner]) -> dict[SocketOwner, set[Place]]:
        """Return the places of all processes that hold each of these sockets, in one pass over /proc.

        Reads the descriptors of the users' processes in the cgroups of the sockets: 40 microseconds for each process.
        Where the kernel does not show the cgroups, it reads the descriptors of all processes of these users.
        """
        by_inode = {owner.inode: owner for owner in wanted}
        found: dict[SocketOwner, set[Place]] = {owner: set() for owner in wanted}
        uids = {owner.uid for owner in wanted}
        cgroup_ids = {self.created_in(owner) for owner in wanted}
        pids = self._processes_in(cgroup_ids)
        for pid in self._entries.pids() if pids is None else pids:
            folder = self._entries.owner(pid)
            if folder is None or (
                # Root owns the folder of a process that is not dumpable.
                folder.st_uid not in uids and (folder.st_uid != 0 or self._entries.uid(pid) not in uids)
            ):
                continue
            if pids is None and None not in cgroup_ids and self._cgroup_ids.of(pid) not in cgroup_ids:
                continue
            for inode in self.sockets_of(pid, by_inode):
                place = self.place_of(int(pid), by_inode[inode])
                if place is not None:
                    found[by_inode[inode]].add(place)
        return found

    def _processes_in(self, cgroup_ids: Collection[int | None]) -> set[str] | None:
        """Return the pids of the processes in these cgroups; None if all processes must be searched for them."""
        found: set[str] = set()
        for cgroup_id in cgroup_ids:
            pids = self._cgroup_ids.processes_in(cgroup_id) if cgroup_id is not None else None
            if pids is None:
                return None
            found |= pids
        return found

    def place_of(self, pid: int, owner: SocketOwner) -> Place | None:
        """Return the place of a process that holds a socket; None if it does not, or if the socket may be another's."""
        # A descriptor can be passed to another process, also into and out of a container. So a process counts only if
        # the socket is of its user and, where the kernel shows that, was created in its cgroup.
        created_in = self.created_in(owner)
        if self._entries.uid(pid) != owner.uid or (created_in is not None and self._cgroup_ids.of(pid) != created_in):
            return None
        place = self._places.of(pid)
        if place.here and self._places.is_outside_container(pid):
            # The container runtime enters the network of a pod to forward a port, as root of the host, for each user of
            # `kubectl port-forward`. Over loopback, it cannot be distinguished from a service of the host.
            place = UNKNOWN
        # After the place: the process that has the socket now had this pid before.
        return place if self.sockets_of(pid, {owner.inode: owner}) else None

    def sockets_of(self, pid: int | str, wanted: Mapping[int, SocketOwner]) -> list[int]:
        """Return the wanted sockets that a process has open; empty if this user may not see its descriptors."""
        names = {f"socket:[{inode}]": inode for inode in wanted}
        found: list[int] = []
        try:
            folder = os.open(self._entries.path(pid, "fd"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return found
        try:
            for descriptor in os.listdir(folder):  # noqa: PTH208 - pathlib costs ten times as much
                with contextlib.suppress(OSError):  # this one was closed meanwhile
                    inode = names.get(os.readlink(descriptor, dir_fd=folder))
                    if inode is not None:
                        found.append(inode)
                        if len(found) == len(names):
                            break
        except OSError:
            pass  # the process has exited
        finally:
            os.close(folder)
        return found
