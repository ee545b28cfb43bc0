"""A history with clocks that only the test advances, and short ways to record and to read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumem_exporter.core.readings import DeviceReading, NodeReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.history_route import history_document
from tests.support.builders.builders import MIB, UUIDS, device, node

DAY = 86400
START = 1_700_006_400
"""The wall clock when a bench starts: the start of a day, so of a minute."""


class HistoryBench:
    """A history whose wall clock is `START` plus `seconds` plus `jumped`."""

    def __init__(self, *, retention_seconds: float = DAY, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.jumped = 0.0
        self.booted = 5000.0
        """The monotonic clock at `START`."""
        self.retention_seconds = retention_seconds
        self.again()

    def again(self) -> None:
        """Replace the history by an empty one, as a restart of the exporter does."""
        self.history = History(
            retention_seconds=self.retention_seconds,
            clock=lambda: self.booted + self.seconds,
            wall_clock=lambda: self.unix_seconds,
        )

    @property
    def unix_seconds(self) -> float:
        """The wall clock."""
        return START + self.seconds + self.jumped

    def record(self, *processes: ReportingProcess, reading: NodeReading | None = None, used_mib: int = 100) -> None:
        """Record one snapshot in the middle of the present second: by default, of one device with this use."""
        self.seconds = int(self.seconds) + 0.5
        shown = reading if reading is not None else node(used(used_mib))
        self.history.add(Snapshot(self.booted + self.seconds, shown, tuple(processes)))

    def run(self, seconds: int, *processes: ReportingProcess, step: int = 1, **options: Any) -> None:
        """Record the same snapshot again and again for some time."""
        for _ in range(0, seconds, step):
            self.record(*processes, **options)
            self.seconds = int(self.seconds) + step

    def document(
        self,
        seconds: float = 600,
        *,
        points: int = 600,
        uuids: Sequence[str] | None = None,
        jobs: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the document of the last seconds: of all devices by default."""
        keys = [*(self.history.uuids() if uuids is None else uuids), *jobs]
        return history_document(self.history, keys, (self.unix_seconds - seconds, self.unix_seconds), points)

    def values(self, name: str, of: str = "max", **options: Any) -> dict[float, int | None]:
        """Return the values in MiB of the first series by the age of the end of their step."""
        document = self.document(**options)
        line: Sequence[int | None] = document["series"][0][name][of]
        assert len(line) == len(document["unix_seconds"])
        ages = [round(self.unix_seconds - unix, 1) for unix in document["unix_seconds"]]
        return dict(zip(ages, (None if value is None else value // MIB for value in line), strict=True))


def used(mib: int, **processes: int | None) -> DeviceReading:
    """Return a device on which the driver reports this use; `processes` are the MiB of `p<pid>`."""
    listed = {int(pid[1:]): None if size is None else size * MIB for pid, size in processes.items()}
    return device(UUIDS[0], used=mib * MIB, processes=listed)
