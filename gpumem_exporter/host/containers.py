"""Read the containers and the Kubernetes pod uid of a process from its cgroup."""

from __future__ import annotations

import re

__all__ = ["container_id", "container_ids", "pod_uid", "user_of_slice"]

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
    """Return the ids of the containers in a text of /proc/PID/cgroup, the outermost first; empty if there is none.

    A container may create cgroups below its own, of any name, but none beside or above it: the first ids are true.
    """
    for line in cgroup_text.splitlines():
        segments = line.split(":", 2)[-1].split("/")
        found = [match.group(1) for each in segments if (match := _ID.search(each)) and _MONITOR not in each]
        if found:
            return tuple(found)
    return ()


def user_of_slice(cgroup_text: str) -> int | None:
    """Return the user of systemd's slice in which a process is, from a text of /proc/PID/cgroup; None if in none."""
    for line in cgroup_text.splitlines():
        found = _USER.match(line.split(":", 2)[-1])
        if found is not None:
            return int(found.group(1))
    return None


def pod_uid(cgroup_text: str) -> str:
    """Return the uid of the innermost pod in a text of /proc/PID/cgroup, as Kubernetes writes it; empty if none."""
    for line in cgroup_text.splitlines():
        for segment in reversed(line.split(":", 2)[-1].split("/")):
            found = _POD.search(segment)
            if found is not None:
                return found.group(1).replace("_", "-")
    return ""
