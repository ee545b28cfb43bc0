"""Selects the processes of a request from one snapshot, or says why nothing matches. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_client.wire.protocol import ENGINE_ACTIONS, DeviceSample
from gpumem_client.wire.units import counted
from gpumem_exporter.actions.action_options import DEVICE_ACTIONS, OUTSIDE_ACTIONS, ActionRequest, Target
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import ProcessFacts, ProcessKey, ReportingProcess, Snapshot, once_per_snapshot
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.errors import ActionForbiddenError, TargetNotFoundError

_MAX_SHOWN = 20
_SEE = "see `gpumem-exporter info`"
_REPORTS = "a job reports if it is started with `gpumem-exporter run -- COMMAND`"
_NOUNS = {"gpu": "GPU", "uuid": "UUID", "pid": "pid", "workload": "workload", "rank": "rank", "user": "user"}
# The selectors whose values are words. A number has no nearest match that would help.
_SPELLED = ("uuid", "workload", "user")

_Reporting = Sequence[tuple[str, ReportingProcess]]


class SelectedProcess(NamedTuple):
    """A reporting process that a target selects."""

    pid: int | str
    """Its name, as in `core.naming`."""
    process: ReportingProcess
    samples: tuple[DeviceSample, ...]
    """Its samples of the selected devices."""

    def __str__(self) -> str:
        return f"pid {self.pid}" + (f" (rank {self.rank})" if self.rank else "")

    @property
    def key(self) -> ProcessKey:
        """The process."""
        return self.process.key

    @property
    def workload(self) -> str:
        """The name of its workload; empty if it has none."""
        return self.process.report.process.workload

    @property
    def rank(self) -> str:
        """Its rank in its job; empty if it has none."""
        return self.process.report.process.rank


@dataclass(frozen=True, slots=True)
class OutsideTarget:
    """A process on which the exporter itself acts, which reports or is on the driver's list."""

    pid: int | str
    workload: str
    rank: str
    host_pid: int | None
    start_time_ticks: int
    """0 if unknown."""
    used_bytes: tuple[tuple[str, int | None], ...]
    """The driver's value for each of its devices, by uuid."""
    attested: bool = True
    """The kernel has named the sender of its report; true for a process without a report."""
    listed: bool = True
    """The driver lists it on a device."""
    title: str = ""
    """Its command or title."""
    owner_uid: int | None = None
    process: ReportingProcess | None = None
    """The process, if it reports."""

    def __str__(self) -> str:
        return f"pid {self.pid}"

    @property
    def key(self) -> ProcessKey | int | None:
        """The process."""
        return self.process.key if self.process is not None else self.host_pid

    @property
    def share(self) -> str:
        """The holder of the share of each limit, as `ProcessKey.share`. The driver's list has no places."""
        return self.process.key.share if self.process is not None else HERE.share(self.owner_uid)

    @classmethod
    def of(cls, selected: SelectedProcess, snapshot: Snapshot) -> OutsideTarget:
        """Return the target for a process that reports."""
        process, own = selected.process, selected.process.report.process
        used = _used_by_pid(snapshot).get(process.host_pid or 0, {})
        return cls(
            *(selected.pid, own.workload, own.rank, process.host_pid, own.start_time_ticks),
            tuple({**{sample.uuid: used.get(sample.uuid) for sample in process.report.devices}, **used}.items()),
            attested=process.attested,
            listed=bool(used),
            title=_command_of(process, snapshot) or own.command,
            owner_uid=process.owner_uid,
            process=process,
        )


@once_per_snapshot
def _used_by_pid(snapshot: Snapshot) -> dict[int, dict[str, int | None]]:
    """Return the driver's value for each process on each device."""
    used: dict[int, dict[str, int | None]] = {}
    for device in snapshot.node.devices if snapshot.node is not None else ():
        for listed in device.processes or ():
            used.setdefault(listed.pid, {})[device.uuid] = listed.used_bytes
    return used


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What results have from the snapshot of their request: names and limits."""

    gpus: Mapping[str, str] = field(default_factory=dict)
    """The NVML index of each device, by uuid."""
    jobs: Mapping[int | str, str] = field(default_factory=dict)
    """The name of each process's job: its workload, otherwise its command, otherwise its pid."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """With `set_memory_fraction`, the bytes that a process may reserve on each device, by uuid."""

    @classmethod
    def of(
        cls, targets: Iterable[SelectedProcess | OutsideTarget], fraction: float | None, snapshot: Snapshot
    ) -> NodeFacts:
        """Return the facts about these processes and the devices."""
        limits = {}
        for device in snapshot.node.devices if snapshot.node is not None and fraction is not None else ():
            if device.memory is not None:
                # PyTorch's total is what the driver does not reserve for itself.
                total_bytes = device.memory.total_bytes - (device.memory.reserved_bytes or 0)
                limits[device.uuid] = int((fraction or 0.0) * total_bytes)
        jobs = {}
        for one in targets:
            title = one.title if isinstance(one, OutsideTarget) else _command_of(one.process, snapshot)
            jobs[one.pid] = one.workload or title or f"pid {one.pid}"
        return cls(snapshot.gpus, jobs, limits)


class Selection(NamedTuple):
    """The processes of a request."""

    commanded: tuple[SelectedProcess, ...]
    """The processes that run the action themselves."""
    outside: tuple[OutsideTarget, ...] = ()
    """The processes on which the exporter itself acts. Only the `OUTSIDE_ACTIONS` have some."""


def select(request: ActionRequest, caller: Caller, snapshot: Snapshot) -> Selection:
    """Select the processes of a request that its caller may act on. `timing.plan` adds the ranks of a group.

    Without a match, the selection is empty if the target names no process: there is nothing to do. Errors name only
    processes that the caller may act on.

    Raises:
        TargetNotFoundError: no process or device has one of the target's names, or no process has all of them.
        ActionForbiddenError: only processes match that the caller may not act on.
    """
    permitted = [(name, process) for name, process in snapshot.names.reporting if caller.may_act_on(process)]
    _require_known(request, caller, snapshot)
    matching = select_reporting(request.target, snapshot)
    listed = select_listed(request.target, snapshot) if request.action in OUTSIDE_ACTIONS else ()
    selected = tuple(one for one in matching if caller.may_act_on(one.process))
    reached = tuple(one for one in listed if caller.may_act_on_listed(one.owner_uid))
    if not selected and not reached:
        if matching or listed:
            raise ActionForbiddenError(
                f"{request.target.describe()} matches only processes of others, which needs {caller.missing_rights}; "
                f"of its own processes, {counted(len(permitted), 'reports', 'report')}"
            )
        if request.target.given.keys() <= {"gpu"}:
            return Selection(())
        raise TargetNotFoundError(nothing_matches(request.target, permitted))
    if request.action not in DEVICE_ACTIONS:
        selected = tuple(one._replace(samples=one.process.report.devices) for one in selected)
    if request.action not in OUTSIDE_ACTIONS:
        return Selection(selected)

    def runs(one: SelectedProcess) -> bool:
        """Return whether a process runs the action itself: an engine whose reporter can speak with it does."""
        return request.action in ENGINE_ACTIONS and request.action in one.process.report.actions

    outside = [OutsideTarget.of(one, snapshot) for one in selected if not runs(one)]
    return Selection(tuple(filter(runs, selected)), (*outside, *reached))


def select_reporting(target: Target, snapshot: Snapshot) -> tuple[SelectedProcess, ...]:
    """Return the reporting processes of a target. A target with a device excludes processes that do not use it."""
    by_device, selected = bool(target.uuid or target.gpu), []
    for name, process in snapshot.names.reporting:
        facts = _facts_of(process, snapshot)
        orphan = facts is not None and facts.pid in snapshot.orphans
        if (orphan or not target.orphans) and target.admits(**_names_of(name, process, snapshot)):
            samples = tuple(
                sample
                for sample in process.report.devices
                if target.admits(uuid=(sample.uuid,), gpu=(snapshot.gpus.get(sample.uuid, ""),))
            )
            if samples or not by_device:
                selected.append(SelectedProcess(json_pid(name), process, samples))
    return tuple(selected)


def select_listed(target: Target, snapshot: Snapshot) -> tuple[OutsideTarget, ...]:
    """Return the target's processes that the driver lists and that do not report."""
    node = snapshot.node
    if node is None or target.workload or target.rank:  # which only reports name
        return ()
    targets = []
    for pid in sorted(_listed_pids(snapshot)):
        used = tuple(
            (uuid, used_bytes)
            for uuid, used_bytes in _used_by_pid(snapshot)[pid].items()
            if target.admits(uuid=(uuid,), gpu=(snapshot.gpus[uuid],))
        )
        orphan = pid in snapshot.orphans or not target.orphans
        if used and orphan and target.admits(**_names_of_listed(pid, snapshot)):
            of = node.facts.get(pid) or ProcessFacts(pid, 0)
            named = (pid, "", "", pid, of.start_time_ticks, used)
            targets.append(OutsideTarget(*named, title=of.command, owner_uid=of.uid))
    return tuple(targets)


def _facts_of(process: ReportingProcess, snapshot: Snapshot) -> ProcessFacts | None:
    """Return what the operating system shows of a process."""
    return snapshot.node.facts_of(process) if snapshot.node is not None else None


def _command_of(process: ReportingProcess, snapshot: Snapshot) -> str:
    facts = _facts_of(process, snapshot)
    return facts.command if facts is not None else ""


def _names_of(name: str, process: ReportingProcess, snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the names of a process by selector. A user has a name and a uid, as far as they are known."""
    own = process.report.process
    users = _names_of_listed(process.host_pid, snapshot)["user"] if process.host_pid is not None else ()
    uids = () if process.owner_uid is None else (str(process.owner_uid),)
    uuids = tuple(sample.uuid for sample in process.report.devices)
    return {"pid": (name,), "workload": (own.workload,), "rank": (own.rank,), "user": (*uids, *users), "uuid": uuids}


def _names_of_listed(host_pid: int, snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return the names of a process that the driver lists, by selector."""
    facts = snapshot.node.facts.get(host_pid) if snapshot.node is not None else None
    return {"pid": (str(host_pid),), "user": (facts.user,) if facts is not None and facts.user else ()}


def _listed_pids(snapshot: Snapshot) -> frozenset[int]:
    """Return the pids that the driver lists and that do not report."""
    up = snapshot.node is not None and snapshot.node.up
    reporting = {process.host_pid for process in snapshot.processes}
    return frozenset(pid for pid in _used_by_pid(snapshot) if up and pid not in reporting)


def _require_known(request: ActionRequest, caller: Caller, snapshot: Snapshot) -> None:
    """Check that each name of the target exists."""
    # An action on only some of the names would hide a typing error.
    listed = select_listed(Target(all=True), snapshot) if request.action in OUTSIDE_ACTIONS else ()
    # Names by selector, and whether the caller may act on what has them.
    names: list[tuple[bool, Mapping[str, Collection[str]]]] = [
        (True, {"gpu": snapshot.gpus.values(), "uuid": snapshot.gpus}),
        *(
            (caller.may_act_on(process), _names_of(name, process, snapshot))
            for name, process in snapshot.names.reporting
        ),
        *((caller.may_act_on_listed(one.owner_uid), _names_of_listed(one.host_pid or 0, snapshot)) for one in listed),
    ]

    def known(selector: str, *, shown: bool) -> dict[str, None]:
        """Return the known names, or the names that the caller is shown. It knows no users of other processes."""
        of_all = selector != "user" and not shown
        return dict.fromkeys(name for may, own in names if may or of_all for name in own.get(selector, ()))

    given = request.target.given
    if all(known(selector, shown=False).keys() >= set(values) for selector, values in given.items()):
        return
    all_known, shown = ({selector: known(selector, shown=shown) for selector in given} for shown in (False, True))
    pids = {*map(str, _listed_pids(snapshot)), *(name for name, _ in snapshot.names.silent)}
    raise TargetNotFoundError(unknown_names(request.target, all_known, pids, shown=shown))


def unknown_names(
    target: Target,
    known: Mapping[str, Collection[str]],
    silent: Collection[str] = (),
    *,
    shown: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Return which names of a target no device and no process has, and the nearest known ones; empty if all are known.

    `silent` are the pids of processes that do not report, so that the action cannot reach them. The text contains only
    names of `shown`, in their order; by default all known ones.
    """
    shown, texts, suggested = known if shown is None else shown, [], False
    for selector, values in target.given.items():
        unreachable = [value for value in values if selector == "pid" and value in silent and value not in known["pid"]]
        if unreachable:
            texts.append(
                f"pid {_listing(unreachable)}: no report arrives, and actions reach only processes that report; "
                f"{_REPORTS}"
            )
        found = {*known[selector], *unreachable}
        if unknown := [value for value in values if value not in found]:
            names = [name for name in dict.fromkeys(shown[selector]) if name]
            noun = _NOUNS[selector]
            there_is = f"known {noun}s: {_listing(names)}" if names else f"no {noun} is known: {_SEE}"
            # One suggestion is enough for a message, and comparing names takes long.
            compared = () if suggested or selector not in _SPELLED else names
            suggested |= selector in _SPELLED
            advice = did_you_mean(unknown[0], compared, there_is)
            texts.append(f"no such {noun} {_listing([repr(value) for value in unknown])}; {advice}")
    return "; ".join(texts)


def nothing_matches(target: Target, reporting: _Reporting) -> str:
    """Describe why nothing matches a target, with the processes that it could select."""
    if not reporting:
        return f"nothing matches {target.describe()}: no process reports that could be shown; {_REPORTS}"
    shown = []
    for name, process in reporting:
        names = {"pid": name, "workload": process.report.process.workload, "rank": process.report.process.rank}
        shown.append(" ".join(f"{selector}={value}" for selector, value in names.items() if value))
    return f"nothing matches {target.describe()}; reporting processes: {_listing(shown)}"


def _listing(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join([*names[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])
