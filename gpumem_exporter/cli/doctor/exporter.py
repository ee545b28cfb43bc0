"""Checks of the exporter: address, version, health, permission for actions, and clock."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import counted
from gpumem_exporter import __version__
from gpumem_exporter.actions.request import ACTIONS
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding

__all__ = [
    "check_actions",
    "check_auth",
    "check_clock",
    "check_health",
    "check_trust",
    "check_version",
    "is_on_this_machine",
    "reach",
]

_STALE_POLL_SECONDS = 15.0
_CLOCKS_APART_SECONDS = 1.0


def reach(api: ExporterApi, tried: Sequence[str]) -> tuple[Finding, dict[str, Any] | None]:
    """Find the address that answers. Return the finding, and the document of `/health` or None."""
    try:
        health = api.get("/health", also=(503,))
    except ExporterUnreachableError as error:
        fix = "start one with `gpumem-exporter serve`, or set GPUMEM_EXPORTER_URL or --url to its address"
        return Finding("exporter", FAIL, str(error), fix), None
    except ExporterAnswerError as error:
        fix = (
            "put user:password@ before the host of the address, or give the token for actions"
            if error.status == 401
            else "use the exporter's own address: another server or a proxy answers there"
        )
        return Finding("exporter", FAIL, f"{shown_url(api.url)}/health answers {error}", fix), None
    silent = [shown_url(url) for url in tried[: tried.index(api.url)]]
    also_tried = f" (no answer at {', '.join(silent)})" if silent else ""
    return Finding("exporter", PASS, f"answers at {shown_url(api.url)}{also_tried}"), health


def check_trust(objection: str, *, nearby: bool) -> Finding:
    """Judge whether the server that answers receives tokens and reports. On this machine another user may run it."""
    if objection:
        fix = "commands send it no token and reporters no report: find out whose process it is"
        return Finding("trust", FAIL if nearby else WARN, f"the server is not trusted: {objection}", fix)
    return Finding("trust", PASS, "the server receives tokens and reports")


def check_version(health: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the versions of the exporter and of this command."""
    version = health.get("version")
    if version == __version__:
        yield Finding("version", PASS, f"{version}, the same as here")
    else:
        fix = "install the same version in both places; different versions still work together"
        detail = f"the exporter has {version or 'an unknown version'}, this command {__version__}"
        yield Finding("version", WARN, detail, fix)


def check_health(health: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge the document of `/health`."""
    status = health.get("status")
    nvml = health.get("nvml") or {}
    demo = "; demo with simulated devices" if health.get("source") == "demo" else ""
    devices = counted(health.get("devices", "?"), "device", "devices")
    counts = f"{devices}, {counted(health.get('processes', '?'), 'process', 'processes')}"
    if status == "ok":
        yield Finding("health", PASS, f"ok, {counts}{demo}")
        return
    problems = "; ".join(_problems(health.get("checks") or {})) or nvml.get("error") or "no reason given"
    if status == "degraded":
        fix = "" if nvml.get("up") else "the exporter attaches when the driver answers; see the line of the driver"
        if nvml.get("released"):
            fix = "run `gpumem-exporter attach-nvml` after the maintenance"
        yield Finding("health", WARN, f"degraded: {problems} ({counts}{demo})", fix)
    else:
        fix = "run nvidia-smi there: if it hangs, save dmesg and restart the node; if not, restart the exporter"
        yield Finding("health", FAIL, f"{status}: {problems} ({counts}{demo})", fix)


def check_clock(devices: Mapping[str, Any], wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compare the time of the exporter's last poll with this machine's clock."""
    taken = devices.get("taken_unix_seconds")
    if taken is None:
        fix = "wait for the first poll; without one, the driver hangs: see /health"
        yield Finding("clock", WARN, "not compared: there is no recent poll of the driver", fix)
        return
    age = wall_clock() - taken
    if age < -_CLOCKS_APART_SECONDS:
        fix = "synchronize the clocks (chrony, systemd-timesyncd): Prometheus would see samples from the future"
        yield Finding("clock", WARN, f"the exporter's last poll is {-age:.1f} s in the future of this clock", fix)
    elif age > _STALE_POLL_SECONDS:
        fix = "synchronize the clocks, or look in /health for a poller that hangs"
        yield Finding("clock", WARN, f"the exporter's last poll is {age:.0f} s old by this clock", fix)
    else:
        yield Finding("clock", PASS, f"agrees: the last poll is {max(age, 0):.1f} s old")


def check_auth(api: ExporterApi, *, has_token: bool) -> Iterator[Finding]:
    """Check that the exporter accepts actions from here. The audit log has the same access rule, so this reads it.

    The answer of a server that is not trusted proves nothing, so it is not asked.
    """
    if api.objection:
        fix = "find out whose process it is: see the line of trust"
        yield Finding("auth", WARN, "not checked, because the server is not trusted", fix)
        return
    try:
        api.get("/api/v1/actions")
    except ExporterAnswerError as error:
        if error.status not in (401, 403):
            raise
        verdict = FAIL if has_token else WARN
        fix = (
            "give the token of the exporter's --action.token-file"
            if has_token
            else "run this on the exporter's machine or as its socket's owner, or give a token with --token-file "
            "or GPUMEM_ACTION_TOKEN_FILE"
        )
        yield Finding("auth", verdict, f"the exporter refuses actions from here: {error.detail}", fix)
        return
    how = "with the token" if has_token else "without a token"
    yield Finding("auth", PASS, f"the exporter accepts actions from here, {how}")


def check_actions(caller: Mapping[str, Any]) -> Iterator[Finding]:
    """Report which actions `--action.allow` turns off. An older exporter does not show them."""
    allowed = caller.get("allowed_actions")
    if allowed is None:
        return
    off = [action for action in ACTIONS if action not in allowed]
    detail = f"off: {', '.join(off)}" if off else "all are on"
    if "empty_cache" in off:
        fix = (
            f"start it with --action.allow {','.join(('default', *(each for each in allowed if each == 'terminate')))}"
        )
        yield Finding("actions", WARN, f"{detail}; no cache can be cleared", fix)
    else:
        yield Finding("actions", PASS, detail)


def _problems(checks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, check in checks.items():
        if check.get("status") != "ok":
            yield f"{name}: {check.get('detail') or check.get('status')}"


def is_on_this_machine(url: str) -> bool:
    """Return whether an address is on this machine: a unix socket, or one of its IP addresses.

    Nothing is sent: a connected datagram socket has the source address of the route, and the route to an own address
    starts at that address or at a loopback address. A name that cannot be resolved is not on this machine. A port
    that `kubectl port-forward` forwards is.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 9, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        # Without a route for this family, the socket does not connect.
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(address)
            source = str(probe.getsockname()[0])
            if source in (address[0], "::1") or source.startswith("127."):
                return True
    return False
