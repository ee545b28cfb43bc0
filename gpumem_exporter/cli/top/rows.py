"""The rows of `top`: one for each process on each device, filtered and sorted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SORTS", "Row", "arrange", "descends", "matches", "rows_of"]

Document = Mapping[str, Any]
Identity = tuple[int | str, str | None]

_NO_DEVICE: tuple[Document, ...] = ({},)


@dataclass(frozen=True, slots=True)
class Row:
    """One process on one device. Sizes are bytes; None is an unknown value. `--json` has the same fields."""

    pid: int | str
    """A number, or `1@4026532007:1001` if the exporter cannot see the process."""
    gpu: str | None
    uuid: str | None
    """None if the process is not on a device yet."""
    workload: str | None
    rank: str | None
    command: str | None
    user: str | None
    k8s_namespace: str | None
    k8s_pod: str | None
    state: str | None
    """`reporting`, `silent` or `unreported`; None without an exporter."""
    used_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    idle_cache_bytes: int | None
    reclaimable_bytes: int | None
    fragmented_bytes: int | None
    non_torch_bytes: int | None
    nccl_bytes: int | None
    """The part of non-torch that NCCL has allocated."""
    unmapped_bytes: int | None
    """What PyTorch counts as reserved and the driver does not hold; not a part of the others."""
    step: int | None
    sample_age_seconds: float | None
    actions: tuple[str, ...]
    """The actions that the process accepts."""

    @property
    def identity(self) -> Identity:
        """The pid and the uuid, which identify the row in each reading."""
        return (self.pid, self.uuid)


_OF_PROCESS = ("workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state", "step", "sample_age_seconds")
_SIZES = ("used", "allocated", "reserved", "idle-cache", "reclaimable", "fragmented", "non-torch")
_OF_DEVICE = ("gpu", "uuid", *(f"{name.replace('-', '_')}_bytes" for name in (*_SIZES, "nccl", "unmapped")))


def rows_of(processes: Document) -> tuple[Row, ...]:
    """Return the rows of a document of `/api/v1/processes`. A process without a device has one row."""
    return tuple(
        Row(
            pid=process["pid"],
            actions=tuple(process.get("actions") or ()),
            **{name: process.get(name) for name in _OF_PROCESS},
            **{name: device.get(name) for name in _OF_DEVICE},
        )
        for process in processes.get("processes") or ()
        for device in process.get("devices") or _NO_DEVICE
    )


def matches(row: Row, text: str) -> bool:
    """Return whether the names in a row contain every word of a filter. Case is ignored."""
    names = (row.pid, row.uuid, row.workload, row.command, row.user, row.k8s_namespace, row.k8s_pod, row.state)
    named = "\n".join(str(name) for name in names if name is not None).casefold()
    return all(word in named for word in text.casefold().split())


def _number(text: object) -> tuple[tuple[int, str], ...]:
    """A sort key: `10` after `9`, `0:10` after `0:9`, and numbers before other texts."""
    parts = str(text).replace("@", ":").split(":")
    return tuple((int(part), "") if part.isascii() and part.isdecimal() else (1 << 62, part) for part in parts)


_VALUES: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: None if not row.workload else (row.workload.casefold(), _number(row.rank)),
    "gpu": lambda row: None if row.gpu is None else _number(row.gpu),
    "pid": lambda row: _number(row.pid),
}
SORTS = (*_SIZES, *_VALUES)
"""The sort columns. Sizes are sorted from the largest, names from the smallest."""


def descends(sort: str, *, reverse: bool) -> bool:
    """Return whether the largest value is first."""
    return (sort in _SIZES) is not reverse


def arrange(rows: Sequence[Row], text: str, sort: str, *, reverse: bool) -> tuple[Row, ...]:
    """Return the rows that pass the filter, sorted. Rows without the value come last; equal rows keep their order."""
    value = _VALUES.get(sort) or (lambda row: getattr(row, f"{sort.replace('-', '_')}_bytes"))
    chosen = sorted((row for row in rows if matches(row, text)), key=lambda row: (_number(row.pid), _number(row.gpu)))
    known = sorted(
        (row for row in chosen if value(row) is not None), key=value, reverse=descends(sort, reverse=reverse)
    )
    return (*known, *(row for row in chosen if value(row) is None))
