"""Do processes report, and can the exporter tell which of the driver's processes each of them is?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding, counted
from gpumem_exporter.procfs import INITIAL_PID_NAMESPACE

__all__ = ["check_pid_namespace", "check_reporters"]

_SHOWN = 5
_MEND = "run the exporter in the host's PID namespace: hostPID: true in the pod, --pid=host for docker and podman"

Document = Mapping[str, Any]


def check_reporters(processes: Sequence[Document]) -> Iterator[Finding]:
    """How many report, and which fell silent."""
    by_state: dict[str, list[Document]] = {"reporting": [], "silent": [], "unreported": []}
    for process in processes:
        by_state.setdefault(str(process.get("state")), []).append(process)
    silent = by_state["silent"]
    if silent:
        mend = "see with `py-spy dump --pid PID` whether it is stopped, or hangs in a call that keeps the GIL"
        yield Finding("reporters", WARN, f"{len(silent)} fell silent: {_listed(silent)}", mend)
    reporting, unreported = by_state["reporting"], by_state["unreported"]
    without = f"; {len(unreported)} on the devices without a reporter" if unreported else ""
    if reporting:
        yield Finding("reporters", PASS, f"{counted(len(reporting), 'reports', 'report')}{without}")
    elif not silent:
        mend = "start training with `gpumem-exporter run -- CMD`, or call gpumem_exporter.client.start()"
        yield Finding("reporters", WARN, f"no process reports{without}", mend)


def check_pid_namespace(
    processes: Sequence[Document], *, exporter_namespace: int | None, own_namespace: int | None, driver_up: bool
) -> Iterator[Finding]:
    """Whether the pids that the exporter sees are the driver's, which knows those of the host alone.

    Args:
        processes: as the exporter lists them.
        exporter_namespace: inode of the exporter's PID namespace; None where it cannot be read from here.
        own_namespace: inode of this process' PID namespace, 0 where it cannot be read; None where the exporter is on
            another machine, of which it says nothing.
        driver_up: the exporter has a driver, so that it matters now.
    """
    reporting = [process for process in processes if process.get("state") == "reporting"]
    serious = FAIL if driver_up else WARN
    lost = [process for process in reporting if process.get("host_pid") is None]
    if lost:
        detail = f"the exporter cannot tell which of the driver's processes these reporters are: {_listed(lost)}"
        yield Finding("pid namespace", serious, f"{detail}; their memory stands under other_processes", _MEND)
        return
    strangers = [process for process in processes if _stranger(process)]
    unlisted = [process for process in reporting if driver_up and _unlisted(process)]
    if strangers and unlisted:
        detail = f"the driver lists pids that the exporter does not see ({_listed(strangers)})"
        yield Finding("pid namespace", FAIL, f"{detail}, and none of the reporters {_listed(unlisted)}", _MEND)
    elif exporter_namespace not in (None, 0, INITIAL_PID_NAMESPACE):
        yield Finding("pid namespace", WARN, "the exporter does not run in the host's: pids do not match there", _MEND)
    elif reporting and driver_up:
        reporters = counted(len(reporting), "reporter", "reporters")
        yield Finding("pid namespace", PASS, f"the driver's processes and {reporters} are told apart")
    elif exporter_namespace == INITIAL_PID_NAMESPACE:
        yield Finding("pid namespace", PASS, "the exporter runs in the host's")
    else:
        proof = "without a driver nothing proves" if reporting else "nothing reports yet that would prove"
        yield _judge_own(own_namespace, f"{proof} the exporter's")


def _judge_own(own_namespace: int | None, not_proved: str) -> Finding:
    """What this process' own namespace says where nothing tells the exporter's."""
    if own_namespace is None:
        mend = "run this on the exporter's machine"
        return Finding("pid namespace", WARN, f"not known from this machine: {not_proved}", mend)
    if own_namespace == INITIAL_PID_NAMESPACE:
        return Finding("pid namespace", PASS, f"this is the host's; {not_proved}")
    return Finding("pid namespace", WARN, f"this is not the host's, and {not_proved}", f"if it runs here too, {_MEND}")


def _stranger(process: Document) -> bool:
    """The driver lists it, and the exporter finds no process with that pid."""
    return process.get("state") == "unreported" and not process.get("command")


def _unlisted(process: Document) -> bool:
    """It holds memory by its own account, and the driver has it on none of those devices."""
    holding = [device for device in process.get("devices") or () if device.get("reserved_bytes")]
    return bool(holding) and all(device.get("used_bytes") is None for device in holding)


def _listed(processes: Sequence[Document]) -> str:
    named = [f"pid {process['pid']} {process.get('workload') or ''}".rstrip() for process in processes[:_SHOWN]]
    more = len(processes) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
