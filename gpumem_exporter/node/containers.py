"""Finds out where a process runs, from files of /proc that need no right to trace the process.

A process is in the exporter's own namespaces if it is in the exporter's PID and user namespace and its cgroup has no
container besides the exporter's own. Otherwise its containers name its place, or its namespaces without a container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumem_client.wire.procfs import pid_namespace
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.node.proc_entries import HiddenError, ProcEntries

# docker, containerd, CRI-O and podman all name a container's cgroup after its id of 64 hexadecimal digits: alone
# (cgroupfs driver), between a prefix and `.scope` (systemd driver), or after a colon.
_ID = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
# The monitor process of a container is outside the container, but the name of its cgroup has the container's id.
_MONITOR = "-conmon-"
# The kubelet names a pod's cgroup after its uid: `podUID` (cgroupfs driver), or `kubepods-burstable-podUID.slice` with
# the dashes of the uid as underscores (systemd driver). A static pod's uid is a hash without dashes.
_POD = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}(?:([-_])[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12}|[0-9a-f]{24}))(?:\.slice)?(?::|$)"
)

# systemd gives each user a slice in which the user may create cgroups of every name. Only root can create the slice.
# In a cgroup namespace, the path of a cgroup outside of it starts with `..`.
_USER = re.compile(r"(?:/\.\.)*/user\.slice/user-([0-9]{1,10})\.slice(?:/|$)")
# slurmstepd makes `/system.slice/slurmstepd.scope/job_N` (version 2) and `/slurm/uid_U/job_N` (version 1), with the
# node's name where a machine has several slurmds. Only root can: a user or a container may make cgroups of every name,
# but below its own slice or container.
_SLURM = re.compile(
    r"(?:/\.\.)*/(?:system\.slice/(?:[^/]+_)?slurmstepd\.scope|slurm(?:_[^/]+)?/uid_[0-9]+)/job_([0-9]{1,20})(?:/|$)"
)
# The containers of a place. A container may nest others in itself without end; all of them are in its place.
_MAX_NESTED = 4
# A host with many containers has many mounts, each with the folders of an image's layers.
_LONGEST_MOUNTS = 16 << 20
# A container may make cgroups without end. Their folders are found again.
_MAX_FOLDERS = 4096
# PROC_CGROUP_INIT_INO of Linux.
_FIRST_CGROUP_NAMESPACE = 0xEFFFFFFB
# A uid that the exporter's user namespace does not have.
_NO_UID = (1 << 32) - 1


def container_id(cgroup_text: str) -> str:
    """Return the id of the innermost container in a text of /proc/PID/cgroup (v1 or v2); empty if there is none."""
    return (container_ids(cgroup_text) or ("",))[-1]


def container_ids(cgroup_text: str) -> tuple[str, ...]:
    """Return the ids of the containers, the outermost first; empty if there is none."""
    # A container may create cgroups below its own, of any name, but none beside or above it: the first ids are true.
    for path in _paths(cgroup_text):
        found = [match.group(1) for each in path.split("/") if (match := _ID.search(each)) and _MONITOR not in each]
        if found:
            return tuple(found)
    return ()


def user_of_slice(cgroup_text: str) -> int | None:
    """Return the user of systemd's slice in which a process is; None if it is in none."""
    found = next(filter(None, map(_USER.match, _paths(cgroup_text))), None)
    return int(found.group(1)) if found is not None else None


def pod_uid(cgroup_text: str) -> str:
    """Return the uid of the innermost pod, as Kubernetes writes it; empty if there is none."""
    segments = (segment for path in _paths(cgroup_text) for segment in reversed(path.split("/")))
    found = next(filter(None, map(_POD.search, segments)), None)
    return found.group(1).replace("_", "-") if found is not None else ""


def slurm_job(cgroup_text: str) -> str:
    """Return the Slurm job whose cgroup slurmstepd has made for a process; empty if there is none."""
    found = next(filter(None, map(_SLURM.match, _paths(cgroup_text))), None)
    return found.group(1) if found is not None else ""


def _paths(cgroup_text: str) -> list[str]:
    # The name of a cgroup has no "\n", but may have other line ends, which splitlines() would find.
    return [line.split(":", 2)[-1] for line in cgroup_text.split("\n")]


class CgroupIds:
    """The ids of cgroups (version 2), by which the kernel shows where a socket was created. Thread-safe."""

    def __init__(self, entries: ProcEntries) -> None:
        self._entries = entries
        self._mount = self._find_mount()
        self._folders: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Return whether the root of this cgroup namespace is mounted; otherwise no id can be read."""
        return bool(self._mount)

    def of(self, pid: int | str) -> int | None:
        """Return the id of a process's cgroup; None if the exporter cannot see the cgroup's folder."""
        try:
            lines = (self._entries.read(pid, "cgroup") or b"").split(b"\n")
        except HiddenError:
            return None
        path = next((line[3:] for line in lines if line.startswith(b"0::")), None)
        if not self._mount or path is None or b"/.." in path:
            return None
        folder = self._mount + os.fsdecode(path)
        try:
            found = os.stat(folder).st_ino  # noqa: PTH116 - pathlib costs ten times as much
        except OSError:
            return None
        if len(self._folders) >= _MAX_FOLDERS:
            self._folders.clear()
        self._folders[found] = folder
        return found

    def processes_in(self, cgroup_id: int) -> set[str] | None:
        """Return the pids of the processes in a cgroup; None if `of` has found no process in it, or it was removed."""
        folder = self._folders.get(cgroup_id)
        try:
            # A removed cgroup, and another one with its path, has another id.
            if folder is None or os.stat(folder).st_ino != cgroup_id:  # noqa: PTH116 - as above
                return None
            return set(Path(folder, "cgroup.procs").read_text("ascii").split())
        except OSError:
            return None  # removed, or its threads may be in other cgroups

    def _find_mount(self) -> str:
        for line in self._entries.text("self", "mountinfo", _LONGEST_MOUNTS).split("\n"):
            before, _, after = line.partition(" - ")
            fields = before.split(" ")
            if after.startswith("cgroup2 ") and len(fields) > 4 and fields[3] == "/":
                return fields[4]
        return ""


@dataclass(frozen=True, slots=True)
class _Namespaces:
    """What /proc shows of the namespaces of a process."""

    depth: int
    """How many PID namespaces the process is below /proc's: 0 if it is in the same one."""
    uid_map: bytes
    """The map of its user namespace, as the exporter's user namespace sees it."""
    containers: tuple[str, ...]
    slice_user: int | None
    """The user of systemd's slice in which the process is."""
    uid: int

    @property
    def made_by(self) -> int:
        """The user outside that is root of the user namespace: it, or root, has made the namespace."""
        first = self.uid_map.split(None, 3)[:3]
        outside = int(first[1]) if len(first) == 3 else _NO_UID
        return self.uid if outside == _NO_UID else outside


class Places:
    """Finds the places of processes in the proc file system of the exporter's PID namespace. Thread-safe."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._entries = ProcEntries(proc)
        own = self._namespaces("self")
        # In a /proc of another PID namespace, the pid of a socket is the pid of another process.
        self._own = own if own is not None and own.depth == 0 else None
        self._has_cgroup_namespace = _has_cgroup_namespace(proc)

    def of(self, pid: int) -> Place:
        """Return the place of a process; unknown if it does not exist, or if /proc does not show it to this user.

        Takes about 50 microseconds. The caller makes sure that the pid still belongs to the process afterwards.
        """
        own, found = self._own, self._namespaces(pid)
        if own is None or found is None:
            return UNKNOWN
        # The exporter may run in a container, and its node in another one (kind).
        containers = _without_prefix(found.containers, own.containers)[:_MAX_NESTED]
        # The containers count before the namespaces: `--pid host` and `hostPID` do not make a container a part of the
        # host. A user without any right may make cgroups that are named as containers, in its slice of systemd, and
        # user namespaces: such places count for that user in every limit.
        if containers:
            return Place(known=True, container=".".join(containers), user=found.slice_user)
        if (found.depth, found.uid_map) == (own.depth, own.uid_map):
            return HERE
        name = self._name_of_namespaces(pid)
        if not name:
            return UNKNOWN
        user = found.slice_user
        if user is None and found.uid_map != own.uid_map:
            user = found.made_by
        return Place(known=True, container=name, user=user)

    def is_outside_container(self, pid: int) -> bool:
        """Return whether the exporter runs in a container, and the process in no container or in another one."""
        own = self._own.containers if self._own is not None else ()
        if not own and not self._has_cgroup_namespace:
            return False
        text = self._entries.text(pid, "cgroup")
        # In a cgroup namespace, the path of a cgroup outside of it starts with `..`.
        outside = not text or any(path.startswith("/..") for path in _paths(text))
        return outside or container_ids(text)[: len(own)] != own

    def _namespaces(self, pid: int | str) -> _Namespaces | None:
        try:
            uid_map, cgroup = self._entries.read(pid, "uid_map"), self._entries.read(pid, "cgroup")
        except HiddenError:
            return None
        status = self._entries.status(pid)
        if status is None or not status.pids or uid_map is None or cgroup is None:
            return None
        text = cgroup.decode("utf-8", "replace")
        return _Namespaces(len(status.pids) - 1, uid_map, container_ids(text), user_of_slice(text), status.uid)

    def _name_of_namespaces(self, pid: int) -> str:
        """Return a name for the namespaces of a process that no cgroup names; empty if there is none."""
        # The inodes need the right to trace the process. The id of its root mount, in its mount namespace, does not.
        folder = self._entries.path(pid)
        processes = pid_namespace(folder)
        try:
            users = os.stat(f"{folder}/ns/user").st_ino  # noqa: PTH116 - pathlib costs ten times as much
        except OSError:
            users = 0
        if processes and users:
            return f"pid{processes}.user{users}"
        rows = [line.split(" ", 5) for line in self._entries.text(pid, "mountinfo").split("\n")]
        root = next((row[0] for row in rows if len(row) > 5 and row[4] == "/"), None)
        return f"mount{int(root)}" if root is not None else ""


def _has_cgroup_namespace(proc: Path) -> bool:
    """Return whether this process is in another cgroup namespace than the machine's first one."""
    try:
        return (proc / "self" / "ns" / "cgroup").stat().st_ino != _FIRST_CGROUP_NAMESPACE
    except OSError:
        return False


def _without_prefix(containers: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """Return the containers without the outer ones in which the exporter is too."""
    for index, (one, other) in enumerate(zip(containers, own, strict=False)):
        if one != other:
            return containers[index:]
    return containers[len(own) :]
