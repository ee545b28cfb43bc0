"""Scripts that run below `gpumem-exporter run`, and what the exporter reports of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.node import EmulatedNode
from tests.emulation.programs import SAY_AND_WAIT, Program
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import CONSOLE_SCRIPT, environment_without
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_until_equal

ISOLATED_RUN = (sys.executable, "-I", "-c", CONSOLE_SCRIPT, "run", "--")
"""The command as it works from any folder, in a Python that runs no user's sitecustomize."""
BOOTSTRAP = REPOSITORY / "client" / "gpumem_client" / "bootstrap"
MIB = 1 << 20

PREAMBLE = f"""{SAY_AND_WAIT}
def hold(mebibytes, device=0):
    import torch
    global held
    held = torch.empty(mebibytes << 20, dtype=torch.uint8, device=f"cuda:{{device}}")
def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gpumem"))
def modules():
    return sorted(name for name in sys.modules if "gpumem" in name)
"""
"""The start of every script of these tests."""

StartScript = Callable[..., Program]


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def start_script(node: EmulatedNode, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartScript]:
    """Runs a script below `run`, in a folder where this project cannot be found, and kills it after the test.

    `start_script(code, "-E", arguments=("x",), command=(…), GPUMEM_WORKLOAD="…")`: the options are the interpreter's,
    `command` stands for the interpreter and its arguments before the script, names in capitals are environment.
    """
    programs: list[Program] = []
    folder = tmp_path / "scripts"
    folder.mkdir()

    def start(
        code: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        command: tuple[str, ...] = (),
        injected: bool = True,
        **environment: str,
    ) -> Program:
        script = folder / f"script{len(programs)}.py"
        script.write_text(PREAMBLE + code)
        environ = environment_without("GPUMEM_", "PYTHON", "COVERAGE") | {"PYTHONWARNINGS": "ignore"}
        if "exporter" in request.fixturenames:
            environ["GPUMEM_EXPORTER_URL"] = request.getfixturevalue("exporter").url
        environ.update(environment)
        programs.append(
            Program(
                node,
                launcher=("env", "-i", f"--chdir={folder}", *assignments(node.environment(environ))),
                command=(
                    *(ISOLATED_RUN if injected else ()),
                    *(command or (sys.executable, *options)),
                    *(str(script), *arguments),
                ),
            )
        )
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


def assignments(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def run_to_the_end(program: Program) -> tuple[Any, str]:
    """Return the last output and stderr of a program that exits with 0."""
    said = program.heard()
    assert program.finish() == 0, program.stderr()
    return said, program.stderr()


def allocated(exporter: ExporterProcess) -> dict[tuple[int, str], float]:
    """Return the allocated bytes of the reporting processes, by pid and gpu."""
    found = exporter.metrics().samples.get("gpumem_torch_allocated_bytes", {}).items()
    return {(int(dict(labels)["pid"]), dict(labels)["gpu"]): value for labels, value in found}


def wait_for_allocated(exporter: ExporterProcess, expected: dict[tuple[int, str], float]) -> None:
    """Wait until exactly these processes report, with exactly these bytes."""
    wait_until_equal(lambda: allocated(exporter), expected, "allocated bytes by pid and device")
