"""Launchers and trainers of other projects: the examples of docs/trainers.md, ranks, actors, and a real kernel."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from gpumem_client.release import DeepClean
from gpumem_client.summary import Summary
from gpumem_toolkit.leaks.live_tensors import LingeringTensors
from gpumem_toolkit.measure.milestones import Milestones
from gpumem_toolkit.oom.diagnosis import OomDiagnosis
from gpumem_toolkit.oom.values import OomValues
from gpumem_toolkit.planning.plan import Plan
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.processes.library_programs import PROGRAMS, PYTHON, StartLibrary
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.torch_release import since_torch
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


def test_ranks_of_torchrun_with_ddp_and_fsdp(start_library: StartLibrary, exporter: ExporterProcess) -> None:
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = start_library(*torchrun, "ddp_and_fsdp.py")
    replicated = program.compare(ddp=2)["ddp"]
    assert [(made.rank, made.world_size) for made in replicated] == [(0, 2), (1, 2)]
    action = exporter.act("reset_peak", target={"workload": "job", "rank": "1"})
    assert {(row["pid"], row["outcome"]) for row in action["results"]} == {(replicated[1].pid, "done")}
    sharded = program.compare(fsdp=2)["fsdp"]
    assert [made.pid for made in sharded] == [made.pid for made in replicated]
    program.end()


def test_actors_of_ray_have_their_job_and_differ_by_their_names(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "ray_actors.py", RAY_USAGE_STATS_ENABLED="0")
    actors = program.compare(driver=1, actor=3)["actor"]
    documents = program.exporter.processes()
    infos = program.exporter.metrics().infos()
    expected = {made.pid: f"ray::Rollout({made.more['name'] or made.more['actor'][:8]})" for made in actors}
    assert len(set(expected.values())) == 3
    assert {made.pid: documents[made.pid]["command"] for made in actors} == expected
    assert {made.pid: infos[str(made.pid)]["command"] for made in actors} == expected
    for made in actors:
        assert documents[made.pid]["ray_job_id"] == infos[str(made.pid)]["ray_job_id"] == made.more["job"] != "ffffffff"
    program.end()


@since_torch((2, 10), "torch 2.9 initializes CUDA before its launcher forks the ranks")
def test_ranks_that_a_kernel_forks_report_and_later_the_kernel_itself(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "notebook.py", run=False)
    ranks = program.compare("notebook-alice", rank=2)["rank"]
    assert [(made.rank, made.world_size) for made in ranks] == [(0, 2), (1, 2)]
    (kernel,) = program.compare("notebook-alice", kernel=1)["kernel"]
    assert kernel.pid not in [made.pid for made in ranks]
    program.end()


def test_a_notebook_shows_the_text_of_a_result() -> None:
    for result in (Summary(reason="no CUDA"), OomDiagnosis(OomValues(phase="forward", requested=1 << 30), ())):
        shown, _ = DisplayFormatter().format(result)
        assert shown["text/plain"] == str(result)
    returned = (Summary, LingeringTensors, DeepClean, Milestones, Plan, OomDiagnosis)
    assert [kind.__name__ for kind in returned if not hasattr(kind, "_repr_pretty_")] == []
