"""Runs named jobs on an emulated node, each in a forked process that has the imported libraries and a fresh context."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY


def on_a_node(benchmark: str, arguments: Sequence[str], *, total_bytes: int) -> dict[str, Any]:
    """Run `python -m benchmark arguments` beside one emulated device, and return the results of its jobs by name."""
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as folder,
        EmulatedNode(Path(folder) / "node", 1, total_bytes) as node,
    ):
        # Libraries count devices when they are imported: without NVML, that initializes the driver before the forks.
        variables = {**node.environment(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, "-m", benchmark, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPOSITORY, env=variables, check=True)
    return {name: result for line in done.stdout.splitlines() for name, result in json.loads(line).items()}


def results_to(names: Iterable[str], result_of: Callable[[str], Any]) -> int:
    """Print the result of each job as a line of JSON. What the jobs print goes to standard error."""
    results = os.dup(1)
    os.dup2(2, 1)
    for name in names:
        print(f"running {name}", file=sys.stderr, flush=True)
        result = json.dumps({name: result_of(name)})
        print(result, file=sys.stderr, flush=True)
        os.write(results, result.encode() + b"\n")
    return 0


def forked(job: Callable[[], Any], seconds: float) -> Any:
    """Run a job in a forked process for at most this long, and return its result or its `error`.

    Kernels of the emulated node compute nothing. A job that loops until a value changes never ends there.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(job, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else {"error": "the job did not end"}
    except EOFError:
        return {"error": "the job ended without a result"}
    finally:
        process.kill()
        process.join()


def _run(job: Callable[[], Any], sender: Any) -> None:
    try:
        result = job()
    except Exception as error:  # noqa: BLE001 - one job fails alone
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    sender.send(result)
