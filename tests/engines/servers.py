"""Real servers on the emulated node."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.waiting import patient, wait_for

HERE = REPOSITORY / "tests" / "engines"
MODEL = HERE / "model"
TITLE = "VLLM::EngineCore"
START_SECONDS = 400.0
"""Most of it is the import of vLLM by two processes."""


def vllm_environment(folder: Path) -> dict[str, str]:
    """Return the variables for a process with vLLM on the emulated node. `folder` is its home."""
    return {
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{HERE / 'plugin'}:{REPOSITORY}",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


class Vllm:
    """`vllm serve` with random weights of a tiny model."""

    def __init__(
        self,
        node: EmulatedNode,
        folder: Path,
        launcher: Sequence[str] = (),
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.popen = subprocess.Popen(
            [
                *launcher,
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL)),
                *("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "256"),
                *("--gpu-memory-utilization", "0.2", "--host", "127.0.0.1", "--port", str(self.port), *options),
            ],
            env=node.environment(**vllm_environment(folder), **environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self) -> str:
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def request(self, method: str, path: str) -> tuple[int, str]:
        """Send a request, and return the status and the body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(60))
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def serves(self) -> bool:
        """Return whether it answers requests."""
        assert self.popen.poll() is None, self.log()[-8000:]
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def wait(self) -> None:
        """Wait until it answers requests."""
        wait_for(self.serves, "vLLM", START_SECONDS)

    def ends(self) -> int:
        """Return its exit status."""
        return self.popen.wait(timeout=patient(START_SECONDS))

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
                self.popen.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._log.close()
