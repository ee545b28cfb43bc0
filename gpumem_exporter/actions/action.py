"""An action and its results: one for each process on each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.protocol import SnapshotFile
from gpumem_exporter.actions.action_options import DEFAULT_DEADLINE_SECONDS, ActionRequest
from gpumem_exporter.core.caller import Caller, Rights, share_of
from gpumem_exporter.core.ledger import sum_of_known

# About the memory of a result with its numbers and names, or of an action without results.
_RESULT_BYTES = 1024
# A string without its characters.
_TEXT_BYTES = 64
# The most engines that a message names.
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The result of an action in one process on one device. Sizes are bytes; None if they were not measured."""

    pid: int | str
    """The process's name, as in `Target`."""
    workload: str
    rank: str
    gpu: str
    uuid: str
    outcome: str
    """One of `protocol.OUTCOMES`, or in a dry run `ActionKind.would`."""
    reason: str = ""
    """The reason for the outcome, for people."""
    reason_code: str | None = None
    """The reason as one of a fixed set of codes, for programs: see `wire.reason_codes.ReasonCode`."""
    reserved_before_bytes: int | None = None
    reserved_after_bytes: int | None = None
    allocated_before_bytes: int | None = None
    allocated_after_bytes: int | None = None
    freed_bytes: int | None = None
    still_free_bytes: int | None = None
    """Of `freed_bytes`, what the process had not reserved again after the action's `settle_seconds`.

    In a dry run, what the process is expected not to reserve again: its idle cache."""
    device_free_before_bytes: int | None = None
    device_free_after_bytes: int | None = None
    duration_seconds: float | None = None
    step: int | None = None
    """The process's step after which it ran. In a dry run, the last step of a process that trains."""
    mode: str | None = None
    """When the process acts: one of `protocol.MODES`. None if the exporter itself acts."""
    at_step: int | None = None
    """The step after which all ranks of its job act; None if the process acts by itself."""
    thread_id: int | None = None
    """The native id of the thread in which it ran."""
    snapshot: SnapshotFile | None = None
    job: str = ""
    """The name of the job: its workload, otherwise its command, otherwise its pid."""
    limit_bytes: int | None = None
    """With `set_memory_fraction`, the most that the process may reserve on the device."""
    profile: str | None = None
    """With `profile`, the id of the profile that the process has sent."""
    driver_before_bytes: int | None = None
    """With an action on engines, the driver's value for the process on the device before the action."""
    driver_after_bytes: int | None = None
    """The driver's value after the action: after `release_memory`, what stays resident."""


@dataclass(frozen=True, slots=True)
class PendingPart:
    """A process that has a command and no result yet. The fields are as of `ActionResult`."""

    pid: int | str
    workload: str
    rank: str
    job: str
    mode: str
    at_step: int | None


@dataclass(frozen=True, slots=True)
class EngineWait:
    """An inference engine whose start an action waits for."""

    pid: int | str
    """The process's name, as in `Target`."""
    title: str
    """The title of the process; empty if it is hidden from the caller."""
    gpu: str
    uuid: str
    until_unix_seconds: float
    """When the action stops waiting at the latest: at its deadline, or when the engine counts as started."""

    def __str__(self) -> str:
        title = f" ({self.title})" if self.title else ""
        return f"the engine in pid {self.pid}{title} starts on GPU {self.gpu or self.uuid}"


def all_waits(waits: Iterable[tuple[EngineWait, ...]]) -> tuple[EngineWait, ...]:
    """Return the engines that are waited for, each once for each device."""
    return tuple({(wait.pid, wait.uuid): wait for some in waits for wait in some}.values())


def describe_starts(waits: Sequence[EngineWait]) -> str:
    """Name the engines that start, and why the memory must stay."""
    named = ", ".join(map(str, waits[:_MAX_NAMED]))
    return f"{named}, and memory that is released meanwhile can end its start"


@dataclass(frozen=True, slots=True)
class Action:
    """The state of an action at one time."""

    id: str
    request: ActionRequest
    """As it was sent. After a restart, an action whose request was not recorded has only what its event shows."""
    state: str
    """The value of an `actions.lifecycle.ActionState`."""
    requested_by: str
    """The caller, for people."""
    created_unix_seconds: float
    group: bool = False
    """Whether ranks of a job act together."""
    at_step: int | None = None
    """Their step, if there is one such job."""
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    """The latest one of its processes."""
    planned: tuple[PendingPart, ...] = ()
    """The processes that got a command; empty once it has ended."""
    results: tuple[ActionResult, ...] = ()
    caller: str = ""
    """The key of the caller, whose audit log has the action."""
    idempotency_key: str | None = None
    """The caller's key: its next request with this key gets this action."""
    duration_seconds: float | None = None
    """From the request to the last result; None while it runs."""
    settling: bool = False
    """Whether a process may still report `still_free_bytes`. The state does not wait for it."""
    unlisted: bool = False
    """It is a profile for a scraper, of which there are many: it is counted, and it is in no
    list and no event."""
    waits_for: tuple[EngineWait, ...] = ()
    """The engines whose start it waits for now, or for a dry run would wait for."""

    @property
    def share(self) -> str:
        """The holder of the share of every limit that the action uses."""
        return share_of(self.caller)

    @property
    def finished(self) -> bool:
        """Whether the action has ended."""
        return self.state not in ("queued", "running")

    @property
    def pending(self) -> list[PendingPart]:
        """The processes that got a command and have no result yet."""
        ended = {result.pid for result in self.results}
        return [part for part in self.planned if part.pid not in ended]

    @property
    def freed_bytes(self) -> int | None:
        """The bytes released to the driver, for a dry run the expected bytes. None if no result has a value."""
        return sum_of_known([result.freed_bytes for result in self.results]) if self.results else None

    @property
    def still_free_bytes(self) -> int | None:
        """The bytes that are still free after settling. None before, and if no process has reported them."""
        if self.settling or not self.finished or not self.results:
            return None
        return sum_of_known([result.still_free_bytes for result in self.results])

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of results with each outcome."""
        return dict(Counter(result.outcome for result in self.results))

    @property
    def kept_bytes(self) -> int:
        """About the memory that the action takes while it is kept."""
        texts = [self.request.reason, *(name for values in self.request.target.given.values() for name in values)]
        for result in self.results:
            texts += [result.reason, "" if result.snapshot is None else result.snapshot.path]
        return _RESULT_BYTES * (1 + len(self.results)) + sum(len(text) + _TEXT_BYTES for text in texts)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return fields of the action by name, and fields of its request that the action itself does not have."""
        return {name: getattr(self if hasattr(Action, name) else self.request, name) for name in names}

    def visible_to(self, caller: Caller) -> bool:
        """Return whether the audit log shows the action to a caller."""
        return caller.rights is Rights.ALL or (caller.rights is Rights.OWN and self.caller == caller.key)
