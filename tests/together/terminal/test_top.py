"""`top` on a real terminal, with real exporters and the emulated node's NVML."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.units import short_bytes
from gpumem_exporter.cli.render.node_tables import PROCESS_FIELDS
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.processes.terminal_program import TerminalProgram
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

_START = """
import gpumem_client as client
from gpumem_client.allocator import idle_cache
idle_cache.IDLE_CACHE_SECONDS = 3.0
client.start(workload=workload, rank=3)
"""
"""Starts the reporter of a process whose idle cache is known after some seconds."""
OpenTop = Callable[..., TerminalProgram]


def top_environment(base: Mapping[str, str] | None = None, **changes: str) -> dict[str, str]:
    """Return an environment without settings for `top`, with changes."""
    own = ("GPUMEM_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONPATH", "TERM")
    kept = {name: value for name, value in (base or os.environ).items() if not name.startswith(own)}
    # The emulated terminal does not know the Kitty keyboard protocol.
    own_terminal = {"TERM": "xterm", "TEXTUAL_DISABLE_KITTY_KEY": "1"}
    return {**kept, **own_terminal, "PYTHONPATH": str(REPOSITORY), **changes}


def top_command(*arguments: str) -> list[str]:
    """Return the command line of `top` with these arguments."""
    return [sys.executable, "-m", "gpumem_exporter", "top", *arguments]


def top_once(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `top --once`."""
    return subprocess.run(
        top_command("--once", *arguments),
        env=top_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )


@pytest.fixture
def open_top() -> Iterator[OpenTop]:
    """Return a function that runs `top` in a terminal: `open_top("--url", …, columns=80, lines=24, environment=…)`."""
    programs: list[TerminalProgram] = []

    def start(
        *arguments: str, environment: Mapping[str, str] | None = None, command: list[str] | None = None, **size: int
    ) -> TerminalProgram:
        programs.append(TerminalProgram(command or top_command(*arguments), environment or top_environment(), **size))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def _until_rows(terminal: TerminalProgram) -> None:
    """Return once the screen lists jobs."""
    terminal.until_shows("Since", "demo-")


def _until_written(terminal: TerminalProgram, text: bytes, times: int) -> None:
    terminal.until(lambda: terminal.output.count(text) >= times, f"{text!r}, {times} times")


def test_the_sizes_on_the_screen_are_those_of_the_exporter(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url, "--interval", "0.2", columns=80, lines=24)

    def agrees() -> bool:
        document = demo.get("/api/v1/live")
        terminal.pump(0.25)
        of_jobs = [(job["name"], short_bytes(job["used_bytes"])) for job in document["jobs"][:3]]
        of_devices = [(device["gpu"], short_bytes(device["memory"]["free_bytes"])) for device in document["devices"]]
        return all(
            any(line.lstrip("▸ ").startswith(name) and f" {size} " in line for line in terminal.lines)
            for name, size in (*of_jobs, *of_devices)
        )

    terminal.until(agrees, "the screen to show the exporter's values")
    assert "DEMO" in terminal.lines[0]
    terminal.until(lambda: "q quit" in terminal.lines[-1], "the keys")
    assert max(map(len, terminal.lines)) <= 80
    terminal.resize(110, 50)
    terminal.type("\r")
    terminal.until_shows("last 10 min", "Peaks of phases", "started")


def _assert_restored(terminal: TerminalProgram) -> None:
    """Check that modes, screen, cursor, wrapping and mouse are restored."""
    assert terminal.modes() == terminal.modes_before
    pairs = (("1049h", "1049l"), ("25l", "25h"), ("7l", "7h"), ("1003h", "1003l"))
    for taken, given in ((f"\x1b[?{one}".encode(), f"\x1b[?{other}".encode()) for one, other in pairs):
        assert terminal.output.rindex(given) > terminal.output.rindex(taken)


@pytest.mark.parametrize(
    ("typed", "sent", "status"),
    [("\x03", None, 130), (None, signal.SIGTERM, -signal.SIGTERM)],
)
def test_the_terminal_is_restored_after_every_end(
    demo: ExporterProcess, open_top: OpenTop, typed: str | None, sent: int | None, status: int
) -> None:
    terminal = open_top("--url", demo.url)
    _until_rows(terminal)
    assert terminal.modes() != terminal.modes_before
    if typed is not None:
        terminal.type(typed)
    if sent is not None:
        terminal.signal(sent)
    assert terminal.wait() == status
    _assert_restored(terminal)


def test_a_broken_connection_ends_top(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url)
    _until_rows(terminal)
    assert terminal.hang_up() == -signal.SIGHUP


def test_the_terminal_is_restored_after_an_exception(demo: ExporterProcess, open_top: OpenTop) -> None:
    code = (
        "import sys; from gpumem_exporter import main; from gpumem_exporter.cli.top.tables import RowTable\n"
        "def fails(self, token='s3' + 'cret'): 1 / 0\n"
        "RowTable.action_reverse = fails\n"
        "sys.exit(main.main())"
    )
    terminal = open_top(command=[sys.executable, "-c", code, "top", "--url", demo.url])
    _until_rows(terminal)
    terminal.type("r")
    assert terminal.wait() == 1
    _assert_restored(terminal)
    after = terminal.output[terminal.output.rindex(b"\x1b[?1049l") :]
    assert b"ZeroDivisionError" in after
    assert b"s3cret" not in after


def test_ctrl_z_restores_the_terminal_and_fg_continues(demo: ExporterProcess, open_top: OpenTop) -> None:
    environment = top_environment(PS1="ready> ", ENV="")
    terminal = open_top(command=["sh", "-i"], environment=environment)
    terminal.until_shows("ready>")
    terminal.type(f"{' '.join(top_command('--url', demo.url))}\n")
    _until_rows(terminal)
    for turn in (1, 2):
        terminal.type("\x1a")
        _until_written(terminal, b"\x1b[?1049l", turn)
        _until_written(terminal, b"Stopped", turn)
        terminal.type("stty -a | tr -s ' ;' '\\n' | grep -x -e icanon -e echo | sort | tr '\\n' +\n")
        _until_written(terminal, b"echo+icanon+", turn)
        terminal.type("fg\n")
        _until_written(terminal, b"\x1b[?1049h", turn + 1)
        terminal.until(lambda: b"quit" in terminal.output[terminal.output.rindex(b"\x1b[?1049h") :], "it to be drawn")
    terminal.type("q")
    terminal.until(lambda: terminal.output.endswith(b"ready> "), "the shell")
    assert terminal.output.count(b"\x1b[?1049l") == 3


def test_a_process_is_shown_to_the_byte_named_harmlessly_and_cleared_after_a_yes(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, open_top: OpenTop
) -> None:
    exporter = start_exporter(node, *QUICK)
    name = "\x1b]0;owned\x07[red]x[/red]"
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")
    process.exec("kept = torch.empty(100 << 20, device='cuda', dtype=torch.uint8)", given=1)
    process.exec("torch.empty(300 << 20, device='cuda', dtype=torch.uint8)", given=1)
    process.exec(_START, workload=name)
    exporter.wait_for_processes(process.pid)

    def reported() -> Any:
        return exporter.processes()[process.pid]["devices"][0]

    wait_for(
        lambda: reported()["idle_cache_bytes"] == 300 * MIB and reported()["non_torch_bytes"] is not None,
        "a sample and a poll that belong together",
    )
    (row,) = json.loads(top_once("--json", "--url", exporter.url).stdout)["rows"]
    device = reported()
    assert {field: row[field] for field in row.keys() & device} == {
        field: device[field] for field in row.keys() & device
    }
    assert row["workload"] == name

    terminal = open_top("--url", exporter.url, "--interval", "0.2", columns=200)
    terminal.until_shows("?]0;owned?[red]x[/red]", "300M")
    assert b"\x1b]0;" not in terminal.output
    terminal.type("c")
    terminal.until_shows("y/n", "Stays free 300 MiB.")
    terminal.type("y")
    terminal.until(lambda: "y/n" not in terminal.text and "300 MiB" in terminal.text, "the result")
    wait_for(lambda: reported()["reclaimable_bytes"] == 0, "a report without the cache")


def test_a_dumb_terminal_is_wrong_usage(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url, environment=top_environment(TERM="dumb"), columns=120)
    assert terminal.wait() == 2
    assert "top --once" in terminal.text
    assert b"\x1b" not in terminal.output


FOREIGN = 4_000_001
"""The pid of no process."""


def test_the_json_document_has_the_fields_that_the_help_lists(demo: ExporterProcess) -> None:
    ended = top_once("--json", "--url", demo.url, "--sort", "fragmented", "--gpu", "7", "--filter", "demo")
    document = json.loads(ended.stdout)
    assert list(document) == [
        *("exporter", "source", "taken_unix_seconds", "nvml", "devices", "jobs", "findings", "rows")
    ]
    assert (document["exporter"], document["source"]) == (demo.url, "demo")
    assert [device["gpu"] for device in document["devices"]] == ["7"]
    assert {row["gpu"] for row in document["rows"]} == {"7"}
    sizes = [row["fragmented_bytes"] for row in document["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    assert tuple(document["rows"][0]) == PROCESS_FIELDS


def top_without_default_exporter(socket: Path, *arguments: str) -> list[str]:
    """Return the command line of `top` with `socket` as the default socket."""
    code = (
        "import os, sys; from gpumem_exporter.main import main\n"
        "from gpumem_exporter.cli import usage; urls = usage.default_urls\n"
        "named = 'GPUMEM_EXPORTER_URL' in os.environ\n"
        f"usage.default_urls = lambda environ: urls(environ) if named else ('unix://{socket}',)\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, "top", *arguments]


def test_once_with_the_driver_alone_has_null_for_unknown_values(node: EmulatedNode, tmp_path: Path) -> None:
    node.set_process(FOREIGN, 0, 3 * GIB)
    command = top_without_default_exporter(tmp_path / "none.sock", "--once")
    environment = top_environment(node.environment())

    def run(*more: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more],
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
        )

    ended = run()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "NVML ALONE" in ended.stdout
    document = json.loads(run("--json").stdout)
    assert document["exporter"] is None
    assert [device["ledger"] for device in document["devices"]] == [None, None]
    (row,) = document["rows"]
    assert (row["pid"], row["used_bytes"], row["state"]) == (FOREIGN, 3 * GIB, None)
    assert {row[f"{name}_bytes"] for name in ("allocated", "reserved", "reclaimable", "fragmented", "non_torch")} == {
        None
    }
    # The driver does not replace a named exporter.
    for named in (run("--url", "unix:///nonexistent.sock"), run(GPUMEM_EXPORTER_URL="unix:///nonexistent.sock")):
        assert (named.returncode, named.stdout, named.stderr.count("\n")) == (1, "", 1)
        assert "unix:///nonexistent.sock" in named.stderr


@pytest.mark.parametrize(
    ("output", "status", "error"),
    [(">&-", 0, ""), ("| true", 0, ""), (">/dev/full", 1, f"{os.strerror(errno.ENOSPC)}\n")],
)
def test_closed_or_full_output_causes_no_traceback(demo: ExporterProcess, output: str, status: int, error: str) -> None:
    shell = f"{' '.join(top_command('--once', '--url', demo.url))} {output}"
    ended = subprocess.run(
        ["sh", "-c", shell], env=top_environment(), capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr.count("\n") == (status != 0)
    assert ended.stderr.endswith(error)
