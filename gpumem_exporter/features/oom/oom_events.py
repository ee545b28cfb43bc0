"""Convert reported out-of-memory errors to events and log lines, each error once."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from gpumem_client.wire.protocol import DeviceSample, OutOfMemory
from gpumem_exporter.core.event import Event, oom_subject, session_of_oom
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import LastOom, ProcessKey, ReportingProcess

MAX_PER_MINUTE = 60
"""The maximum number of a process's errors that are stored and logged in a minute."""
MAX_OF_OWNER_PER_MINUTE = 600
"""The same for all processes of a user."""
_SESSIONS = 4096
# The numbers of a sample.
_SAMPLE_FIELDS = tuple(
    f.name for f in fields(DeviceSample) if f.default is None and f.name != "planned_reserved_peak_bytes"
)
_ERROR_VALUES = ("requested_bytes", "device_free_bytes", "limit_bytes")
_ALLOCATOR_VALUES = ("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "fragmented_bytes")

_log = logging.getLogger(__name__)


class OomDeduplicator:
    """Finds the new errors in each report. Not thread-safe."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()
        self._minute = 0
        # The errors of each process, and of each owner.
        self._in_minute: Counter[ProcessKey | str] = Counter()

    def knows(self, session: str, number: int) -> bool:
        """Return whether a reporter has sent this error to this exporter, which may be not stored yet."""
        return 0 < number <= self._highest.get(session, 0)

    def new_events(
        self, process: ReportingProcess, gpu_of: Callable[[str], str | None], received_unix_seconds: float
    ) -> list[Event]:
        """Return the events of the new errors in the last report; `gpu_of` returns the NVML index of a device."""
        ooms = process.report.ooms
        session = process.report.process.session
        # A report repeats every error that the exporter has not acknowledged, so the numbers of a session arrive in
        # order: errors up to the highest known number are known. A restarted exporter knows no numbers; the storage
        # then detects duplicates by the event's subject, which has the session and the number.
        seen = self._highest.get(session, -1)
        self._highest[session] = max(seen, *(oom.number for oom in ooms))
        self._highest.move_to_end(session)
        while len(self._highest) > _SESSIONS:
            self._highest.popitem(last=False)
        # A number that is sent twice or out of order is the same error.
        new = {oom.number: oom for oom in reversed(ooms) if oom.number > seen}
        return [_event(process, oom, gpu_of(oom.uuid), received_unix_seconds) for _, oom in sorted(new.items())]

    def within_limit(
        self, process: ProcessKey, events: Sequence[Event], received_unix_seconds: float
    ) -> Sequence[Event]:
        """Log the first events of a process in each minute, and return them. The others are left out."""
        minute = int(received_unix_seconds // 60)
        if minute != self._minute:
            self._minute, self._in_minute = minute, Counter()
        owner = events[0].owner
        before = self._in_minute[process]
        left = min(MAX_PER_MINUTE - before, MAX_OF_OWNER_PER_MINUTE - self._in_minute[owner])
        stored = events[: max(0, left)]
        self._in_minute[process] += len(events)
        self._in_minute[owner] += len(stored)
        for event in stored:
            _log_oom(event)
        if before <= MAX_PER_MINUTE < self._in_minute[process]:
            shown = {"pid": events[0].pid, "workload": events[0].workload, "limit_per_minute": MAX_PER_MINUTE}
            _log.warning("further out-of-memory errors of this minute are left out", extra={"fields": shown})
        return stored


def last_ooms(events: Iterable[Event], now_seconds: float, now_unix_seconds: float) -> list[LastOom]:
    """Convert `oom` events to the records that the metrics page shows, with the same values."""
    # After the clock was set back, an event may be in the future: it counts as happening now.
    return [
        LastOom(
            gpu=event.gpu or "",
            uuid=event.uuid,
            pid=str(event.pid),
            workload=event.workload or "",
            rank=event.rank or "",
            session=session_of_oom(event),
            number=event.detail["number"],
            happened_seconds=now_seconds - max(0.0, now_unix_seconds - event.time_unix_seconds),
            happened_unix_seconds=event.time_unix_seconds,
            owner=event.owner,
            **_values(event.detail, _ERROR_VALUES),
            **_values(event.detail["allocator"] or {}, _ALLOCATOR_VALUES),
        )
        for event in events
        if event.uuid is not None and event.pid is not None
    ]


def _values(detail: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: detail.get(name) for name in names}


def _event(process: ReportingProcess, oom: OutOfMemory, gpu: str | None, received_unix_seconds: float) -> Event:
    identity = process.report.process
    sample = oom.sample
    # The allocator's `requested_bytes` differs from the error's, so the allocator's values are in a separate object.
    allocator: dict[str, Any] | None = None
    if sample is not None:
        allocator = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
        allocator["fragmented_bytes"] = fragmented_bytes(sample)
    detail: dict[str, Any] = {
        **{name: getattr(oom, name) for name in ("number", *_ERROR_VALUES, "step")},
        "phase": oom.phase or None,
        "allocator": allocator,
    }
    return Event(
        "oom",
        max(0.0, received_unix_seconds - oom.age_seconds),  # a report may claim any age
        gpu=gpu,
        uuid=oom.uuid,
        pid=json_pid(process.name),
        workload=identity.workload,
        rank=identity.rank,
        detail=detail,
        subject=oom_subject(identity.session, oom.number),
        owner=process.key.share,
    )


def _log_oom(event: Event) -> None:
    detail, allocator = event.detail, event.detail["allocator"] or {}
    _log.warning(
        "out of memory",
        extra={
            "fields": {
                **{name: getattr(event, name) for name in ("workload", "rank", "pid", "gpu", "uuid")},
                **{name: detail[name] for name in _ERROR_VALUES},
                **{name: allocator.get(name) for name in ("allocated_bytes", "reclaimable_bytes", "fragmented_bytes")},
                **{name: detail[name] for name in ("step", "phase", "number")},
            }
        },
    )
