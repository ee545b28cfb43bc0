"""Who is meant: what a query names, held against the processes that each exporter knows now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.fleet.naming import Named, Place

__all__ = ["Choice", "Member", "Missing", "choose", "member"]

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A process that is acted on."""

    place: Place
    pid: int | str
    workload: str | None
    """None where nobody reports for it, as for the rank."""
    rank: str | None
    gpus: tuple[str, ...] = ()
    uuids: tuple[str, ...] | None = None
    """The devices that were named; None: all of its devices."""

    @property
    def target(self) -> dict[str, Any]:
        """The process as an action's target: by all that tells it from a later one with its pid."""
        named = {"pid": self.pid, "workload": self.workload, "rank": self.rank}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Missing:
    """What was named and is not acted on."""

    place: Place
    named: Named
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of a query on one exporter."""

    members: tuple[Member, ...]
    missing: tuple[Missing, ...]


def choose(place: Place, named: Iterable[Named], processes: Sequence[Document], *, unreported: bool) -> Choice:
    """The processes of one exporter that are named, each once.

    Args:
        place: the exporter.
        named: what the query's series name there.
        processes: those of its `/api/v1/processes`.
        unreported: what is asked for can be done to processes that do not report.
    """
    able = [process for process in processes if unreported or process["reporting"]]
    chosen: dict[str, Member] = {}
    missing = []
    for name in named:
        meant = [(process, uuids) for process in able if (uuids := name.devices(process)) != ()]
        for process, uuids in meant:
            key = str(process["pid"])
            chosen[key] = member(place, process, _union(chosen.get(key), uuids))
        if not meant:
            there = any(name.devices(process) != () for process in processes)
            missing.append(
                Missing(place, name, "unsupported", "it does not report: nobody there could do it")
                if there
                else Missing(place, name, "gone", "no process there is it any more")
            )
    return Choice(tuple(chosen.values()), tuple(missing))


def member(place: Place, process: Document, uuids: tuple[str, ...] | None = None) -> Member:
    """A process of `/api/v1/processes` as a member."""
    return Member(
        place,
        process["pid"],
        process["workload"],
        process["rank"],
        tuple(device["gpu"] or "" for device in process["devices"] if uuids is None or device["uuid"] in uuids),
        uuids,
    )


def _union(known: Member | None, uuids: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if known is None:
        return uuids
    return None if known.uuids is None or uuids is None else tuple(dict.fromkeys((*known.uuids, *uuids)))
