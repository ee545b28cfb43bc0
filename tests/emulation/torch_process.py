"""A real Python process with real PyTorch on an emulated node, which runs commands of a test (see torch_worker.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.paths import REPOSITORY
from tests.support.processes.zygote import TORCH, fork_program
from tests.support.waiting import patient

from .node import EmulatedNode
from .programs import PipedProcess

WORKER = "tests.emulation.torch_worker"
START_TIMEOUT_SECONDS = patient(90.0)  # importing torch, on a busy machine


class TorchProcessError(AssertionError):
    """The process ended or did not answer in time; the text has its stderr."""


class RemoteError(Exception):
    """A command raised in the process."""

    def __init__(self, type_: str, message: str, traceback: str) -> None:
        super().__init__(f"{type_}: {message}\n{traceback}")
        self.type = type_
        self.message = message


class TorchProcess(PipedProcess):
    """One process. It starts immediately and imports torch in the background; the first `call` waits for that.

    Without a node, there is no emulated driver. `environment` adds to the node's; a value of None removes a variable.
    `launcher` is a command prefix, such as `("gpumem-exporter", "run", "--")`. With `fresh`, the process is not a
    fork of an interpreter that has imported torch.
    """

    def __init__(
        self,
        node: EmulatedNode | None,
        environment: Mapping[str, str | None] | None = None,
        launcher: Sequence[str] = (),
        fresh: bool = False,
    ) -> None:
        variables = dict(os.environ) if node is None else node.environment()
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), variables.get("PYTHONPATH"))))
        for name, value in (environment or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._next_id = 1
        self._hello: dict[str, Any] = {}
        forked = None
        if not launcher and not fresh:
            forked = fork_program(TORCH, WORKER, (), variables, stderr=stderr.fileno(), new_session=True)
        popen = forked or subprocess.Popen(
            [*launcher, sys.executable, "-m", WORKER],
            env=variables,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        super().__init__(popen, stderr)

    @property
    def pid(self) -> int:
        """The pid of the process; waits until it runs."""
        return int(self.wait_until_started()["pid"])

    def wait_until_started(self) -> dict[str, Any]:
        """Wait until the process has imported torch, and return its `pid`, `torch` and `python`."""
        if not self._hello:
            self._hello = json.loads(self._line(START_TIMEOUT_SECONDS))["value"]
        return self._hello

    def call(self, command: str, /, timeout_seconds: float = 60, **arguments: Any) -> Any:
        """Run a command of torch_worker.Worker and return its answer.

        Raises RemoteError if the command raised, and TorchProcessError without an answer in time.
        """
        return self.receive(self.send(command, **arguments), timeout_seconds)

    def exec(self, code: str, /, timeout_seconds: float = 60, **variables: Any) -> Any:
        """Run Python code with the names torch, worker, the variables and those of earlier code; return `result`."""
        return self.call("exec", timeout_seconds=timeout_seconds, code=code, **variables)

    def call_program(self, module: str, function: str, /, **given: Any) -> Any:
        """Call a function of a module of tests.programs and return its result."""
        code = f"from tests.programs import {module}\nresult = {module}.{function}(**given)"
        return self.exec(code, timeout_seconds=110, given=given)

    def end_with(self, code: str) -> int:
        """Run code as the rest of the program and return the exit status; an exception of the code ends the program."""
        self.exec(f"import __main__, os, sys, time\ndef program(*_):\n{textwrap.indent(code, '    ')}")
        self.exec("__main__.answer = program")
        self.send("hello")
        return self.finish()

    def send(self, command: str, /, **arguments: Any) -> int:
        """Send a command and return its number for `receive`. Answers arrive in the order of the commands."""
        number = self._next_id
        self._next_id += 1
        line = json.dumps({"id": number, "command": command, "arguments": arguments}) + "\n"
        try:
            self._stdin.write(line.encode())
            self._stdin.flush()
        except OSError as error:
            raise self._error(f"{command!r} could not be sent ({error})") from error
        return number

    def receive(self, number: int, timeout_seconds: float = 60) -> Any:
        """Wait for the answer to a command."""
        self.wait_until_started()
        end = time.monotonic() + patient(timeout_seconds)
        while True:
            answer = json.loads(self._line(max(0.0, end - time.monotonic())))
            if answer["id"] == number:
                break
        if "error" in answer:
            error = answer["error"]
            raise RemoteError(error["type"], error["message"], error["traceback"])
        return answer["value"]

    def answered(self, timeout_seconds: float = 0) -> bool:
        """Return whether an answer is available or arrives within this time, or the process has ended."""
        self.wait_until_started()
        return not self.silent(timeout_seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its launcher."""
        os.kill(self.pid, number)

    def finish(self, timeout_seconds: float = 30) -> int:
        """Close the stdin of the process, so that it ends normally, and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            return super().finish(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {timeout_seconds} s of the request") from None

    def _error(self, what: str) -> TorchProcessError:
        if self._popen.poll() is None and self._hello:
            with contextlib.suppress(OSError):
                os.kill(self._hello["pid"], signal.SIGUSR2)  # every thread's stack, to stderr
                time.sleep(0.2)
        return TorchProcessError(f"torch process {self._popen.pid} {what}; its stderr:\n{self.stderr()[-8000:]}")
