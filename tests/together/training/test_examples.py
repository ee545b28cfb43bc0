"""The programs in examples/: on the CPU, and on the emulated node with an exporter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import clean_environment, run_command
from tests.support.servers.exporter_process import UNLIMITED
from tests.support.waiting import patient, wait_for

EXAMPLES = REPOSITORY / "examples"
SMALL = ("--epochs", "1", "--samples", "72", "--effective-batch", "32", "--width", "32", "--layers", "2")


# In a fork of an interpreter that has imported torch.
RUN = """
import contextlib, io, runpy, sys
sys.argv, output = [path, *arguments], io.StringIO()
with contextlib.redirect_stdout(output):
    runpy.run_path(path, run_name="__main__")
result = output.getvalue()
"""


@pytest.fixture
def process() -> Iterator[TorchProcess]:
    """A process without a GPU and an exporter."""
    none = dict.fromkeys(name for name in os.environ if name.startswith("GPUMEM_"))
    with TorchProcess(None, {**none, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}) as started:
        yield started


def run(process: TorchProcess, example: str, *arguments: str) -> str:
    return str(process.exec(RUN, path=str(EXAMPLES / example), arguments=arguments, timeout_seconds=110))


def test_the_training_example_runs_without_a_gpu_and_an_exporter(process: TorchProcess) -> None:
    small = ("--steps", "1", "--batch", "1", "--length", "8", "--width", "32", "--layers", "1")
    assert run(process, "train.py", *small).startswith("step 0 loss ")


def test_every_tool_works_without_a_gpu_and_an_exporter(process: TorchProcess, tmp_path: Path) -> None:
    output = run(process, "toolkit.py", *SMALL, "--folder", str(tmp_path))
    assert re.search(r"^3 steps\b.*\b32\b", output, re.MULTILINE)  # the last one of 8 samples
    assert "no CUDA" in output
    assert re.search(r"^none +0 +.*\bms\b", output, re.MULTILINE), "the row without checkpointing"
    assert re.search(r"^every block +2 +.*\bms\b", output, re.MULTILINE)
    assert str(tmp_path / "last.pt") in output
    load = "result = sorted(torch.load(path, weights_only=True))"
    assert process.exec(load, path=str(tmp_path / "last.pt")) == ["model", "optimizer"]


def test_the_command_in_the_docstring_of_the_hoarding_example_releases_its_cache(
    node: EmulatedNode, start_exporter: StartExporter
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", *UNLIMITED)
    variables = clean_environment(**node.environment(OMP_NUM_THREADS="1", GPUMEM_EXPORTER_URL=exporter.url))
    hoarding = [
        sys.executable,
        "-m",
        "gpumem_exporter",
        "run",
        "--workload",
        "notebook",
        "--",
        sys.executable,
        str(EXAMPLES / "hoard.py"),
    ]
    with subprocess.Popen(
        [*hoarding, "--mebibytes", "640"],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as program:
        try:
            held = {"workload": "notebook", "gpu": "0"}
            wait_for(lambda: any(exporter.metrics().values("gpumem_torch_reclaimable_bytes", **held)), "its report")
            cached = exporter.metrics().value("gpumem_torch_reclaimable_bytes", **held)
            cleared = run_command("clear", "--workload", "notebook", "--json", GPUMEM_EXPORTER_URL=exporter.url)
            assert f'"freed_bytes": {int(cached)}' in cleared.stdout
            assert cached == 640 << 20
            program.communicate(b"\n", timeout=patient(60))
            assert program.returncode == 0
        finally:
            program.kill()
