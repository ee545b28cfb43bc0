"""Checks of the driver: whether NVML answers, and for which devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.nvml.provider import DeviceIdentity, Provider

__all__ = ["check_driver", "judge_driver_elsewhere"]

Document = Mapping[str, Any]

_NO_DEMO = "run serve without --demo on a node with GPUs"


def check_driver(
    make_provider: Callable[[], Provider], health: Document, *, timeout_seconds: float
) -> Iterator[Finding]:
    """Initialize NVML in this process, list the devices, and shut NVML down.

    Args:
        make_provider: returns the provider to initialize.
        health: the exporter's document of `/health`; empty without an exporter.
        timeout_seconds: a driver that takes longer counts as hanging; the thread that waits for it is abandoned.
    """
    answers: list[tuple[str, Sequence[DeviceIdentity]] | Exception] = []
    thread = threading.Thread(target=_query, args=(make_provider, answers), name="gpumem-doctor-nvml", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        fix = "look for Xid errors in the kernel log; reset or drain the GPU, or restart the node"
        yield Finding("driver", FAIL, f"NVML does not answer within {timeout_seconds:g} s", fix)
    elif isinstance(answers[0], Exception):
        yield _absent(answers[0], health)
    else:
        version, devices = answers[0]
        yield Finding("driver", PASS, f"NVML answers, driver {version}")
        yield from _judge_devices(devices)


def judge_driver_elsewhere(health: Document) -> Finding:
    """Judge the driver of an exporter on another machine by that exporter's `/health`."""
    nvml = health.get("nvml") or {}
    if not nvml.get("up"):
        detail = f"the exporter, on another machine, has no driver: {nvml.get('error') or 'no reason given'}"
        fix = "run doctor and nvidia-smi on the exporter's machine"
        return Finding("driver", WARN if nvml.get("released") else FAIL, detail, fix)
    if health.get("source") == "demo":
        return Finding("driver", WARN, "the exporter shows simulated devices", _NO_DEMO)
    return Finding("driver", PASS, "the exporter, on another machine, has a driver")


def _query(make_provider: Callable[[], Provider], answers: list[Any]) -> None:
    try:
        provider = make_provider()
        provider.open()
        try:
            answers.append((provider.driver_version(), tuple(provider.devices())))
        finally:
            provider.close()
    except Exception as error:  # noqa: BLE001 - the error is the finding
        answers.append(error)


def _absent(error: Exception, health: Document) -> Finding:
    """Judge a driver that this process cannot use. It is not needed if the exporter has one."""
    nvml = health.get("nvml") or {}
    here = f"not usable in this process ({error})"
    if nvml.get("up") and health.get("source") == "demo":
        return Finding("driver", WARN, f"{here}; the exporter shows simulated devices", _NO_DEMO)
    if nvml.get("up"):
        return Finding("driver", PASS, f"{here}, and not needed: the exporter has a driver")
    if nvml.get("error") not in (None, "", str(error)):
        verdict = WARN if nvml.get("released") else FAIL
        return Finding("driver", verdict, f"{here} nor in the exporter: {nvml['error']}", _fix(error))
    return Finding("driver", FAIL, str(error), _fix(error))


def _fix(error: Exception) -> str:
    if not isinstance(error, NvmlError):
        return "install gpumem-exporter again, with its dependencies"
    return (
        "install the NVIDIA driver; in a container add the NVIDIA runtime with "
        "NVIDIA_DRIVER_CAPABILITIES=utility (docker: --gpus all), then try nvidia-smi"
    )


def _judge_devices(devices: Sequence[DeviceIdentity]) -> Iterator[Finding]:
    if not devices:
        fix = "make the GPUs visible here: docker --gpus all, or NVIDIA_VISIBLE_DEVICES=all; see nvidia-smi -L"
        yield Finding("devices", FAIL, "the driver lists no device", fix)
        return
    broken = [device for device in devices if device.error]
    for device in broken:
        fix = "look for its Xid in the kernel log; reset the GPU or restart the node. The other devices work"
        yield Finding("devices", FAIL, f"gpu {device.gpu} {device.uuid}: {device.error}", fix)
    working = [device for device in devices if not device.error]
    if working:
        listed = ", ".join(f"{device.gpu} {device.name}".strip() for device in working)
        yield Finding("devices", PASS, f"{len(working)} of {len(devices)} answer: {listed}")
