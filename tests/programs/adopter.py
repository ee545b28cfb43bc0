"""A subreaper: adopts what runs below it. It starts the command of its arguments, or the lines of its stdin."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36

ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
for command in sys.argv[1:] or sys.stdin:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], environment, setsigdef=[signal.SIGCHLD])
    print(pid, flush=True)
while True:
    time.sleep(3600)
