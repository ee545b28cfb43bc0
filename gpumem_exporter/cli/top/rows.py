"""The rows of `top`: one for each process on each device, chosen and put in order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SORTS", "Choice", "Row", "arrange", "descends", "rows_of", "with_gpu"]

Document = Mapping[str, Any]
Identity = tuple[int | str, str | None]

_NO_DEVICE: tuple[Document, ...] = ({},)


@dataclass(frozen=True, slots=True)
class Row:
    """One process on one device; bytes, and None for what cannot be known. The fields are those of `--json`."""

    pid: int | str
    """What the exporter calls it: a number, or `1@4026532007` where two processes have the same."""
    gpu: str | None
    uuid: str | None
    """None for a process on no device yet."""
    workload: str | None
    rank: str | None
    command: str | None
    user: str | None
    k8s_namespace: str | None
    k8s_pod: str | None
    state: str | None
    """`reporting`, `silent` or `unreported`; None where no exporter could say."""
    used_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    reclaimable_bytes: int | None
    fragmented_bytes: int | None
    non_torch_bytes: int | None
    step: int | None
    sample_age_seconds: float | None
    actions: tuple[str, ...]
    """The actions that the process accepts."""

    @property
    def identity(self) -> Identity:
        """What stays the same from one reading to the next."""
        return (self.pid, self.uuid)


_OF_PROCESS = ("workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state", "step", "sample_age_seconds")
_OF_DEVICE = (
    "gpu",
    "uuid",
    "used_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reclaimable_bytes",
    "fragmented_bytes",
    "non_torch_bytes",
)


def rows_of(processes: Document) -> tuple[Row, ...]:
    """The rows of a document of `/api/v1/processes`; a process that is on no device has one too."""
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


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows are shown; what is given narrows each other."""

    gpus: tuple[str, ...] = ()
    """Indices; the index of a GPU includes its MIG devices. Empty for all."""
    workload: str | None = None
    text: str = ""
    """Words that the names in a row must all contain, in any case."""

    def takes(self, row: Row) -> bool:
        """The row is shown."""
        if self.gpus and not with_gpu(row.gpu, self.gpus):
            return False
        if self.workload is not None and row.workload != self.workload:
            return False
        named = "\n".join(str(value) for value in _names(row) if value is not None).casefold()
        return all(word in named for word in self.text.casefold().split())


def with_gpu(gpu: str | None, wanted: Sequence[str]) -> bool:
    """A device's index is among those wanted, or is a MIG device of one of them."""
    return gpu is not None and any(gpu == index or gpu.startswith(f"{index}:") for index in wanted)


def _names(row: Row) -> Iterator[object]:
    yield from (row.pid, row.uuid, row.workload, row.command, row.user, row.k8s_namespace, row.k8s_pod, row.state)


def _number(text: object) -> tuple[tuple[int, str], ...]:
    """Sorts `10` behind `9` and `0:10` behind `0:9`; what is no number comes after."""
    parts = str(text).replace("@", ":").split(":")
    return tuple((int(part), "") if part.isascii() and part.isdecimal() else (1 << 62, part) for part in parts)


_SIZES = ("used", "allocated", "reserved", "reclaimable", "fragmented", "non-torch")
_VALUES: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: None if not row.workload else (row.workload.casefold(), _number(row.rank)),
    "gpu": lambda row: None if row.gpu is None else _number(row.gpu),
    "pid": lambda row: _number(row.pid),
}
SORTS = (*_SIZES, *_VALUES)
"""What rows may be sorted by; sizes the largest first, names the smallest."""


def descends(sort: str, *, reverse: bool) -> bool:
    """The largest comes first."""
    return (sort in _SIZES) is not reverse


def arrange(rows: Sequence[Row], choice: Choice, sort: str, *, reverse: bool) -> tuple[Row, ...]:
    """The chosen rows in order. Rows without the value come last; equal rows keep their order."""
    value = _VALUES.get(sort) or (lambda row: getattr(row, f"{sort.replace('-', '_')}_bytes"))
    chosen = sorted(filter(choice.takes, rows), key=lambda row: (_number(row.pid), _number(row.gpu)))
    known = sorted(
        (row for row in chosen if value(row) is not None), key=value, reverse=descends(sort, reverse=reverse)
    )
    return (*known, *(row for row in chosen if value(row) is None))
