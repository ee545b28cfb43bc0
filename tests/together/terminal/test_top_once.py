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

from tests.emulation.node import GIB, EmulatedNode
from tests.support.exporter_process import ExporterProcess
from tests.support.running_command import run_command
from tests.support.top_program import top_command, top_environment, top_once
from tests.support.waiting import patient

FOREIGN = 4_000_001
"""The pid of no process."""


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
    shown = json.loads(run_command("info", "--json", "--url", demo.url, *target).stdout)
    for document in (chosen, shown):
        assert [device["gpu"] for device in document["devices"]] == ["0", "1", "2"]
    assert sorted(process["pid"] for process in shown["processes"]) == sorted(row["pid"] for row in chosen["rows"])


def top_without_default_exporter(socket: Path, *arguments: str) -> list[str]:
    """Return the command line of `top` with `socket` as the default socket."""
    code = (
        "import os, sys; from gpumem_exporter.main import main\n"
        "from gpumem_exporter.cli.commands import top; urls = top.exporter_urls\n"
        "is_named = lambda url: url is not None or 'GPUMEM_EXPORTER_URL' in os.environ\n"
        f"top.exporter_urls = lambda url: urls(url) if is_named(url) else ('unix://{socket}',)\n"
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
