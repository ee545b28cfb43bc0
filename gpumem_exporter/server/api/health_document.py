"""What `/health` says. Pure: decided from one snapshot and the poller's state."""

from __future__ import annotations

from typing import Any

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.events import EventLogStatus
from gpumem_exporter.nvml.poller import PollerStatus

__all__ = ["health_document"]

_RANKS = ("ok", "degraded", "failing")


def health_document(
    snapshot: Snapshot, poller: PollerStatus, events: EventLogStatus, *, source: str, version: str
) -> dict[str, Any]:
    """The exporter's state: `failing` is what a restart may mend, `degraded` what the node lacks."""
    node = snapshot.node
    checks = {
        "poller": _poller_check(poller),
        "nvml": _nvml_check(snapshot, poller),
        "devices": _devices_check(snapshot),
        "reports": _reports_check(snapshot),
        "events": _events_check(events),
    }
    status = max((check["status"] for check in checks.values()), key=_RANKS.index)
    up = bool(node and node.up)
    return {
        "status": status,
        "version": version,
        "source": source,
        "nvml": {"up": up, "error": "" if up else checks["nvml"]["detail"]},
        "devices": len(node.devices) if node else 0,
        "processes": len(snapshot.processes),
        "checks": checks,
    }


def _poller_check(poller: PollerStatus) -> dict[str, str]:
    if not poller.alive:
        return _check("failing", f"the poller has ended{': ' + poller.error if poller.error else ''}")
    if poller.stuck:
        busy = f" for {poller.busy_seconds:.0f} s" if poller.busy_seconds is not None else ""
        return _check("failing", f"the driver has not answered a poll{busy}")
    return _check("ok", f"{poller.polls} polls" if poller.polls else "the first poll is under way")


def _nvml_check(snapshot: Snapshot, poller: PollerStatus) -> dict[str, str]:
    node = snapshot.node
    if node is None:
        return _check("degraded", poller.error or "the driver has not answered lately")
    if not node.up:
        return _check("degraded", node.error or "the driver does not answer")
    return _check("ok", f"driver {node.driver_version}" if node.driver_version else "")


def _devices_check(snapshot: Snapshot) -> dict[str, str]:
    node = snapshot.node
    if node is None or not node.up:
        return _check("ok", "not known")
    lost = [f"{device.gpu or device.uuid}: {device.error}" for device in node.devices if not device.up]
    if lost:
        return _check("degraded", f"{len(lost)} of {len(node.devices)} do not answer ({'; '.join(lost)})")
    if not node.devices:
        return _check("degraded", "the driver has no device")
    return _check("ok", f"{len(node.devices)} answer")


def _reports_check(snapshot: Snapshot) -> dict[str, str]:
    silent = f", {len(snapshot.silent)} fell silent" if snapshot.silent else ""
    return _check("ok", f"{len(snapshot.processes)} processes report{silent}")


def _events_check(events: EventLogStatus) -> dict[str, str]:
    lost = f"; {events.waiting} wait, {events.dropped} were lost" if events.waiting or events.dropped else ""
    if events.error:
        return _check("degraded", events.error + lost)
    if not events.alive:
        return _check("degraded", f"nothing keeps events{lost}")
    if not events.prompt:
        return _check("degraded", f"{events.where} has not answered for {events.busy_seconds or 0:.0f} s{lost}")
    aside = f"; a damaged file was put aside as {events.damaged_file}" if events.damaged_file else ""
    return _check("ok", f"kept in {events.where}{aside}{lost}")


def _check(status: str, detail: str) -> dict[str, str]:
    return {"status": status, "detail": detail}
