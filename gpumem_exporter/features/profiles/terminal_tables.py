"""A memory profile, or the difference of two, as tables: whose memory it is, and which lines allocated it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
    sizes: list[tuple[str, str]] = [("bytes", "right"), ("blocks", "right")]
    if differs:
        sizes = [("before", "right"), ("after", "right"), ("change", "right")]
    for title, names, key, cells in (
        ("Owners", (("owner", "cut"), ("kind", "cut"), ("shape", "cut"), ("allocated by", "cut")), "owners", _owner),
        ("Lines", (("line", "cut"), ("called from", "cut"), ("mostly for", "cut")), "lines", _line),
    ):
        groups = document[key]
        if groups:
            yield plain("")
            yield table(title, [*sizes, *names], ([*_numbers(each), *cells(each)] for each in groups[:_SHOWN]))
            if rest := len(groups[_SHOWN:]) + document[f"more_{key}"]["count"]:
                yield plain(f"and {rest} more", "dim")


def _profile_head(document: Document) -> Iterator[RenderableType]:
    seconds = document["recorded_seconds"]
    recorded = f"recorded for {human_seconds(seconds)}" if seconds else "without a recording"
    moment = "at the highest moment, " if document["moment"] == "peak" else ""
    yield plain(f"Memory of {_subject(document)}, {moment}{recorded}", "bold")
    for device in document["devices"]:
        sizes = [
            f"{human_bytes(device[f'{name}_bytes'])} {text}"
            for name, text in (
                ("allocated", "allocated"),
                ("peak", "at the highest moment"),
                ("reserved", "reserved"),
                ("fragmented", "fragmented"),
            )
            if device[f"{name}_bytes"] is not None
        ]
        yield plain(f"{_device(device)}: {', '.join(sizes)}")


def _difference_head(document: Document) -> Iterator[RenderableType]:
    before, after = document["before"], document["after"]
    yield plain(f"What changed in the memory of {_subject(after)}", "bold")
    seconds = after["unix_seconds"] - before["unix_seconds"]
    later = f"{human_seconds(abs(seconds))} {'later' if seconds >= 0 else 'earlier'}"
    other = "" if before["process"] == after["process"] else f" of another process, pid {before['pid']}"
    yield plain(f"From {before['id'][:8]}{other} to {after['id'][:8]}, {later}")


def _subject(document: Document) -> str:
    rank = f" rank {document['rank']}" if document["rank"] else ""
    name = f"{document['workload']}{rank}, " if document["workload"] else ""
    return f"{name}pid {document['pid']}"


def _device(device: Document) -> str:
    return f"GPU {device['gpu']}" if device["gpu"] else str(device["uuid"])


def _kind(group: Document) -> str:
    return kind_text(group["kind"])


def _numbers(group: Document) -> Sequence[str]:
    if "change_bytes" in group:
        sizes = (human_bytes(group["before_bytes"]), human_bytes(group["after_bytes"]))
        return (*sizes, human_growth(group["change_bytes"]))
    return (human_bytes(group["bytes"]), f"{group['blocks']:,}")


def _owner(group: Document) -> Sequence[str]:
    shape = " ".join(filter(None, (group["dtype"], group["shape"])))
    return (group["owner"] or _kind(group), _kind(group), shape or UNKNOWN, group["line"] or UNKNOWN)


def _line(group: Document) -> Sequence[str]:
    owner = group["owner"] or (_kind(group) if group["kind"] else UNKNOWN)
    return (group["line"], group["called_from"] or UNKNOWN, owner)
