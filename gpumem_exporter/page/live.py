"""The document that page, `info`, `top` and `fleet` show: the whole node from one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.ledger import DeviceLedger, node_ledgers, node_shares, sum_of_known
from gpumem_exporter.core.samples import PartKey, Snapshot
from gpumem_exporter.page.documents import Document, Part, device_document
from gpumem_exporter.page.findings import Finding, FindingsOf, Since, find
from gpumem_exporter.page.growth import GrowingPart, Growth, growing_parts, growth
from gpumem_exporter.page.job_document import clear_document, job_document
from gpumem_exporter.page.jobs import VALUES, Hues, Job, jobs_by_device, jobs_of, sums_of
from gpumem_exporter.page.oom import OF_DEVICE, jobs_beside, uses_of
from gpumem_exporter.page.words import WORDS

ALL_DETAILS = "all"
# A device's state of this age is the state at an error: other jobs seldom change within it.
_NEAR_SECONDS = 5.0
# The minima of minutes change no more often.
_GROWTH_SECONDS = 30.0
_FINDING = ("id", "kind", "severity", "title", "sentence", "gpu", "uuid", "idle_cache_bytes", "next")


class NodeView:
    """Builds the document of the node. Thread-safe.

    `clock` is the monotonic clock of the snapshots.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        minima_of: Callable[[PartKey], Sequence[tuple[float, int]]] = lambda _: (),
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._since = Since(clock)
        self._hues = Hues()
        self.minima_of = minima_of
        """Returns the smallest allocated bytes of a process on a device in each minute of the last hour, with the end
        of the minute in Unix seconds. Without a history, no growth is found."""
        self.findings: Sequence[FindingsOf] = ()
        """Of features."""
        # When the growth was computed, and what grows on each device. Replaced, never changed.
        self._growths: tuple[float, Mapping[PartKey, Growth]] = (-_GROWTH_SECONDS, {})
        # The last snapshot that was noticed. Replaced, never changed.
        self._noticed: Snapshot | None = None

    def notice(self, snapshot: Snapshot, failed_checks: Iterable[Mapping[str, str]]) -> None:
        """Note since when each finding lasts, and who uses each device.

        Called about once a second, also while no client reads the document.
        """
        jobs = jobs_of(snapshot)
        self._findings(snapshot, jobs, self._growing(snapshot, jobs), failed_checks)
        self._noticed = snapshot

    def device_at_error(self, uuid: str, pid: str) -> Document | None:
        """Return who else uses a device now, for the event of an error in the process `pid`; None if not known."""
        snapshot = self._noticed
        if snapshot is None or snapshot.node is None or self._clock() - snapshot.taken_seconds >= _NEAR_SECONDS:
            return None
        device = next((device for device in snapshot.node.devices if device.uuid == uuid), None)
        if device is None:
            return None
        there = uses_of(snapshot).get(uuid, ())
        failed = next((part for parts, _ in there for part in parts if str(part.process.pid) == pid), None)
        reporter = failed.process.reporter if failed is not None else None
        grows = self._growths[1].get(reporter.part(uuid)) if reporter is not None else None
        return {
            "total_bytes": device.memory.total_bytes if device.memory is not None else None,
            "growth_bytes_per_hour": grows.bytes_per_hour if grows is not None else None,
            **jobs_beside(there, failed),
        }

    def document(
        self,
        snapshot: Snapshot,
        node: Mapping[str, Any],
        now_unix_seconds: float,
        *,
        viewer: Caller | None = None,
        details: str = "",
    ) -> Document:
        """Return the document without its time.

        `node` has what the snapshot does not have: the host's name, the version, the checks. The identities of others'
        processes are hidden from `viewer`; None shows them. `details` is the id of the job whose processes have all
        their values, or `all`. Unknown values are null.
        """
        shares, ledgers = node_shares(snapshot), node_ledgers(snapshot)
        jobs = jobs_of(snapshot, viewer)
        growing = self._growing(snapshot, jobs)
        reading = snapshot.node
        by_device = jobs_by_device(jobs)
        hues = self._hues.of(job.id for job in (*jobs_of(snapshot), *jobs))
        listed = reading is not None and all(device.processes is not None for device in reading.devices)
        devices = [
            {
                **device_document(device, ledgers.get(device.uuid), shares.get(device.uuid, [])),
                "pressure_ratio": _pressure(ledgers.get(device.uuid)),
                "jobs": _users(by_device.get(device.uuid, ())),
            }
            for device in (reading.devices if reading is not None else ())
        ]
        findings = self._findings(snapshot, jobs, growing, node["failed_checks"])
        return {
            "node": {
                **node,
                "taken_unix_seconds": reading.taken_unix_seconds if reading is not None else None,
                "identities_hidden": viewer is not None and viewer.rights is not Rights.ALL,
                "totals": _totals(devices, jobs, listed=listed),
            },
            "devices": devices,
            "jobs": [
                job_document(
                    *(job, snapshot, now_unix_seconds, growing.get(job.id, ())),
                    hue=hues[job.id],
                    whole=details in (ALL_DETAILS, job.id),
                )
                for job in jobs
            ],
            "findings": [_finding(finding, snapshot, now_unix_seconds) for finding in findings],
            "words": WORDS,
        }

    def _growing(self, snapshot: Snapshot, jobs: Sequence[Job]) -> Mapping[str, Sequence[GrowingPart]]:
        """Return the processes of each job that grow, by the job's id, with starts on the monotonic clock."""
        now, (computed_seconds, growths) = self._clock(), self._growths
        if now - computed_seconds >= _GROWTH_SECONDS:
            to_monotonic = now - self._wall_clock()
            parts = (process.part(sample.uuid) for process in snapshot.processes for sample in process.report.devices)
            minima = {part: [(end + to_monotonic, size) for end, size in self.minima_of(part)] for part in parts}
            growths = {part: grows for part, sizes in minima.items() if (grows := growth(sizes)) is not None}
            self._growths = now, growths
        devices = snapshot.node.devices if snapshot.node is not None else ()
        free = {device.uuid: device.memory.free_bytes for device in devices if device.memory is not None}
        return growing_parts(jobs, growths, free) if growths else {}

    def _findings(
        self,
        snapshot: Snapshot,
        jobs: Sequence[Job],
        growing: Mapping[str, Sequence[GrowingPart]],
        failed_checks: Iterable[Mapping[str, str]],
    ) -> list[Finding]:
        found = find(
            snapshot,
            jobs,
            node_ledgers(snapshot),
            failed_checks=failed_checks,
            growing=growing,
            more=self.findings,
        )
        return self._since.lasting(found)


def _pressure(ledger: DeviceLedger | None) -> float | None:
    """Return the pressure, as docs/numbers.md, the dashboards and the alerts define it."""
    if ledger is None:
        return None
    known = ledger.categories
    usable = ledger.total_bytes - known.get("driver_reserved", 0)
    available = known["free"] + known.get("torch_reclaimable", 0)
    return round(1 - available / usable, 4) if usable > 0 else None


def _users(there: Sequence[tuple[Job, Sequence[Part]]]) -> list[Document]:
    """Return the jobs on a device, the largest first."""
    users: list[Document] = [{"job": job.id, **sums_of(parts, OF_DEVICE)} for job, parts in there]
    return sorted(users, key=lambda each: -(each["used_bytes"] or 0))


def _totals(devices: Sequence[Document], jobs: Sequence[Job], *, listed: bool) -> Document:
    """Return the sums of the node; `listed` is whether the driver lists the processes of every device."""
    memories = [device["memory"] or {} for device in devices]
    values = {
        **{name: [memory.get(name) for memory in memories] for name in ("total_bytes", "used_bytes", "free_bytes")},
        **{name: [device[name] for device in devices] for name in ("idle_cache_bytes", "allocatable_bytes")},
    }
    parts = [part for job in jobs for part in job.parts]
    used = [part.share.used_bytes for part in parts if part.share is not None]
    by_processes = sum_of_known(used or [None])
    # On a lost device the use of a process is unknown: that is not 0.
    reporting = [VALUES["used_bytes"](part) for part in parts if part.process.reporter is not None]
    reported = sum_of_known(reporting) if by_processes is not None else None
    # The use of a process that the driver does not show may be the larger part.
    known = listed and None not in used
    coverage = round(reported / by_processes, 4) if known and by_processes and reported is not None else None
    return {
        "devices": len(devices),
        "jobs": len(jobs),
        "processes": sum(len(job.processes) for job in jobs),
        **{name: sum_of_known(sizes or [None]) for name, sizes in values.items()},
        "reported_bytes": reported,
        "coverage_ratio": coverage,
    }


def _finding(finding: Finding, snapshot: Snapshot, now_unix_seconds: float) -> Document:
    job, since = finding.job, finding.since_seconds
    clear = None
    if job is not None and finding.idle_cache_bytes is not None:
        of_job = clear_document(job, snapshot.taken_seconds)
        clear = of_job and {**of_job, "job": job.id, "name": job.name}
    return {
        **{name: getattr(finding, name) for name in _FINDING},
        "job": job.id if job is not None else None,
        "owner": job.owner["owner"] if job is not None else "",
        "since_unix_seconds": None if since is None else round(now_unix_seconds - (snapshot.taken_seconds - since), 1),
        "clear": clear,
    }
