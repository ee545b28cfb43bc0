"""The finding about what a launcher, a server or a container has left behind."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.readings import LostLauncher, ProcessFacts
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.features.orphans.orphan_findings import orphans_left_behind
from gpumem_exporter.main import main
from gpumem_exporter.page.findings import Finding
from gpumem_exporter.page.jobs import jobs_of
from tests.support.builders.builders import MIB, device, node, reporting

GIB = 1024 * MIB


def orphan_findings(
    pids: tuple[int, ...], lost: LostLauncher, *, viewer: Caller | None = None, held: int = 10, free: int = 40
) -> list[Finding]:
    """Return the findings about orphans, which only the driver lists, with `held` GiB each on a device of 80 GiB."""
    used = (80 - free) * GIB
    listed: dict[int, int | None] = {**dict.fromkeys(pids, held * GIB), 99: used - len(pids) * held * GIB}
    facts = {pid: ProcessFacts(pid, 1000, "VLLM::Worker_TP0") for pid in pids}
    known = dataclasses.replace(node(device(used=used, processes=listed)), facts=facts)
    shown = Snapshot(1000.0, known, orphans=dict.fromkeys(pids, lost))
    return list(orphans_left_behind(shown, jobs_of(shown, viewer), node_ledgers(shown)))


def test_the_orphans_of_one_server_are_one_finding_since_its_end() -> None:
    lost = LostLauncher("launcher_ended", "python vllm", 4711, ended_seconds=700.0)
    (found,) = orphan_findings((7, 8), lost)
    assert (found.severity, found.since_seconds) == ("warning", 700.0)
    for part in ("2 processes", "20.0 GiB on GPU 0", "server (python vllm, pid 4711)"):
        assert part in found.sentence
    (found,) = orphan_findings((7,), lost, viewer=Caller(CallerKind.TCP, Rights.NONE))
    assert "4711" in found.sentence
    assert "vllm" not in found.sentence.lower(), "the name of a launcher is an identity"
    assert len(orphan_findings((7, 8), LostLauncher("launcher_ended"))) == 2, "of unknown launchers"
    assert "container" in orphan_findings((7,), dataclasses.replace(lost, reason="container_gone"))[0].sentence


def test_what_two_launchers_of_one_workload_left_behind_are_two_findings() -> None:
    processes = [reporting(pid, workload="llm", session=f"session-{pid}") for pid in (7, 8)]
    lost = {pid: LostLauncher("launcher_ended", "torchrun", 4000 + pid, 700.0) for pid in (7, 8)}
    facts = {pid: ProcessFacts(pid, processes[0].start_time_ticks) for pid in (7, 8)}
    known = dataclasses.replace(node(device(processes={7: MIB, 8: MIB})), facts=facts)
    shown = Snapshot(1000.0, known, tuple(processes), orphans=lost)
    found = orphans_left_behind(shown, jobs_of(shown), node_ledgers(shown))
    assert len({each.id for each in found}) == 2


@pytest.mark.parametrize(("held", "free", "severity"), [(1, 40, "info"), (4, 40, "warning"), (1, 3, "warning")])
def test_the_severity_of_an_orphan_depends_on_who_needs_its_memory(held: int, free: int, severity: str) -> None:
    (found,) = orphan_findings((7,), LostLauncher("launcher_ended"), held=held, free=free)
    assert found.severity == severity


def test_the_next_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = orphan_findings((7,), LostLauncher("launcher_ended"))
    command, *options = shlex.split(found.next.partition(": ")[2].removeprefix("gpumem-exporter "))
    assert main([command, *options, "--help"]) == 0
    assert "--orphans" in capsys.readouterr().out
