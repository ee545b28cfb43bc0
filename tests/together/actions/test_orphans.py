"""What a killed server leaves behind, from the metrics to its end, beside a job that its shell has left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.programs import CUDA
from tests.support.processes.adopter import Adopter, idle_soon
from tests.support.processes.running_command import clean_environment, run_command
from tests.support.processes.terminal_program import TerminalProgram
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for

TITLE = "VLLM::EngineCore"
JOB = f"""{CUDA}
malloc(256 << 20)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(sys.argv[1] + ".new", sys.argv[1])
time.sleep(3600)
"""
SERVER = f"""
import os, subprocess, sys, time
environment = {{**os.environ, "PYTHONHOME": sys.base_prefix}}
subprocess.Popen(["{TITLE}", "job.py", "engine"], executable=os.environ["PYTHON"], env=environment)
time.sleep(3600)
"""


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path) -> ExporterProcess:
    flags = (*QUICK, "--action.allow", "default,terminate")
    return start_exporter(node, *flags, environment=idle_soon(tmp_path), fresh=True)


@pytest.fixture
def adopter(node: EmulatedNode, tmp_path: Path) -> Iterator[Adopter]:
    for name, text in {"job.py": JOB, "server.py": SERVER}.items():
        (tmp_path / name).write_text(text)
    with Adopter(tmp_path, node.environment()) as adopter:
        yield adopter


def pid_in(file: Path) -> int:
    wait_for(file.exists, f"the pid in {file.name}")
    return int(file.read_text())


def orphans(exporter: ExporterProcess) -> dict[int, str]:
    """Return the reason of each orphan on the page of metrics, by pid."""
    found = exporter.metrics().by("pid", "gpumem_process_orphan", reason="launcher_ended")
    return {int(pid): "launcher_ended" for pid, value in found.items() if value == 1}


def test_an_engine_without_its_server_is_shown_and_terminated_and_a_background_job_is_not(
    node: EmulatedNode, exporter: ExporterProcess, adopter: Adopter, tmp_path: Path
) -> None:
    server = adopter.run("exec $PYTHON server.py")
    shell = adopter.run("nohup $PYTHON job.py job & wait")
    engine, job = pid_in(tmp_path / "engine"), pid_in(tmp_path / "job")
    listed = "/api/v1/processes"
    wait_for(lambda: {engine, job} <= {each["pid"] for each in exporter.get(listed)["processes"]}, "both on the list")
    assert orphans(exporter) == {}
    assert "No job matches." in run_command("info", "--orphans", "--url", exporter.url).stdout
    assert run_command("terminate", "--orphans", "--yes", "--url", exporter.url).returncode == 0

    adopter.kill(server, shell)
    wait_for(lambda: orphans(exporter) == {engine: "launcher_ended"}, "the orphan")
    # Readers of the live document share one for half a second.
    live, finding = wait_for(lambda: orphan_finding(exporter), "the finding")
    (found,) = [each for each in live["jobs"] if each["orphan_count"]]
    (process,) = found["processes"]
    assert (finding["job"], found["state"], process["pid"]) == (found["id"], "orphan", engine)
    assert (process["orphan"]["reason"], process["orphan"]["launcher_pid"]) == ("launcher_ended", server)
    assert finding["since_unix_seconds"] == pytest.approx(process["orphan"]["ended_unix_seconds"], abs=0.2)
    for part in (TITLE, "GPU 0", f"pid {server}"):
        assert part in finding["sentence"]
    shown = run_command("info", "--orphans", "--json", "--url", exporter.url)
    assert [each["pid"] for each in json.loads(shown.stdout)["processes"]] == [engine]

    dry = run_command("terminate", "--orphans", "--dry-run", "--json", "--url", exporter.url)
    used = node.books().used_by(engine)
    assert [(each["pid"], each["outcome"], each["freed_bytes"]) for each in json.loads(dry.stdout)["results"]] == [
        (engine, "would_terminate", used)
    ]
    command = [sys.executable, "-m", "gpumem_exporter", "terminate", "--orphans", "--url", exporter.url]
    for answer, ends in (("n", False), ("y", True)):
        terminal = TerminalProgram(command, clean_environment(TERM="xterm"), columns=120, lines=24)
        terminal.until_shows(str(engine), "[y/N]")
        terminal.type(f"{answer}\n")
        assert terminal.wait() == (0 if ends else 1)
        terminal.close()
        assert (engine in adopter.pids) is not ends
    (ended, *_) = exporter.get("/api/v1/actions")["actions"]
    assert (ended["freed_bytes"], node.books().used_by(engine)) == (used, 0)
    assert job in adopter.pids
    assert node.books().used_by(job) >= 256 * MIB
    wait_for(lambda: orphans(exporter) == {}, "the end of the orphan")


def orphan_finding(exporter: ExporterProcess) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the live document and its finding of an orphan; None without one."""
    live = exporter.get("/api/v1/live")
    findings = [each for each in live["findings"] if each["kind"] == "orphan"]
    return (live, findings[0]) if findings else None
