"""The programs in examples/: on the CPU, and on the emulated node with an exporter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import UNLIMITED
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

EXAMPLES = REPOSITORY / "examples"
SMALL = ("--epochs", "1", "--samples", "72", "--effective-batch", "32", "--width", "32", "--layers", "2")


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes, "PYTHONPATH": str(REPOSITORY)}


def run(example: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=patient(110),
        check=False,
        env=environment(CUDA_VISIBLE_DEVICES=""),
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_training_example_runs_without_a_gpu_and_an_exporter() -> None:
    output = run("train.py", *("--steps", "1", "--batch", "1", "--length", "8", "--width", "32", "--layers", "1"))
    assert output.startswith("step 0 loss ")


def test_every_tool_works_without_a_gpu_and_an_exporter(start_torch: StartTorch, tmp_path: Path) -> None:
    output = run("toolkit.py", *SMALL, "--folder", str(tmp_path))
    assert re.search(r"^3 steps\b.*\b32\b", output, re.MULTILINE)  # the last one of 8 samples
    assert "no CUDA" in output
    assert re.search(r"^none +0 +.*\bMiB$", output, re.MULTILINE), "the row without checkpointing"
    assert re.search(r"^every block +2 +.*\bMiB\b", output, re.MULTILINE)
    assert str(tmp_path / "last.pt") in output
    load = "result = sorted(torch.load(path, weights_only=True))"
    assert start_torch().exec(load, path=str(tmp_path / "last.pt")) == ["model", "optimizer"]


@pytest.mark.slow
def test_every_tool_works_on_a_gpu_and_the_exporter_shows_its_measurements(
    node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", *UNLIMITED)
    variables = environment(**node.environment(), GPUMEM_EXPORTER_URL=exporter.url)
    arguments = ("--effective-batch", "400000", "--samples", "1400000", "--folder", str(tmp_path))
    seen: set[tuple[str, str]] = set()
    with (tmp_path / "output").open("w+") as output:
        program = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "toolkit.py"), *arguments], env=variables, stdout=output, stderr=output
        )
        try:

            def ended() -> bool:
                for name, samples in exporter.metrics().samples.items():
                    for labels in samples:
                        values = dict(labels)
                        if values.get("workload") == "toolkit":
                            seen.add((name, values.get("phase") or values.get("component") or ""))
                return program.poll() is not None

            wait_for(ended, "the program's end", 240.0)
        finally:
            program.kill()
            program.wait(patient(30))
        output.seek(0)
        assert program.returncode == 0, output.read()
    assert seen >= {
        *(("gpumem_torch_phase_peak_bytes", phase) for phase in ("forward", "backward", "optimizer")),
        *(("gpumem_torch_component_bytes", part) for part in ("parameters", "gradients", "optimizer_state", "other")),
        ("gpumem_torch_planned_reserved_peak_bytes", ""),
        ("gpumem_torch_plan_error_ratio", ""),
    }
    assert "fits" in (tmp_path / "output").read_text()
    assert (tmp_path / "memory.pickle").exists()


def test_the_command_in_the_docstring_of_the_hoarding_example_releases_its_cache(
    node: EmulatedNode, start_exporter: StartExporter
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", *UNLIMITED)
    variables = environment(**node.environment(), GPUMEM_EXPORTER_URL=exporter.url)
    command = [sys.executable, "-m", "gpumem_exporter"]
    hoarding = [*command, "run", "--workload", "notebook", "--", sys.executable, str(EXAMPLES / "hoard.py")]
    with subprocess.Popen(
        [*hoarding, "--mebibytes", "640"],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as program:
        try:
            held = {"workload": "notebook", "gpu": "0"}
            wait_for(lambda: exporter.metrics().values("gpumem_torch_reclaimable_bytes", **held), "its report")
            cached = exporter.metrics().value("gpumem_torch_reclaimable_bytes", **held)
            cleared = subprocess.run(
                [*command, "clear", "--workload", "notebook", "--json"],
                env=variables,
                capture_output=True,
                text=True,
                timeout=patient(60),
                check=True,
            )
            assert f'"freed_bytes": {int(cached)}' in cleared.stdout
            assert cached == 640 << 20
            program.communicate(b"\n", timeout=patient(60))
            assert program.returncode == 0
        finally:
            program.kill()
