"""Describes why a target matches nothing: the unknown names with the nearest known ones, or what reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from heapq import nlargest
from itertools import islice

from gpumem_exporter.actions.request import Target
from gpumem_exporter.core.samples import ReportingProcess

_MAX_SHOWN = 20
_NOUNS = {"gpu": "GPU", "uuid": "UUID", "pid": "pid", "workload": "workload", "rank": "rank", "user": "user"}
_SPELLED = ("uuid", "workload", "user")
"""The selectors whose values are words. A number has no nearest match that would help."""
_MAX_COMPARED = 100
"""The maximum number of known names that one unknown name is compared with, on the event loop."""
_MAX_COMPARED_LENGTH = 64
"""The number of characters of a name that are compared. The time of a comparison grows with their square."""
_CANDIDATES = 3
_SIMILAR = 0.6

_Names = Mapping[str, Mapping[str, None]]


def unknown_names(
    target: Target,
    known: Mapping[str, Iterable[str]],
    unreported: Iterable[str] = (),
    *,
    shown: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Return which names of a target no device and no process has; empty if all are known.

    `unreported` are the pids of processes that do not report, so that the action cannot reach them. The text contains
    only names of `shown`, in their order; by default all known ones.
    """
    listed = {selector: dict.fromkeys(names) for selector, names in known.items()}
    permitted = listed if shown is None else {selector: dict.fromkeys(names) for selector, names in shown.items()}
    return "; ".join(_unknown(target, listed, permitted, frozenset(unreported)))


def nothing_matches(target: Target, reporting: Sequence[tuple[str, ReportingProcess]]) -> str:
    """Describe why nothing matches a target, with the processes that it could select."""
    if target.orphans:
        return f"nothing matches {target.describe()}: no process of the target has lost its launcher, as far as known"
    if not reporting:
        return f"nothing matches {target.describe()}: no process reports that could be shown"
    shown = []
    for name, process in reporting:
        workload, rank = process.report.process.workload, process.report.process.rank
        shown.append(f"pid={name}" + (f" workload={workload}" if workload else "") + (f" rank={rank}" if rank else ""))
    return f"nothing matches {target.describe()}; reporting processes: {_listing(shown, separator='; ')}"


def _unknown(target: Target, known: _Names, shown: _Names, unreported: frozenset[str]) -> Iterator[str]:
    suggested = False
    for selector, values in target.given().items():
        unreachable = unreported if selector == "pid" else frozenset[str]()
        if silent := [value for value in values if value in unreachable]:
            yield f"pid {_listing(silent)}: no report arrives, and actions reach only processes that report"
        unknown = [value for value in values if value not in known[selector] and value not in unreachable]
        if unknown:
            names = [name for name in shown[selector] if name]
            nearest = "" if suggested or selector not in _SPELLED else _nearest(unknown[0], names)
            suggested |= selector in _SPELLED
            noun = _NOUNS[selector]
            there_is = f"known {noun}s: {_listing(names)}" if names else f"no {noun} is known"
            advice = f"did you mean {nearest}? {there_is}" if nearest else there_is
            yield f"no such {noun} {_listing([repr(value) for value in unknown])}; {advice}"


def _nearest(value: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a value; empty if no name is similar.

    A message has one suggestion, and only the names that share the most characters with the value are compared exactly:
    the longest request would otherwise stop the event loop for 40 s.
    """
    matcher = SequenceMatcher(b=value[:_MAX_COMPARED_LENGTH])

    def ratio(name: str, *, exact: bool) -> float:
        matcher.set_seq1(name[:_MAX_COMPARED_LENGTH])
        return matcher.ratio() if exact else matcher.quick_ratio()

    candidates = nlargest(_CANDIDATES, islice(known, _MAX_COMPARED), key=lambda name: ratio(name, exact=False))
    similarity, nearest = max(((ratio(name, exact=True), name) for name in candidates), default=(0.0, ""))
    return nearest if similarity >= _SIMILAR else ""


def _listing(names: list[str], separator: str = ", ") -> str:
    more = len(names) - _MAX_SHOWN
    return separator.join([*names[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])
