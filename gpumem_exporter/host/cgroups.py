"""What the cgroup of a process shows: its containers, its Kubernetes pod, its user, and an id that sockets have too."""

from __future__ import annotations

import os
import re

from gpumem_exporter.host.proc_entries import HiddenError, ProcEntries

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


def container_id(cgroup_text: str) -> str:
    """Return the id of the innermost container in a text of /proc/PID/cgroup (v1 or v2); empty if there is none."""
    return (container_ids(cgroup_text) or ("",))[-1]


def container_ids(cgroup_text: str) -> tuple[str, ...]:
    """Return the ids of the containers, the outermost first; empty if there is none.

    A container may create cgroups below its own, of any name, but none beside or above it: the first ids are true.
    """
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


def _paths(cgroup_text: str) -> list[str]:
    # The name of a cgroup has no "\n", but may have other line ends, which splitlines() would find.
    return [line.split(":", 2)[-1] for line in cgroup_text.split("\n")]


class CgroupIds:
    """The ids of cgroups (version 2), by which the kernel shows where a socket was created. Thread-safe."""

    def __init__(self, entries: ProcEntries) -> None:
        self._entries = entries
        self._mount = self._find_mount()

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
        try:
            return os.stat(self._mount + os.fsdecode(path)).st_ino  # noqa: PTH116 - pathlib costs ten times as much
        except OSError:
            return None

    def _find_mount(self) -> str:
        for line in self._entries.text("self", "mountinfo").split("\n"):
            before, _, after = line.partition(" - ")
            fields = before.split(" ")
            if after.startswith("cgroup2 ") and len(fields) > 4 and fields[3] == "/":
                return fields[4]
        return ""
