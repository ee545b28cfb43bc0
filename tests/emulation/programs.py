"""Small programs on an emulated node, without torch: they start in a twentieth of a second.

Each is Python source behind one of two preambles, `CUDA` (the runtime through ctypes) or `NVML` (pynvml, initialized).
In both `say(value)` answers one JSON line, and `wait()` returns when the test calls `go()`.
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
from typing import Any

from tests.support.waiting import patient

from . import build
from .node import EmulatedNode

_PREAMBLE = """
import json, os, sys, threading, time
def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
def wait():
    sys.stdin.readline()
"""

CUDA = (
    _PREAMBLE
    + """
import ctypes
cuda = ctypes.CDLL(None)  # the preloaded runtime
driver = ctypes.CDLL("libcuda.so.1")
def malloc(nbytes):
    pointer = ctypes.c_void_p()
    return cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), pointer
def free(pointer):
    return cuda.cudaFree(pointer)
def device_count():
    count = ctypes.c_int(-1)
    return cuda.cudaGetDeviceCount(ctypes.byref(count)), count.value
def memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    return cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), free.value, total.value
def has_context(device):
    flags, active = ctypes.c_uint(), ctypes.c_int(-1)
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    return active.value
def name_of(device):
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, 256, device)
    return name.value.decode()
"""
)

NVML = (
    _PREAMBLE
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
    handle = device if not isinstance(device, int) else nvml.nvmlDeviceGetHandleByIndex(device)
    seen = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return {"total": seen.total, "reserved": seen.reserved, "used": seen.used, "free": seen.free}
def processes(device):
    handle = device if not isinstance(device, int) else nvml.nvmlDeviceGetHandleByIndex(device)
    return [[p.pid, p.usedGpuMemory, p.gpuInstanceId] for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
"""
)


class Program:
    """One running program. Use as a context manager: it is killed and reaped at the end.

    Args:
        launcher: what stands before the interpreter, such as `("unshare", "--pid", "--fork")`.
        command: another program than Python; it speaks JSON lines and reads stdin likewise.
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
        self._buffer = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        self._popen = subprocess.Popen(
            [*launcher, *(command or (sys.executable, "-c", preamble + code))],
            env={**node.environment(), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        self._answers = self._popen.stdout.fileno()
        self.pid = self._popen.pid

    def heard(self, timeout_seconds: float = 30) -> Any:
        """The next value that the program says."""
        end = time.monotonic() + patient(timeout_seconds)
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._answers, 1 << 16) if ready else b""
            if not part:
                raise AssertionError(
                    f"the program {'ended' if ready else 'said nothing'}; its stderr:\n{self.stderr()}"
                )
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def silent(self, for_seconds: float) -> bool:
        """Whether it says nothing in that time."""
        return not self._buffer and not select.select([self._answers], [], [], for_seconds)[0]

    def go(self) -> None:
        """Lets the program's `wait()` return."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b"\n")
        self._popen.stdin.flush()

    def stderr(self) -> str:
        """What it wrote there so far."""
        fd = self._stderr.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def finish(self, timeout_seconds: float = 30) -> int:
        """Waits for its own end; returns its exit status."""
        return self._popen.wait(timeout=patient(timeout_seconds))

    def kill(self) -> None:
        """SIGKILL to all of it, and waits."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(timeout=patient(30))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._stderr.close()


def hammer(node: EmulatedNode, threads: int, operations: int) -> Program:
    """A process that allocates and frees as fast as it can (see src/hammer.c); starts at `go()`. 0: without end."""
    return Program(node, command=(str(node.libraries / build.HAMMER), str(threads), str(operations)))


def run(node: EmulatedNode, code: str, preamble: str = CUDA, **environment: str) -> Any:
    """Runs a program to its end and returns what it said last."""
    with Program(node, code, preamble, environment) as program:
        value = program.heard()
        if status := program.finish():
            raise AssertionError(f"the program ended with {status}; its stderr:\n{program.stderr()}")
        return value
