"""`doctor`: what is wrong on this machine and with the exporter that answers, and how to fix it.

A check yields its findings.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_client.wire.peer import unix_peer, user_name
from gpumem_client.wire.units import counted
from gpumem_exporter import __version__
from gpumem_exporter.actions.action_options import ACTIONS, OUTSIDE_ACTIONS
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.node_view import processes_of
from gpumem_exporter.cli.options import connection_options
from gpumem_exporter.cli.program import FAILED, in_daemon_thread
from gpumem_exporter.cli.render.terminal import plain, print_result, table
from gpumem_exporter.cli.usage import action_token, exporter_urls, kube_forward, open_api
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumem_exporter.core.readings import DeviceReading

_EXAMPLES = """\b
Examples:
  gpumem-exporter doctor
  gpumem-exporter doctor --url http://gpu-node-7:9844
  kubectl exec -n gpumem POD -- gpumem-exporter doctor    # the exporter's pod
  gpumem-exporter doctor --json | jq '.findings[] | select(.verdict != "PASS")'

\b
Exit code: 1 if a line has FAIL, else 0.
"""
PASS = "PASS"  # noqa: S105 - a verdict
WARN = "WARN"
FAIL = "FAIL"
_STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red"}

_DRIVER_SECONDS = 10.0
_SOCKET_SECONDS = 2.0
_PROCESSES_SHOWN = 5
_OF_HEALTH = ("driver", "device_lost", "check")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`."""

    check: str
    verdict: str
    """`PASS`, `WARN` (works in part) or `FAIL`."""
    detail: str
    fix: str = ""
    """How to fix it; empty if there is nothing to fix."""


@click.command(epilog=_EXAMPLES)
@connection_options
def doctor(token_file: str | None, as_json: bool) -> int:
    """Show what is wrong and how to fix it.

    Checks driver, devices, exporter, socket, version, health, permissions, actions, reporters, PID namespace and jobs.
    Run it on the exporter's machine to check the driver, and where training runs to check the connection to the
    exporter. If the driver is on another machine, doctor shows what the exporter reports about it. Nothing is changed.
    """
    findings = tuple(diagnose(token_file))
    verdict = next((each for each in (FAIL, WARN) if any(found.verdict == each for found in findings)), PASS)
    document = {"verdict": verdict, "findings": [asdict(finding) for finding in findings]}
    print_result(document, _lines(findings), as_json=as_json)
    return FAILED if verdict == FAIL else 0


def _lines(findings: Iterable[Finding]) -> Iterator[RenderableType]:
    rows = []
    for finding in findings:
        parts = [plain(finding.detail), *(plain(f"→ {fix}", "italic") for fix in (finding.fix,) if fix)]
        text = plain("").append("\n").join(parts)
        rows.append((plain(finding.verdict, _STYLES[finding.verdict]), plain(finding.check), text))
    yield table("", (("", "left"), ("", "left"), ("", "wrap")), rows)


def diagnose(token_file: str | None) -> Iterator[Finding]:
    """Run every check. A check that fails does not stop the others."""
    urls = tuple(exporter_urls())
    with open_api(token_file, token_for_reads=False) as api:
        reached, health = reach(api, urls)
        nearby = is_on_this_machine(api.url) and kube_forward() is None
        # Not during maintenance, which an open driver would disturb.
        if nearby and not (health and health["nvml"]["released"]):
            yield from run_check("driver", partial(check_driver, health or {}))
        elif health is not None:
            yield from run_check("driver", lambda: [check_driver_elsewhere(health)])
        yield reached
        for url in urls:
            if url.startswith("unix://"):
                path = Path(url.removeprefix("unix://"))
                yield from run_check("socket", partial(check_socket, path, required=len(urls) == 1))
        if health is None:
            return
        yield check_trust(api.objection, nearby=nearby)
        live: Callable[[], dict[str, Any]] = cache(lambda: api.get("/api/v1/live?details=all"))
        checks: dict[str, Callable[[], Iterable[Finding]]] = {
            "version": lambda: check_version(health["version"]),
            "health": lambda: check_health(health),
            "auth": lambda: check_auth(api, has_token=bool(action_token(token_file))),
            "actions": lambda: check_actions(api.get("/api/v1/caller")["allowed_actions"]),
            "reporters": lambda: check_reporters(processes_of(live()), live()["findings"]),
            "pid namespace": lambda: check_pid_namespace(processes_of(live()), health),
            "jobs": lambda: check_jobs(live()["findings"]),
        }
        for name, check in checks.items():
            yield from run_check(name, check)


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    """Run one check. An exception becomes a finding."""
    try:
        return tuple(check())
    except Exception as error:  # noqa: BLE001 - each check fails alone, also on a broken node
        return (Finding(name, WARN, f"the check failed: {str(error) or type(error).__name__}"),)


def is_on_this_machine(url: str) -> bool:
    """Return whether an address is on this machine: a unix socket, a loopback address, or the machine's name."""
    scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    own = ("localhost", "::1", socket.gethostname().lower())
    return scheme == "unix" or host in own or host.startswith("127.")


def check_driver(health: Mapping[str, Any]) -> Iterator[Finding]:
    """Initialize NVML in this process, list the devices, and shut NVML down.

    `health` is the document of the exporter's `/health`, or empty. A driver that takes longer than the timeout counts
    as hanging; the thread that waits for it is abandoned.
    """

    def query() -> tuple[str, Sequence[DeviceReading]]:
        from gpumem_exporter.node.pynvml_provider import PynvmlProvider

        provider = PynvmlProvider()
        provider.open()
        with closing(provider):
            return provider.driver_version(), provider.devices()

    try:
        version, devices = asyncio.run(asyncio.wait_for(in_daemon_thread(query), _DRIVER_SECONDS))
    except asyncio.TimeoutError:
        fix = "look for Xid errors in the kernel log; reset or drain the GPU, or restart the node"
        yield Finding("driver", FAIL, f"NVML does not answer within {_DRIVER_SECONDS:g} s", fix)
    except Exception as error:  # noqa: BLE001 - the error is the finding
        fix = "install gpumem-exporter again, with its dependencies"
        if isinstance(error, NvmlError):
            fix = "install the NVIDIA driver, in a container the NVIDIA runtime (docker: --gpus all); try nvidia-smi"
        up = health.get("nvml", {}).get("up")
        yield check_driver_elsewhere(health) if up else Finding("driver", FAIL, str(error), fix)
    else:
        yield Finding("driver", PASS, f"NVML answers, driver {version}")
        if not devices:
            fix = "make the GPUs visible here: docker --gpus all, or NVIDIA_VISIBLE_DEVICES=all; see nvidia-smi -L"
            yield Finding("devices", FAIL, "the driver lists no device", fix)
        for device in devices:
            if device.error:
                fix = "look for its Xid in the kernel log; reset the GPU or restart the node. The other devices work"
                yield Finding("devices", FAIL, f"gpu {device.gpu} {device.uuid}: {device.error}", fix)
        working = [f"{device.gpu} {device.name}".strip() for device in devices if not device.error]
        if working:
            yield Finding("devices", PASS, f"{len(working)} of {len(devices)} answer: {', '.join(working)}")


def check_driver_elsewhere(health: Mapping[str, Any]) -> Finding:
    """Judge the driver of the exporter by its `/health`."""
    if not health["nvml"]["up"]:
        detail, released = f"the exporter has no driver: {health['nvml']['error']}", health["nvml"]["released"]
        fix = "" if released else "run doctor and nvidia-smi on the exporter's machine"
        return Finding("driver", WARN if released else FAIL, detail, fix)
    if health["source"] == "demo":
        fix = "run serve without --demo on a node with GPUs"
        return Finding("driver", WARN, "the exporter shows simulated devices", fix)
    return Finding("driver", PASS, "not read by this process: the exporter has a driver")


def check_socket(path: Path, *, required: bool) -> Iterator[Finding]:
    """Check the socket's file, its permissions and its listener. It is required if it is the only address."""
    verdict, user = FAIL if required else WARN, user_name(os.geteuid())
    try:
        status = path.stat()
    except (FileNotFoundError, PermissionError) as error:
        detail, fix = f"none at {path}", f"run serve with --web.listen-socket {path}, and mount its directory in jobs"
        if isinstance(error, PermissionError):
            detail, fix = f"this process ({user}) may not access {path}", "run as root, or use TCP: --url"
        if not required:
            detail += ", and not needed: there is a TCP address"
        yield Finding("socket", FAIL if required else PASS, detail, fix if required else "")
        return
    described = f"{path} mode {stat.S_IMODE(status.st_mode):04o} of {user_name(status.st_uid)}"
    if not stat.S_ISSOCK(status.st_mode):
        fix = "remove it, and mount the socket's directory, not the socket"
        yield Finding("socket", verdict, f"{described} is not a socket", fix)
        return
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(_SOCKET_SECONDS)
            connection.connect(str(path))
            peer = unix_peer(connection)
    except PermissionError:
        fix = "run as its owner or in its group, or set the exporter's umask so that others may write to it"
        yield Finding("socket", verdict, f"{described}: this process ({user}) may not connect", fix)
    except OSError as error:
        fix = "start the exporter again: it replaces the socket of a killed exporter"
        yield Finding("socket", verdict, f"{described}: no process listens ({str(error.strerror).lower()})", fix)
    else:
        where = f"pid {peer.pid}" if peer.pid else "in another PID namespace"
        yield Finding("socket", PASS, f"{described}; listening: {where}, {user_name(peer.uid)}")


def reach(api: ExporterApi, tried: Sequence[str]) -> tuple[Finding, dict[str, Any] | None]:
    """Find the address that answers. Return the finding, and the document of `/health` or None."""
    fix = "use the exporter's own address: another server or a proxy answers there"
    try:
        health = api.get("/health", also=(503,))
    except ExporterUnreachableError as error:
        return Finding("exporter", FAIL, str(error)), None
    except ExporterAnswerError as error:
        if error.status == 401:
            fix = "put user:password@ before the host of the address, or give the token for actions"
        return Finding("exporter", FAIL, f"{shown_url(api.url)} refuses: {error}", fix), None
    nvml = health.get("nvml")
    if not ({"version", "checks"} <= health.keys() and isinstance(nvml, dict) and {"up", "released"} <= nvml.keys()):
        return Finding("exporter", FAIL, f"the server at {shown_url(api.url)} is not a gpumem-exporter", fix), None
    silent = [shown_url(url) for url in tried[: tried.index(api.url)]]
    also_tried = f" (no answer at {', '.join(silent)})" if silent else ""
    return Finding("exporter", PASS, f"answers at {shown_url(api.url)}{also_tried}"), health


def check_trust(objection: str, *, nearby: bool) -> Finding:
    """Judge whether the server that answers receives tokens and reports. On this machine another user may run it."""
    if objection:
        fix = "commands send it no token and reporters no report: find out whose process it is"
        return Finding("trust", FAIL if nearby else WARN, f"the server is not trusted: {objection}", fix)
    return Finding("trust", PASS, "the server receives tokens and reports")


def check_version(version: str) -> Iterator[Finding]:
    """Compare the versions of the exporter and of this command."""
    if version == __version__:
        yield Finding("version", PASS, f"{version}, the same as here")
    else:
        fix = "install the same version in both places; different versions still work together"
        yield Finding("version", WARN, f"the exporter has {version}, this command {__version__}", fix)


def check_health(health: Document) -> Iterator[Finding]:
    """Judge the document of `/health`."""
    status, nvml = health["status"], health["nvml"]
    demo = "; demo with simulated devices" if health["source"] == "demo" else ""
    devices = counted(health["devices"], "device", "devices")
    counts = f"{devices}, {counted(health['processes'], 'process', 'processes')}{demo}"
    if status == "ok":
        yield Finding("health", PASS, f"ok, {counts}")
        return
    failing = [f"{name}: {each['detail']}" for name, each in health["checks"].items() if each["status"] != "ok"]
    detail = f"{status}: {'; '.join(failing)} ({counts})"
    fix = "run nvidia-smi there: if it hangs, save dmesg and restart the node; if not, restart the exporter"
    if status == "degraded":
        fix = "" if nvml["up"] else "the exporter attaches when the driver answers; see the line of the driver"
        fix = "run `gpumem-exporter attach-nvml` after the maintenance" if nvml["released"] else fix
    yield Finding("health", WARN if status == "degraded" else FAIL, detail, fix)


def check_auth(api: ExporterApi, *, has_token: bool) -> Iterator[Finding]:
    """Check that the exporter accepts actions from here. The audit log has the same access rule, so this reads it."""
    if api.objection:
        # The answer of a server that is not trusted proves nothing.
        fix = "find out whose process it is: see the line of trust"
        yield Finding("auth", WARN, "not checked, because the server is not trusted", fix)
        return
    try:
        api.get("/api/v1/actions")
    except ExporterAnswerError as error:
        if error.status not in (401, 403):
            raise
        fix = "give the token of the exporter's --action.token-file, or run this as the owner of its socket"
        detail = f"the exporter refuses actions from here: {error.detail}"
        yield Finding("auth", FAIL if has_token else WARN, detail, fix)
    else:
        how = "with the token" if has_token else "without a token"
        yield Finding("auth", PASS, f"the exporter accepts actions from here, {how}")


def check_actions(allowed: Sequence[str]) -> Iterator[Finding]:
    """Report which actions `--action.allow` turns off."""
    off = [action for action in ACTIONS if action not in allowed]
    detail = f"off: {', '.join(off)}" if off else "all are on"
    if "empty_cache" in off:
        wanted = ",".join(["default", *(action for action in OUTSIDE_ACTIONS if action in allowed)])
        fix = f"start it with --action.allow {wanted}"
        yield Finding("actions", WARN, f"{detail}; no cache can be cleared", fix)
    else:
        yield Finding("actions", PASS, detail)


def check_reporters(processes: Sequence[Document], findings: Sequence[Document]) -> Iterator[Finding]:
    """Count the processes that report, and tell how the others can report. Silent ones are findings about jobs."""
    states = [process.get("state") for process in processes]
    unreported = next((each["sentence"] for each in findings if each["kind"] == "unreported"), "")
    if reporting := states.count("reporting"):
        text = counted(reporting, "process reports", "processes report")
        yield Finding("reporters", PASS, f"{text}. {unreported}" if unreported else text)
    elif "silent" not in states:
        fix = "start a PyTorch job below `gpumem-run`; it reports as soon as it uses a GPU"
        yield Finding("reporters", WARN, unreported or "no process reports", fix)


def check_pid_namespace(processes: Sequence[Document], health: Document) -> Iterator[Finding]:
    """Check that the exporter runs in the host's PID namespace: the driver lists processes by the host's pids."""
    fix = "run the exporter in the host's PID namespace: hostPID: true in the pod, --pid=host for docker and podman"
    reporting = [process for process in processes if process.get("state") == "reporting"]
    lost = [process for process in reporting if process.get("host_pid") is None]
    if health["mode"] == "sidecar":
        detail = "the exporter does not run in the host's: other processes and non-torch memory are unknown"
        yield Finding("pid namespace", WARN, detail, f"nothing in a sidecar; elsewhere, {fix}")
    elif lost:
        named = [f"pid {each['pid']} {each.get('workload') or ''}".rstrip() for each in lost[:_PROCESSES_SHOWN]]
        more = f" and {len(lost) - _PROCESSES_SHOWN} more" if len(lost) > _PROCESSES_SHOWN else ""
        listed = f"reporters without a process of the driver: {', '.join(named)}{more}"
        detail = f"{listed}; their memory counts as other processes"
        yield Finding("pid namespace", FAIL if health["nvml"]["up"] else WARN, detail, fix)
    else:
        yield Finding("pid namespace", PASS, "the exporter and the driver use the same pids")


def check_jobs(findings: Sequence[Document]) -> Iterator[Finding]:
    """Report what the exporter finds wrong with the jobs of the node."""
    # The line of the exporter's health has the driver, its devices and the parts of the exporter.
    of_jobs = [each for each in findings if each["severity"] != "info" and each["kind"] not in _OF_HEALTH]
    for each in of_jobs:
        yield Finding("jobs", WARN, f"{each['title']}: {each['sentence']}", each.get("next", ""))
    if not of_jobs:
        yield Finding("jobs", PASS, "nothing needs attention")
