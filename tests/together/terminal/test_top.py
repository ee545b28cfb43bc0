"""`top` on a real terminal, with real exporters and the emulated node's NVML."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.units import short_bytes
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.terminal_program import TerminalProgram
from tests.support.top_program import (
    FOREIGN,
    demo,
    top_command,
    top_environment,
    top_once,
    top_without_default_exporter,
)
from tests.support.waiting import wait_for

__all__ = ["demo"]

OpenTop = Callable[..., TerminalProgram]
StartExporter = Callable[..., ExporterProcess]

_FIELDS = {
    "used": "used_bytes",
    "allocated": "allocated_bytes",
    "reclaimable": "reclaimable_bytes",
    "fragmented": "fragmented_bytes",
    "non-torch": "non_torch_bytes",
}
_SHORT = {"allocated": "alloc", "reclaimable": "reclaim", "fragmented": "frag"}


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


def _process_rows(terminal: TerminalProgram) -> dict[tuple[str, str], dict[str, str]]:
    """The sizes on the screen by pid and device, read below their headings; empty while there are none."""
    lines = terminal.lines
    top = next((i for i, line in enumerate(lines) if re.match(r" *pid[▲▼]? ?gpu", line)), None)
    if top is None:
        return {}
    ends = {}
    for name in _FIELDS:
        word = name if re.search(rf"\b{name}\b", lines[top]) else _SHORT.get(name, name)
        if word in lines[top]:  # a narrow screen leaves out less important sizes
            ends[name] = lines[top].index(word) + len(word)
    rows = {}
    for line in lines[top + 1 :]:
        if re.match(r" *\d+ \d", line) and len(line) >= max(ends.values()):
            pid, gpu = line.split()[:2]
            rows[pid, gpu] = {name: line[:end].split()[-1] for name, end in ends.items()}
    return rows


def _until_rows(terminal: TerminalProgram) -> None:
    """Return once the screen lists processes."""
    terminal.until(lambda: _process_rows(terminal), "rows of processes")


def _until_written(terminal: TerminalProgram, text: bytes, times: int) -> None:
    terminal.until(lambda: terminal.output.count(text) >= times, f"{text!r}, {times} times")


def _api_rows(document: Any) -> dict[tuple[str, str], dict[str, str]]:
    """The same sizes from `/api/v1/processes`."""
    return {
        (str(process["pid"]), device["gpu"]): {name: short_bytes(device[field]) for name, field in _FIELDS.items()}
        for process in document["processes"]
        for device in process["devices"]
    }


def test_the_sizes_on_the_screen_are_those_of_the_exporter(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url, "--interval", "0.2", columns=80, lines=24)

    def agrees() -> bool:
        reported = _api_rows(demo.get("/api/v1/processes"))
        terminal.pump(0.25)
        shown = _process_rows(terminal)
        return len(shown) >= 8 and all(sizes.items() <= reported.get(key, {}).items() for key, sizes in shown.items())

    terminal.until(agrees, "the screen to show the exporter's values")
    for device in demo.get("/api/v1/devices")["devices"]:
        (line,) = [line for line in terminal.lines if re.match(rf"{device['gpu']} +[HA]100", line)]
        assert line.endswith(short_bytes(device["memory"]["total_bytes"]))
    assert terminal.lines[1].startswith("DEMO")
    terminal.until(lambda: terminal.lines[-1].startswith(" q quit"), "the keys")
    assert max(map(len, terminal.lines)) <= 80


def _assert_restored(terminal: TerminalProgram) -> None:
    """Check that modes, screen, cursor, wrapping and mouse are restored."""
    assert terminal.modes() == terminal.modes_before
    pairs = (("1049h", "1049l"), ("25l", "25h"), ("7l", "7h"), ("1003h", "1003l"))
    for taken, given in ((f"\x1b[?{one}".encode(), f"\x1b[?{other}".encode()) for one, other in pairs):
        assert terminal.output.rindex(given) > terminal.output.rindex(taken)


@pytest.mark.parametrize(
    ("typed", "sent", "status"),
    [
        ("q", None, 0),
        ("\x03", None, 130),
        (None, signal.SIGTERM, -signal.SIGTERM),
        (None, signal.SIGHUP, -signal.SIGHUP),
    ],
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
        "import sys; from gpumem_exporter.cli import main; from gpumem_exporter.cli.top.app import NodeTop\n"
        "def fails(self, token='s3' + 'cret'): 1 / 0\n"
        "NodeTop.action_reverse = fails\n"
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


def test_without_an_exporter_no_sizes_are_shown_until_it_answers_again(
    node: EmulatedNode, start_exporter: StartExporter, open_top: OpenTop
) -> None:
    node.set_process(FOREIGN, 0, 3 * GIB)
    exporter = start_exporter(node, *QUICK)
    terminal = open_top("--url", exporter.url, "--interval", "0.2", columns=200)
    terminal.until_shows(str(FOREIGN), "3.0G")
    for stop, start in (
        (lambda: exporter.stop(signal.SIGKILL), exporter.start),
        (lambda: exporter.signal(signal.SIGSTOP), lambda: exporter.signal(signal.SIGCONT)),
    ):
        stop()
        terminal.until_shows("LOST", exporter.url)
        assert "3.0G" not in terminal.text
        assert str(FOREIGN) not in terminal.text
        start()
        terminal.until_shows(str(FOREIGN), "3.0G")
        assert "LOST" not in terminal.text


def test_the_driver_replaces_the_exporter_until_it_answers(
    node: EmulatedNode, start_exporter: StartExporter, open_top: OpenTop, tmp_path: Path
) -> None:
    node.set_process(FOREIGN, 0, 3 * GIB)
    node.set_process(FOREIGN + 1, 1, 2 * GIB)
    node.lose_device(1)
    socket = tmp_path / "exporter0" / "exporter.sock"
    terminal = open_top(
        command=top_without_default_exporter(socket, "--interval", "0.2"),
        environment=top_environment(node.environment()),
        columns=200,
    )
    terminal.until_shows("NVML ALONE", str(FOREIGN), "3.0G", "GPU is lost")
    (device,) = [line for line in terminal.lines if line.startswith("0 ")]
    book = node.books()[0]
    assert device.split()[-3:] == [short_bytes(n) for n in (book.used_bytes, book.free_bytes, book.total_bytes)]
    row = terminal.until(lambda: _process_rows(terminal).get((str(FOREIGN), "0")), "its row")
    assert row == {"used": "3.0G", "allocated": "-", "reclaimable": "-", "fragmented": "-", "non-torch": "-"}
    assert str(socket) in terminal.text

    exporter = start_exporter(node, *QUICK)
    assert exporter.socket == socket
    terminal.until(lambda: "NVML ALONE" not in terminal.text, "the exporter to take over")
    terminal.until_shows(str(socket), str(FOREIGN))

    exporter.stop(signal.SIGKILL)
    terminal.until_shows("NVML ALONE", str(FOREIGN), "3.0G")


def test_a_process_is_shown_to_the_byte_named_harmlessly_and_cleared_after_a_yes(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, open_top: OpenTop
) -> None:
    exporter = start_exporter(node, *QUICK)
    name = "\x1b]0;owned\x07[red]x[/red]"
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")
    process.exec("kept = torch.empty(100 << 20, device='cuda', dtype=torch.uint8)", given=1)
    process.exec("torch.empty(300 << 20, device='cuda', dtype=torch.uint8)", given=1)
    process.call("start_client", workload=name, rank=3)
    exporter.wait_for_processes(process.pid)

    def reported() -> Any:
        return exporter.processes()[process.pid]["devices"][0]

    wait_for(
        lambda: reported()["reclaimable_bytes"] == 300 * MIB and reported()["non_torch_bytes"] is not None,
        "a sample and a poll that belong together",
    )
    document = json.loads(top_once("--json", "--url", exporter.url).stdout)
    (row,) = document["rows"]
    assert {field: row[field] for field in row if field in reported()} == {
        field: value for field, value in reported().items() if field in row
    }
    assert row["workload"] == name
    assert json.loads(top_once("--json", "--url", exporter.url, "--gpu", "1").stdout)["rows"] == []
    assert json.loads(top_once("--json", "--url", exporter.url, "--workload", name).stdout)["rows"]

    terminal = open_top("--url", exporter.url, "--interval", "0.2", columns=120)
    terminal.until_shows(f"{process.pid} 0", "?]0;owned?[red]x[/red]", "300M")
    assert b"\x1b]0;" not in terminal.output
    sizes = {name: short_bytes(reported()[field]) for name, field in _FIELDS.items()}
    terminal.until(lambda: _process_rows(terminal) == {(str(process.pid), "0"): sizes}, f"its row: {sizes}")

    def asks() -> bool:
        return "y/n" in terminal.text

    def note() -> str:
        return " ".join(" ".join(terminal.lines[-4:]).split())

    terminal.type("c")
    terminal.until(asks, "the question")
    assert "rank 3?" in note()
    assert "300 MiB" in note()
    terminal.type("n")
    terminal.until(lambda: not asks(), "the end of the question")
    assert reported()["reclaimable_bytes"] == 300 * MIB
    terminal.type("c")
    terminal.until(asks, "the question")
    terminal.type("y")
    terminal.until(lambda: not asks() and "Freed 300 MiB in " in note(), "the result")
    after = {**sizes, "used": "612M", "reclaimable": "0B"}
    terminal.until(lambda: [*_process_rows(terminal).values()] == [after], f"the row without what was freed: {after}")


def test_the_ranks_of_a_job_that_trains_clear_as_a_group(demo: ExporterProcess, open_top: OpenTop) -> None:
    def sent() -> list[Any]:
        actions = demo.get("/api/v1/actions?limit=20")["actions"]
        return [it for it in actions if it["reason"] == "requested in top" and not it["dry_run"]]

    ranks = [pid for pid, it in demo.processes().items() if it["workload"] == "demo-llm-pretrain"]
    terminal = open_top("--url", demo.url, "--filter", "demo-llm-pretrain", columns=80)
    _until_rows(terminal)
    terminal.type("jc")
    terminal.until(lambda: "Clear demo-llm-pretrain (4 ranks)?" in terminal.text, "the question")
    assert "At the end of a step" in " ".join(terminal.lines[-4:])
    assert sent() == []
    terminal.type("y")
    (action,) = terminal.until(sent, "the request")
    assert (action["mode"], action["group"], sorted(action["target"]["pid"])) == ("step", True, sorted(ranks))


def test_a_dumb_terminal_is_wrong_usage(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url, environment=top_environment(TERM="dumb"), columns=120)
    assert terminal.wait() == 2
    assert "top --once" in terminal.text
    assert b"\x1b" not in terminal.output
