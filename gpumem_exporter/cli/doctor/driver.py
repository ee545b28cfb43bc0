"""Does the driver's library answer here, and for which devices?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.nvml.provider import DeviceIdentity, Provider

__all__ = ["RELEASED", "check_driver", "judge_driver_elsewhere"]

RELEASED = "released on request"
"""How an exporter begins to say that it has no driver because somebody asked for it (`release-nvml`)."""
_NO_DEMO = "serve without --demo where there are GPUs"


def check_driver(
    make_provider: Callable[[], Provider], *, exporter_source: str, exporter_error: str = "", timeout_seconds: float
) -> Iterator[Finding]:
    """Initialise NVML in this process, list the devices, release it again.

    Args:
        make_provider: the driver to ask.
        exporter_source: where a reachable exporter has its devices from, `nvml` or `demo`; empty without one that has.
        exporter_error: why a reachable exporter has none; empty where none is reached.
        timeout_seconds: a driver that takes longer counts as hanging; its thread is left behind.
    """
    answers: list[tuple[str, Sequence[DeviceIdentity]] | Exception] = []
    thread = threading.Thread(target=_ask, args=(make_provider, answers), name="gpumem-doctor-nvml", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        mend = "look for Xid errors in the kernel's log; reset or drain the GPU, or restart the node"
        yield Finding("driver", FAIL, f"NVML does not answer within {timeout_seconds:g} s", mend)
        return
    answer = answers[0]
    if isinstance(answer, Exception):
        yield _absent(answer, exporter_source, exporter_error)
        return
    version, devices = answer
    yield Finding("driver", PASS, f"NVML answers, driver {version}")
    yield from _judge_devices(devices)


def judge_driver_elsewhere(*, exporter_source: str, exporter_error: str) -> Finding:
    """What an exporter on another machine says of its driver: this machine's is not the one that matters.

    Args:
        exporter_source: where it has its devices from, `nvml` or `demo`; empty while it has none.
        exporter_error: why it has none.
    """
    if exporter_source == "nvml":
        return Finding("driver", PASS, "the exporter has one; it is on another machine, and this one's is not asked")
    if exporter_source == "demo":
        return Finding("driver", WARN, "the exporter shows simulated devices", _NO_DEMO)
    mend = "run this and nvidia-smi on the exporter's machine: this one's driver is not asked"
    return Finding("driver", _verdict(exporter_error), f"the exporter has none: {exporter_error}", mend)


def _ask(make_provider: Callable[[], Provider], answers: list[Any]) -> None:
    try:
        provider = make_provider()
        provider.open()
        try:
            answers.append((provider.driver_version(), tuple(provider.devices())))
        finally:
            provider.close()
    except Exception as error:  # noqa: BLE001 - it is the finding
        answers.append(error)


def _absent(error: Exception, exporter_source: str, exporter_error: str) -> Finding:
    """There is no driver in this process; whether that matters depends on the exporter's."""
    if exporter_source == "nvml":
        return Finding("driver", PASS, f"none in this process ({error}); the exporter has one, which suffices")
    if exporter_source == "demo":
        return Finding("driver", WARN, f"none here ({error}); the exporter shows simulated devices", _NO_DEMO)
    if exporter_error and exporter_error != str(error):
        detail = f"none here ({error}); the exporter has none either: {exporter_error}"
        return Finding("driver", _verdict(exporter_error), detail, _mend(error))
    return Finding("driver", FAIL, str(error), _mend(error))


def _verdict(exporter_error: str) -> str:
    """An exporter without a driver has a fault, unless it was asked to let it go."""
    return WARN if exporter_error.startswith(RELEASED) else FAIL


def _mend(error: Exception) -> str:
    if not isinstance(error, NvmlError):
        return "install gpumem-exporter again, with its dependencies"
    return (
        "install the NVIDIA driver; in a container add the NVIDIA runtime with "
        "NVIDIA_DRIVER_CAPABILITIES=utility (docker: --gpus all), then try nvidia-smi"
    )


def _judge_devices(devices: Sequence[DeviceIdentity]) -> Iterator[Finding]:
    if not devices:
        mend = "make the GPUs visible here: docker --gpus all, or NVIDIA_VISIBLE_DEVICES=all; see nvidia-smi -L"
        yield Finding("devices", FAIL, "the driver lists no device", mend)
        return
    broken = [device for device in devices if device.error]
    for device in broken:
        mend = "see the kernel's log for its Xid; reset the GPU or restart the node. The others are served meanwhile"
        yield Finding("devices", FAIL, f"gpu {device.gpu} {device.uuid}: {device.error}", mend)
    well = [device for device in devices if not device.error]
    if well:
        listed = ", ".join(f"{device.gpu} {device.name}".strip() for device in well)
        yield Finding("devices", PASS, f"{len(well)} of {len(devices)} answer: {listed}")
