from __future__ import annotations

import re

import pytest

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter import __version__
from gpumem_exporter.application import COMMANDS
from gpumem_exporter.cli.program import PROGRAM
from gpumem_exporter.main import main


def _exits_with_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(PROGRAM)
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"{PROGRAM} {__version__}\n"


@pytest.mark.parametrize("words", [["fleet", "clear"], ["actions", "list"], ["run"]])
def test_help_prints_the_help_of_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    expected = capsys.readouterr().out
    assert main(["help", *words]) == 0
    assert capsys.readouterr().out == expected != ""


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_the_help_lists_every_command_with_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    listed = out.partition("Look:")[2].partition("Examples:")[0]
    assert re.findall(r"^  ([\w-]+) ", listed, re.MULTILINE) == list(COMMANDS)
    assert "gpumem-exporter serve --demo" in out
    assert "..." not in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_the_program_says_what_the_help_of_each_command_begins_with(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    assert COMMANDS[name].summary in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        (["dance"], "'dance'", ", ".join(COMMANDS)),
        (["--verbose", "info"], "--verbose", "--help"),
        (["info", "now"], "now", "info --help"),
        (["clear", "--pid"], "--pid", "gpumem-exporter clear --help"),
        *(
            (["clear", "--all", f"--wait={value}"], "--wait", wrong)
            for value, wrong in (("-0.1", "x>=0"), ("inf", "seconds"))
        ),
        (["clear", "--all", "--settle=3601"], "--settle", "0<=x<=3600"),
        *((["gc", "--all", f"--deadline={value}"], "--deadline", "3600") for value in ("0", "3601")),
        (["clear", "--all", "--mode", "now", "--group"], "--mode now", "a group acts"),
        (["clear", "--all", "--gpu", "0", "--pid", "3"], "--gpu, --pid", "--all"),
        (["info", "--url", "ftp://node:9844"], "ftp://node:9844", "https://host:port"),
        (["actions"], "command", "actions --help"),
        (["actions", "show"], "ID", "actions show --help"),
        (["actions", "list", "--state", "over"], "--state 'over'", "cancelled"),
        (["clear", "--json=3"], "--json", "take a value"),
        (["fleet", "clear"], "--query", "fleet clear --help"),
        (["fleet", "clear", "--query", "up"], "Prometheus", "--prometheus URL"),
        (["fleet", "clear", "--query", "up", "--max-processes", "0"], "--max-processes", "fleet clear --help"),
        (
            ["fleet", "clear", "--query", "up", "--deadline", "soon"],
            "--deadline",
            "expected seconds",
        ),
        (["fleet", "top", "--prometheus", "http://p"], "terminal", "fleet info"),
        (["fleet", "info", "--prometheus", "node:9090"], "--prometheus", "http://host:port"),
        (["top"], "terminal", "top --once"),
        (["top", "--json"], "--json", "--once"),
        (["top", "--once", "--interval=0"], "--interval", "0.2<=x<=3600"),
        (["--kube", "gpu-1", "serve"], "--kube", "`serve` uses no exporter of one node"),
        (["--url", "a:1", "fleet", "info"], "--url", "--instance-url http://{instance}"),
        (["--url", "a:1", "info", "--url", "b:1"], "--url", "once"),
        (["--kube", "gpu-1", "fleet", "info"], "--kube", "--instance-url http://{instance}"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], wrong: str, right: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden file of mistakes has the most frequent ones."""
    monkeypatch.delenv("GPUMEM_PROMETHEUS_URL", raising=False)
    line = _exits_with_one_line(capsys, arguments, 2)
    assert wrong in line
    assert right in line


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ExporterAnswerError(403, "no\n token \x1b[31m"), 1, "gpumem-exporter info: no token ?[31m"),
        (ExporterAnswerError(401, "a token is required"), 1, "--token-file"),
        (ExporterAnswerError(422, "settle_seconds: too long"), 2, "gpumem-exporter info: settle_seconds: too long"),
    ],
)
def test_an_error_has_its_exit_code(
    error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("gpumem_exporter.cli.api_client.ExporterApi.get", fails)
    assert main(["info", "--url", "unix:///nonexistent.sock"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert printed in captured.err
    assert bool(printed) is bool(captured.err)


def test_a_prometheus_without_an_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fleet clear --query up --prometheus http://127.0.0.1:1"
    line = _exits_with_one_line(capsys, words.split(), 1)
    assert "http://127.0.0.1:1" in line
    assert "Errno" not in line
