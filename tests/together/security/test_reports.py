"""Whom the exporter believes: reports of real users, in real namespaces, over loopback and the unix socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.protocol import (
    MAX_COMPONENTS,
    MAX_LABEL_LENGTH,
    MAX_PHASES,
    REPORTS_PATH,
    CommandResult,
    DeviceSample,
    OutOfMemory,
    Report,
    to_wire,
)
from tests.support.builders.builders import UUIDS
from tests.support.processes.local_users import EVE, NEW_USER_NAMESPACE, LocalUser, SharedNode
from tests.support.processes.namespaces import needs_namespaces
from tests.support.processes.other_user import needs_root
from tests.support.servers.exporter_process import token_file
from tests.support.waiting import wait_for

pytestmark = [needs_root, needs_namespaces]

PAGES = ("/metrics", "/api/v1/processes")


@pytest.fixture(scope="module")
def node() -> Iterator[SharedNode]:
    with closing(SharedNode()) as node:
        yield node


@pytest.fixture(autouse=True)
def reported(node: SharedNode, root: LocalUser, ada: LocalUser, eve: LocalUser) -> Iterator[None]:
    """Ada's process reports; at the end every process sends its final report."""
    assert ada.send(node.tcp, ada.report(workload="ada"))[0] == 200
    yield
    for process in (root, ada, eve):
        process.send(node.tcp, process.report(final=True))
    wait_for(lambda: not node.exporter.processes(), "the end of all")


def of(node: SharedNode, process: LocalUser) -> Any:
    """Return what the exporter shows of a process."""
    return node.exporter.processes()[process.pid]


def outcome(node: SharedNode, name: str) -> float:
    return sum(node.exporter.metrics().values("gpumem_reports_total", outcome=name))


@pytest.mark.parametrize("final", [False, True], ids=["takeover", "final"])
def test_a_user_cannot_report_for_the_process_of_another(
    node: SharedNode, root: LocalUser, ada: LocalUser, eve: LocalUser, url: str, final: bool
) -> None:
    before = outcome(node, "foreign_process")
    for victim in (ada, root):
        stolen = victim.report(session="eve", session_started_seconds=1e12, workload="stolen", final=final)
        reply = eve.send(url, stolen)
        assert reply.status == 403, reply
        assert f"pid {victim.pid} belongs to uid" in reply.detail
    assert of(node, ada)["workload"] == "ada"
    assert outcome(node, "foreign_process") == before + 2


def test_a_user_reports_its_own_process_and_a_launcher_for_it(node: SharedNode, eve: LocalUser, url: str) -> None:
    reply = eve.send(url, eve.report(workload="eve"))
    assert reply.status == 200, reply
    assert (of(node, eve)["workload"], of(node, eve)["attested"]) == ("eve", True)
    with closing(LocalUser(EVE)) as launcher:
        assert launcher.send(url, eve.report(step=7))[0] == 200
    assert of(node, eve)["step"] == 7


def test_root_of_a_user_namespace_reports_itself_but_no_process_of_the_node(
    node: SharedNode, root: LocalUser, ada: LocalUser, url: str
) -> None:
    with closing(LocalUser(0, NEW_USER_NAMESPACE)) as inside:
        assert inside.send(url, inside.report(workload="inside"))[0] == 200
        assert of(node, inside)["workload"] == "inside"
        for victim in (root, ada):
            assert inside.send(url, victim.report(workload="stolen"))[0] == 403
        assert inside.send(url, inside.report(final=True))[0] == 200


def test_a_start_in_the_future_does_not_silence_the_next_session(node: SharedNode, ada: LocalUser) -> None:
    assert ada.send(node.tcp, ada.report(session="ahead", session_started_seconds=1e12))[0] == 200
    for final in (False, True):
        reply = ada.send(node.tcp, ada.report(session="next", session_started_seconds=1e11, final=final))
        assert reply.status == 200, reply


def test_labels_phases_and_components_beyond_the_limits_are_left_out(node: SharedNode, ada: LocalUser) -> None:
    names = {f"{number:03}" + "p" * 150: number for number in range(40)}
    wide = {"uuid": UUIDS[0], "reserved_bytes": 1, "phase_peak_bytes": names, "component_bytes": names}
    before = outcome(node, "shortened")
    for _ in range(2):
        sent = ada.report(workload="w" * 200, rank="r" * 200)
        assert ada.request(node.tcp, "POST", REPORTS_PATH, {**to_wire(sent), "devices": [wide]})[0] == 200
    entry = of(node, ada)
    (device,) = entry["devices"]
    assert (len(device["phase_peak_bytes"]), len(device["component_bytes"])) == (MAX_PHASES, MAX_COMPONENTS)
    assert {len(name) for name in device["phase_peak_bytes"]} == {len(entry["workload"]), len(entry["rank"])} == {128}
    assert outcome(node, "shortened") == before + 2
    named = [line for line in node.exporter.log().splitlines() if "report not stored as sent" in line]
    assert len(named) == 1
    assert f"pid={ada.pid}" in named[0]


def test_the_page_and_the_memory_are_bounded_whatever_one_user_sends(ada: LocalUser, eve: LocalUser) -> None:
    """Every report is as large as it may be. There is no driver, so the exporter knows no devices."""
    with closing(SharedNode()) as node:
        refused = 0
        for pid in range(1, 700):
            report = largest_report(eve, pid) if pid < 60 else eve.report(pid=pid, pid_namespace=4242)
            reply = eve.send(node.url, report)
            assert reply.status == 200 or (reply.status == 503 and "max-processes" in reply.detail), reply
            refused += reply.status == 503
        assert refused > 100
        sizes = [len(node.exporter.request("GET", path).body) for path in PAGES for _ in range(3)]
        assert max(sizes) < 12_000_000, sizes
        assert node.exporter.peak_bytes() < 160 << 20
        assert ada.send(node.url, ada.report())[0] == 200


def largest_report(process: LocalUser, number: int) -> Report:
    """A report of made-up devices, with as many results and errors and as long texts as the protocol allows."""
    text = "\U0001f4a3" * MAX_LABEL_LENGTH
    names = {f"{text[3:]}{index:03}": 2**62 for index in range(MAX_PHASES)}
    values: dict[str, Any] = {field.name: 2**40 for field in fields(DeviceSample) if field.default is None} | {
        "reserved_bytes": 2**42
    }
    devices = tuple(
        DeviceSample(f"GPU-{number:032}-{index:032}", phase_peak_bytes=names, component_bytes=names, **values)
        for index in range(48)
    )
    ooms = tuple(OutOfMemory(device.uuid, index + 1, requested_bytes=2**62) for index, device in enumerate(devices))
    results = tuple(CommandResult(f"{index}", "done", reason="r" * 2000) for index in range(16))
    return process.report(
        pid=number,
        pid_namespace=4242,
        session=f"session {number}",
        devices=devices,
        ooms=ooms,
        results=results,
        workload=text,
        rank=text,
        actions=tuple(f"{text}{text}"[:200] for _ in range(64)),
    )


def test_a_reporter_with_only_a_token_is_unattested_and_replaces_no_attested_one(
    tmp_path: Path, root: LocalUser, ada: LocalUser, eve: LocalUser
) -> None:
    with_token = {"Authorization": "Bearer secret of reporters"}
    proxied = {**with_token, "X-Forwarded-For": "192.0.2.1"}  # the kernel knows the proxy, not the reporter
    with closing(SharedNode("--report.token-file", token_file(tmp_path, "secret of reporters"))) as node:
        assert ada.send(node.url, ada.report())[0] == 401
        unseen = {"pid": 5, "pid_namespace": 4242, "workload": "far"}
        assert eve.send(node.tcp, eve.report(**unseen), **proxied)[0] == 200
        assert eve.send(node.tcp, ada.report(workload="made up"), **proxied)[0] == 200
        assert ada.send(node.tcp, ada.report(workload="ada"), **with_token)[0] == 200
        shown = {each["workload"]: each["attested"] for each in node.exporter.get("/api/v1/processes")["processes"]}
        assert shown == {"far": False, "ada": True}
        reply = eve.send(node.tcp, ada.report(workload="made up"), **proxied)
        assert (reply.status, "attests" in reply.detail) == (409, True), reply
        reply = eve.send(node.tcp, root.report(start_time_ticks=5), **proxied)
        assert (reply.status, "another process" in reply.detail) == (403, True), reply
        reply = eve.send(node.url, root.report(), **with_token)
        assert (reply.status, "belongs to uid 0" in reply.detail) == (403, True), (
            "the token does not replace the kernel's uid"
        )
