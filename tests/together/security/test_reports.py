"""Whom the exporter believes: reports of real users, in real namespaces, over loopback and the unix socket."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
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
from tests.emulation.node import MIB, NVML_ERROR_DRIVER_NOT_LOADED, EmulatedNode
from tests.support.builders.builders import sample
from tests.support.processes.local_users import NEW_USER_NAMESPACE, LocalUser
from tests.support.processes.namespaces import needs_namespaces
from tests.support.processes.other_user import OTHER_UID, needs_root
from tests.support.servers.exporter_process import QUICK, ExporterProcess, token_file
from tests.support.waiting import wait_for

pytestmark = [needs_root, needs_namespaces]

ADA, EVE = OTHER_UID, OTHER_UID + 1
PAGES = ("/metrics", "/api/v1/processes")


@dataclass(frozen=True)
class Place:
    """An exporter of root on an emulated node, and processes of several users."""

    node: EmulatedNode
    exporter: ExporterProcess
    tcp: str
    root: LocalUser
    ada: LocalUser
    eve: LocalUser

    def url(self, way: str) -> str:
        return self.exporter.url if way == "unix" else self.tcp

    def processes(self) -> list[dict[str, Any]]:
        return [entry for entry in self.exporter.get("/api/v1/processes")["processes"] if entry["reporting"]]

    def of(self, process: LocalUser) -> list[dict[str, Any]]:
        """What the exporter shows of a process."""
        return [entry for entry in self.processes() if entry["host_pid"] == process.pid]

    def outcome(self, name: str) -> float:
        return sum(self.exporter.metrics().values("gpumem_reports_total", outcome=name))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)  # unlike pytest's folders
        yield path


@pytest.fixture(scope="module")
def place(folder: Path, emulation: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        node = stack.enter_context(EmulatedNode(folder / "node"))
        exporter = ExporterProcess(folder, *QUICK, environment=node.environment())
        stack.callback(exporter.close)
        users = [stack.enter_context(closing(LocalUser(uid))) for uid in (0, ADA, EVE)]
        yield Place(node, exporter, exporter.tcp_url, *users)


@pytest.fixture(autouse=True)
def reported(place: Place) -> Iterator[None]:
    """Ada's process reports; at the end every process sends its final report."""
    assert place.ada.send(place.tcp, ada_report(place))[0] == 200
    yield
    for process in (place.root, place.ada, place.eve):
        process.send(place.tcp, process.report(final=True))
    wait_for(lambda: not place.processes(), "the end of all")


def ada_report(place: Place, **changes: Any) -> Any:
    devices = (sample(place.node.uuid(0), allocated=10 * MIB),)
    return place.ada.report(**{"workload": "ada", "devices": devices, **changes})


WAYS = pytest.mark.parametrize("way", ["tcp", "unix"])


@WAYS
@pytest.mark.parametrize("final", [False, True], ids=["takeover", "final"])
def test_a_user_cannot_report_for_the_process_of_another(place: Place, way: str, final: bool) -> None:
    before = place.outcome("foreign_process")
    for victim in (place.ada, place.root):
        stolen = victim.report(session="eve", session_started_seconds=1e12, workload="stolen", final=final)
        reply = place.eve.send(place.url(way), stolen)
        assert reply.status == 403, reply
        assert f"pid {victim.pid} belongs to uid" in reply.detail
    assert [entry["workload"] for entry in place.of(place.ada)] == ["ada"]
    assert place.outcome("foreign_process") == before + 2


@WAYS
def test_a_user_reports_its_own_process_and_a_launcher_for_it(place: Place, way: str) -> None:
    reply = place.eve.send(place.url(way), place.eve.report(workload="eve"))
    assert reply.status == 200, reply
    assert [(entry["workload"], entry["attested"]) for entry in place.of(place.eve)] == [("eve", True)]
    with closing(LocalUser(EVE)) as launcher:
        assert launcher.send(place.url(way), place.eve.report(step=7))[0] == 200
    assert [entry["step"] for entry in place.of(place.eve)] == [7]


@WAYS
def test_root_of_a_user_namespace_reports_itself_but_no_process_of_the_node(place: Place, way: str) -> None:
    with closing(LocalUser(0, NEW_USER_NAMESPACE)) as inside:
        assert inside.send(place.url(way), inside.report(workload="inside"))[0] == 200
        assert [entry["workload"] for entry in place.of(inside)] == ["inside"]
        for victim in (place.root, place.ada):
            assert inside.send(place.url(way), victim.report(workload="stolen"))[0] == 403
        assert inside.send(place.url(way), inside.report(final=True))[0] == 200


def test_a_start_in_the_future_does_not_silence_the_next_session(place: Place) -> None:
    assert place.ada.send(place.tcp, ada_report(place, session="ahead", session_started_seconds=1e12))[0] == 200
    for final in (False, True):
        reply = place.ada.send(place.tcp, ada_report(place, session="next", session_started_seconds=1e11, final=final))
        assert reply.status == 200, reply


def test_labels_phases_and_components_beyond_the_limits_are_left_out(place: Place) -> None:
    names = {f"{number:03}" + "p" * 150: number for number in range(40)}
    wide = {
        "uuid": place.node.uuid(0),
        "reserved_bytes": 1,
        "phase_peak_bytes": names,
        "component_bytes": names,
    }
    before = place.outcome("shortened")
    for _ in range(2):
        sent = ada_report(place, devices=(), workload="w" * 200, rank="r" * 200)
        assert place.ada.request(place.tcp, "POST", REPORTS_PATH, {**to_wire(sent), "devices": [wide]})[0] == 200
    (entry,) = place.of(place.ada)
    (device,) = entry["devices"]
    assert (len(device["phase_peak_bytes"]), len(device["component_bytes"])) == (MAX_PHASES, MAX_COMPONENTS)
    assert {len(name) for name in device["phase_peak_bytes"]} == {len(entry["workload"]), len(entry["rank"])} == {128}
    assert place.outcome("shortened") == before + 2
    named = [line for line in place.exporter.log().splitlines() if "report not stored as sent" in line]
    assert len(named) == 1
    assert f"pid={place.ada.pid}" in named[0]


def test_the_page_and_the_memory_are_bounded_whatever_one_user_sends(folder: Path, place: Place) -> None:
    """Every report is as large as it may be. The driver is down, so the exporter knows no devices."""
    own = folder / "flood"
    own.mkdir(mode=0o755)
    with EmulatedNode(own / "node") as node:
        node.set_init_error(NVML_ERROR_DRIVER_NOT_LOADED)
        with closing(ExporterProcess(own, *QUICK, environment=node.environment(), ready="/-/healthy")) as exporter:
            refused = 0
            for pid in range(1, 700):
                report = largest_report(place.eve, pid) if pid < 60 else place.eve.report(pid=pid, pid_namespace=4242)
                reply = place.eve.send(exporter.url, report)
                assert reply.status == 200 or (reply.status == 503 and "max-processes" in reply.detail), reply
                refused += reply.status == 503
            assert refused > 100
            sizes = [len(exporter.request("GET", path).body) for path in PAGES for _ in range(3)]
            assert max(sizes) < 12_000_000, sizes
            resident = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{exporter.pid}/status").read_text())
            assert resident is not None
            assert int(resident[1]) < 160 << 10, f"{resident[1]} KiB"
            assert place.ada.send(exporter.url, ada_report(place))[0] == 200
            print(sizes, resident[1], refused)


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


def test_a_reporter_with_only_a_token_is_unattested_and_replaces_no_attested_one(folder: Path, place: Place) -> None:
    own = folder / "token"
    own.mkdir(mode=0o755)
    token = token_file(own, "secret of reporters")
    with_token = {"Authorization": "Bearer secret of reporters"}
    proxied = {**with_token, "X-Forwarded-For": "192.0.2.1"}  # the kernel knows the proxy, not the reporter
    with closing(
        ExporterProcess(own, *QUICK, "--report.token-file", token, environment=place.node.environment())
    ) as exporter:
        assert place.ada.send(exporter.url, ada_report(place))[0] == 401
        unseen = {"pid": 5, "pid_namespace": 4242, "workload": "far"}
        assert place.eve.send(exporter.tcp_url, place.eve.report(**unseen), **proxied)[0] == 200
        assert place.eve.send(exporter.tcp_url, ada_report(place, workload="made up"), **proxied)[0] == 200
        assert place.ada.send(exporter.tcp_url, ada_report(place), **with_token)[0] == 200
        shown = {entry["workload"]: entry["attested"] for entry in exporter.get("/api/v1/processes")["processes"]}
        assert shown == {"far": False, "ada": True}
        reply = place.eve.send(exporter.tcp_url, ada_report(place, workload="made up"), **proxied)
        assert (reply.status, "attests" in reply.detail) == (409, True), reply
        reply = place.eve.send(exporter.tcp_url, place.root.report(start_time_ticks=5), **proxied)
        assert (reply.status, "another process" in reply.detail) == (403, True), reply
        reply = place.eve.send(exporter.url, place.root.report(), **with_token)
        assert (reply.status, "belongs to uid 0" in reply.detail) == (403, True), (
            "the token does not replace the kernel's uid"
        )
