"""Starts processes by fork from a parent that has done their imports, in a tenth of a second instead of seconds.

A zygote is an interpreter that imports the modules of most programs (torch and torch._dynamo, or the exporter's server)
and forks a child for each program. The child runs a module like `python -m`, with its own arguments, environment,
standard streams and session. Settings that are read only at the start of an interpreter are those of the zygote.
`fork_program` returns None for a program that needs other ones, and the caller starts a fresh interpreter. The same
applies to all programs with GPUMEM_TEST_ZYGOTE=0.

A forked program has the zygote as its parent, and /proc shows the zygote's command line and initial environment.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.paths import REPOSITORY

TORCH = ("torch", "torch._dynamo")
EXPORTER = (
    "gpumem_exporter.main",
    "gpumem_exporter.serve_command",
    "gpumem_exporter.app",
    "gpumem_exporter.serving",
)
"""The modules that a zygote imports before it forks."""

_READ_LATE = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "EMULATED_NODE",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables that programs read after their imports, besides this project's own."""
_OWN = "GPUMEM_"
_MAX_ZYGOTES = 4
"""The maximum number of zygotes in a test process; other programs start as fresh interpreters."""


class ForkedProcess:
    """A program that a zygote forked; a subset of `subprocess.Popen`.

    `stdin` and `stdout` are None if the caller passed a descriptor; `returncode` is negative for a signal.
    """

    def __init__(self, status: socket.socket, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self._status = status
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self.pid = int(self._receive())

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._collect(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit and return the exit status; raises `subprocess.TimeoutExpired` like Popen."""
        status = self._collect(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if it still runs."""
        self.send_signal(signal.SIGKILL)

    def _collect(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            self.returncode = int(self._receive())
            self._status.close()
        return self.returncode

    def _receive(self) -> bytes:
        message = self._status.recv(64)
        if not message:
            raise RuntimeError("the zygote exited; its messages are in the test's stderr")
        return message


class _Zygote:
    """A zygote, seen from the tests."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(far_end.fileno()), *imports],
                env=environment,
                cwd=REPOSITORY,
                pass_fds=(far_end.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def fork(self, request: Mapping[str, Any], stdin: int | None, stdout: int | None, stderr: int) -> ForkedProcess:
        with contextlib.ExitStack() as stack:
            status, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(far_end.close)
            opened: list[IO[bytes] | None] = []
            given = []
            for descriptor, mode in ((stdin, "wb"), (stdout, "rb")):
                if descriptor is not None:
                    opened.append(None)
                    given.append(descriptor)
                    continue
                read, write = os.pipe()
                near, far = (write, read) if mode == "wb" else (read, write)
                stack.callback(os.close, far)
                opened.append(os.fdopen(near, mode, 0))
                given.append(far)
            message = json.dumps(request).encode()
            socket.send_fds(self._control, [message], [far_end.fileno(), *given, stderr])
        return ForkedProcess(status, *opened)

    def close(self) -> None:
        self._control.close()
        self._process.wait(30)


_zygotes: dict[tuple[object, ...], _Zygote] = {}


def fork_program(
    imports: Sequence[str],
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int,
    new_session: bool = False,
) -> ForkedProcess | None:
    """Start `python -m module arguments…` from a zygote, in the current folder.

    `imports` is TORCH or EXPORTER; `environment` is complete. Standard input and output are new pipes if None. Returns
    None if the program needs a fresh interpreter.
    """
    settings = (environment.get("PYTORCH_CUDA_ALLOC_CONF", ""), environment.get("PYTORCH_ALLOC_CONF", ""))
    if os.environ.get("GPUMEM_TEST_ZYGOTE") == "0" or any("backend:" in setting for setting in settings):
        return None  # torch reads the backend at import, other settings at the first allocation
    fixed = {name: value for name, value in environment.items() if name not in _READ_LATE and not name.startswith(_OWN)}
    key = (*imports, *sorted(fixed.items()))
    zygote = _zygotes.get(key)
    if zygote is None:
        if len(_zygotes) == _MAX_ZYGOTES:
            return None
        if not _zygotes:
            atexit.register(_close_all)
        zygote = _zygotes[key] = _Zygote(imports, fixed)
    request = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": str(Path.cwd()),
        "new_session": new_session,
    }
    return zygote.fork(request, stdin, stdout, stderr)


def _close_all() -> None:
    while _zygotes:
        _zygotes.popitem()[1].close()


# In the zygote


class _Child:
    """A running child of the zygote: its pid, a pidfd, and the socket for its exit status."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        self.status = status

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            self.status.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.forget()

    def forget(self) -> None:
        os.close(self.descriptor)
        self.status.close()


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Returns the request in a child, and None in the zygote after the tests exited."""
    children: dict[int, _Child] = {}
    selector = selectors.PollSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fileobj)
                children.pop(key.fd).reap()
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not message:
                for child in children.values():
                    os.kill(child.pid, signal.SIGKILL)
                    child.reap()
                return None
            status = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid:
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
                status.send(str(pid).encode())
                child = _Child(pid, status)
                children[child.descriptor] = child
                selector.register(child.descriptor, selectors.EVENT_READ, child)
                continue
            for child in children.values():
                child.forget()
            status.close()
            control.close()
            for number, descriptor in enumerate(descriptors[1:]):
                os.dup2(descriptor, number)
                os.close(descriptor)
            request: dict[str, Any] = json.loads(message)
            return request


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    request = _serve(control)
    if request is None:
        return
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
