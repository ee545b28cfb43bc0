"""The size of what a report adds to the exporter's pages. Pure."""

from __future__ import annotations

from functools import lru_cache

from gpumem_client.wire.protocol import Report

__all__ = ["page_bytes", "share_bytes"]

_SHARE_BYTES = 6 << 20
_SHARE_BYTES_PER_PROCESS = 12 << 10
"""A process with short labels on one device takes 6 to 9 KiB."""

_DEVICE_SERIES = 23
"""The series of a process on one device, without phases and components."""
_LINE_BYTES = 120
"""Name, names of labels and value of a series."""
_PROCESS_BYTES = 2000
"""The other series and documents of a process."""
_ESCAPED = '"\\\n'


def share_bytes(max_processes: int) -> int:
    """Return how much of the metrics page the reports of one user may take: 6 MiB, more with more processes."""
    return max(_SHARE_BYTES, max_processes * _SHARE_BYTES_PER_PROCESS)


def page_bytes(report: Report) -> int:
    """Return about how many bytes of the metrics page a report takes; the JSON documents take less.

    Unknown values count as well, so that the result only depends on the number of devices and on texts.
    """
    identity = report.process
    line = _LINE_BYTES + _label_bytes(identity.workload) + _label_bytes(identity.rank)
    total = _PROCESS_BYTES + sum(map(len, (*report.actions, *report.modes, *report.waiting)))
    for sample in report.devices:
        names = (*sample.phase_peak_bytes, *sample.component_bytes)
        total += (_DEVICE_SERIES + len(names)) * (line + _label_bytes(sample.uuid)) + sum(map(_label_bytes, names))
    return total


@lru_cache(maxsize=1024)
def _label_bytes(text: str) -> int:
    """Return the bytes of a label value: UTF-8, with a backslash before some characters."""
    return len(text.encode("utf-8", "replace")) + sum(map(text.count, _ESCAPED))
