"""A memory profile that the exporter keeps, and what the exporter knows about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from gpumem_client.profile.profile_types import Profile
from gpumem_exporter.core.container import Place
from gpumem_exporter.features.profiles.profile_document import read_profile
from gpumem_exporter.features.profiles.profile_lines import Format, Moment, ShownProfile, has_peak, lines_of

OF_IDENTITY = (
    *("workload", "rank", "command", "slurm_job_id", "ray_job_id"),
    *("pid_namespace", "start_time_ticks", "session"),
)
"""The facts that are values of the process' identity, under the same names."""


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


class StoredProfile(NamedTuple):
    """A profile with its rows."""

    facts: ProfileFacts
    profile: Profile

    @classmethod
    def of(cls, facts: ProfileFacts, body: bytes) -> StoredProfile:
        """Return a profile with its rows, from the body of the request. Raises ProfileInvalidError."""
        return cls(facts, read_profile(body)[1])

    def at(self, moment: Moment) -> ShownProfile:
        """Return the profile at its end, or at its highest moment: see `lines_of`."""
        facts, profile = self
        about = {
            "id": facts.id,
            "time": datetime.fromtimestamp(facts.time_unix_seconds, timezone.utc).isoformat(),
            "unix_seconds": facts.time_unix_seconds,
            "cause": facts.cause,
            "pid": facts.pid,
            "workload": facts.workload,
            "rank": facts.rank,
            "job": facts.job,
            "process": [facts.pid_namespace, facts.reported_pid, facts.start_time_ticks],
            "recorded_seconds": facts.recorded_seconds,
            "pause_seconds": profile.pause_seconds,
            "step": facts.step,
        }
        gpus = (kept.gpu or None for kept in facts.devices)
        devices = [{"gpu": gpu, **asdict(device)} for gpu, device in zip(gpus, profile.devices, strict=True)]
        return ShownProfile(about, moment, lines_of(profile, moment), devices, profile.notes)

    def shown(self, form: Format, moment: Moment) -> list[ShownProfile]:
        """Return what a format shows: a page has all moments, another format has one."""
        if form != "html":
            return [self.at(moment)]
        return [self.at("live"), *([self.at("peak")] if has_peak(self.profile) else [])]
