"""Which container a process is in, told by its cgroup. Pure."""

from __future__ import annotations

import re

__all__ = ["container_id"]

# docker, containerd, CRI-O and podman all name a container's cgroup after its id, 64 hexadecimal digits: alone
# (cgroupfs driver), or behind a prefix and before `.scope` (systemd driver), or behind a colon.
_ID = re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")
# The monitor beside a container lives in a cgroup with the container's id in its name, and is not in the container.
_MONITOR = "-conmon-"


def container_id(cgroup_text: str) -> str:
    """The id of the innermost container in the text of /proc/PID/cgroup, v1 or v2; empty outside of containers."""
    for line in cgroup_text.splitlines():
        path = line.split(":", 2)[-1]
        for segment in reversed(path.split("/")):
            found = _ID.search(segment)
            if found is not None and _MONITOR not in segment:
                return found.group(1)
    return ""
