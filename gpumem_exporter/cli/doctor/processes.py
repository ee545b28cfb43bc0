"""Checks of processes: whether they report, and whether the exporter can match them with the driver's processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding
from gpumem_exporter.procfs import INITIAL_PID_NAMESPACE
from gpumem_exporter.units import counted

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
        fix = "start training with `gpumem-exporter run -- CMD`, or call gpumem_exporter.client.start()"
        yield Finding("reporters", WARN, f"no process reports{without}", fix)


def check_pid_namespace(
    processes: Sequence[Document], *, exporter_namespace: int | None, own_namespace: int | None, driver_up: bool
) -> Iterator[Finding]:
    """Check that the exporter runs in the host's PID namespace: the driver lists processes by the host's pids.

    Args:
        processes: as the exporter lists them.
        exporter_namespace: inode of the exporter's PID namespace; None if unknown.
        own_namespace: inode of this process' PID namespace, 0 if unknown; None if the exporter is on another machine.
        driver_up: whether the exporter has a driver.
    """
    reporting = [process for process in processes if process.get("state") == "reporting"]
    serious = FAIL if driver_up else WARN
    lost = [process for process in reporting if process.get("host_pid") is None]
    if lost:
        detail = f"the exporter cannot match these reporters with the driver's processes: {_listed(lost)}"
        yield Finding("pid namespace", serious, f"{detail}; their memory counts as other processes", _FIX)
        return
    not_found = [process for process in processes if _not_found(process)]
    unlisted = [process for process in reporting if driver_up and _unlisted(process)]
    if not_found and unlisted:
        detail = f"the driver lists pids that the exporter does not see ({_listed(not_found)})"
        yield Finding("pid namespace", FAIL, f"{detail}, and none of the reporters {_listed(unlisted)}", _FIX)
    elif exporter_namespace not in (None, 0, INITIAL_PID_NAMESPACE):
        detail = "the exporter does not run in the host's: its pids are not the driver's"
        yield Finding("pid namespace", WARN, detail, _FIX)
    elif reporting and driver_up:
        reporters = counted(len(reporting), "reporter", "reporters")
        yield Finding("pid namespace", PASS, f"{reporters} matched with the driver's processes")
    elif exporter_namespace == INITIAL_PID_NAMESPACE:
        yield Finding("pid namespace", PASS, "the exporter runs in the host's")
    elif own_namespace == INITIAL_PID_NAMESPACE:
        yield Finding("pid namespace", PASS, "this process runs in the host's; the exporter's is not known")
    else:
        fix = f"run doctor on the exporter's machine; if this is it, {_FIX}"
        yield Finding("pid namespace", WARN, "the exporter's is not known", fix)


def _not_found(process: Document) -> bool:
    """Whether the driver lists a process that the exporter does not find in /proc."""
    return process.get("state") == "unreported" and not process.get("command")


def _unlisted(process: Document) -> bool:
    """Whether a process reports memory on devices where the driver does not list it."""
    holding = [device for device in process.get("devices") or () if device.get("reserved_bytes")]
    return bool(holding) and all(device.get("used_bytes") is None for device in holding)


def _listed(processes: Sequence[Document]) -> str:
    named = [f"pid {process['pid']} {process.get('workload') or ''}".rstrip() for process in processes[:_SHOWN]]
    more = len(processes) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
