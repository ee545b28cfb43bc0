"""Findings: what on the node needs attention, with one definition of severity for page, terminal and commands.

Findings and alert rules have the same severities. A full device is no finding: it is what it was bought for.
`critical`: work is lost, or nothing is known of the devices. `warning`: a person should look at it today. `info`: worth
knowing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.core.ledger import DeviceLedger, fragmented_bytes
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.samples import LastOom, Snapshot
from gpumem_exporter.page.documents import Part
from gpumem_exporter.page.growth import GrowingPart
from gpumem_exporter.page.jobs import Job, jobs_by_device

SEVERITIES = ("critical", "warning", "info")
# Of one severity, these kinds come first: what failed, what will fail, and what a termination or a clear helps. By age
# alone, readers missed an error behind three older warnings: the page shows a few findings at first.
_URGENT = ("driver", "device_lost", "oom", "growth", "check", "orphan", "idle_cache", "inactive")
SEVERITY = {
    "oom_ended_process": "critical",
    "oom_caught": "warning",
    "growth": "warning",  # also within the hour: a forecast is for the owner of the process, who can act on it
    "device_lost": "critical",
    "driver": "critical",
    "check_failing": "critical",
    "check_degraded": "warning",
    "idle_cache_lacked": "warning",
    "idle_cache": "info",
    "inactive_lacked": "warning",
    "inactive": "info",
    "orphan": "warning",
    "orphan_small": "info",
    "fragmented": "warning",
    "unattributed": "warning",
    "silent": "warning",
    "starting": "info",
    "kv_cache": "info",
    "starting_together": "warning",
    "unreported": "info",
}
"""The severity of each state. A test compares it with the alert rules."""
_MOST = 50
# How long an error is shown whose process continues.
_CAUGHT_SECONDS = 600.0
# From this share in use on, other processes may lack the idle cache of a job.
_FULL = 0.95
_IDLE_BESIDE_FULL = 0.05
_LITTLE_FREE, _OTHER_FAILED = ", where little memory is free", ", where another job ran out of memory"
# Shares of the device's memory from which these are findings.
_MUCH_IDLE = 0.2
_FRAGMENTED = 0.1
_UNATTRIBUTED = 0.02

# A job that holds less without any activity is no finding.
_MUCH_INACTIVE_BYTES = 1 << 30
_FAILS_SOON_SECONDS = 3600.0
# Fragmented and unattributed memory change with each step, so they must last for this time. A process that starts uses
# memory before its first report.
_LASTING_SECONDS = 10.0
_LASTING = ("fragmented", "unattributed", "unreported")
_DOCTOR = "See what is wrong: gpumem-exporter doctor"
# A finding that was absent for this time starts again.
_FORGOTTEN_SECONDS = 5.0
# A finding has a lower severity only after this time: the free memory of a device changes with each step.
_CALMER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that needs attention."""

    id: str
    """The same while the finding lasts, and for every viewer."""
    kind: str
    severity: str
    title: str
    sentence: str
    """Without times, which each surface shows in the viewer's time zone."""
    job: Job | None = None
    gpu: str | None = None
    uuid: str | None = None
    since_seconds: float | None = None
    """On the monotonic clock; None: since the finding was first seen."""
    idle_cache_bytes: int | None = None
    """The idle cache that a clear of the job would free, if others may need it."""
    next: str = ""
    """What to do next, and the command for it, if there is one: `See what grows: gpumem-exporter …`."""


_Errors: TypeAlias = Sequence[tuple[LastOom, Job | None]]
_OnDevice: TypeAlias = tuple[DeviceReading, DeviceLedger, Sequence[tuple[Job, Sequence[Part]]]]
FindingsOf: TypeAlias = Callable[[Snapshot, Sequence[Job], Mapping[str, DeviceLedger]], Iterable[Finding]]
"""Returns the findings of a feature, from a snapshot, its jobs and its ledgers."""


def find(
    snapshot: Snapshot,
    jobs: Sequence[Job],
    ledgers: Mapping[str, DeviceLedger],
    *,
    failed_checks: Iterable[Mapping[str, str]] = (),
    growing: Mapping[str, Sequence[GrowingPart]] | None = None,
    more: Iterable[FindingsOf] = (),
) -> list[Finding]:
    """Return the findings of a node in no order.

    `growing` has the processes of each job that grow, by the job's id, the fastest first. `more` find what features
    know.
    """
    devices = snapshot.node.devices if snapshot.node is not None and snapshot.node.up else ()
    errors, there = _errors(snapshot, jobs), jobs_by_device(jobs)
    on_devices = [
        (device, ledgers[device.uuid], there.get(device.uuid, ())) for device in devices if device.uuid in ledgers
    ]
    return [
        *_checks(failed_checks, has_devices=bool(devices)),
        *(_lost(device) for device in devices if not device.up),
        *_ooms(snapshot, errors),
        *_growing(jobs, growing or {}),
        *_idle_caches(snapshot, on_devices, errors),
        *_inactive(snapshot, jobs, errors),
        *_silent(jobs),
        *_starting(snapshot, jobs),
        *(each for feature in more for each in feature(snapshot, jobs, ledgers)),
        *(each for on_device in on_devices for each in _in_ledger(*on_device)),
    ]


class _Seen(NamedTuple):
    """When a finding was seen, and with which severity."""

    first_seconds: float
    last_seconds: float
    severity: str
    severe_seconds: float
    """When it was last found with this severity."""


class Since:
    """Remembers since when each finding lasts. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By the id of the finding.
        self._seen: dict[str, _Seen] = {}

    def lasting(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that have lasted long enough, with their start, the most severe, urgent and old first."""
        now = self._clock()
        with self._lock:
            known = {key: seen for key, seen in self._seen.items() if now - seen.last_seconds < _FORGOTTEN_SECONDS}
            lasting = []
            for finding in findings:
                seen = known.get(finding.id) or _Seen(now, now, finding.severity, now)
                calmer = SEVERITIES.index(finding.severity) > SEVERITIES.index(seen.severity)
                if calmer and now - seen.severe_seconds < _CALMER_SECONDS:
                    seen = seen._replace(last_seconds=now)
                else:
                    seen = _Seen(seen.first_seconds, now, finding.severity, now)
                known[finding.id] = seen
                if finding.kind not in _LASTING or now - seen.first_seconds >= _LASTING_SECONDS:
                    since = seen.first_seconds if finding.since_seconds is None else finding.since_seconds
                    lasting.append(replace(finding, severity=seen.severity, since_seconds=since))
            self._seen = known
        lasting.sort(key=_rank)
        return lasting[:_MOST]


def _rank(finding: Finding) -> tuple[int, int, float, str]:
    kind = _URGENT.index(finding.kind) if finding.kind in _URGENT else len(_URGENT)
    return SEVERITIES.index(finding.severity), kind, finding.since_seconds or 0.0, finding.id


def called(job: Job) -> str:
    """Return the name of a job with its user or namespace, as sentences have it: `notebook (carol)`."""
    who = job.owner["user"] or job.owner["k8s_namespace"]
    return f"{job.name} ({who})" if who else job.name


def finding(kind: str, subject: str, title: str, sentence: str, *, state: str = "", **more: Any) -> Finding:
    """Return a finding about a subject, which is a part of its id; `state` is for kinds with several severities."""
    return Finding(f"{kind} {subject}".strip(), kind, SEVERITY[state or kind], title, sentence, **more)


def _checks(failed: Iterable[Mapping[str, str]], *, has_devices: bool) -> Iterator[Finding]:
    for check in failed:
        part, detail = check["part"], check["detail"]
        if part == "devices" and has_devices:
            continue  # each lost device is a finding
        if part == "nvml":
            yield finding("driver", "", "No driver", f"The driver does not answer: {detail}.", next=_DOCTOR)
        else:
            state = f"check_{check['status']}"
            yield finding("check", part, "Exporter", f"{part}: {detail}.", state=state, next=_DOCTOR)


def _lost(device: DeviceReading) -> Finding:
    name = f"GPU {device.gpu}" if device.gpu else device.uuid
    sentence, subject = f"{name} does not answer: {device.error}.", device.uuid or device.gpu
    step = "Look for its Xid error: dmesg | grep -i xid"
    return finding("device_lost", subject, "Lost device", sentence, gpu=device.gpu, uuid=device.uuid, next=step)


def _errors(snapshot: Snapshot, jobs: Iterable[Job]) -> _Errors:
    """Return each out-of-memory error with the job whose process failed; None if the job has ended."""
    # A session is a claim of its reporter, so it counts for the errors of the same user and container only.
    known: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        for reporter in job.reporters:
            known["session", reporter.report.process.session, reporter.key.share] = job
            if job.workload:
                known["workload", job.workload, reporter.key.share] = job
    return [
        (oom, known.get(("session", oom.session, oom.owner)) or known.get(("workload", oom.workload, oom.owner)))
        for oom in snapshot.ooms
    ]


def _ooms(snapshot: Snapshot, errors: _Errors) -> Iterator[Finding]:
    """Yield one finding for the errors of a job on a device: the last of the most severe."""
    by_job: defaultdict[tuple[str, str, str], list[tuple[LastOom, Job | None]]] = defaultdict(list)
    for oom, job in errors:
        if oom.ended_process or snapshot.taken_seconds - oom.happened_seconds <= _CAUGHT_SECONDS:
            by_job[oom.owner, oom.workload or oom.pid, oom.uuid].append((oom, job))
    for of_job in by_job.values():
        oom, job = max(of_job, key=lambda each: (each[0].ended_process, each[0].happened_seconds))
        sessions = {each.report.process.session for each in job.reporters} if job is not None else ()
        fate = ", and the process continues" if oom.session in sessions else ""
        # First what became of the job: a narrow page cuts the end off.
        sentence = (
            (called(job) if job is not None else oom.workload or f"pid {oom.pid}")
            + (f" rank {oom.rank}" if oom.rank else "")
            + f" requested {'more than was free' if oom.requested_bytes is None else human_bytes(oom.requested_bytes)}"
            + (f" on GPU {oom.gpu}" if oom.gpu else "")
            + (", and the process ended" if oom.ended_process else fate)
        )
        if oom.device_free_bytes is not None and oom.device_free_bytes < (oom.requested_bytes or 0):
            sentence += f"; {human_bytes(oom.device_free_bytes)} was free"
        others = f" {len(of_job)} of its processes failed there." if len(of_job) > 1 else ""
        yield finding(
            *("oom", f"{oom.uuid} {oom.session} {oom.number}", "Out of memory", f"{sentence}.{others}"),
            state="oom_ended_process" if oom.ended_process else "oom_caught",
            job=job,
            gpu=oom.gpu or None,
            uuid=oom.uuid,
            since_seconds=oom.happened_seconds,
            next=f"See what held the memory: gpumem-exporter events --type oom --pid {oom.pid}",
        )


def _growing(jobs: Sequence[Job], growing: Mapping[str, Sequence[GrowingPart]]) -> Iterator[Finding]:
    for job in jobs:
        parts = growing.get(job.id, ())
        if not parts:
            continue
        pids = {each.part.process.pid: each.part.process for each in parts}
        who, most, where = called(job), "", ""
        if len(pids) > 1:
            most, where = "up to ", f" in {len(pids)} of {len(job.processes)} processes"
        elif len(job.processes) > 1:
            (process,) = pids.values()
            who += f" rank {process.rank}" if process.rank else f" pid {process.pid}"
        left = min((each.full_in_seconds for each in parts if each.full_in_seconds is not None), default=None)
        fate = ""
        if left is not None and left < _FAILS_SOON_SECONDS:
            fate = f"; it will be out of memory in {human_seconds(left)}" if left >= 1 else "; it has no memory left"
        sentence = f"{who} grows by {most}{human_bytes(parts[0].growth.bytes_per_hour)} an hour{where}{fate}."
        since_seconds = min(each.growth.since_seconds for each in parts)
        step = f"See what holds it: gpumem-exporter profile {parts[0].part.process.pid} --search 10s"
        yield finding("growth", job.id, "Growing", sentence, job=job, since_seconds=since_seconds, next=step)


def _idle_caches(snapshot: Snapshot, on_devices: Iterable[_OnDevice], errors: _Errors) -> Iterator[Finding]:
    """Yield the jobs whose idle cache others lack, and the jobs with much idle cache."""
    found: dict[str, list[tuple[Job, DeviceReading, int, str]]] = {}
    """By job: its idle cache on each device, and why others lack it."""
    for device, ledger, there in on_devices:
        full = ledger.categories["free"] < (1 - _FULL) * ledger.total_bytes
        failed = [
            job
            for oom, job in errors
            if oom.uuid == device.uuid and snapshot.taken_seconds - oom.happened_seconds < _CAUGHT_SECONDS
        ]
        for job, parts in there:
            size = sum(
                part.sample.idle_cache_bytes or 0
                for part in parts
                if part.process.reporter is not None and part.process.reporter.clears and part.sample is not None
            )
            beside = any(each is not job for each in failed)
            lacking = (_LITTLE_FREE if full else _OTHER_FAILED if beside else "") if len(there) > 1 else ""
            if size and size >= (_IDLE_BESIDE_FULL if lacking else _MUCH_IDLE) * ledger.total_bytes:
                found.setdefault(job.id, []).append((job, device, size, lacking))
    for places in found.values():
        shown = [place for place in places if place[-1]] or places
        size = sum(size for _, _, size, _ in shown)
        where = gpus_in_words([device.gpu for _, device, _, _ in shown])
        job, device, _, lacking = shown[0]
        pids = ",".join(str(process.pid) for process in job.processes if process.reporter is not None)
        yield finding(
            *("idle_cache", job.id, "Idle cache"),
            f"{called(job)} holds {human_bytes(size)} of idle cache on {where}{lacking}.",
            state="idle_cache_lacked" if lacking else "",
            job=job,
            gpu=device.gpu,
            uuid=device.uuid,
            idle_cache_bytes=size,
            next=f"See what a clear would free: gpumem-exporter clear --pid {pids} --dry-run",
        )


def _inactive(snapshot: Snapshot, jobs: Sequence[Job], errors: _Errors) -> Iterator[Finding]:
    for job in jobs:
        idle_since = job.idle_since_seconds(snapshot)
        size = job.sums["used_bytes"] or 0
        # An orphan has a finding of its own.
        if idle_since is None or size < _MUCH_INACTIVE_BYTES or any(each.orphan is not None for each in job.processes):
            continue
        uuids = {part.uuid for part in job.parts}
        lacked = any(oom.uuid in uuids and oom.happened_seconds > idle_since and of is not job for oom, of in errors)
        lasting = human_seconds(snapshot.taken_seconds - idle_since)
        sentence = f"{called(job)} has held {human_bytes(size)} for {lasting} without any activity"
        yield finding(
            *("inactive", job.id, "Inactive", f"{sentence}{_OTHER_FAILED if lacked else ''}."),
            state="inactive_lacked" if lacked else "",
            job=job,
            since_seconds=idle_since,
            next="Ask its owner whether anybody needs it",
        )


def gpus_in_words(gpus: Sequence[str]) -> str:
    """Return `GPU 3`, or `GPUs 0, 1 and 5`."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    return f"GPUs {', '.join(gpus[:-1])} and {gpus[-1]}"


def _silent(jobs: Sequence[Job]) -> Iterator[Finding]:
    for job in jobs:
        silent = [process for process in job.processes if process.silent is not None]
        if silent:
            many = f" ({len(silent)} of {len(job.processes)} processes)" if len(job.processes) > 1 else ""
            sentence = f"No recent report from {called(job)}{many}: its allocated memory is unknown."
            host_pid = next((process.host_pid for process in silent if process.host_pid is not None), None)
            step = f"See where it is: py-spy dump --pid {host_pid}" if host_pid is not None else ""
            yield finding("silent", job.id, "Silent", sentence, job=job, next=step)


def _starting(snapshot: Snapshot, jobs: Sequence[Job]) -> Iterator[Finding]:
    by_pid = {process.host_pid: job for job in jobs for process in job.processes if process.host_pid is not None}
    known = [(by_pid[each.host_pid], each.gpu) for each in snapshot.starting if each.host_pid in by_pid]
    places = dict.fromkeys(known)
    for job in dict.fromkeys(job for job, _ in places):
        where = gpus_in_words([gpu for each, gpu in places if each is job])
        sentence = (
            f"{called(job)} starts on {where}. Clears there wait until it has started: memory that is released "
            "meanwhile can end its start."
        )
        yield finding("starting", job.id, "Engine starts", sentence, job=job)
    for gpu in dict.fromkeys(gpu for _, gpu in places):
        first, *others = [called(job) for job, each in places if each == gpu]
        if others:
            sentence = (
                f"{first} and {', '.join(others)} start on GPU {gpu} at the same time. Each measures what the other "
                "takes, so their caches get wrong sizes. Start them one after another."
            )
            yield finding("starting_together", gpu, "Engines start", sentence, gpu=gpu)


def _in_ledger(
    device: DeviceReading, ledger: DeviceLedger, jobs: Sequence[tuple[Job, Sequence[Part]]]
) -> Iterator[Finding]:
    place: dict[str, Any] = {"gpu": device.gpu, "uuid": device.uuid}
    # Not from the ledger: if the reclaimable part of a cache is unknown, it counts the whole cache as fragmented.
    sizes = [sum(fragmented_bytes(part.sample) or 0 for part in parts if part.sample is not None) for _, parts in jobs]
    if 0 < sum(sizes) >= _FRAGMENTED * ledger.total_bytes:
        size = max(sizes)
        worst, _ = jobs[sizes.index(size)]
        sentence = (
            f"{called(worst)} holds {human_bytes(size)} of fragmented cache on GPU {device.gpu}. "
            "A clear cannot free it."
        )
        step = "Start it again with: gpumem-run --allocator expandable_segments:True -- COMMAND"
        yield finding("fragmented", device.uuid, "Fragmented", sentence, job=worst, next=step, **place)
    # Not if the memory of a process may be unattributed, or if the memory is the host's.
    known = "other_processes" in ledger.categories and not (device.memory is not None and device.memory.of_host)
    hidden = any(_used_is_unknown(part) for _, parts in jobs for part in parts)
    size = ledger.categories["unattributed"]
    if known and not hidden and size >= _UNATTRIBUTED * ledger.total_bytes:
        sentence = f"{human_bytes(size)} on GPU {device.gpu} is used by no process that the driver lists."
        step = "Look for a process in another container or virtual machine: fuser -v /dev/nvidia*"
        yield finding("unattributed", device.uuid, "Unattributed", sentence, next=step, **place)


def _used_is_unknown(part: Part) -> bool:
    return part.share is None or (part.share.non_torch_bytes if part.sample else part.share.used_bytes) is None
