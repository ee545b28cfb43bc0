"""Processes of other users and namespaces on this machine that send requests.

They are forks of the test: another user may not be allowed to read this repository, and a fork needs no import.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - imported by the first connection; a fork of another user cannot read it
import json
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpumem_exporter.errors import ExporterUnreachableError
from gpumem_exporter.procfs import pid_namespace, start_time_ticks
from gpumem_exporter.wire.http import Connection
from tests.support.waiting import patient

__all__ = ["NEW_PID_NAMESPACE", "NEW_USER_NAMESPACE", "LocalUser", "Reply", "needs_root"]

NEW_PID_NAMESPACE = 0x20000000
NEW_USER_NAMESPACE = 0x10000000

_PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


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

    Args:
        uid: the user.
        namespaces: the flags of unshare(2) for its namespaces.

    Attributes:
        pid: The process, in this PID namespace.
        own_pid: The process, in its own PID namespace.
        pid_namespace: Its PID namespace.
        start_time_ticks: The start of the process.
    """

    def __init__(self, uid: int, namespaces: int = 0) -> None:
        self.uid = uid
        self._pipe, other_end = multiprocessing.Pipe()
        self._child = os.fork()
        if not self._child:
            self._pipe.close()
            _become(uid, namespaces, other_end)
        other_end.close()
        assert self._pipe.poll(patient(10)), "the process of the user did not start"
        self.pid, self.own_pid, self.pid_namespace, self.start_time_ticks = self._pipe.recv()

    def request(self, url: str, method: str, path: str, document: Any = None, **headers: str) -> Reply:
        """Send a request on a new connection; underscores in header names become hyphens."""
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


def _become(uid: int, namespaces: int, pipe: Pipe) -> None:
    """Run the requests of a fork as the user; never returns."""
    status = 1
    try:
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


def _take_user(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # setuid(2) hides /proc/PID/fd from other processes of the user; a program that the user starts is not hidden.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def _sent(url: str, method: str, path: str, document: Any, headers: dict[str, str]) -> tuple[int, Any]:
    body = None if document is None else json.dumps(document).encode()
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
