"""Launchers and trainers of other projects: the examples of docs/trainers.md, ranks, actors, and a real kernel.

What the programs of tests/programs/libraries state of themselves is compared with what an exporter reports of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
from tests.support.paths import REPOSITORY
from tests.support.processes.injected_scripts import exporter
from tests.support.processes.running_command import environment_without
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.torch_release import since_torch
from tests.support.waiting import eventually, patient, wait_for

__all__ = ["exporter"]

PROGRAMS = REPOSITORY / "tests" / "programs" / "libraries"
PYTHON = sys.executable


@dataclass(frozen=True)
class Statement:
    """What a process wrote with `statement.state`: a moment from which on it leaves its memory alone.

    `rank` is as the library calls it; it and `world_size` are None without ranks. `devices` has the allocated and
    reserved bytes by UUID where it has a context; `reporters` has the names of the client's threads.
    """

    role: str
    pid: int
    rank: int | None
    world_size: int | None
    devices: dict[str, list[int]]
    reporters: list[str]
    more: dict[str, Any]

    @classmethod
    def read(cls, file: Path) -> Statement:
        document = json.loads(file.read_text())
        own = {name: document.pop(name) for name in ("role", "pid", "rank", "world_size", "devices", "reporters")}
        return cls(**own, more=document)


@dataclass
class LibraryProgram:
    """One running program with all of its processes."""

    popen: subprocess.Popen[bytes]
    node: EmulatedNode
    exporter: ExporterProcess
    statements: Path
    log: Path
    _compared: set[Path] = field(default_factory=set)

    def compare(self, workload: str = "job", /, **counts: int) -> dict[str, list[Statement]]:
        """Wait until as many processes as given for each role have made a statement, and compare all of them.

        The exporter reports exactly those that use CUDA, with this workload and with their ranks and bytes, and their
        memory profiles add up to these bytes. The processes then continue. Returns the statements of each role, in the
        order of ranks and pids.
        """
        wait_for(lambda: self._made(counts), f"statements of {counts}", 120.0)
        files = set(self.statements.glob("*.json")) - self._compared
        eventually(
            lambda: (self._reported(), _expected(files, workload)),
            lambda both: both[0] == both[1],
            what="the reports to be as stated",
        )
        found = sorted(map(Statement.read, files), key=lambda made: (made.rank or 0, made.pid))
        on_devices = {made.pid for made in found if made.devices}
        assert {pid for device in self.node.books().devices for pid in device.processes} == on_devices
        assert {made.pid: made.reporters for made in found} == {
            made.pid: ["gpumem-reporter"] if made.devices else [] for made in found
        }
        for made in found:
            if made.devices:
                self._check_profile(made)
        for file in files:
            file.with_suffix(".compared").touch()
        self._compared |= files
        return {role: [made for made in found if made.role == role] for role in counts}

    def end(self) -> None:
        """Wait until the program has ended with 0, and is not reported any more."""
        assert self.popen.wait(patient(60)) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text()
        wait_for(lambda: not self.exporter.processes(), "the exporter to forget the processes")

    def close(self) -> None:
        """End all of its processes after a failed test."""
        if self.popen.poll() is None:
            self.popen.terminate()  # launchers end the ranks, which may have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(patient(10))
        (self.statements / "ended").touch()  # ends the processes that wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(patient(30))

    def _check_profile(self, made: Statement) -> None:
        results = self.exporter.act("profile", target={"pid": made.pid}, wait_seconds=60)["results"]
        assert {result["outcome"] for result in results} == {"done"}, results
        profile = self.exporter.get(f"/api/v1/profiles/{results[0]['profile']}")
        assert sum(row["bytes"] for row in profile["rows"]) == sum(allocated for allocated, _ in made.devices.values())

    def _made(self, counts: dict[str, int]) -> bool:
        assert self.popen.poll() is None, self.log.read_text()
        files = set(self.statements.glob("*.json")) - self._compared
        roles = [file.stem.rpartition("-")[0] for file in files]
        return all(roles.count(role) == count for role, count in counts.items())

    def _reported(self) -> dict[int, Any]:
        return {
            pid: {
                **{name: entry[name] for name in ("workload", "rank", "world_size")},
                "devices": {
                    device["uuid"]: [device["allocated_bytes"], device["reserved_bytes"]] for device in entry["devices"]
                },
            }
            for pid, entry in self.exporter.processes().items()
        }


def _expected(files: Iterable[Path], workload: str) -> dict[int, Any]:
    return {
        made.pid: {
            "workload": workload,
            "rank": "" if made.rank is None else str(made.rank),
            "world_size": made.world_size,
            "devices": made.devices,
        }
        for made in map(Statement.read, files)
        if made.devices
    }


StartLibrary = Callable[..., LibraryProgram]


@pytest.fixture
def start_library(node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path) -> Iterator[StartLibrary]:
    """Start `gpumem-exporter run --workload job -- command…` in the folder of the programs.

    `start_library(*command, run=False, CUDA_VISIBLE_DEVICES="1")`: without `run` the program starts the client itself.
    Names in capitals are environment.
    """
    programs: list[LibraryProgram] = []

    def start(*command: str, run: bool = True, **environment: str) -> LibraryProgram:
        folder = tmp_path / f"program{len(programs)}"
        statements = folder / "statements"
        statements.mkdir(parents=True)
        log = folder / "log"
        launcher = (PYTHON, "-m", "gpumem_exporter", "run", "--workload", "job", "--") if run else ()
        own = {
            "GPUMEM_EXPORTER_URL": exporter.url,
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder),  # caches, sockets and settings of the libraries
            "OMP_NUM_THREADS": "1",
            "STATEMENTS": str(statements),
        }
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*launcher, *command],
                cwd=PROGRAMS,
                env=node.environment(environment_without("GPUMEM_", "PYTHON"), **own, **environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        programs.append(LibraryProgram(popen, node, exporter, statements, log))
        return programs[-1]

    yield start
    for program in programs:
        program.close()
        print(program.log.read_text())  # pytest shows it where the test failed


MAGICS = [
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
        [PYTHON, str(PROGRAMS / "cells.py"), *MAGICS],
        env=node.environment(CUDA_VISIBLE_DEVICES="0", OMP_NUM_THREADS="1"),
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


NOTEBOOK = [
    'import gpumem_client as gpumem\ngpumem.start(workload="notebook-alice")',
    """
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, notebook_launcher
from statement import state_and_wait

def train():
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = torch.nn.Linear(256, 256)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, 256, device=accelerator.device)).sum())
    optimizer.step()
    state_and_wait("rank", rank=accelerator.process_index, world_size=accelerator.num_processes)
    accelerator.end_training()

notebook_launcher(train, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
""",
    'rows = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")\nstate_and_wait("kernel")',
]


@since_torch((2, 10), "torch 2.9 initializes CUDA before its launcher forks the ranks")
def test_ranks_that_a_kernel_forks_report_and_later_the_kernel_itself(start_library: StartLibrary) -> None:
    program = start_library(PYTHON, "cells.py", *NOTEBOOK, run=False)
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
