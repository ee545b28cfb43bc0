"""A node that several users and containers share: a real exporter of root, and their processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from gpumem_client.wire.protocol import MODES
from tests.support.builders.builders import MIB, UUIDS, sample
from tests.support.processes.local_users import NEW_MOUNT_NAMESPACE, NEW_PID_NAMESPACE, Cgroup, LocalUser, Reply
from tests.support.servers.exporter_process import QUICK, ExporterProcess

ACTIONS = "/api/v1/actions"
ADA, EVE = 1001, 1002
CONTAINER = NEW_PID_NAMESPACE | NEW_MOUNT_NAMESPACE
KINDS = {
    "docker": (CONTAINER, True),
    "docker --pid host": (NEW_MOUNT_NAMESPACE, True),
    "namespaces only": (CONTAINER, False),
}
"""The namespaces of a container, and whether its cgroup names it."""
_FLAGS = (*QUICK, "--report.expiry", "600", "--action.allow", "default,set_memory_fraction,terminate")


def open_folder(owner: int = 0) -> Path:
    """Return a new folder that every user can search, which the folders of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="gpumem-"))
    folder.chmod(0o755)
    os.chown(folder, owner, owner)
    return folder


class SharedNode:
    """An exporter that allows every action, users of the host, and containers.

    `launcher` starts the exporter, as in `ExporterProcess`; `owner` is the user of the socket's folder.
    """

    def __init__(self, *flags: str, launcher: Sequence[str] = (), owner: int = 0) -> None:
        self.folder = open_folder(owner)
        self.exporter = ExporterProcess(self.folder, *_FLAGS, *flags, launcher=launcher)
        self.url, self.tcp = self.exporter.url, self.exporter.tcp_url
        self.users: list[LocalUser] = []
        self.cgroups: list[Cgroup] = []

    def user(self, uid: int, namespaces: int = 0, cgroup: Cgroup | None = None, **report: Any) -> LocalUser:
        """Start a process of a user, which reports itself."""
        user = LocalUser(uid, namespaces, cgroup)
        self.users.append(user)
        reply = self.report(user, **report)
        assert reply.status == 200, reply
        return user

    def container(self, kind: str = "docker") -> dict[str, Any]:
        """Return the place of a new container, for `user`. It has the namespaces of its first process."""
        namespaces, has_cgroup = KINDS[kind]
        if has_cgroup:
            self.cgroups.append(Cgroup(uuid4().hex * 2))
        return {"namespaces": namespaces, "cgroup": self.cgroups[-1] if has_cgroup else None}

    def report(self, sender: LocalUser, about: LocalUser | None = None, url: str = "", **changes: Any) -> Reply:
        """Let a user report about a process, by default about its own."""
        known = {"modes": MODES, "devices": (sample(UUIDS[0], 0, MIB),)}
        return sender.send(url or self.url, (about or sender).report(**{**known, **changes}))

    def close(self) -> None:
        """End all processes."""
        for user in self.users:
            user.close()
        for cgroup in reversed(self.cgroups):
            cgroup.close()
        self.exporter.close()
        shutil.rmtree(self.folder)


def act(user: LocalUser, url: str, action: str = "empty_cache", **request: Any) -> Reply:
    """Let a user request an action, by default a dry run; `key` is its idempotency key."""
    headers = {"Idempotency_Key": request.pop("key")} if "key" in request else {}
    document = {"action": action, "wait_seconds": 0, "dry_run": True, **request}
    return user.request(url, "POST", ACTIONS, document, **headers)
