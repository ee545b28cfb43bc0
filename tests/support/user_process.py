"""A process of a chosen user, also in a container, that sends the requests that a test gives it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpumem_exporter.procfs import pid_namespace, start_time_ticks
from gpumem_exporter.wire.protocol import REPORTS_PATH, Report, to_wire
from tests.support.builders import report
from tests.support.waiting import wait_for

__all__ = ["NEW_PID", "NEW_USER", "UserProcess", "user_process"]

NEW_PID, NEW_USER = 0x20000000, 0x10000000
"""CLONE_NEWPID, CLONE_NEWUSER."""


@dataclass(slots=True)
class UserProcess:
    """A running process and the pipes to it.

    Attributes:
        pid: in the namespace of the test.
        own_pid: in its own PID namespace.
    """

    pid: int
    own_pid: int
    requests: BinaryIO
    answers: BinaryIO
    sequence: int = 0

    def report(self, **changes: Any) -> Report:
        """Return a true report of this process, with changes."""
        self.sequence += 1
        entry = f"/proc/{self.pid}"
        true = {
            "start_time_ticks": start_time_ticks(entry),
            "pid_namespace": pid_namespace(entry),
            "session": f"session of {self.pid}",
            "sequence": self.sequence,
        }
        return report(**{"pid": self.own_pid, **true, **changes})

    def send(self, url: str, sent: Report, **headers: str) -> tuple[int, str]:
        """Send a report on a new connection of this process; return the status and the body of the answer."""
        return self.request(url, "POST", REPORTS_PATH, to_wire(sent), **headers)

    def request(self, url: str, method: str, path: str, document: Any = None, **headers: str) -> tuple[int, str]:
        """Send a request on a new connection of this process; return the status and the body of the answer."""
        body = b"" if document is None else json.dumps(document, ensure_ascii=False).encode()
        sent = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close", **headers}
        lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in sent.items())]
        raw = "\r\n".join((*lines, "", "")).encode() + body
        self.requests.write(json.dumps([url, len(raw)]).encode() + b"\n" + raw)
        self.requests.flush()
        answer = self.answers.read(int(self.answers.readline()))
        head, _, text = answer.decode().partition("\r\n\r\n")
        assert head, "the connection failed"
        return int(head.split()[1]), text


@contextlib.contextmanager
def user_process(uid: int, *, namespace: int = 0) -> Iterator[UserProcess]:
    """Start a process of this user, in a namespace of its own if one is given. Only root can.

    In a PID namespace it is the first process. In a user namespace it is root, and so it is outside.
    """
    to_child, requests = os.pipe()
    answers, to_parent = os.pipe()
    starter = os.fork()
    if starter == 0:
        _start(uid, namespace, to_child, to_parent, (requests, answers))
    os.close(to_child)
    os.close(to_parent)
    with os.fdopen(requests, "wb") as writer, os.fdopen(answers, "rb") as reader:
        line = reader.readline()
        assert line, "the process did not start"
        pid = int(line)
        for name in ("uid_map", "gid_map") if namespace == NEW_USER else ():
            Path(f"/proc/{pid}/{name}").write_text("0 0 1\n")
        writer.write(b"\n")
        writer.flush()
        wait_for(lambda: f"\nUid:\t{uid}\t" in _status(pid), "its user")
        try:
            yield UserProcess(pid, 1 if namespace == NEW_PID else pid, writer, reader)
        finally:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: os.waitpid(starter, os.WNOHANG)[0] == starter, "its end")


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _start(uid: int, namespace: int, requests: int, answers: int, of_parent: tuple[int, int]) -> None:
    """The child: only system calls, because the parent may have threads."""
    try:
        for descriptor in of_parent:
            os.close(descriptor)
        if namespace and ctypes.CDLL(None).unshare(namespace) != 0:
            os._exit(1)
        pid = os.fork() if namespace == NEW_PID else 0
        if pid:
            os.write(answers, f"{pid}\n".encode())
            os.close(answers)
            os.waitpid(pid, 0)
            os._exit(0)
        if namespace != NEW_PID:
            os.write(answers, f"{os.getpid()}\n".encode())
        os.read(requests, 1)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        with os.fdopen(requests, "rb") as reader:
            while line := reader.readline():
                url, length = json.loads(line)
                answer = _exchange(url, reader.read(length))
                os.write(answers, f"{len(answer)}\n".encode() + answer)
    finally:
        os._exit(1)


def _exchange(url: str, request: bytes) -> bytes:
    try:
        if url.startswith("unix://"):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(url.removeprefix("unix://"))
        else:
            host, _, port = url.removeprefix("http://").rpartition(":")
            connection = socket.socket()
            connection.connect((host, int(port)))  # create_connection imports a codec, which this user cannot read
        with connection:
            connection.sendall(request)
            answer = b""
            while data := connection.recv(65536):
                answer += data
            return answer
    except OSError:
        return b""
