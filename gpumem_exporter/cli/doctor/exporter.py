"""Is there an exporter, is it well, of which version, and does its clock agree?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpumem_exporter import __version__
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.doctor.driver import RELEASED
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding, counted
from gpumem_exporter.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.wire.http import shown_url

__all__ = ["check_auth", "check_clock", "check_health", "check_version", "reach"]

_STALE_POLL_SECONDS = 15.0
_CLOCKS_APART_SECONDS = 1.0


def reach(api: ExporterApi, tried: Sequence[str]) -> tuple[Finding, dict[str, Any] | None]:
    """Which address answers, and what it says at `/health`; None when none does."""
    try:
        health = api.get("/health", also=(503,))
    except ExporterUnreachableError as error:
        mend = "start one with `gpumem-exporter serve`, or name its address in GPUMEM_EXPORTER_URL or with --url"
        return Finding("exporter", FAIL, str(error).partition("; start one")[0], mend), None
    except ExporterAnswerError as error:
        mend = (
            "put user:password@ before the host of its address, or give the token for actions, which opens it as well"
            if error.status == 401
            else "name the exporter's own address: what answers there is something else, or stands in between"
        )
        return Finding("exporter", FAIL, f"{shown_url(api.url)}/health answers {error}", mend), None
    passed_over = [shown_url(url) for url in tried[: tried.index(api.url)]]
    after = f" (nobody at {', '.join(passed_over)})" if passed_over else ""
    return Finding("exporter", PASS, f"answers at {shown_url(api.url)}{after}"), health


def check_version(health: Mapping[str, Any]) -> Iterator[Finding]:
    """Exporter and this command should be of one version."""
    version = health.get("version")
    if version == __version__:
        yield Finding("version", PASS, f"{version}, here and there")
    else:
        mend = "install the same version in both places; they understand each other meanwhile"
        detail = f"the exporter is {version or 'of unknown version'}, this is {__version__}"
        yield Finding("version", WARN, detail, mend)


def check_health(health: Mapping[str, Any]) -> Iterator[Finding]:
    """What `/health` says."""
    status = health.get("status")
    nvml = health.get("nvml") or {}
    demo = "; it serves a demo" if health.get("source") == "demo" else ""
    devices = counted(health.get("devices", "?"), "device", "devices")
    counts = f"{devices}, {counted(health.get('processes', '?'), 'process', 'processes')}"
    if status == "ok":
        yield Finding("health", PASS, f"ok, {counts}{demo}")
        return
    troubles = "; ".join(_troubles(health.get("checks") or {})) or nvml.get("error") or "no reason given"
    if status == "degraded":
        mend = "" if nvml.get("up") else "it attaches by itself once the driver answers; see the driver's line"
        if str(nvml.get("error", "")).startswith(RELEASED):
            mend = "`gpumem-exporter attach-nvml` once the maintenance is over"
        yield Finding("health", WARN, f"degraded: {troubles} ({counts}{demo})", mend)
    else:
        mend = "try nvidia-smi there: if it hangs, too, save dmesg and restart the node; if not, restart the exporter"
        yield Finding("health", FAIL, f"{status}: {troubles} ({counts}{demo})", mend)


def check_clock(devices: Mapping[str, Any], wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """The time of the exporter's last poll against this machine's clock."""
    taken = devices.get("taken_unix_seconds")
    if taken is None:
        mend = "wait for the first poll; if it does not come, the driver hangs: see /health"
        yield Finding("clock", WARN, "cannot be compared: no poll of the driver is fresh", mend)
        return
    age = wall_clock() - taken
    if age < -_CLOCKS_APART_SECONDS:
        mend = "synchronise the clocks (chrony, systemd-timesyncd): Prometheus would see samples from the future"
        yield Finding("clock", WARN, f"the exporter's last poll is {-age:.1f} s in the future of this clock", mend)
    elif age > _STALE_POLL_SECONDS:
        mend = "synchronise the clocks, or look in /health for a poller that is stuck"
        yield Finding("clock", WARN, f"the exporter's last poll is {age:.0f} s old by this clock", mend)
    else:
        yield Finding("clock", PASS, f"agrees: the last poll is {max(age, 0):.1f} s old")


def check_auth(api: ExporterApi, *, has_token: bool) -> Iterator[Finding]:
    """May this user act from here? The audit log is under the same rule as actions, and reading it changes nothing."""
    try:
        api.get("/api/v1/actions")
    except ExporterAnswerError as error:
        if error.status not in (401, 403):
            raise
        verdict = FAIL if has_token else WARN
        mend = (
            "give the token of the exporter's --action.token-file"
            if has_token
            else "ask from the exporter's own machine or as its socket's owner, or give a token with --token-file "
            "or GPUMEM_ACTION_TOKEN_FILE"
        )
        yield Finding("auth", verdict, f"actions are refused here: {error.detail}", mend)
        return
    how = "with the token" if has_token else "without a token"
    yield Finding("auth", PASS, f"actions are taken from here, {how}")


def _troubles(checks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, check in checks.items():
        if check.get("status") != "ok":
            yield f"{name}: {check.get('detail') or check.get('status')}"
