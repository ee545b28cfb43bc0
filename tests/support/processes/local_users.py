"""A node that several users and containers share: a real exporter of root, and processes of users that send requests.

The processes are forks: another user may not be allowed to read this repository, and a fork needs no import.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - imported by the first connection; a fork of another user cannot read it
import json
import multiprocessing
import os
import shutil
import struct
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from gpumem_client.wire.protocol import MODES, REPORTS_PATH, Report, to_wire
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

NEW_PID_NAMESPACE = 0x20000000
NEW_USER_NAMESPACE = 0x10000000
NEW_MOUNT_NAMESPACE = 0x00020000

_PR_SET_DUMPABLE = 4

_CAPABILITIES_OF_DOCKER = 0xA80425FB
"""The capabilities of root in a container that docker starts, among them CAP_SETUID."""
_CAPABILITY_VERSION = 0x20080522


def _cgroups() -> Path | None:
    """Return where version 2 of the cgroups is mounted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)


class Cgroup:
    """A cgroup that is named as docker names the cgroup of a container."""

    def __init__(self, container_id: str, below: str = "") -> None:
        root = _cgroups()
        assert root is not None
        self.path = root / below / f"docker-{container_id}.scope"
        self.path.mkdir()

    def enter(self) -> None:
        """Move this process into it."""
        (self.path / "cgroup.procs").write_text("0")

    def close(self) -> None:
        """Remove it, once its processes have ended."""
        wait_for(lambda: not (self.path / "cgroup.procs").read_text(), "the end of the processes of a cgroup")
        self.path.rmdir()


def _can_make_cgroups() -> bool:
    try:
        cgroup = Cgroup(uuid4().hex * 2)  # other workers try at the same time
    except (AssertionError, OSError):
        return False
    cgroup.close()
    return True


needs_cgroups = pytest.mark.skipif(not _can_make_cgroups(), reason="creating cgroups is not allowed here")


class Reply(NamedTuple):
    """The reply to a request: its status and its JSON document."""

    status: int
    document: Any

    @property
    def detail(self) -> str:
        """The detail of a problem."""
        return str(self.document["detail"])


class LocalUser:
    """A process of a user.

    `namespaces` are flags of unshare(2). A process in the cgroup of a container has docker's capabilities. `pid` is in
    this PID namespace, `own_pid` in its own.
    """

    def __init__(self, uid: int, namespaces: int = 0, cgroup: Cgroup | None = None) -> None:
        self.uid = uid
        self._pipe, other_end = multiprocessing.Pipe()
        self._child = os.fork()
        if not self._child:
            self._pipe.close()
            _become(uid, namespaces, cgroup, other_end)
        other_end.close()
        assert self._pipe.poll(patient(10)), "the process of the user did not start"
        self.pid, self.own_pid, self.pid_namespace, self.start_time_ticks = self._pipe.recv()
        self._sequence = 0

    def report(self, **changes: Any) -> Report:
        """Return a true report of this process, with changes."""
        self._sequence += 1
        true = {
            "start_time_ticks": self.start_time_ticks,
            "pid_namespace": self.pid_namespace,
            "session": f"{self.uid}-{self.pid}",
            "sequence": self._sequence,
        }
        return report(**{"pid": self.own_pid, **true, **changes})

    def send(self, url: str, sent: Report, **headers: str) -> Reply:
        """Send a report on a new connection."""
        return self.request(url, "POST", REPORTS_PATH, to_wire(sent), **headers)

    def request(self, url: str, method: str, path: str, document: Any = None, **headers: str) -> Reply:
        """Send a request on a new connection; underscores in header names become hyphens. Bytes are a body."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        self._pipe.send((url, method, path, document, sent))
        assert self._pipe.poll(patient(30)), f"{method} {path} was not answered"
        return Reply(*self._pipe.recv())

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        os.waitpid(self._child, 0)


def _become(uid: int, namespaces: int, cgroup: Cgroup | None, pipe: Pipe) -> None:
    """Run the requests of a fork as the user; never returns."""
    status = 1
    try:
        if cgroup is not None:
            cgroup.enter()
        if namespaces & NEW_USER_NAMESPACE:
            _take_user(uid)
        if namespaces and ctypes.CDLL(None, use_errno=True).unshare(namespaces) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        if namespaces & NEW_PID_NAMESPACE:
            child = os.fork()  # only children are in the new namespace
            if child:
                pipe.close()
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os._exit(status)
        facts = (int(Path("/proc/self").readlink().name), os.getpid(), pid_namespace(), start_time_ticks())
        if cgroup is not None:
            _keep_capabilities_of_docker()
        if not namespaces & NEW_USER_NAMESPACE:
            _take_user(uid)
        pipe.send(facts)
        while (order := pipe.recv()) is not None:
            pipe.send(_sent(*order))
        status = 0
    except EOFError:
        status = 0
    except BaseException:
        traceback.print_exc()  # pytest shows it with the failure of the parent
        raise
    finally:
        os._exit(status)


def _keep_capabilities_of_docker() -> None:
    kept = _CAPABILITIES_OF_DOCKER
    header, sets = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _take_user(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # setuid(2) hides /proc/PID/fd from other processes of the user; a program that the user starts is not hidden.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def _sent(url: str, method: str, path: str, document: Any, headers: dict[str, str]) -> tuple[int, Any]:
    body = document
    if document is not None and not isinstance(document, bytes):
        body = json.dumps(document, ensure_ascii=False).encode()
    if body is not None:
        headers = {"Content-Type": "application/json", **headers}
    connection = Connection(url, timeout_seconds=patient(30))
    try:
        answer = connection.request(method, path, body, headers)
    except ExporterUnreachableError as error:
        return 0, {"detail": str(error)}
    finally:
        connection.close()
    return answer.status, json.loads(answer.body)


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
