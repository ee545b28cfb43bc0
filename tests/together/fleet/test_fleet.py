"""`fleet` over three exporters that serve the demo and a real Prometheus that scrapes them.

The first accepts actions of any local user, the second requires a token, and a fixture stops the third.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gpumem_exporter.features.fleet.prometheus import Prometheus
from tests.support.ports import free_port
from tests.support.processes.running_command import clean_environment, run_command
from tests.support.processes.terminal_program import TerminalProgram
from tests.support.servers.exporter_process import ExporterProcess, token_file
from tests.support.servers.running_prometheus import RunningPrometheus
from tests.support.waiting import wait_for

TOKEN = "a-token-for-tests"
RECENT = 'last_over_time(gpumem_torch_reclaimable_bytes{workload="demo-notebook"}[10m])'
"""Selects the third node's processes also while its exporter is down."""


@dataclass(frozen=True)
class Fleet:
    """Three exporters, their instance labels, and a Prometheus."""

    exporters: tuple[ExporterProcess, ...]
    instances: tuple[str, ...]
    prometheus: RunningPrometheus

    def command(self, *arguments: str, token: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        known = {"GPUMEM_PROMETHEUS_URL": self.prometheus.url, **environ}
        if token:
            known.setdefault("GPUMEM_ACTION_TOKEN", TOKEN)
        return run_command("fleet", *arguments, **known)

    def json(self, *arguments: str, code: int = 0, **options: Any) -> Any:
        ended = self.command(*arguments, "--json", **options)
        assert (ended.returncode, ended.stderr) == (code, ""), ended.stdout
        return json.loads(ended.stdout)

    def ask(self, query: str) -> list[dict[str, str]]:
        """The labels of a query's series."""
        return Prometheus(self.prometheus.url).query(query)[0]

    def wait_until_known(self) -> None:
        """Wait until Prometheus knows every process that these tests select."""
        known = 'gpumem_torch_reclaimable_bytes{workload=~"demo-(llm-pretrain|pipeline-finetune|notebook)"}'
        wait_for(lambda: len(self.ask(known)) == 3 * (4 + 2 + 1), "every process of three exporters", 90.0)

    def actions(self, number: int) -> list[Any]:
        """The actions of an exporter, newest first."""
        answer = self.exporters[number].request("GET", "/api/v1/actions", headers={"Authorization": f"Bearer {TOKEN}"})
        return list(json.loads(answer.body)["actions"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    token = token_file(folder, TOKEN)
    exporters: list[ExporterProcess] = []
    instances = tuple(f"127.0.0.1:{free_port()}" for _ in range(3))
    try:
        for number, instance in enumerate(instances):
            (folder / f"node{number}").mkdir()
            guarded = ("--action.token-file", token) if number == 1 else ()
            flags = ("--demo", "--web.listen-address", instance, *guarded)
            exporters.append(ExporterProcess(folder / f"node{number}", *flags, environment=clean_environment()))
        with RunningPrometheus(folder / "prometheus", {instance: instance for instance in instances}) as prometheus:
            running = Fleet(tuple(exporters), instances, prometheus)
            running.wait_until_known()
            yield running
    finally:
        for exporter in exporters:
            exporter.close()


@pytest.fixture
def third_is_down(fleet: Fleet) -> Iterator[str]:
    """The third exporter's instance, while it is down."""
    fleet.exporters[2].stop()
    try:
        yield fleet.instances[2]
    finally:
        fleet.exporters[2].start()
        fleet.wait_until_known()


def test_a_clear_acts_on_exactly_the_processes_that_the_query_selects(fleet: Fleet) -> None:
    query = 'gpumem_torch_allocated_bytes{workload=~"demo-(llm-pretrain|pipeline-finetune)", rank!~"[23]"}'
    wanted = {(labels["instance"], labels["pid"]) for labels in fleet.ask(query)}
    assert len(wanted) == 9
    before = [len(fleet.actions(number)) for number in range(3)]
    for words, code, error in (
        (("--query", query, "--max-processes", "8"), 1, r"\b9\b.*--max-processes 8\b"),
        (("--query", "sum("), 2, "parse error"),
    ):
        ended = fleet.command("clear", *words)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert re.search(error, ended.stderr)
    assert [len(fleet.actions(number)) for number in range(3)] == before

    # By default, ranks clear together, also the ones that the query leaves out.
    ended = fleet.command("clear", "--mode", "now", "--query", query, "--reason", "a test")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    for number, instance in enumerate(fleet.instances):
        actions = fleet.actions(number)
        new = actions[: len(actions) - before[number]]
        targets = [action["target"]["pid"] for action in new]
        pids = {str(pid) for each in targets for pid in (each if isinstance(each, list) else [each])}
        assert pids == {pid for at, pid in wanted if at == instance}
        assert [(action["reason"], action["outcomes"].keys()) for action in new] == [("a test", {"done"})]
    lines = ended.stdout.splitlines()
    rows = [line.split() for line in lines[1:-1]]
    assert {(row[0], row[3]) for row in rows} == wanted
    assert re.search(r"\d [KMGT]iB\b.*\b9 processes\b", lines[-1])


def test_exporters_that_refuse_or_are_down_are_named_and_the_others_act(fleet: Fleet, third_is_down: str) -> None:
    document = fleet.json("gc", "--query", RECENT, token=False, code=1)
    found = {row["instance"]: row for row in document["results"]}
    assert {instance: row["outcome"] for instance, row in found.items()} == {
        fleet.instances[0]: "done",
        fleet.instances[1]: "refused",
        third_is_down: "failed",
    }
    assert "--action.token-file" in found[fleet.instances[1]]["reason"]
    assert f"http://{third_is_down}" in found[third_is_down]["reason"]
    assert found[third_is_down]["workload"] == "demo-notebook"

    info = fleet.command("info")
    assert info.returncode == 1
    totals, *lines = info.stdout.splitlines()
    assert re.search(r"\b2\b.*\b3\b.*\b16\b", totals)
    assert any("No answer" in line and third_is_down in line for line in lines)
    for instance in fleet.instances[:2]:
        gpus = [line.split()[1] for line in lines if line.startswith(f"{instance} ")]
        assert [gpu for gpu in gpus if gpu.isdecimal()] == [str(gpu) for gpu in range(8)]
        assert gpus.count("demo-llm-pretrain") == 1


def test_top_is_live_until_q(fleet: Fleet) -> None:
    command = [sys.executable, "-m", "gpumem_exporter", "fleet", "top", "--interval", "0.2"]
    environment = clean_environment(TERM="xterm-256color", GPUMEM_PROMETHEUS_URL=fleet.prometheus.url)
    terminal = TerminalProgram(command, environment, columns=160, lines=50)
    try:
        terminal.until_shows("24 devices")
        drawn = terminal.output.count(b"24 devices")
        terminal.until(lambda: terminal.output.count(b"24 devices") > drawn, "the next update")
        terminal.type("q")
        assert terminal.wait() == 0
    finally:
        terminal.close()
