from __future__ import annotations

import re

import pytest

from gpumem_exporter.cli.commands.actions import ACTION_COMMANDS, ActionCommand
from gpumem_exporter.cli.main import main
from gpumem_exporter.cli.program import PROGRAM

COMMANDS = ("info", "top", "clear", "gc", "reset-peak", "snapshot", "fraction", "terminate")


def test_the_help_lists_every_command_and_the_labels_of_a_series(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--help"]) == 0
    out = capsys.readouterr().out
    listed = out.partition("Commands:")[2].partition("Examples:")[0]
    assert tuple(line.split()[0] for line in listed.strip().splitlines()) == COMMANDS
    assert "..." not in listed
    assert re.search(r"^ *pid\W+workload\W+rank\W+gpu\W+uuid\b", out, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {PROGRAM} fleet {command}")
    assert "--prometheus URL" in out
    assert ("--max-processes" in out) is (command not in ("info", "top"))
    assert ("--group" in out) is (command not in ("info", "top", "terminate"))
    assert ("Examples:" in out) is (command not in ("info", "top"))


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        ([], "Missing command", "fleet --help"),
        (["claer"], "'claer'", "fleet --help"),
        (["clear"], "--query", "fleet clear --help"),
        (["clear", "--query", "up"], "Prometheus", "--prometheus URL"),
        (["clear", "--query", "up", "--parallel", "0"], "--parallel", "fleet clear --help"),
        (["clear", "--query", "up", "--max-processes", "0"], "--max-processes", "fleet clear --help"),
        (["clear", "--query", "up", "--group", "--mode", "now"], "--mode now", "step"),
        (["clear", "--query", "up", "--deadline", "nan"], "--deadline nan", "over 0"),
        (["fraction", "1.5", "--query", "up"], "F 1.5", "at most 1"),
        (["terminate", "--query", "up", "--group"], "--group", "fleet terminate --help"),
        (["top", "--interval", "nan"], "--interval nan", "0.2 to 3600"),
        (["top", "--prometheus", "http://p"], "terminal", "fleet info"),
        (["info", "--prometheus", "node:9090"], "--prometheus", "http://host:port"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], wrong: str, right: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUMEM_PROMETHEUS_URL", raising=False)
    assert main(["fleet", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"{PROGRAM} fleet: ")
    assert wrong in captured.err
    assert right in captured.err


@pytest.mark.parametrize("command", ACTION_COMMANDS, ids=lambda command: command.name)
def test_the_help_of_each_action_has_an_example_of_its_own_with_a_dry_run(
    command: ActionCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", command.name, "--help"]) == 0
    text = capsys.readouterr().out
    example = text[text.index("Examples:") :]
    assert f"fleet {command.name} " in example
    assert "--dry-run" in example
    assert ("gpumem_torch_idle_cache_bytes" in example) == (command.name == "clear")
