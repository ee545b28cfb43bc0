"""Finds the inference engines that start, because memory that another process releases meanwhile spoils their start.

There are two sources:

- The report of the engine's process says that the engine starts, or that it has started. A reporter in vLLM knows.
- The title of a process in the driver's list starts with `VLLM::` or `sglang::`. Such a process starts while it is
  younger than 15 minutes and its memory on the device still grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpumem_exporter.core.readings import NodeReading, ProcessFacts
from gpumem_exporter.core.samples import ReportingProcess, StartingEngine

TITLED_START_SECONDS = 900.0
"""The age at which an engine that is known by its title counts as started. Every user can choose a title, so this also
bounds how long one process can hold back the actions of others."""
REPORTED_START_SECONDS = 3600.0
"""How long a report that an engine starts counts. The reporter itself says when the start ends; 1 h is enough for the
largest models, and ends the hold of an engine that hangs."""
GROWTH_PAUSE_SECONDS = 180.0
"""An engine that has not grown for this time has started. The memory of a starting engine stands still while its shards
are read (it takes the memory of all weights at once) and while torch.compile works, which took one to two minutes for
large models; then the cache follows. An engine that serves blocks clears for this time after it took its cache."""
GROWTH_BYTES = 64 << 20
"""Less is not growth: an engine that serves loads kernels and takes workspaces of some MiB with its first requests."""

ENGINE_TITLES = ("VLLM::", "sglang::")
"""The starts of the titles that inference engines give their processes."""


# vLLM compares the free memory of the device before it loads a model with the free memory after a trial run. It exits
# if memory was released in between (vllm-project/vllm#56830), and otherwise takes a cache of the wrong size. SGLang
# also takes the size of its cache from free memory.
@dataclass(frozen=True, slots=True)
class _Titled:
    """One process with the title of an engine, on one device."""

    facts: ProcessFacts
    smallest_bytes: int | None
    """The smallest use since the last growth; None if the driver does not report it."""
    grew_seconds: float
    """When the use last grew, or when the process was first seen."""

    def used(self, used_bytes: int | None, now: float) -> _Titled:
        """Return the state after another reading."""
        if used_bytes is None:
            return self
        if self.smallest_bytes is None or used_bytes < self.smallest_bytes:
            return replace(self, smallest_bytes=used_bytes)
        if used_bytes - self.smallest_bytes >= GROWTH_BYTES:
            return replace(self, smallest_bytes=used_bytes, grew_seconds=now)
        return self


class StartingEngines:
    """Follows the processes with the title of an engine. Not thread-safe: the store's lock protects it."""

    def __init__(self) -> None:
        self.titled: dict[tuple[str, int], _Titled] = {}
        """By device and host pid; only young processes of the last reading. Replaced, never changed."""
        # The NVML index of each device, by uuid.
        self._gpus: dict[str, str] = {}
        # The host pids on each device whose list the driver returned.
        self._listed: dict[str, frozenset[int]] = {}

    def put_reading(self, reading: NodeReading) -> None:
        """Take the use of each process with the title of an engine."""
        if not reading.up:
            # Without the engines of the last reading, each would be new when the driver answers again, and so start.
            return
        unread = {device.uuid for device in reading.devices if device.processes is None}
        titled = {key: known for key, known in self.titled.items() if key[0] in unread}
        for device in reading.devices:
            for listed in device.processes or ():
                key = (device.uuid, listed.pid)
                known = self.titled.get(key)
                facts = reading.facts.get(listed.pid)
                if facts is None and known is not None:
                    facts = known.facts  # /proc was read while the process changed its title
                if facts is None or not _is_young_engine(facts, reading.taken_seconds):
                    continue
                if known is None or known.facts.start_time_ticks != facts.start_time_ticks:
                    known = _Titled(facts, listed.used_bytes, reading.taken_seconds)
                titled[key] = replace(known.used(listed.used_bytes, reading.taken_seconds), facts=facts)
        self.titled = titled
        self._gpus = {device.uuid: device.gpu for device in reading.devices}
        self._listed = {
            device.uuid: frozenset(listed.pid for listed in device.processes)
            for device in reading.devices
            if device.processes is not None
        }

    def at(self, now: float, processes: Iterable[tuple[ReportingProcess, float | None]]) -> tuple[StartingEngine, ...]:
        """Return the engines that start, for each of their devices.

        `processes` are the processes that report whether an engine starts, with the time since when each reports so.
        """
        starting: list[StartingEngine] = []
        started: set[tuple[int, int]] = set()
        for process, since_seconds in processes:
            if since_seconds is not None and now - since_seconds < REPORTED_START_SECONDS:
                starting += self._reported(process, since_seconds)
            # Only the owner of a process can say that its engine has started.
            if process.report.engine_starting is False and process.host_pid is not None and process.attested:
                started.add((process.host_pid, process.start_time_ticks))
        for (uuid, host_pid), known in self.titled.items():
            facts = known.facts
            has_started = (host_pid, facts.start_time_ticks) in started or not _is_young_engine(facts, now)
            if not has_started and now - known.grew_seconds < GROWTH_PAUSE_SECONDS:
                until_seconds = (facts.started_seconds or 0.0) + TITLED_START_SECONDS
                gpu = self._gpus.get(uuid, "")
                starting.append(StartingEngine(uuid, gpu, host_pid, facts.command, until_seconds, facts.uid))
        return tuple(starting)

    def _reported(self, process: ReportingProcess, since_seconds: float) -> Iterator[StartingEngine]:
        """Yield the devices of an engine that reports."""
        title, until_seconds = process.report.process.command, since_seconds + REPORTED_START_SECONDS
        for uuid in [sample.uuid for sample in process.report.devices]:
            # Where the driver's list is known, a process that it does not list uses no memory. Neither does one without
            # a known host pid, which any client can invent to hold back the actions of others.
            listed = self._listed.get(uuid)
            if listed is None or process.host_pid in listed:
                gpu = self._gpus.get(uuid, "")
                yield StartingEngine(uuid, gpu, process.host_pid, title, until_seconds, process.owner_uid, process)


def _is_young_engine(facts: ProcessFacts, now: float) -> bool:
    return (
        facts.command.startswith(ENGINE_TITLES)
        and facts.started_seconds is not None
        and now - facts.started_seconds < TITLED_START_SECONDS
    )
