"""Small programs on an emulated node without torch, which start in 50 ms.

A program is Python source after one of two preambles: `CUDA` (the runtime through ctypes) or `NVML` (pynvml,
initialized). In both, `say(value)` writes one JSON line, and `wait()` returns when the test calls `go()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from typing_extensions import Self

from tests.support.processes.zygote import ForkedProcess
from tests.support.waiting import patient

from .node import EmulatedNode

SAY_AND_WAIT = """
import json, os, sys, threading, time
def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
def wait():
    sys.stdin.readline()
"""

CUDA = (
    SAY_AND_WAIT
    + """
import ctypes
cuda = ctypes.CDLL(None)  # the preloaded runtime
def malloc(nbytes):
    pointer = ctypes.c_void_p()
    return cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), pointer
def free(pointer):
    return cuda.cudaFree(pointer)
def memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    return cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), free.value, total.value
"""
)

NVML = (
    SAY_AND_WAIT
    + """
import pynvml as nvml
nvml.nvmlInit()
def code(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except nvml.NVMLError as error:
        return error.value
    return 0
def memory(device):
    handle = nvml.nvmlDeviceGetHandleByIndex(device)
    return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used
"""
)


class PipedProcess:
    """A process that writes lines to its stdout and reads its stdin; a context manager, which kills and reaps it.

    The process has pipes for stdin and stdout, and a session of its own; it writes its stderr to a file.
    """

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedProcess, stderr: IO[bytes]) -> None:
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._popen = popen
        self._stderr = stderr
        self._stdin, self._stdout = popen.stdin, popen.stdout
        self._answers = popen.stdout.fileno()
        self._buffer = b""

    @property
    def returncode(self) -> int | None:
        """None while the process or its launcher runs."""
        return self._popen.poll()

    def silent(self, for_seconds: float) -> bool:
        """Return whether the process writes nothing in this time."""
        return b"\n" not in self._buffer and not select.select([self._answers], [], [], for_seconds)[0]

    def stderr(self) -> str:
        """Return the stderr of the process so far."""
        fd = self._stderr.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def finish(self, timeout_seconds: float = 30) -> int:
        """Wait for the end of the process and return its exit status."""
        return self._popen.wait(timeout=patient(timeout_seconds))

    def kill(self) -> None:
        """Send SIGKILL to the process group and wait."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(timeout=patient(30))

    def close(self) -> None:
        """Kill the process if it runs, and close its files."""
        self.kill()
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, seconds: float) -> bytes:
        """Return the next line of stdout."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._error(f"did not answer within {seconds} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise self._error(f"ended with {self._popen.wait(timeout=patient(30))}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _error(self, what: str) -> AssertionError:
        return AssertionError(f"process {self._popen.pid} {what}; its stderr:\n{self.stderr()[-8000:]}")


class Program(PipedProcess):
    """One running program.

    `launcher` is a command prefix, such as `("unshare", "--pid", "--fork")`. `command` is a program other than Python,
    which writes JSON lines and reads stdin in the same way.
    """

    def __init__(
        self,
        node: EmulatedNode,
        code: str = "",
        preamble: str = CUDA,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        popen = subprocess.Popen(
            [*launcher, *(command or (sys.executable, "-c", preamble + code))],
            env={**node.environment(), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        super().__init__(popen, stderr)
        self.pid = popen.pid

    def heard(self, timeout_seconds: float = 30) -> Any:
        """Return the next value of the program."""
        line = self._line(patient(timeout_seconds))
        # Older releases of torch print how many ranks are connected.
        return self.heard(timeout_seconds) if line.startswith(b"[Gloo]") else json.loads(line)

    def go(self) -> None:
        """Make the program's `wait()` return."""
        self._stdin.write(b"\n")
        self._stdin.flush()


def run(node: EmulatedNode, code: str, preamble: str = CUDA, **environment: str) -> Any:
    """Run a program to its end and return its last value."""
    with Program(node, code, preamble, environment) as program:
        value = program.heard()
        if status := program.finish():
            raise AssertionError(f"the program ended with {status}; its stderr:\n{program.stderr()}")
        return value
