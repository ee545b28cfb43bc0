"""A memory profile, or the difference of two, as tables: whose memory it is, and which lines allocated it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from gpumem_client.wire.units import UNKNOWN, human_bytes, human_growth, human_seconds
from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.features.profiles.profile_lines import kind_text

if TYPE_CHECKING:
    from rich.console import RenderableType


_SHOWN = 10


def profile_tables(document: Document) -> Iterator[RenderableType]:
    """Yield all that is printed of a profile or of a difference, from top to bottom."""
    differs = "before" in document
    yield from _difference_head(document) if differs else _profile_head(document)
    for note in document["notes"]:
        yield plain(f"Note: {note}", "yellow")
    main, size = ("change_bytes", human_growth) if differs else ("bytes", human_bytes)
    kinds = [f"{_kind(each)} {size(each[main])}" for each in document["kinds"] if each[main]]
    yield plain("")
    if not kinds:
        yield plain("Nothing changed." if differs else "Nothing is allocated.")
        return
    yield plain(", ".join(kinds))
    for title, names in (("Owners", _OWNER), ("Lines", _LINE)):
        groups, columns = document[title.lower()], {**(_CHANGES if differs else _SIZES), **names}
        if groups:
            alignments = [(name, "cut" if name in names else "right") for name in columns]
            yield plain("")
            yield table(title, alignments, ([cell(each) for cell in columns.values()] for each in groups[:_SHOWN]))
            if rest := len(groups[_SHOWN:]) + document[f"more_{title.lower()}"]["count"]:
                yield plain(f"and {rest} more", "dim")


def _profile_head(document: Document) -> Iterator[RenderableType]:
    seconds = document["recorded_seconds"]
    recorded = f"recorded for {human_seconds(seconds)}" if seconds else "without a recording"
    moment = "at the highest moment, " if document["moment"] == "peak" else ""
    yield plain(f"Memory of {subject(document)}, {moment}{recorded}", "bold")
    for device in document["devices"]:
        sizes = [
            f"{human_bytes(device[f'{name}_bytes'])} {'at the highest moment' if name == 'peak' else name}"
            for name in ("allocated", "peak", "reserved", "fragmented")
            if device[f"{name}_bytes"] is not None
        ]
        name = f"GPU {device['gpu']}" if device["gpu"] else device["uuid"]
        yield plain(f"{name}: {', '.join(sizes)}")


def _difference_head(document: Document) -> Iterator[RenderableType]:
    before, after = document["before"], document["after"]
    yield plain(f"What changed in the memory of {subject(after)}", "bold")
    seconds = after["unix_seconds"] - before["unix_seconds"]
    later = f"{human_seconds(abs(seconds))} {'later' if seconds >= 0 else 'earlier'}"
    other = "" if before["process"] == after["process"] else f" of another process, pid {before['pid']}"
    yield plain(f"From {before['id'][:8]}{other} to {after['id'][:8]}, {later}")


def subject(document: Document) -> str:
    """Return the name of the process of a profile."""
    rank = f" rank {document['rank']}" if document["rank"] else ""
    name = f"{document['workload']}{rank}, " if document["workload"] else ""
    return f"{name}pid {document['pid']}"


def _kind(group: Document) -> str:
    return kind_text(group["kind"])


_Cells: TypeAlias = Mapping[str, Callable[[Document], str]]
_SIZES: _Cells = {"bytes": lambda group: human_bytes(group["bytes"]), "blocks": lambda group: f"{group['blocks']:,}"}
_CHANGES: _Cells = {
    "before": lambda group: human_bytes(group["before_bytes"]),
    "after": lambda group: human_bytes(group["after_bytes"]),
    "change": lambda group: human_growth(group["change_bytes"]),
}
_OWNER: _Cells = {
    "owner": lambda group: group["owner"] or _kind(group),
    "kind": _kind,
    "shape": lambda group: " ".join(filter(None, (group["dtype"], group["shape"]))) or UNKNOWN,
    "allocated by": lambda group: group["line"] or UNKNOWN,
}
_LINE: _Cells = {
    "line": lambda group: group["line"],
    "called from": lambda group: group["called_from"] or UNKNOWN,
    "mostly for": lambda group: group["owner"] or (_kind(group) if group["kind"] else UNKNOWN),
}
