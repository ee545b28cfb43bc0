"""Checks of this machine: the driver and its devices, and the exporter's unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpumem_client.wire.peer import unix_peer, user_name
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.cli.doctor import FAIL, PASS, WARN, Finding
from gpumem_exporter.cli.top.source import in_daemon_thread
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.core.samples import DeviceMemory
    from gpumem_exporter.node.provider import DeviceIdentity, Provider

_SOCKET_SECONDS = 2.0
# On real drivers, total = used + free + reserved within 2 MiB: NVML rounds each value.
_ROUNDING_BYTES = 4 << 20


def is_on_this_machine(url: str) -> bool:
    """Return whether an address is on this machine: a unix socket, or a loopback address."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or parts.hostname == "localhost" or str(parts.hostname).startswith(("127.", "::1"))


def check_driver(
    make_provider: Callable[[], Provider], health: Mapping[str, Any], *, timeout_seconds: float
) -> Iterator[Finding]:
    """Initialize NVML in this process, list the devices, and shut NVML down.

    `health` is the document of the exporter's `/health`, or empty. A driver that takes longer than the timeout counts
    as hanging; the thread that waits for it is abandoned.
    """

    def query() -> tuple[str, Sequence[DeviceIdentity], dict[str, DeviceMemory]]:
        provider = make_provider()
        provider.open()
        with closing(provider):
            devices, memory = provider.devices(), {}
            for each in devices:
                with suppress(NvmlError):  # a device that is lost is a finding already
                    memory[each.gpu] = provider.read_memory(each.uuid)
            return provider.driver_version(), devices, memory

    try:
        version, devices, memory = asyncio.run(asyncio.wait_for(in_daemon_thread(query), timeout_seconds))
    except asyncio.TimeoutError:
        fix = "look for Xid errors in the kernel log; reset or drain the GPU, or restart the node"
        yield Finding("driver", FAIL, f"NVML does not answer within {timeout_seconds:g} s", fix)
    except Exception as error:  # noqa: BLE001 - the error is the finding
        nvml = health.get("nvml") or {}
        fix = "install gpumem-exporter again, with its dependencies"
        if isinstance(error, NvmlError):
            fix = (
                "install the NVIDIA driver; in a container add the NVIDIA runtime with "
                "NVIDIA_DRIVER_CAPABILITIES=utility (docker: --gpus all), then try nvidia-smi"
            )
        failed = Finding("driver", WARN if nvml.get("released") else FAIL, str(error), fix)
        yield check_driver_elsewhere(health) if nvml.get("up") else failed
    else:
        yield Finding("driver", PASS, f"NVML answers, driver {version}")
        yield from _check_devices(devices)
        yield from _check_memory(memory)


def check_driver_elsewhere(health: Mapping[str, Any]) -> Finding:
    """Judge the driver of the exporter by its `/health`."""
    nvml = health.get("nvml") or {}
    if not nvml.get("up"):
        detail = f"the exporter has no driver: {nvml.get('error') or 'no reason given'}"
        fix = "run doctor and nvidia-smi on the exporter's machine"
        return Finding("driver", WARN if nvml.get("released") else FAIL, detail, fix)
    if health.get("source") == "demo":
        fix = "run serve without --demo on a node with GPUs"
        return Finding("driver", WARN, "the exporter shows simulated devices", fix)
    return Finding("driver", PASS, "not read by this process: the exporter has a driver")


def _check_devices(devices: Sequence[DeviceIdentity]) -> Iterator[Finding]:
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


def _check_memory(memory: Mapping[str, DeviceMemory]) -> Iterator[Finding]:
    """Compare NVML's own `used` with the exporter's, which is total - free - reserved."""
    for gpu, found in memory.items():
        theirs = found.driver_used_bytes
        if theirs is not None and abs(theirs - found.used_bytes) > _ROUNDING_BYTES:
            detail = (
                f"gpu {gpu}: NVML counts {human_bytes(theirs)} as used, and total - free - reserved is "
                f"{human_bytes(found.used_bytes)}"
            )
            fix = "the exporter shows the second value; look for a library between NVML and this process (vGPU, HAMi)"
            yield Finding("memory", WARN, detail, fix)


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
