"""A memory profile that the exporter keeps, and what the exporter knows about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple

from gpumem_client.profile.profile_types import CAUSES, Profile
from gpumem_exporter.core.container import Place
from gpumem_exporter.features.profiles.profile_lines import Line, Moment, Stack, lines_of, stacks_of

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
    """The id that the reporter chose: for an action, the id of the action."""
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

    @property
    def uuids(self) -> tuple[str, ...]:
        """The devices, in the order of the profile."""
        return tuple(device.uuid for device in self.devices)

    @property
    def gpus(self) -> dict[str, str]:
        """The NVML index of each device by UUID; a device whose index is unknown is left out."""
        return {device.uuid: device.gpu for device in self.devices if device.gpu}


@dataclass(frozen=True)
class StoredProfile(ProfileFacts):
    """A profile with its rows."""

    profile: Profile

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing and why, for people."""
        return self.profile.notes

    def lines(self, moment: Moment) -> Sequence[Line]:
        """Return the lines at the end, or at the highest moment; see `lines_of`."""
        return lines_of(self.profile, self._stacks, moment)

    def at(self, moment: Moment) -> ProfileAtMoment:
        """Return the profile with the lines of one moment, which takes less memory; see `lines_of`."""
        facts = {each.name: getattr(self, each.name) for each in fields(ProfileFacts)}
        return ProfileAtMoment(**facts, moment=moment, lines=tuple(self.lines(moment)))

    @cached_property
    def _stacks(self) -> Sequence[Stack | None]:
        return stacks_of(self.profile)


@dataclass(frozen=True)
class ProfileAtMoment(ProfileFacts):
    """A profile with the lines of one moment: what is compared with another profile."""

    moment: Moment
    lines: tuple[Line, ...]


def device_names(uuids: Iterable[str], gpus: Mapping[str, str]) -> list[str]:
    """Return `GPU 0` for each device, or its UUID if its index is unknown."""
    return [f"GPU {gpus[uuid]}" if uuid in gpus else uuid for uuid in uuids]
