"""`top --once`, and wrong usage of `top`."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.node import GIB, NVML_ERROR_DRIVER_NOT_LOADED, EmulatedNode
from tests.support.exporter_process import ExporterProcess
from tests.support.top_program import (
    FOREIGN,
    demo,
    top_command,
    top_environment,
    top_once,
    top_without_default_exporter,
)
from tests.support.waiting import patient

__all__ = ["demo"]


def test_once_prints_a_full_frame(demo: ExporterProcess) -> None:
    ended = top_once("--url", demo.url)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert "DEMO" in lines[0]
    assert "\x1b" not in ended.stdout
    assert not any("…" in line for line in lines if "python" in line)
    assert sum("python pretrain.py" in line for line in lines) == 1, "the ranks are folded"
    assert sum("demo-llm-pretrain" in line for line in lines) >= 5, "the job and its devices"


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
    help_text = subprocess.run(
        top_command("--help"), env=top_environment(), capture_output=True, text=True, timeout=patient(60), check=True
    ).stdout
    listed = re.search(r"in order: ([\w\s,]+);", help_text)
    assert listed
    assert [name.strip() for name in listed.group(1).split(",")] == list(document["rows"][0])


def test_info_and_top_select_with_the_options_of_the_actions(demo: ExporterProcess) -> None:
    target = ("--workload", "demo-llm-pretrain", "--rank", "0,1", "--rank", "2")
    chosen = json.loads(top_once("--json", "--url", demo.url, "--sort", "devices", *target).stdout)
    assert [(row["gpu"], row["rank"]) for row in chosen["rows"]] == [("0", "0"), ("1", "1"), ("2", "2")]
    shown = json.loads(_info("--json", "--url", demo.url, *target).stdout)
    for document in (chosen, shown):
        assert [device["gpu"] for device in document["devices"]] == ["0", "1", "2"]
    assert sorted(process["pid"] for process in shown["processes"]) == sorted(row["pid"] for row in chosen["rows"])


def test_an_unknown_name_is_answered_with_the_nearest_one_as_by_an_action(demo: ExporterProcess) -> None:
    target = ("--url", demo.url, "--workload", "demo-notebok", "--gpu", "99")
    answers = [top_once(*target), _info(*target)]
    assert {(ended.returncode, ended.stdout) for ended in answers} == {(1, "")}
    for ended in answers:
        (line,) = ended.stderr.splitlines()
        assert "no such GPU '99'; known GPUs: 0, 1, 2, 3, 4, 5, 6, 7; " in line
        assert "no such workload 'demo-notebok'; did you mean demo-notebook?" in line


def _info(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumem_exporter", "info", *arguments]
    environment = top_environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60), check=False)


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


def test_without_exporter_and_driver_both_errors_are_in_one_line(node: EmulatedNode, tmp_path: Path) -> None:
    node.set_init_error(NVML_ERROR_DRIVER_NOT_LOADED)
    ended = subprocess.run(
        top_without_default_exporter(tmp_path / "none.sock", "--once"),
        env=top_environment(node.environment()),
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "none.sock" in ended.stderr
    assert "NVML_ERROR_DRIVER_NOT_LOADED" in ended.stderr


@pytest.mark.parametrize(
    ("output", "status", "error"),
    [(">&-", 0, ""), (">/dev/full", 1, f"{os.strerror(errno.ENOSPC)}\n")],
)
def test_closed_or_full_output_causes_no_traceback(demo: ExporterProcess, output: str, status: int, error: str) -> None:
    for more in ((), ("--json",)):
        shell = f"{' '.join(top_command('--once', '--url', demo.url, *more))} {output}"
        ended = subprocess.run(
            ["sh", "-c", shell], env=top_environment(), capture_output=True, text=True, timeout=patient(60), check=False
        )
        assert (ended.returncode, ended.stdout) == (status, "")
        assert ended.stderr.count("\n") == (status != 0)
        assert ended.stderr.endswith(error)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--once", "--sort", "size"), r"--sort\b.*\bsize\b.*\bused\b.*\breclaimable\b"),
        (("--once", "--interval", "0"), r"--interval 0\b.*\b0\.2\b.*\b3600\b"),
        (("--json",), "--once"),
        ((), "top --once"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(arguments: tuple[str, ...], named: str) -> None:
    ended = subprocess.run(
        top_command(*arguments),
        env=top_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert re.search(named, ended.stderr)
