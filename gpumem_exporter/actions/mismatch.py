"""Describes why a target matches nothing: the unknown names with the nearest known ones, or what reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from gpumem_exporter.actions.request import Target
from gpumem_exporter.actions.targets import listed_pids, user_names, users_of
from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import ReportingProcess, Snapshot

__all__ = ["known_names", "mismatch", "unknown_names"]

_MAX_SHOWN = 20
_NOUNS = {"gpu": "GPU", "uuid": "UUID", "pid": "pid", "workload": "workload", "rank": "rank", "user": "user"}
_SPELLED = ("uuid", "workload", "user")
"""The selectors whose values are words. A number has no nearest match that would help."""

Reporting = Iterable[tuple[str, ReportingProcess]]


def unknown_names(target: Target, known: Mapping[str, Iterable[str]], unreported: Iterable[str] = ()) -> str:
    """Return which names of a target no device and no process has; empty if all are known.

    Args:
        target: the target.
        known: the names that exist, by selector. They are shown in this order.
        unreported: the pids of processes that do not report, so that the action cannot reach them.
    """
    listed = {selector: list(dict.fromkeys(names)) for selector, names in known.items()}
    return "; ".join(_unknown(target, listed, frozenset(unreported)))


def mismatch(target: Target, snapshot: Snapshot) -> str:
    """Describe why nothing matches a target, with the processes that it could select."""
    reporting = Names.of(snapshot).reporting
    if not reporting:
        return f"nothing matches {target.describe()}: no process reports to this exporter"
    shown = [
        f"pid={name}"
        + (f" workload={process.report.process.workload}" if process.report.process.workload else "")
        + (f" rank={process.report.process.rank}" if process.report.process.rank else "")
        for name, process in reporting
    ]
    return f"nothing matches {target.describe()}; reporting processes: {_listing(shown, separator='; ')}"


def known_names(snapshot: Snapshot, permitted: Reporting, *, with_listed: bool) -> Mapping[str, Iterable[str]]:
    """Return the names that the target of an action may have, by selector.

    Args:
        snapshot: the state of the node.
        permitted: the processes that the caller may act on; the names of other users are not known.
        with_listed: the target also selects processes that only the driver lists.
    """
    reporting = Names.of(snapshot).reporting
    identities = [process.report.process for _, process in reporting]
    devices = () if snapshot.node is None else snapshot.node.devices
    listed = listed_pids(snapshot) if with_listed else ()
    reported = (sample.uuid for _, process in reporting for sample in process.report.devices)
    users = (user for _, process in permitted for user in users_of(process, snapshot))
    return {
        "gpu": (device.gpu for device in devices),
        "uuid": (*(device.uuid for device in devices), *reported),
        "pid": (*(name for name, _ in reporting), *map(str, listed)),
        "workload": sorted(identity.workload for identity in identities),
        "rank": sorted((identity.rank for identity in identities), key=lambda rank: (len(rank), rank)),
        "user": sorted((*users, *(user for pid in listed for user in user_names(pid, snapshot)))),
    }


def _unknown(target: Target, known: Mapping[str, list[str]], unreported: frozenset[str]) -> Iterator[str]:
    for selector, values in target.given().items():
        unreachable = unreported if selector == "pid" else frozenset[str]()
        if silent := [value for value in values if value in unreachable]:
            yield f"pid {', '.join(silent)}: no report arrives, and actions reach only processes that report"
        unknown = [value for value in values if value not in known[selector] and value not in unreachable]
        if unknown:
            noun = _NOUNS[selector]
            yield f"no such {noun} {', '.join(map(repr, unknown))}; {_advice(selector, unknown, known[selector])}"


def _advice(selector: str, unknown: list[str], known: list[str]) -> str:
    nearest = [name for value in unknown if selector in _SPELLED for name in get_close_matches(value[:256], known, n=1)]
    named = [name for name in known if name]
    there_is = f"known {_NOUNS[selector]}s: {_listing(named)}" if named else f"no {_NOUNS[selector]} is known"
    return f"did you mean {', '.join(dict.fromkeys(nearest))}? {there_is}" if nearest else there_is


def _listing(names: list[str], separator: str = ", ") -> str:
    more = len(names) - _MAX_SHOWN
    return separator.join([*names[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])
