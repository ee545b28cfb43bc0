"""Programs with widely used libraries (tests/programs/libraries), compared with what an exporter reports of them."""

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

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import eventually, patient, wait_for

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
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*(_RUN if run else ()), *command],
                cwd=PROGRAMS,
                env=_environment(node, exporter, folder, statements, environment),
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


_RUN = (PYTHON, "-m", "gpumem_exporter", "run", "--workload", "job", "--")


def _environment(
    node: EmulatedNode, exporter: ExporterProcess, folder: Path, statements: Path, more: dict[str, str]
) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM_", "PYTHON"))}
    return {
        **node.environment(inherited),
        "GPUMEM_EXPORTER_URL": exporter.url,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),  # caches, sockets and settings of the libraries
        "OMP_NUM_THREADS": "1",
        "STATEMENTS": str(statements),
        **more,
    }
