"""Starts a process with open sockets as systemd does: sd_listen_fds(3)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_LAUNCHER = """
import fcntl, os, sys
sockets, command = sys.argv[1].split(","), sys.argv[2:]
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sockets]
for position, copy in enumerate(copies):
    os.dup2(copy, 3 + position)
    os.close(copy)
os.environ.update(LISTEN_FDS=str(len(sockets)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="a:b")
os.execv(command[0], command)
"""


def start_activated(sockets: Sequence[socket.socket], command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command with these sockets from file descriptor 3 on. Both pipes are text.

    `options` are those of Popen.
    """
    numbers = [sock.fileno() for sock in sockets]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM_", "LISTEN_"))}
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, ",".join(map(str, numbers)), *command],
        pass_fds=numbers,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
