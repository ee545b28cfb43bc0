"""The examples of docs/trainers.md with the real libraries, and the magics in a real kernel."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.library_programs import PROGRAMS, PYTHON
from tests.support.waiting import patient

CELLS = [
    "%load_ext gpumem_toolkit.notebook\nimport torch\nempty = torch.empty(0, device='cuda')",
    "%%gpumem\nweights = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
    "torch.nn.Linear(2048, 2048, device='cuda')",
    "%%gpumem\n1 / 0",
    "%%gpumem\nawait wait()",
    "def step():\n    kept = torch.empty(96 << 20, dtype=torch.uint8, device='cuda')\n"
    "    return torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\nstep()",
    "%gpumem clear",
    "%gpumem",
    "print(torch.cuda.memory_allocated() >> 20)",
]


def examples(start_torch: StartTorch, section: str) -> Any:
    """Run the examples of a section of the page, in a process that has imported torch."""
    process = start_torch(CUDA_VISIBLE_DEVICES="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    code = "from tests.programs.libraries import page_examples\nresult = page_examples.run(section)"
    return process.exec(code, timeout_seconds=110, section=section)


VALUES = {"gpumem/alloc_retries", "gpumem/allocated_peak_bytes", "gpumem/non_torch_bytes", "gpumem/reserved_bytes"}


def test_the_callback_of_transformers_measures_logs_and_explains(start_torch: StartTorch) -> None:
    found = examples(start_torch, "transformers")
    assert set(found["logged"]) >= VALUES
    assert found["phases"] == ["save", "train"]
    assert [note.partition(" ")[0] for note in found["notes"]] == ["gpumem:"]
    assert "out of memory in forward of phase train" in found["notes"][0]
    assert "Tried to allocate 1024.00 GiB" in found["arguments"][0]
    assert found["left"] == []


@pytest.mark.parametrize("section", ["accelerate", "Lightning", "Batch size"])
def test_other_examples_run(section: str, start_torch: StartTorch) -> None:
    found = examples(start_torch, section)
    if section == "Batch size":
        assert 1 < found["found"] <= 4
    elif section == "accelerate":
        assert set(found["logged"]) == VALUES
    else:
        assert found["phases"] == ["save", "train"]


def test_a_notebook_shows_the_cost_of_a_cell_and_clears_what_only_its_history_holds(node: EmulatedNode) -> None:
    done = subprocess.run(
        [PYTHON, str(PROGRAMS / "magics.py")],
        env={**node.environment(), "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"},
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, cost, failed, awaiting, oom, cleared, shown, rest = map(json.loads, done.stdout.splitlines())
    assert [each["status"] for each in (loaded, cost, cleared, shown, rest)] == ["ok"] * 5
    assert "peak 80.0 MiB" in cost["shown"]
    assert {line.split()[0]: line.split()[1] for line in cost["shown"].splitlines() if line.endswith(" MiB")} == {
        "cell:": "cuda:0",
        "weights": "+64.0",
        "Out[2]": "+16.0",
    }
    assert "Linear(in_features=2048" in cost["shown"]
    assert (failed["status"], failed["error"]) == ("error", "ZeroDivisionError")
    assert (awaiting["status"], awaiting["error"]) == ("error", "UsageError")
    assert (oom["status"], oom["error"]) == ("error", "OutOfMemoryError")
    assert "gpumem: out of memory" in oom["shown"]
    assert {"error: step.kept", "weights", "Out[2]"} <= {line[:24].strip() for line in oom["shown"].splitlines()}
    assert "Out[" not in shown["shown"]
    assert rest["shown"].split() == ["64"]
