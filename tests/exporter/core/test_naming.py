"""A process has one name on the metrics page, in JSON documents and in the target of an action."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.actions.selection import SelectedProcess, matches, processes_of
from gpumem_exporter.core.container import Place
from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.page.documents import processes_document
from tests.support.builders.builders import MIB, device, node, reporting, sample

SAMPLE = (sample(allocated=MIB),)


def of_target(target: Target, snapshot: Snapshot) -> list[SelectedProcess]:
    """Return the reporting processes of a target."""
    return [one for one in matches(target, snapshot, processes_of(snapshot).values()) if one.reporter is not None]


def known(*processes: ReportingProcess, listed: dict[int, int | None] | None = None, **facts: int) -> Snapshot:
    """Reporters and the driver's processes; `p70=5` means that pid 70 started at tick 5 according to the host."""
    reading = dataclasses.replace(
        node(device(used=100 * MIB, processes=listed or {})),
        facts={int(pid[1:]): ProcessFacts(int(pid[1:]), ticks) for pid, ticks in facts.items()},
    )
    return Snapshot(taken_seconds=0.0, node=reading, processes=processes)


def names(snapshot: Snapshot) -> list[str]:
    return [name for name, _ in snapshot.names.reporting]


def in_namespace(namespace: int, pid: int = 1, received_seconds: float = 0.0, **changes: Any) -> ReportingProcess:
    process = reporting(pid, host_pid=None, pid_namespace=namespace, devices=SAMPLE, **changes)
    return dataclasses.replace(process, received_seconds=received_seconds)


"""Pid 1 in two namespaces, pid 70 in one while the driver lists another pid 70, and the unique pid 8."""


def test_no_report_of_another_owner_changes_the_name_of_a_process_or_hides_it() -> None:
    inside = Place(known=True, container=".".join(letter * 64 for letter in "ab"))
    mine = in_namespace(11, owner_uid=1001)
    others = [
        in_namespace(11, owner_uid=1002, received_seconds=9.0),
        in_namespace(12, owner_uid=1001),
        dataclasses.replace(mine, key=mine.key._replace(place=inside), received_seconds=9.0),
        in_namespace(11),
    ]
    assert names(known(mine)) == ["1@11:1001"]
    shown = dict(known(mine, *others, listed={1: MIB}).names.reporting)
    assert [*shown] == ["1@11", "1@11:1001", f"1@11:1001:{'a' * 12}.{'b' * 12}", "1@11:1002", "1@12:1001"]
    assert shown["1@11:1001"] is mine
    for name in shown:
        assert Target(pid=name).admits(pid=(name,))
        (found,) = of_target(Target(pid=name), known(mine, *others))
        assert found.pid == json_pid(name)


def test_a_process_whose_pid_was_reused_has_no_name_and_is_no_target() -> None:
    old = reporting(70, devices=SAMPLE, start_time_ticks=1000)
    assert names(known(old, p70=1000)) == ["70"]
    assert names(known(old, p70=0)) == ["70"], "the host hides the start time"
    replaced = known(old, listed={70: 9 * MIB}, p70=1001)
    assert names(replaced) == []
    assert of_target(Target(all=True), replaced) == []
    (document,) = processes_document(replaced, "nvml")["processes"]
    assert (document["pid"], document["state"], document["workload"]) == (70, "unreported", None)


@pytest.mark.parametrize(("ticks", "others"), [(1000, 0), (0, 0), (999, 9 * MIB), (1001, 9 * MIB)])
def test_the_drivers_bytes_belong_to_a_reporter_only_if_the_start_times_are_equal(ticks: int, others: int) -> None:
    (ledger,) = node_ledgers(
        known(reporting(70, devices=SAMPLE, start_time_ticks=1000), listed={70: 9 * MIB}, p70=ticks)
    ).values()
    assert ledger.categories["other_processes"] == others
    assert ledger.categories["torch_allocated"] == (0 if others else MIB)
    assert sum(ledger.categories.values()) == ledger.total_bytes


def test_the_later_of_two_reporters_with_one_host_pid_has_the_name() -> None:
    first = dataclasses.replace(in_namespace(11), host_pid=70, received_seconds=1.0)
    second = dataclasses.replace(in_namespace(12), host_pid=70, received_seconds=2.0)
    for order in ((first, second), (second, first)):
        (found,) = of_target(Target(pid=70), known(*order))
        assert found.reporter is second
