"""A memory profile that the exporter keeps, and what the exporter knows about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpumem_client.profile.profile_types import CAUSES, Profile, ProfiledDevice
from gpumem_exporter.core.container import Place
from gpumem_exporter.features.profiles.profile_lines import Line, Moment, has_peak, lines_of

Format = Literal["json", "pprof", "html"]
"""The formats of `profile_formats`."""
ACTION, OUT_OF_MEMORY = CAUSES
"""Why a profile was taken: a caller requested it, or an out-of-memory error."""


class KeptDevice(NamedTuple):
    """The sums of a profile on one device, in bytes."""

    uuid: str
    gpu: str
    """NVML index; empty if it is unknown."""
    allocated_bytes: int
    peak_bytes: int | None
    """The most that was allocated at one time of the recording; None without a recording."""


@dataclass(frozen=True)
class ProfileFacts:
    """What the exporter knows about a profile without reading it. Its first line on disk has the same values."""

    id: str
    """Chosen by the exporter, in 32 hexadecimal digits."""
    time_unix_seconds: float
    """When it was taken."""
    cause: str
    """One of `gpumem_client.profile.profile_types.CAUSES`."""
    pid: int | str
    """The name of the process at that time, as in `core.naming`."""
    workload: str
    rank: str
    command: str
    """The program of the process, as it reports it."""
    job: str
    """The id of the job, as in `view.jobs`."""
    slurm_job_id: str
    ray_job_id: str
    devices: tuple[KeptDevice, ...]
    recorded_seconds: float
    """The length of the recording; 0 without one."""
    step: int | None
    oom_number: int | None
    """The number of the out-of-memory error in its session, for that cause."""
    pid_namespace: int
    reported_pid: int
    """In the process' own PID namespace."""
    start_time_ticks: int
    session: str
    """Of the reporter."""
    sent_id: str
    """The id that the reporter chose: for an action, the id of the action. Version 0.3 reads no profile without it."""
    owner_uid: int | None
    """The user of the process, according to the kernel; None if only a token vouches for it."""
    place: Place
    size_bytes: int
    """As it was sent, which is compressed."""

    @property
    def share(self) -> str:
        """The holder of the share of the space that the profile takes, as `ProcessKey.share`."""
        return self.place.share(self.owner_uid)

    @property
    def process_key(self) -> tuple[int | None, Place, int, int, int]:
        """The process, which no other process has in common."""
        return self.owner_uid, self.place, self.pid_namespace, self.reported_pid, self.start_time_ticks


@dataclass(frozen=True, slots=True)
class ShownProfile:
    """What every format is made of: a profile at one moment, or the difference of two."""

    facts: ProfileFacts
    """Of a difference: the later profile."""
    moment: Moment
    lines: Sequence[Line]
    """Of a difference: the lines of both profiles, also the lines that are equal."""
    devices: tuple[ProfiledDevice, ...]
    """Of a difference: the devices of the later profile, then the others of the earlier one."""
    notes: tuple[str, ...] = ()
    """What is missing and why, for people."""
    pause_seconds: float = 0.0
    before: ProfileFacts | None = None
    """The earlier profile of a difference."""

    @property
    def gpus(self) -> dict[str, str]:
        """The NVML index of each device by UUID; a device whose index is unknown is left out."""
        known = (*(self.before.devices if self.before else ()), *self.facts.devices)
        return {device.uuid: device.gpu for device in known if device.gpu}

    def ranked(self) -> list[Line]:
        """Return the lines from the largest change to the smallest; of equal ones, the largest line is first."""
        return sorted(self.lines, key=lambda line: (-abs(line.change_bytes), -line.bytes))


class StoredProfile(NamedTuple):
    """A profile with its rows."""

    facts: ProfileFacts
    profile: Profile

    def at(self, moment: Moment) -> ShownProfile:
        """Return the profile at its end, or at its highest moment: see `lines_of`."""
        profile = self.profile
        lines = lines_of(profile, moment)
        return ShownProfile(self.facts, moment, lines, profile.devices, profile.notes, profile.pause_seconds)

    def shown(self, form: Format, moment: Moment) -> list[ShownProfile]:
        """Return what a format shows: a page has all moments, another format has one."""
        if form != "html":
            return [self.at(moment)]
        return [self.at("live"), *([self.at("peak")] if has_peak(self.profile) else [])]
