"""Checks of processes: whether they report, and whether the exporter can match them with the driver's processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumem_client.wire.units import counted
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding

__all__ = ["check_pid_namespace", "check_reporters"]

_SHOWN = 5
_FIX = "run the exporter in the host's PID namespace: hostPID: true in the pod, --pid=host for docker and podman"

Document = Mapping[str, Any]


def check_reporters(processes: Sequence[Document]) -> Iterator[Finding]:
    """Count the processes that report, and name silent ones."""
    by_state: dict[str, list[Document]] = {"reporting": [], "silent": [], "unreported": []}
    for process in processes:
        by_state.setdefault(str(process.get("state")), []).append(process)
    silent = by_state["silent"]
    if silent:
        fix = "check with `py-spy dump --pid PID` whether it is stopped, or hangs in a call that keeps the GIL"
        yield Finding("reporters", WARN, f"{len(silent)} silent: {_listed(silent)}", fix)
    reporting, unreported = by_state["reporting"], by_state["unreported"]
    without = (
        f"; {counted(len(unreported), 'process', 'processes')} on the devices without a reporter" if unreported else ""
    )
    if reporting:
        yield Finding("reporters", PASS, f"{counted(len(reporting), 'process reports', 'processes report')}{without}")
    elif not silent:
        fix = "start training with `gpumem-exporter run -- CMD`, or call gpumem_client.start()"
        yield Finding("reporters", WARN, f"no process reports{without}", fix)


def check_pid_namespace(processes: Sequence[Document], *, mode: str | None, driver_up: bool) -> Iterator[Finding]:
    """Check that the exporter runs in the host's PID namespace: the driver lists processes by the host's pids.

    Args:
        processes: as the exporter lists them.
        mode: the exporter's, from `/health`; None if it is older than this field.
        driver_up: whether the exporter has a driver.
    """
    reporting = [process for process in processes if process.get("state") == "reporting"]
    lost = [process for process in reporting if process.get("host_pid") is None]
    if mode == "sidecar":
        detail = "the exporter does not run in the host's: other processes and non-torch memory are unknown"
        yield Finding("pid namespace", WARN, detail, f"nothing in a sidecar; elsewhere, {_FIX}")
    elif lost:
        detail = f"the exporter cannot match these reporters with the driver's processes: {_listed(lost)}"
        yield Finding(
            "pid namespace", FAIL if driver_up else WARN, f"{detail}; their memory counts as other processes", _FIX
        )
    elif mode is None:
        yield Finding("pid namespace", WARN, "the exporter does not show its own", "install the same version there")
    elif reporting and driver_up:
        reporters = counted(len(reporting), "reporter", "reporters")
        yield Finding("pid namespace", PASS, f"{reporters} matched with the driver's processes")
    else:
        yield Finding("pid namespace", PASS, "the driver's pids are those of the exporter's")


def _listed(processes: Sequence[Document]) -> str:
    named = [f"pid {process['pid']} {process.get('workload') or ''}".rstrip() for process in processes[:_SHOWN]]
    more = len(processes) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
