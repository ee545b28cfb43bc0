"""The series of a history: what each one is about, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from gpumem_exporter.core.samples import PartKey

StoredRow: TypeAlias = tuple[Any, ...]
"""The step in seconds, its start in Unix seconds, `used`, `allocated`, `idle_cache`, `other_cache` and `in_use_peak` as
the highest values of the step, and the lowest of the first four. Values are whole KiB, and None is unknown. A lowest
value is None if it is equal to the highest."""


class Subject(NamedTuple):
    """What a series is about."""

    uuid: str
    """Of a device; empty for others."""
    job: str
    """The id of a job; empty for a device."""
    name: str
    """The name of the device's model, or the workload of the job."""
    command: str = ""
    """Of a job; `--web.hide-identities` hides it."""
    gpu: str = ""
    """The NVML index of the device."""
    owner: str = ""
    """The user whose share of the memory the series uses."""
    start_time_ticks: int = 0
    """Of a job that is one process without a workload, and of a cache: differs for a later process with the same pid.
    """
    part: str = ""
    """Of a series that no document has. Of the key-value cache of one process of the job on one device: the process's
    name, a space and the uuid; its values `used` and `in_use_peak` are what running requests use, `allocated` is the
    size. Of the minima of a process on a device, which is of no job: the session, a space and the uuid."""

    @classmethod
    def of_minima(cls, part: PartKey) -> Subject:
        """Return the subject of the smallest `allocated` of a process on a device in each minute."""
        return cls("", "", "", owner=part.share, part=f"{part.session} {part.uuid}")

    @property
    def key(self) -> str:
        """The key of the series: a device's uuid or a job's id. Other keys have a space, which no id has."""
        return f"{self.job or self.owner} {self.part}" if self.part else self.uuid or self.job


Past: TypeAlias = Callable[[float], Iterable[tuple[Subject, Iterable[StoredRow]]]]
"""Returns the series of the time before the exporter started, until a time in Unix seconds."""
