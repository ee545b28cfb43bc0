"""The document that page, `info`, `top` and `fleet` show: the whole node from one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpumem_client.wire.protocol import ENGINE_ACTIONS
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.actions.sentences import stays_free
from gpumem_exporter.actions.timing import turns_of_job
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.ledger import DeviceLedger, node_ledgers, node_shares, sum_of_known
from gpumem_exporter.core.samples import PartKey, Snapshot
from gpumem_exporter.page.documents import Part, device_document, process_document
from gpumem_exporter.page.engine_words import component_sums, engine_document
from gpumem_exporter.page.findings import Finding, FindingsOf, Since, find
from gpumem_exporter.page.growth import GrowingPart, Growth, growing_parts, growth
from gpumem_exporter.page.hues import Hues
from gpumem_exporter.page.jobs import Job, job_uuids, jobs_by_device, jobs_of, sums_of
from gpumem_exporter.page.oom import NEAR_SECONDS, OF_DEVICE, DeviceUse, uses_of
from gpumem_exporter.page.words import WORDS

ALL_DETAILS = "all"
_CLEAR = ActionRequest("empty_cache", Target(all=True))
# The minima of minutes change no more often.
_GROWTH_SECONDS = 30.0

Document = dict[str, Any]


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
        # The growth of each process on each device, and when it was computed. Replaced, never changed.
        self._growths: Mapping[PartKey, tuple[float, Growth | None]] = {}
        # The use of each device, and when it was noticed. Replaced, never changed.
        self._uses: tuple[float, Mapping[str, DeviceUse]] = (-NEAR_SECONDS, {})

    def notice(self, snapshot: Snapshot, failed_checks: Iterable[Mapping[str, str]]) -> None:
        """Note since when each finding lasts, and who uses each device.

        Called about once a second, also while no client reads the document.
        """
        jobs = jobs_of(snapshot)
        self._findings(snapshot, jobs, self._growing(snapshot, jobs), failed_checks)
        self._uses = self._clock(), uses_of(snapshot, jobs)

    def device_at_error(self, uuid: str, pid: str) -> Document | None:
        """Return who else uses a device now, for the event of an error in the process `pid`; None if not known."""
        noticed, uses = self._uses
        if uuid not in uses or self._clock() - noticed >= NEAR_SECONDS:
            return None
        growths = self._growths
        return uses[uuid].document(pid, lambda part: growths.get(part, (0.0, None))[1])

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

        `node` has what the snapshot does not have: the host's name, the version, the checks and, if an exporter runs,
        the folder of its client. The identities of others' processes are hidden from `viewer`; None shows them.
        `details` is the id of the job whose processes have all their values, or `all`. Unknown values are null.
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
        findings = self._findings(snapshot, jobs, growing, node["failed_checks"], node.get("client_directory"))
        return {
            "node": {
                **node,
                "taken_unix_seconds": reading.taken_unix_seconds if reading is not None else None,
                "identities_hidden": viewer is not None and viewer.rights is not Rights.ALL,
                "totals": _totals(devices, jobs, listed=listed),
            },
            "devices": devices,
            "jobs": [
                _job(
                    job,
                    snapshot,
                    now_unix_seconds,
                    growing.get(job.id, ()),
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
        now, known = self._clock(), self._growths
        computed: dict[PartKey, tuple[float, Growth | None]] = {}
        for process in snapshot.processes:
            for sample in process.report.devices:
                part = process.part(sample.uuid)
                before = known.get(part)
                if before is not None and now - before[0] < _GROWTH_SECONDS:
                    computed[part] = before
                else:
                    to_monotonic = now - self._wall_clock()
                    minima = [(seconds + to_monotonic, size) for seconds, size in self.minima_of(part)]
                    computed[part] = now, growth(minima)
        self._growths = computed
        growths = {part: grows for part, (_, grows) in computed.items() if grows is not None}
        devices = snapshot.node.devices if snapshot.node is not None else ()
        free = {device.uuid: device.memory.free_bytes for device in devices if device.memory is not None}
        return growing_parts(jobs, growths, free) if growths else {}

    def _findings(
        self,
        snapshot: Snapshot,
        jobs: Sequence[Job],
        growing: Mapping[str, Sequence[GrowingPart]],
        failed_checks: Iterable[Mapping[str, str]],
        client_directory: str | None = "",
    ) -> list[Finding]:
        found = find(
            snapshot,
            jobs,
            node_ledgers(snapshot),
            failed_checks=failed_checks,
            growing=growing,
            client_directory=client_directory,
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

    def over_devices(values: Iterable[int | None]) -> int | None:
        return sum_of_known([*values] or [None])

    memories = [device["memory"] or {} for device in devices]
    shares = [(part.process.reporter is not None, part.share) for job in jobs for part in job.parts]
    used = [(reports, share.used_bytes) for reports, share in shares if share is not None]
    by_processes = sum_of_known([size for _, size in used] or [None])
    reported = sum_of_known([size for reports, size in used if reports]) if by_processes is not None else None
    # The use of a process that the driver does not show may be the larger part.
    known = listed and all(size is not None for _, size in used)
    coverage = round(reported / by_processes, 4) if known and by_processes and reported is not None else None
    return {
        "devices": len(devices),
        "jobs": len(jobs),
        "processes": sum(len(job.processes) for job in jobs),
        "total_bytes": over_devices(memory.get("total_bytes") for memory in memories),
        "used_bytes": over_devices(memory.get("used_bytes") for memory in memories),
        "free_bytes": over_devices(memory.get("free_bytes") for memory in memories),
        "idle_cache_bytes": over_devices(device["idle_cache_bytes"] for device in devices),
        "allocatable_bytes": over_devices(device["allocatable_bytes"] for device in devices),
        "reported_bytes": reported,
        "coverage_ratio": coverage,
    }


def _job(
    job: Job,
    snapshot: Snapshot,
    now_unix_seconds: float,
    growing: Sequence[GrowingPart],
    *,
    hue: int,
    whole: bool,
) -> Document:
    uuids = job_uuids(job, snapshot.gpus)
    full = min((each.full_in_seconds for each in growing if each.full_in_seconds is not None), default=None)
    last_reports = [process.last_report_unix_seconds for process in job.processes]
    ranks = [process.rank for process in job.processes]
    sizes = {each.report.process.world_size for each in job.reporters} - {None}
    return {
        "id": job.id,
        "name": job.name,
        "hue": hue,
        "workload": job.workload,
        "command": job.command,
        **job.owner(),
        "gpus": [snapshot.gpus[uuid] for uuid in uuids if uuid in snapshot.gpus],
        "uuids": uuids,
        "process_count": len(job.processes),
        "reporting_count": len(job.reporters),
        "orphan_count": sum(process.orphan is not None for process in job.processes),
        "ranks": [rank for rank in ranks if rank],
        "world_size": sizes.pop() if len(sizes) == 1 else None,
        **job.sums,
        "incomplete": job.incomplete,
        "growth_bytes_per_hour": growing[0].growth.bytes_per_hour if growing else None,
        "full_in_seconds": None if full is None else round(full),
        "state": job.state(snapshot.taken_seconds, [engine.host_pid for engine in snapshot.starting]),
        "inactive_since_unix_seconds": None
        if (idle := job.idle_since_seconds(snapshot)) is None
        else round(snapshot.unix_seconds(idle, next(iter(job.reporters), None))),
        "engine": engine_document(job.processes, snapshot),
        **component_sums(job),
        "since_unix_seconds": job.started_unix_seconds(snapshot.node),
        **job.steps(snapshot, now_unix_seconds),
        "last_report_unix_seconds": min((last for last in last_reports if last is not None), default=None),
        "clear": _clear(job, snapshot.taken_seconds),
        "engine_memory": _engine_memory(job),
        "processes": [
            {
                **process_document(process, snapshot, whole=whole),
                "engine": engine_document([process], snapshot),
            }
            for process in job.processes
        ],
    }


def _clear(job: Job, now_seconds: float) -> Document | None:
    """Return the target of a clear of the job, and when it would act; None where nothing stays free."""
    able = [
        SelectedProcess(process.pid, process.reporter, process.reporter.report.devices)
        for process in job.processes
        if process.reporter is not None and process.reporter.clears
    ]
    samples = [sample for one in able for sample in one.samples]
    idle = sum(sample.idle_cache_bytes or 0 for sample in samples)
    if not idle:
        return None
    again = sum(
        sample.reclaimable_bytes - sample.idle_cache_bytes
        for sample in samples
        if sample.reclaimable_bytes is not None and sample.idle_cache_bytes is not None
    )
    modes = {turn.mode for _, turn in turns_of_job(_CLEAR, able, able, now_seconds)}
    mode = next(mode for mode in ("step", "idle", "now") if mode in modes)
    again = max(0, again)
    at_least = any(sample.idle_cache_bytes is None and sample.reserved_bytes != 0 for sample in samples)
    return {
        "stays_free_bytes": idle,
        "again_bytes": again,
        "at_least": at_least,
        "sentence": f"{stays_free(idle, again, at_least=at_least, at_step=mode == 'step')}.",
        "target": _target([one.pid for one in able]),
        "mode": mode,
    }


def _engine_memory(job: Job) -> Document | None:
    """Return the action that lets the engines of a job sleep, or wakes them; None without an engine that reports."""
    engines = [
        (process.pid, process.reporter.report)
        for process in job.processes
        if process.reporter is not None
        and ENGINE_ACTIONS[0] not in process.reporter.report.denied_actions
        and (process.reporter.report.engine is not None or ENGINE_ACTIONS[0] in process.reporter.report.actions)
    ]
    if not engines:
        return None
    asleep = any(sample.unmapped_bytes for _, report in engines for sample in report.devices)
    release, resume = ENGINE_ACTIONS
    return {"action": resume if asleep else release, "target": _target([pid for pid, _ in engines])}


def _target(pids: Sequence[int | str]) -> Document:
    return {"pid": pids[0] if len(pids) == 1 else pids}


def _finding(finding: Finding, snapshot: Snapshot, now_unix_seconds: float) -> Document:
    job, since = finding.job, finding.since_seconds
    clear = None
    if job is not None and finding.idle_cache_bytes is not None and (of_job := _clear(job, snapshot.taken_seconds)):
        clear = {**of_job, "job": job.id, "name": job.name}
    return {
        "id": finding.id,
        "kind": finding.kind,
        "severity": finding.severity,
        "title": finding.title,
        "sentence": finding.sentence,
        "job": job.id if job is not None else None,
        "owner": job.owner()["owner"] if job is not None else "",
        "gpu": finding.gpu,
        "uuid": finding.uuid,
        "since_unix_seconds": None if since is None else round(now_unix_seconds - (snapshot.taken_seconds - since), 1),
        "idle_cache_bytes": finding.idle_cache_bytes,
        "next": finding.next,
        "clear": clear,
    }
