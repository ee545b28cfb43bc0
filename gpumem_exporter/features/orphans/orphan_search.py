"""Decides which processes are orphans: their launcher has ended, and they do not compute any more.

`node.launchers` finds the processes whose launcher has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpumem_exporter.core.readings import LostLauncher, NodeReading, ProcessFacts
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.core.starting_engines import ENGINE_TITLES

QUIET_SECONDS = 300.0
"""A process that has computed nothing for this time is idle. A step, a checkpoint or a compilation of a large model
rarely takes longer without the CPU."""
ENDING_SECONDS = 60.0
"""The processes of a server that stops end one after another. One that is left after this time is left behind."""


class OrphanSearch:
    """Finds the orphans of one reading after another. Not thread-safe: the store calls it with its lock."""

    def __init__(self) -> None:
        self._busy_seconds: dict[str, float] = {}  # when each device was last busy, by uuid

    def find(self, reading: NodeReading, processes: Iterable[ReportingProcess]) -> Mapping[int, LostLauncher]:
        """Return what each orphan of a reading has lost, by host pid; `processes` are the reporting processes."""
        if not reading.up:
            return {}
        # A device whose utilization is unknown counts as busy, and so does one at its first sight: to call a process an
        # orphan that computes would be worse than to be late.
        now, known = reading.taken_seconds, self._busy_seconds
        self._busy_seconds = {
            device.uuid: known[device.uuid] if device.uuid in known and device.utilization_ratio == 0 else now
            for device in reading.devices
        }
        lost = {pid: facts for pid, facts in reading.facts.items() if facts.lost is not None}
        if not lost:
            return {}
        reporters = {process.host_pid: process for process in processes if process.host_pid in lost}
        devices: dict[int, list[str]] = {}
        for device in reading.devices:
            for listed in device.processes or ():
                if listed.pid in lost:
                    devices.setdefault(listed.pid, []).append(device.uuid)
        return {
            pid: facts.lost
            for pid, facts in lost.items()
            if facts.lost is not None
            and (facts.lost.ended_seconds is None or now - facts.lost.ended_seconds >= ENDING_SECONDS)
            and not self._computes(now, facts, facts.lost, reporters.get(pid), devices.get(pid, ()))
        }

    def _computes(
        self,
        now: float,
        facts: ProcessFacts,
        lost: LostLauncher,
        reporter: ReportingProcess | None,
        uuids: Iterable[str],
    ) -> bool:
        # A process without its launcher may still finish its work: a rank of torchrun trains on if its agent is killed.
        since = now - QUIET_SECONDS
        if reporter is not None and reporter.start_time_ticks == facts.start_time_ticks:
            report, engine = reporter.report, reporter.report.engine
            if report.engine_starting or max(reporter.active_seconds, reporter.stepped_seconds) > since:
                return True
            if engine is not None and engine.state:
                idle_seconds = QUIET_SECONDS if engine.idle_seconds is None else engine.idle_seconds
                return engine.state in ("starting", "serving") or idle_seconds < QUIET_SECONDS
        # An engine's workers spin on the CPU while they wait for a request, so a device must be busy as well.
        spins = facts.command.startswith(ENGINE_TITLES)
        busy = any(self._busy_seconds.get(uuid, now) > since for uuid in uuids)
        return lost.computed_seconds > since and (busy or not spins)
