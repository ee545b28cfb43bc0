"""Out-of-memory errors, as reports tell them: each one once, as an event and as a log line."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.events.model import Event
from gpumem_exporter.protocol import DeviceSample, OutOfMemory

__all__ = ["OomIntake"]

_SESSIONS = 4096
_SAMPLE_FIELDS = tuple(
    f.name for f in fields(DeviceSample) if f.name not in ("uuid", "phase_peak_bytes", "component_bytes")
)

_log = logging.getLogger(__name__)


class OomIntake:
    """Takes the errors of each report and leaves out those that came before. One thread uses it.

    A report carries every error that no answer has acknowledged yet, so a session's numbers never come out of order:
    those up to the highest seen are known. An exporter that was started in between knows none, and tells them from
    what is kept: the event's subject is the session and the number.
    """

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def take(
        self, process: ReportingProcess, pid: int | str, gpus: Mapping[str, str], received_unix_seconds: float
    ) -> list[Event]:
        """The events of those errors of a process' report that are new.

        Args:
            process: with the report that came.
            pid: the process' name.
            gpus: the NVML index of each device by uuid.
            received_unix_seconds: when the report came.
        """
        ooms = process.report.ooms
        if not ooms:
            return []
        session = process.report.process.session
        seen = self._highest.get(session, -1)
        self._highest[session] = max(seen, *(oom.number for oom in ooms))
        self._highest.move_to_end(session)
        while len(self._highest) > _SESSIONS:
            self._highest.popitem(last=False)
        events = [
            _event(process, pid, oom, gpus.get(oom.uuid), received_unix_seconds) for oom in ooms if oom.number > seen
        ]
        for event in events:
            _tell(event)
        return events


def _event(
    process: ReportingProcess, pid: int | str, oom: OutOfMemory, gpu: str | None, received_unix_seconds: float
) -> Event:
    identity = process.report.process
    sample = oom.sample
    # The allocator's own `requested_bytes` is another figure: it has a place of its own.
    allocator: dict[str, Any] | None = None
    if sample is not None:
        allocator = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
        allocator["fragmented_bytes"] = fragmented_bytes(sample)
    detail: dict[str, Any] = {
        "number": oom.number,
        "requested_bytes": oom.requested_bytes,
        "device_free_bytes": oom.device_free_bytes,
        "limit_bytes": oom.limit_bytes,
        "step": oom.step,
        "allocator": allocator,
    }
    return Event(
        "oom",
        received_unix_seconds - oom.age_seconds,
        gpu=gpu,
        uuid=oom.uuid,
        pid=pid,
        workload=identity.workload,
        rank=identity.rank,
        detail=detail,
        subject=f"oom:{identity.session}:{oom.number}",
    )


def _tell(event: Event) -> None:
    detail, allocator = event.detail, event.detail["allocator"] or {}
    _log.warning(
        "out of memory",
        extra={
            "fields": {
                "workload": event.workload,
                "rank": event.rank,
                "pid": event.pid,
                "gpu": event.gpu,
                "uuid": event.uuid,
                **{name: detail[name] for name in ("requested_bytes", "device_free_bytes", "limit_bytes")},
                **{name: allocator.get(name) for name in ("allocated_bytes", "reclaimable_bytes", "fragmented_bytes")},
                **{name: detail[name] for name in ("step", "number")},
            }
        },
    )
