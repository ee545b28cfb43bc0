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
    """The sizes on the screen by pid and device, read below their headings; empty while the screen is half drawn."""
    lines = terminal.lines
    top = next((i for i, line in enumerate(lines) if re.match(r" *pid[▲▼]? gpu", line)), None)
    if top is None:
        return {}
    ends = {}
    for name in _FIELDS:
        word = name if re.search(rf"\b{name}\b", lines[top]) else _SHORT.get(name, name)
        if word not in lines[top]:
            continue  # a narrow screen leaves out less important sizes
        end = lines[top].index(word) + len(word)
        # The arrow of the sort column is after its heading, inside of the column or in the gap after it.
        ends[name] = end + (lines[top][end : end + 1] in ("▼", "▲"))
    rows = {}
    if not (lines[-2] and lines[-1]):
        return {}
    for line in lines[top + 1 : -2]:
        if not line:
            break
        if not re.match(r" *\d+ \d", line) or len(line) < max(ends.values()):
            return {}
        pid, gpu = line.split()[:2]
        rows[pid, gpu] = {name: line[:end].split()[-1] for name, end in ends.items()}
    return rows


def _until_rows(terminal: TerminalProgram) -> None:
    """Return once the screen lists processes."""
    terminal.until(lambda: _process_rows(terminal), "rows of processes")


def _api_rows(document: Any) -> dict[tuple[str, str], dict[str, str]]:
    """The same sizes from `/api/v1/processes`."""
    return {
        (str(process["pid"]), device["gpu"]): {name: short_bytes(device[field]) for name, field in _FIELDS.items()}
        for process in document["processes"]
        for device in process["devices"]
    }


@pytest.mark.parametrize(("columns", "lines", "rows"), [(80, 24, 9), (200, 60, 14)])
def test_the_sizes_on_the_screen_are_those_of_the_exporter(
    demo: ExporterProcess, open_top: OpenTop, columns: int, lines: int, rows: int
) -> None:
    terminal = open_top("--url", demo.url, "--interval", "0.2", columns=columns, lines=lines)

    def agrees() -> bool:
        reported = _api_rows(demo.get("/api/v1/processes"))
        terminal.pump(0.25)
        shown = _process_rows(terminal)
        return len(shown) >= rows and all(
            sizes.items() <= reported.get(key, {}).items() for key, sizes in shown.items()
        )

    terminal.until(agrees, "the screen to show the exporter's values")
    for device in demo.get("/api/v1/devices")["devices"]:
        (line,) = [line for line in terminal.lines if re.match(rf"{device['gpu']} +[HA]100", line)]
        assert line.endswith(short_bytes(device["memory"]["total_bytes"]))
    assert terminal.lines[1].startswith("DEMO")
    assert terminal.lines[-1].startswith("q quit")
    assert max(map(len, terminal.lines)) <= columns


def test_keys_sort_reverse_and_filter_what_is_listed(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url, "--sort", "pid", columns=120, lines=60)

    def pids() -> list[int]:
        return [int(pid) for pid, _ in _process_rows(terminal)]

    terminal.until(lambda: len(pids()) >= 12 and pids() == sorted(pids()), "rows by pid")
    terminal.type("r")
    terminal.until(lambda: pids() == sorted(pids(), reverse=True), "rows by pid, reversed")
    terminal.type("s")
    terminal.until_shows("used▼")
    terminal.type("/LLM train")
    terminal.until_shows("/LLM train_")
    terminal.type("\r")
    terminal.until_shows("1-4 of 4")

    def only_these() -> bool:
        processes = terminal.text.partition("last events")[0]
        return processes.count("demo-") == processes.count("demo-llm-pretrain") == 4

    terminal.until(only_these, "these rows")
    terminal.type("\x1b")
    terminal.until(lambda: len(pids()) >= 12, "the others again")


def test_history_and_events_are_those_of_the_exporter(demo: ExporterProcess, open_top: OpenTop) -> None:
    """`top --once` reads once, so its history is the exporter's."""
    wait_for(lambda: len(demo.get("/api/v1/live")["history"]["seconds"]) >= 3, "a history")
    printed = top_once("--url", demo.url, environment=top_environment(PYTHONUTF8="1")).stdout
    heading, *devices = printed.splitlines()[2:11]
    begin, end = heading.index("in use, 10 min"), heading.index("memory")
    assert len(devices) == 8
    assert all(re.fullmatch("[▁▂▃▄▅▆▇█ ]*[▁▂▃▄▅▆▇█]", line[begin:end].rstrip()) for line in devices), devices

    terminal = open_top("--url", demo.url, "--interval", "0.2", columns=160, lines=120)

    def reported() -> list[str]:
        """Return a part of each event's line; other tests of the demo may have requested actions."""
        events = demo.get("/api/v1/events?limit=100")["events"]
        newest = sorted(events, key=lambda event: (event["unix_seconds"], event["id"]), reverse=True)
        return [
            f"{event['workload']}{f' rank {rank}' if (rank := event['rank']) else ''} (pid {event['pid']})"
            if "action" not in event["detail"]
            else f"{event['detail']['action']} on "
            for event in newest
        ]

    def agrees(footer: str) -> bool:
        listed = reported()
        terminal.pump(0.25)
        shown = terminal.text.partition("last events\n")[2].split("\n")[:-2]
        shown = [line for line in shown if re.match(r"\d", line)]
        return footer in terminal.text and len(shown) == len(listed) and all(map(str.__contains__, shown, listed))

    terminal.until(lambda: agrees("e events"), "the screen to show the exporter's events")
    assert "in use, 10 min" in terminal.text
    assert _process_rows(terminal)
    terminal.type("e")
    terminal.until(lambda: agrees(f"1-{len(reported())} of {len(reported())}"), "the events alone")
    assert not _process_rows(terminal)
    terminal.type("c")
    terminal.type("e")
    terminal.until(lambda: _process_rows(terminal), "the processes again")
    assert terminal.lines[-1].startswith("q quit"), "c is a key of the processes"


def test_a_resized_window_is_filled_and_nothing_wraps(demo: ExporterProcess, open_top: OpenTop) -> None:
    # The variables do not change with the window.
    environment = top_environment(COLUMNS="40", LINES="10")
    terminal = open_top("--url", demo.url, environment=environment)
    _until_rows(terminal)
    for columns, lines in ((200, 60), (100, 30), (80, 24)):
        terminal.resize(columns, lines)

        def filled(columns: int = columns, lines: int = lines) -> bool:
            ends = terminal.lines[0].startswith("gpumem-exporter top"), terminal.lines[lines - 1].startswith("q quit")
            once = terminal.text.count("gpumem-exporter top") == terminal.text.count("q quit") == 1
            return all(ends) and once and ("command" in terminal.text) == (columns == 200)

        terminal.until(filled, f"{columns}x{lines} to be filled")
    terminal.resize(50, 10)
    terminal.until_shows("50x10", "72x12")


def _assert_restored(terminal: TerminalProgram) -> None:
    """Check that modes, screen, cursor and wrapping are restored."""
    assert terminal.modes() == terminal.modes_before
    for taken, given in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?7l", b"\x1b[?7h")):
        assert terminal.output.count(taken) == terminal.output.count(given) >= 1
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
        "import sys; from gpumem_exporter.cli import main; from gpumem_exporter.cli.top import view\n"
        "view.View.press = lambda *_: 1 / 0\n"
        "sys.exit(main.main())"
    )
    terminal = open_top(command=[sys.executable, "-c", code, "top", "--url", demo.url])
    _until_rows(terminal)
    terminal.type("j")
    assert terminal.wait() == 1
    _assert_restored(terminal)
    after = terminal.output[terminal.output.rindex(b"\x1b[?1049l") :]
    assert b"ZeroDivisionError" in after


def test_ctrl_z_restores_the_terminal_and_fg_continues(demo: ExporterProcess, open_top: OpenTop) -> None:
    environment = top_environment(PS1="ready> ", ENV="")
    terminal = open_top(command=["sh", "-i"], environment=environment)
    terminal.until_shows("ready>")
    terminal.type(f"{' '.join(top_command('--url', demo.url))}\n")
    _until_rows(terminal)
    for turn in (1, 2):
        terminal.type("\x1a")
        terminal.until(lambda n=turn: terminal.output.count(b"\x1b[?1049l") == n, "the first screen")
        terminal.until(lambda n=turn: terminal.output.count(b"Stopped") >= n, "the shell to say so")
        terminal.type("stty -a | tr -s ' ;' '\\n' | grep -x -e icanon -e echo | sort | tr '\\n' +\n")
        terminal.until(lambda n=turn: terminal.output.count(b"echo+icanon+") == n, "the shell's own modes")
        terminal.type("fg\n")
        terminal.until(lambda n=turn: terminal.output.count(b"\x1b[?1049h") == n + 1, "the screen again")
        drawn = len(terminal.output)
        terminal.until(lambda n=drawn: b"q quit" in terminal.output[n:], "it to be drawn")
    terminal.type("q")
    terminal.until(lambda: terminal.output.endswith(b"ready> "), "the shell")
    assert terminal.output.count(b"\x1b[?1049l") == 3


def test_top_continues_after_sigstop(demo: ExporterProcess, open_top: OpenTop) -> None:
    terminal = open_top("--url", demo.url)
    _until_rows(terminal)
    terminal.signal(signal.SIGSTOP)
    terminal.signal(signal.SIGCONT)
    terminal.until(lambda: terminal.output.count(b"\x1b[?1049h") == 2, "the screen to be taken again")
    terminal.type("q")
    assert terminal.wait() == 0
    _assert_restored(terminal)


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
        return "? y/n" in terminal.text

    def note() -> str:
        return " ".join(terminal.lines[-3:])

    terminal.type("c")
    terminal.until(lambda: "q quit" not in terminal.lines[-1], "a note that no process is chosen")
    assert not asks()
    terminal.type("jc")
    terminal.until(asks, "the question")
    assert "rank 3? y/n" in note()
    assert "300 MiB" in note()
    terminal.type("n")
    terminal.until_shows("q quit")
    assert reported()["reclaimable_bytes"] == 300 * MIB
    terminal.type("c")
    terminal.until(asks, "the question")
    terminal.type("y")
    terminal.until(lambda: not asks() and "Freed 300 MiB in 1 of 1 process" in terminal.lines[-1], "the result")
    after = {**sizes, "used": "612M", "reclaimable": "0B"}
    terminal.until(
        lambda: list(_process_rows(terminal).values()) == [after], f"the row without what was freed: {after}"
    )


def test_the_ranks_of_a_job_that_trains_clear_as_a_group(demo: ExporterProcess, open_top: OpenTop) -> None:
    def sent() -> list[Any]:
        actions = demo.get("/api/v1/actions?limit=20")["actions"]
        return [it for it in actions if it["reason"] == "requested in top" and not it["dry_run"]]

    ranks = [pid for pid, it in demo.processes().items() if it["workload"] == "demo-llm-pretrain"]
    terminal = open_top("--url", demo.url, "--filter", "demo-llm-pretrain", columns=80)
    _until_rows(terminal)
    terminal.type("jc")
    terminal.until(lambda: "Clear demo-llm-pretrain (4 ranks)? y/n" in terminal.text, "the question")
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
