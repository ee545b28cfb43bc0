"""Selects the processes of a request from one snapshot, or says why nothing matches. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gpumem_client.wire.protocol import ENGINE_ACTIONS, DeviceSample
from gpumem_client.wire.units import counted
from gpumem_exporter.actions.action_options import OUTSIDE_ACTIONS, ActionRequest, Target
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot, once_per_snapshot
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.errors import ActionForbiddenError, TargetNotFoundError

_MAX_SHOWN = 20
_SEE = "see `gpumem-exporter info`"
_REPORTS = "a job reports if it is started with `gpumem-exporter run -- COMMAND`"
_NOUNS = {"gpu": "GPU", "uuid": "UUID", "pid": "pid", "workload": "workload", "rank": "rank", "user": "user"}
# The selectors whose values are words. A number has no nearest match that would help.
_SPELLED = ("uuid", "workload", "user")


@dataclass(frozen=True, slots=True)
class SelectedProcess:
    """A process that a target selects, which reports or is on the driver's list."""

    pid: int | str
    """Its name, as in `core.naming`."""
    reporter: ReportingProcess | None = None
    """The process, if it reports."""
    samples: tuple[DeviceSample, ...] = ()
    """Its samples of the selected devices."""
    facts: ProcessFacts | None = None
    """What the operating system shows of it."""
    used_bytes: Mapping[str, int | None] = field(default_factory=dict)
    """The driver's value for each device on which it lists the process, by uuid."""

    def __str__(self) -> str:
        return f"pid {self.pid}" + (f" (rank {self.rank})" if self.rank else "")

    @property
    def process(self) -> ReportingProcess:
        """The process, of one that reports."""
        if self.reporter is None:
            raise ValueError(f"{self} does not report")
        return self.reporter

    @property
    def key(self) -> ProcessKey | int | str:
        """The process."""
        return self.reporter.key if self.reporter is not None else self.pid

    @property
    def workload(self) -> str:
        """The name of its workload; empty if it has none."""
        return self.reporter.report.process.workload if self.reporter is not None else ""

    @property
    def rank(self) -> str:
        """Its rank in its job; empty if it has none."""
        return self.reporter.report.process.rank if self.reporter is not None else ""

    @property
    def host_pid(self) -> int | None:
        """Its pid on this host; None if it is unknown."""
        known = self.facts.pid if self.facts is not None else None
        return self.reporter.host_pid if self.reporter is not None else known

    @property
    def start_time_ticks(self) -> int:
        """Its start; 0 if it is unknown."""
        return (self.reporter or self.facts or ProcessFacts(0, 0)).start_time_ticks

    @property
    def owner_uid(self) -> int | None:
        """Its user; None if it is unknown."""
        known = self.facts.uid if self.facts is not None else None
        return self.reporter.owner_uid if self.reporter is not None else known

    @property
    def place(self) -> Place:
        """Where it runs. The driver's list has no places: in a container, a user may act only on what reports."""
        return self.reporter.key.place if self.reporter is not None else HERE

    def permits(self, caller: Caller) -> bool:
        """Return whether a caller may act on it."""
        return caller.may_act_for(self.owner_uid, self.place)

    @property
    def share(self) -> str:
        """The holder of the share of each limit, as `ProcessKey.share`."""
        return self.place.share(self.owner_uid)

    @property
    def attested(self) -> bool:
        """Whether the kernel has named the sender of its report; true for a process without a report."""
        return self.reporter is None or self.reporter.attested

    @property
    def title(self) -> str:
        """Its command or title."""
        reported = self.reporter.report.process.command if self.reporter is not None else ""
        return (self.facts.command if self.facts is not None else "") or reported

    @property
    def job(self) -> str:
        """The name of its job: its workload, otherwise its command, otherwise its pid."""
        return self.workload or self.title or f"pid {self.pid}"

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Its names by selector. A user has a uid and a name, as far as they are known."""
        uids = () if self.owner_uid is None else (str(self.owner_uid),)
        users = (self.facts.user,) if self.facts is not None and self.facts.user else ()
        known = {"pid": (str(self.pid),), "workload": (), "rank": (), "user": (*uids, *users)}
        return known if self.reporter is None else {**known, "workload": (self.workload,), "rank": (self.rank,)}

    @property
    def uuids(self) -> Sequence[str]:
        """The devices that it reports, or on which the driver lists it."""
        reported = self.reporter.report.devices if self.reporter is not None else ()
        return list(dict.fromkeys([*(sample.uuid for sample in reported), *self.used_bytes]))


@once_per_snapshot
def processes_of(snapshot: Snapshot) -> Mapping[Hashable, SelectedProcess]:
    """Return the processes that report and those that only the driver lists, by key, on all their devices."""
    node, used = snapshot.node, defaultdict[int | None, dict[str, int | None]](dict)
    for device in node.devices if node is not None else ():
        for listed in device.processes or ():
            used[listed.pid][device.uuid] = listed.used_bytes
    found = []
    for name, process in snapshot.names.reporting:
        facts = node.facts_of(process) if node is not None else None
        devices, listed_bytes = process.report.devices, used[process.host_pid]
        found.append(SelectedProcess(json_pid(name), process, devices, facts, listed_bytes))
    if node is not None and node.up:
        unreported = used.keys() - {None, *(process.host_pid for process in snapshot.processes)}
        pids = sorted(pid for pid in unreported if pid is not None)
        facts_of = {pid: node.facts.get(pid) or ProcessFacts(pid, 0) for pid in pids}
        found += [SelectedProcess(pid, facts=facts_of[pid], used_bytes=used[pid]) for pid in pids]
    return {one.key: one for one in found}


def limits_of(fraction: float | None, snapshot: Snapshot) -> Mapping[str, int]:
    """Return the bytes of each device that a process may reserve with a fraction, by uuid; empty without one."""
    devices = snapshot.node.devices if snapshot.node is not None and fraction is not None else ()
    # PyTorch's total is what the driver does not reserve for itself.
    totals = {each.uuid: each.memory.total_bytes - (each.memory.reserved_bytes or 0) for each in devices if each.memory}
    return {uuid: int((fraction or 0.0) * total_bytes) for uuid, total_bytes in totals.items()}


def select(request: ActionRequest, caller: Caller, snapshot: Snapshot) -> tuple[SelectedProcess, ...]:
    """Select the processes of a request that its caller may act on. `timing.plan` adds the ranks of a group.

    Without a match, the selection is empty if the target names no process: there is nothing to do. Errors name only
    processes that the caller may act on.

    Raises:
        TargetNotFoundError: no process or device has one of the target's names, or no process has all of them.
        ActionForbiddenError: only processes match that the caller may not act on.
    """
    # Only an action of the exporter itself reaches a process that does not report.
    reached = [one for one in processes_of(snapshot).values() if one.reporter or request.action in OUTSIDE_ACTIONS]
    own = [one for one in reached if one.permits(caller)]
    _require_known(request.target, caller, snapshot, reached, own)
    matching = matches(request.target, snapshot, reached)
    selected = [one for one in matching if one.permits(caller)]
    if matching and not selected:
        raise ActionForbiddenError(
            f"{request.target.describe()} matches only processes of others, which needs {caller.missing_rights}; "
            f"of its own processes, {counted(sum(one.reporter is not None for one in own), 'reports', 'report')}"
        )
    if not selected and not request.target.given.keys() <= {"gpu"}:
        raise TargetNotFoundError(nothing_matches(request.target, own))
    if KINDS[request.action].by_device:
        return tuple(selected)
    return tuple(replace(one, samples=one.reporter.report.devices if one.reporter else ()) for one in selected)


def commanded(request: ActionRequest, one: SelectedProcess) -> bool:
    """Return whether a process runs an action itself: also an engine does whose reporter can speak with it."""
    if request.action not in OUTSIDE_ACTIONS:
        return True
    able = one.reporter is not None and request.action in one.reporter.report.actions
    return request.action in ENGINE_ACTIONS and able


def matches(target: Target, snapshot: Snapshot, processes: Iterable[SelectedProcess]) -> list[SelectedProcess]:
    """Return the processes of a target. A target with a device excludes processes that do not use it."""
    matching = []
    for one in processes:
        if target.orphans and (one.facts is None or one.facts.pid not in snapshot.orphans):
            continue
        if not target.admits(**one.names):
            continue
        if target.uuid or target.gpu:
            used = {u for u in one.uuids if target.admits(uuid=(u,), gpu=(snapshot.gpus.get(u, ""),))}
            samples = tuple(sample for sample in one.samples if sample.uuid in used)
            if not samples and (one.reporter is not None or not used):
                continue
            one = replace(one, samples=samples)
        matching.append(one)
    return matching


def _require_known(
    target: Target,
    caller: Caller,
    snapshot: Snapshot,
    reached: Sequence[SelectedProcess],
    own: Sequence[SelectedProcess],
) -> None:
    """Check that each name of the target exists. Messages name only processes that the caller may act on."""
    # An action on only some of the names would hide a typing error.
    known, shown = ({name: _known_names(name, snapshot, some) for name in target.given} for some in (reached, own))
    if "user" in shown:  # the users of others' processes are not known
        known["user"] = shown["user"]
    if all(known[selector].keys() >= set(values) for selector, values in target.given.items()):
        return
    every = processes_of(snapshot).values()
    silent = {
        "pid": {*(str(one.pid) for one in every), *(name for name, _ in snapshot.names.silent)},
        # The page calls a job without a workload by its program.
        "workload": {one.title for one in every if one.reporter is None and one.permits(caller)},
    }
    raise TargetNotFoundError(unknown_names(target, known, shown, silent))


def _known_names(selector: str, snapshot: Snapshot, processes: Sequence[SelectedProcess]) -> dict[str, None]:
    if selector == "gpu":
        return dict.fromkeys(snapshot.gpus.values())
    if selector == "uuid":
        return dict.fromkeys([*snapshot.gpus, *(uuid for one in processes for uuid in one.uuids)])
    return dict.fromkeys(name for one in processes for name in one.names[selector])


def unknown_names(
    target: Target,
    known: Mapping[str, Collection[str]],
    shown: Mapping[str, Iterable[str]],
    silent: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> str:
    """Return which names of a target no device and no process has, and the nearest known ones; empty if all are known.

    `silent` are the names of processes that do not report, so that the action cannot reach them. The text contains only
    names of `shown`, in their order.
    """
    texts, suggested = [], False
    for selector, values in target.given.items():
        unreachable = [each for each in values if each in silent.get(selector, ()) and each not in known[selector]]
        if unreachable:
            texts.append(
                f"{selector} {_listing(unreachable)}: no report arrives, and actions reach only processes that report; "
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


def nothing_matches(target: Target, processes: Sequence[SelectedProcess]) -> str:
    """Describe why nothing matches a target, with the processes that it could select."""
    if not processes:
        return f"nothing matches {target.describe()}: no process reports that could be shown; {_REPORTS}"
    shown = []
    for one in processes:
        names = {"pid": one.pid, "workload": one.workload, "rank": one.rank}
        shown.append(" ".join(f"{selector}={value}" for selector, value in names.items() if value))
    return f"nothing matches {target.describe()}; processes: {_listing(shown)}"


def _listing(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join([*names[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])
