from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from gpumem_exporter import __version__
from gpumem_exporter.cli.doctor.driver import check_driver, judge_driver_elsewhere
from gpumem_exporter.cli.doctor.exporter import (
    check_auth,
    check_clock,
    check_health,
    check_version,
    is_on_this_machine,
    reach,
)
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding, collect, verdict_of
from gpumem_exporter.cli.doctor.processes import check_pid_namespace, check_reporters
from gpumem_exporter.errors import ExporterAnswerError, ExporterUnreachableError, NvmlUnavailableError
from gpumem_exporter.nvml.provider import DeviceIdentity
from gpumem_exporter.procfs import INITIAL_PID_NAMESPACE
from tests.support.golden import assert_golden
from tests.support.waiting import patient

_OTHER_NAMESPACE = 4026532000


class _Provider:
    """A driver with prepared answers."""

    source = "nvml"

    def __init__(self, devices: Iterable[DeviceIdentity] = (), error: Exception | None = None) -> None:
        self._devices, self._error = tuple(devices), error
        self.closed = False

    def open(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.closed = True

    def driver_version(self) -> str:
        return "580.1"

    def devices(self) -> tuple[DeviceIdentity, ...]:
        return self._devices


class _Api:
    """An exporter that answers each route with one document or error."""

    def __init__(self, answer: dict[str, Any] | Exception, url: str = "http://node:9844") -> None:
        self._answer = answer
        self.url = url

    def get(self, path: str, *, also: tuple[int, ...] = ()) -> dict[str, Any]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def _health(source: str = "", error: str = "", *, released: bool = False) -> dict[str, Any]:
    """Return the health of an exporter whose driver is `nvml`, `demo`, or absent."""
    return {"source": source or "nvml", "nvml": {"up": bool(source), "error": error, "released": released}}


def _driver(provider: Any, health: Any = (), timeout_seconds: float = 30.0) -> list[Finding]:
    return list(check_driver(lambda: provider, dict(health), timeout_seconds=timeout_seconds))


def _verdicts(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.verdict) for finding in findings]


def _process(pid: int, state: str = "reporting", **changes: Any) -> dict[str, Any]:
    devices = [{"used_bytes": 2, "reserved_bytes": 1}]
    return {
        "pid": pid,
        "host_pid": pid,
        "state": state,
        "workload": "llm",
        "command": "python",
        "devices": devices,
        **changes,
    }


def _namespace(*processes: dict[str, Any], **changes: Any) -> list[Finding]:
    known: dict[str, Any] = {"exporter_namespace": None, "own_namespace": INITIAL_PID_NAMESPACE, "driver_up": True}
    return list(check_pid_namespace(processes, **{**known, **changes}))


def test_the_worst_finding_is_the_verdict() -> None:
    findings = [Finding("a", PASS, ""), Finding("b", FAIL, ""), Finding("c", WARN, "")]
    assert verdict_of(findings) == FAIL
    assert verdict_of([findings[0], findings[2]]) == WARN
    assert verdict_of(findings[:1]) == PASS


def test_an_exception_in_a_check_is_a_finding() -> None:
    def broken() -> Iterable[Finding]:
        yield Finding("x", PASS, "")
        raise KeyError("pid")

    assert _verdicts(collect("x", broken)) == [("x", WARN)]


def test_a_driver_that_answers_passes_with_its_devices_and_is_closed() -> None:
    provider = _Provider([DeviceIdentity("0", "GPU-0", "NVIDIA H100"), DeviceIdentity("1", "GPU-1", "NVIDIA H100")])
    findings = _driver(provider)
    assert _verdicts(findings) == [("driver", PASS), ("devices", PASS)]
    assert "580.1" in findings[0].detail
    assert "0 NVIDIA H100, 1 NVIDIA H100" in findings[1].detail
    assert provider.closed


@pytest.mark.parametrize(("source", "verdict"), [("", FAIL), ("nvml", PASS), ("demo", WARN)])
def test_a_missing_driver_fails_unless_the_exporter_needs_none(source: str, verdict: str) -> None:
    (finding,) = _driver(_Provider(error=NvmlUnavailableError("no libnvidia-ml.so.1")), _health(source))
    assert (finding.check, finding.verdict) == ("driver", verdict)
    assert "libnvidia-ml.so.1" in finding.detail
    assert bool(finding.fix) == (verdict != PASS)


@pytest.mark.parametrize(("released", "verdict"), [(False, FAIL), (True, WARN)])
def test_without_any_driver_both_errors_are_named_and_a_release_is_no_failure(released: bool, verdict: str) -> None:
    provider, reason = _Provider(error=NvmlUnavailableError("no libnvidia-ml.so.1")), "why the exporter has none"
    (finding,) = _driver(provider, _health(error=reason, released=released))
    assert finding.verdict == verdict
    assert "libnvidia-ml.so.1" in finding.detail
    assert reason in finding.detail


def test_a_common_reason_for_no_driver_is_shown_once() -> None:
    error = NvmlUnavailableError("no libnvidia-ml.so.1")
    (finding,) = _driver(_Provider(error=error), _health(error=str(error)))
    assert finding.detail == str(error)


@pytest.mark.parametrize(
    ("source", "reason", "verdict"),
    [
        ("nvml", "", PASS),
        ("demo", "", WARN),
        ("", "driver not loaded", FAIL),
        ("", "released by ada (upgrade)", WARN),
    ],
)
def test_an_exporter_on_another_machine_answers_for_its_own_driver(source: str, reason: str, verdict: str) -> None:
    finding = judge_driver_elsewhere(_health(source, reason, released="released" in reason))
    assert (finding.check, finding.verdict) == ("driver", verdict)
    assert reason in finding.detail
    assert bool(finding.fix) == (verdict != PASS)
    assert "NVIDIA_DRIVER_CAPABILITIES" not in finding.fix, "advice for this machine"


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("unix:///run/gpumem/exporter.sock", True),
        ("http://127.0.0.1:9844", True),
        ("https://ada:secret@127.0.0.1:9844", True),
        ("http://localhost:9844", True),
        ("http://203.0.113.9:9844", False),
        ("http://node.invalid:9844", False),
    ],
)
def test_an_address_is_recognized_as_local(url: str, own: bool) -> None:
    assert is_on_this_machine(url) is own


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


def test_an_exporter_that_answers_is_named_with_the_silent_addresses() -> None:
    finding, health = reach(_Api({"status": "ok"}), ["unix:///s", "http://node:9844"])  # type: ignore[arg-type]
    assert finding.verdict == PASS
    assert "http://node:9844" in finding.detail
    assert "unix:///s" in finding.detail
    assert health == {"status": "ok"}


def test_a_missing_password_is_explained_and_no_password_is_shown() -> None:
    wanted = ExporterAnswerError(401, "password-needed")
    finding, health = reach(_Api(wanted, "https://ada:secret@node:9844"), [])  # type: ignore[arg-type]
    assert (finding.verdict, health) == (FAIL, None)
    for part in ("https://node:9844/health", "401", "password-needed"):
        assert part in finding.detail
    assert "secret" not in finding.detail + finding.fix
    assert "user:password@" in finding.fix


@pytest.mark.parametrize(("status", "verdict"), [("ok", PASS), ("degraded", WARN), ("failing", FAIL), (None, FAIL)])
def test_health_gives_the_verdict_and_the_reasons(status: str | None, verdict: str) -> None:
    check = {"status": status, "detail": "driver-away"}
    health = {"status": status, "nvml": {"up": False}, "checks": {"nvml": check, "reports": {"status": "ok"}}}
    (finding,) = check_health(health)
    assert finding.verdict == verdict
    assert ("nvml: driver-away" in finding.detail) == (verdict != PASS)
    assert "reports" not in finding.detail


@pytest.mark.parametrize(
    ("taken", "verdict"), [(1000.0, PASS), (990.0, PASS), (1000.9, PASS), (1001.1, WARN), (984.0, WARN), (None, WARN)]
)
def test_the_clock_passes_if_the_last_poll_is_recent(taken: float | None, verdict: str) -> None:
    (finding,) = check_clock({"taken_unix_seconds": taken}, wall_clock=lambda: 1000.0)
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict == WARN)


@pytest.mark.parametrize(
    ("answer", "has_token", "verdict"),
    [
        ({"actions": []}, False, PASS),
        ({"actions": []}, True, PASS),
        (ExporterAnswerError(403, "only from loopback"), False, WARN),
        (ExporterAnswerError(401, "a token is needed"), False, WARN),
        (ExporterAnswerError(401, "token-wrong"), True, FAIL),
    ],
)
def test_a_refused_caller_gets_the_reason_and_a_refused_token_fails(
    answer: dict[str, Any] | Exception, has_token: bool, verdict: str
) -> None:
    (finding,) = check_auth(_Api(answer), has_token=has_token)  # type: ignore[arg-type]
    assert finding.verdict == verdict
    if isinstance(answer, ExporterAnswerError):
        assert answer.detail in finding.detail
        assert finding.fix


def test_an_unmatched_reporter_fails_only_with_a_driver() -> None:
    lost = _process(5, host_pid=None)
    for driver_up, verdict in ((True, FAIL), (False, WARN)):
        (finding,) = _namespace(_process(1), lost, driver_up=driver_up)
        assert finding.verdict == verdict
        assert "pid 5" in finding.detail
        assert "hostPID" in finding.fix


def test_an_exited_process_beside_matched_reporters_is_no_failure() -> None:
    assert _verdicts(_namespace(_process(1), _process(40000, "unreported", command=None))) == [("pid namespace", PASS)]


@pytest.mark.parametrize(
    ("exporter", "own", "verdict"),
    [
        (_OTHER_NAMESPACE, INITIAL_PID_NAMESPACE, WARN),
        (INITIAL_PID_NAMESPACE, _OTHER_NAMESPACE, PASS),
        (None, INITIAL_PID_NAMESPACE, PASS),
        (None, _OTHER_NAMESPACE, WARN),
        (None, 0, WARN),
        (None, None, WARN),
    ],
)
def test_without_reporters_the_inode_of_the_namespace_decides(
    exporter: int | None, own: int | None, verdict: str
) -> None:
    (finding,) = _namespace(exporter_namespace=exporter, own_namespace=own)
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict == WARN)


def test_the_text_of_each_finding() -> None:
    def broken() -> Iterable[Finding]:
        raise OSError("it breaks")

    absent = NvmlUnavailableError("libnvidia-ml.so.1 is not found")
    api = "https://ada:secret@node:9844"
    tried = ["unix:///s", api]
    unlisted = _process(12, devices=[{"used_bytes": None, "reserved_bytes": 1}])
    stranger = _process(40000, "unreported", command=None)
    checks = {"nvml": {"status": "failing", "detail": "the driver is away"}}
    degraded = {"status": "degraded", "devices": 8, "processes": 2, "checks": checks}
    released = {**degraded, "nvml": {"up": False, "error": "released by ada", "released": True}}
    elsewhere = {"exporter_namespace": None, "own_namespace": None, "driver_up": True}
    findings = [
        *_driver(_Provider([DeviceIdentity("0", "GPU-0", "A"), DeviceIdentity("1", "GPU-1", error="GPU is lost")])),
        *_driver(_Provider()),
        *(finding for source in ("", "nvml", "demo") for finding in _driver(_Provider(error=absent), _health(source))),
        *_driver(_Provider(error=ImportError("No module named 'pynvml'"))),
        *(judge_driver_elsewhere(_health(source, "it is gone")) for source in ("", "nvml", "demo")),
        reach(_Api({"status": "ok"}, api), tried)[0],  # type: ignore[arg-type]
        reach(_Api(ExporterUnreachableError("no exporter answers at x"), api), tried)[0],  # type: ignore[arg-type]
        *(reach(_Api(ExporterAnswerError(code, "why"), api), tried)[0] for code in (401, 404)),  # type: ignore[arg-type]
        *check_version({"version": __version__}),
        *check_version({"version": "9.9"}),
        *check_health({"status": "ok", "devices": 1, "processes": 1, "source": "demo"}),
        *(finding for health in (degraded, released, {**degraded, "status": None}) for finding in check_health(health)),
        *(
            finding
            for taken in (None, 1000.0, 900.0, 1100.0)
            for finding in check_clock({"taken_unix_seconds": taken}, wall_clock=lambda: 1000.0)
        ),
        *(
            finding
            for answer in ({"actions": []}, ExporterAnswerError(401, "a token is needed"))
            for has_token in (False, True)
            for finding in check_auth(_Api(answer), has_token=has_token)  # type: ignore[arg-type]
        ),
        *check_reporters([_process(1), _process(3, "silent"), _process(4, "unreported")]),
        *check_reporters([_process(1), _process(2)]),
        *check_reporters([_process(4, "unreported")]),
        *_namespace(_process(1), _process(5, host_pid=None)),
        *_namespace(unlisted, stranger),
        *_namespace(_process(1)),
        *_namespace(exporter_namespace=_OTHER_NAMESPACE),
        *_namespace(exporter_namespace=INITIAL_PID_NAMESPACE),
        *_namespace(),
        *_namespace(_process(1), driver_up=False),
        *_namespace(own_namespace=_OTHER_NAMESPACE),
        *check_pid_namespace([], **elsewhere),
        *collect("clock", broken),
    ]
    lines = [f"{found.verdict} {found.check}: {found.detail}{found.fix and f' → {found.fix}'}" for found in findings]
    assert_golden("doctor.txt", "\n".join(lines).replace(__version__, "VERSION") + "\n")
