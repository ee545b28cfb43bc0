from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter import __version__
from gpumem_exporter.actions.action_options import ACTIONS, DEFAULT_ACTIONS
from gpumem_exporter.cli.commands import doctor
from gpumem_exporter.cli.commands.doctor import (
    FAIL,
    WARN,
    Finding,
    check_actions,
    check_auth,
    check_driver,
    check_driver_elsewhere,
    check_health,
    check_jobs,
    check_pid_namespace,
    check_reporters,
    check_trust,
    check_version,
    is_on_this_machine,
    reach,
    run_check,
)
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.errors import NvmlUnavailableError
from gpumem_exporter.node import pynvml_provider
from tests.support.builders.fleet_builders import process
from tests.support.truth.golden import assert_golden
from tests.support.waiting import patient

UNREPORTED = {
    "kind": "unreported",
    "sentence": "1 of 3 processes does not report. PyTorch jobs report below gpumem-run.",
}


class _Provider:
    """A driver with prepared answers."""

    source = "nvml"

    def __init__(self, devices: Iterable[DeviceReading] = (), error: Exception | None = None) -> None:
        self._devices, self._error = tuple(devices), error
        self.closed = False

    def open(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.closed = True

    def driver_version(self) -> str:
        return "580.1"

    def devices(self) -> tuple[DeviceReading, ...]:
        return self._devices


class _Api:
    """An exporter that answers each route with one document or error."""

    def __init__(self, answer: dict[str, Any] | Exception, url: str = "http://node:9844") -> None:
        self._answer = answer
        self.url = url
        self.objection = ""
        self.asked: list[str] = []

    def get(self, path: str, *, also: tuple[int, ...] = ()) -> dict[str, Any]:
        self.asked.append(path)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def _health(source: str = "", error: str = "", *, released: bool = False) -> dict[str, Any]:
    """Return the health of an exporter whose driver is `nvml`, `demo`, or absent."""
    nvml = {"up": bool(source), "error": error, "released": released}
    checks = {"poller": {"status": "ok"}, "nvml": {"status": "failing", "detail": "the driver is away"}}
    known = {"status": "degraded", "version": __version__, "mode": "node", "devices": 8, "processes": 2}
    return {**known, "source": source or "nvml", "nvml": nvml, "checks": checks}


def _driver(provider: Any, health: Any = (), timeout_seconds: float = 30.0) -> list[Finding]:
    with (
        patch.object(pynvml_provider, "PynvmlProvider", lambda: provider),
        patch.object(doctor, "_DRIVER_SECONDS", timeout_seconds),
    ):
        return list(check_driver(dict(health)))


def _process(pid: int, state: str = "reporting", **changes: Any) -> dict[str, Any]:
    devices = [{"used_bytes": 2, "reserved_bytes": 1}]
    return {**process(pid, host_pid=pid, state=state, workload="llm", command="python"), "devices": devices, **changes}


def _finding(kind: str, severity: str = "warning") -> dict[str, Any]:
    return {"kind": kind, "severity": severity, "title": "Title", "sentence": f"It is {kind}.", "next": "See: dump"}


def _namespace(*processes: dict[str, Any], source: str = "nvml", **changes: Any) -> list[Finding]:
    return list(check_pid_namespace(processes, {**_health(source), **changes}))


def test_a_driver_that_hangs_fails_after_the_timeout() -> None:
    release = threading.Event()

    class Hanging(_Provider):
        def open(self) -> None:
            release.wait(patient(30))

    try:
        (finding,) = _driver(Hanging(), timeout_seconds=0.01)
    finally:
        release.set()
    assert finding.verdict == FAIL
    assert "0.01 s" in finding.detail


def test_the_text_of_each_finding() -> None:
    healthy = _Provider([DeviceReading("0", "GPU-0", "A"), DeviceReading("1", "GPU-1", error="GPU is lost")])

    def broken() -> Iterable[Finding]:
        raise OSError("it breaks")

    absent = NvmlUnavailableError("libnvidia-ml.so.1 is not found")
    api = "https://ada:secret@node:9844"
    tried = ["unix:///s", api]
    degraded, released = _health(), _health(error="released by ada", released=True)
    answers: list[dict[str, Any] | Exception] = [
        {"actions": []},
        ExporterAnswerError(401, "a token is needed"),
        ExporterAnswerError(403, "no"),
    ]
    findings = [
        *_driver(healthy),
        *_driver(_Provider()),
        *(finding for source in ("", "nvml", "demo") for finding in _driver(_Provider(error=absent), _health(source))),
        *_driver(_Provider(error=absent), _health(error=str(absent))),
        *_driver(_Provider(error=absent), _health(error="its own reason")),
        *_driver(_Provider(error=ImportError("No module named 'pynvml'"))),
        *(check_driver_elsewhere(_health(source, "it is gone")) for source in ("", "nvml", "demo")),
        check_driver_elsewhere(_health(error="released by ada", released=True)),
        *(reach(_Api(answer, api), tried)[0] for answer in (_health(), {"status": "ok"})),  # type: ignore[arg-type]
        reach(_Api(ExporterUnreachableError("no exporter answers at x"), api), tried)[0],  # type: ignore[arg-type]
        *(reach(_Api(ExporterAnswerError(code, "why"), api), tried)[0] for code in (401, 404)),  # type: ignore[arg-type]
        check_trust("", nearby=True),
        check_trust("it runs as uid 1001", nearby=True),
        check_trust("it has no certificate", nearby=False),
        *check_version(__version__),
        *check_version("9.9"),
        *check_health({**_health("demo"), "status": "ok", "devices": 1, "processes": 1}),
        *(
            found
            for health in (degraded, released, {**degraded, "status": "failing"})
            for found in check_health(health)
        ),
        *(
            finding
            for answer in answers
            for has_token in (False, True)
            for finding in check_auth(_Api(answer), has_token=has_token)  # type: ignore[arg-type]
        ),
        *(finding for allowed in (ACTIONS, DEFAULT_ACTIONS, ["terminate"]) for finding in check_actions(allowed)),
        *check_reporters([_process(1), _process(3, "silent"), _process(4, "unreported")], [UNREPORTED]),
        *check_reporters([_process(1), _process(2)], []),
        *check_reporters([_process(4, "unreported")], [UNREPORTED]),
        *check_reporters([_process(3, "silent")], []),
        *check_jobs([_finding("silent"), _finding("check"), _finding("unreported", "info")]),
        *check_jobs([]),
        *_namespace(_process(1), _process(5, host_pid=None)),
        *_namespace(_process(1), _process(5, host_pid=None), source=""),
        *_namespace(_process(1)),
        *_namespace(),
        *_namespace(_process(5, host_pid=None), mode="sidecar"),
        *run_check("jobs", broken),
    ]
    lines = [f"{found.verdict} {found.check}: {found.detail}{found.fix and f' → {found.fix}'}" for found in findings]
    assert not any("secret" in line for line in lines)
    assert healthy.closed
    assert_golden("doctor.txt", "\n".join(lines).replace(__version__, "VERSION") + "\n")


@pytest.mark.parametrize("nvml", [None, 3, [], {}, {"up": True}])
def test_a_server_with_another_document_at_the_route_of_the_health_is_not_an_exporter(nvml: Any) -> None:
    finding, health = reach(_Api({**_health(), "nvml": nvml}), ["http://node:9844"])  # type: ignore[arg-type]
    assert (finding.verdict, health) == (FAIL, None)


def test_a_server_that_is_not_trusted_gets_no_token_to_check_permissions() -> None:
    api = _Api({"actions": []})
    api.objection = "it runs as uid 1001"
    (finding,) = check_auth(api, has_token=True)  # type: ignore[arg-type]
    assert (finding.check, finding.verdict) == ("auth", WARN)
    assert api.asked == []


def test_an_address_is_recognized_as_local() -> None:
    for own in ("unix:///run/e.sock", "https://ada:secret@127.0.0.1:9844", f"http://{socket.gethostname()}:9844"):
        assert is_on_this_machine(own)
    for other in ("http://203.0.113.9:9844", "http://node.invalid:9844"):
        assert not is_on_this_machine(other)
