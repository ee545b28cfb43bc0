"""The tables of a profile's page: devices, owners and lines of code, as HTML.

Names come from another user's process, so every text goes through `text`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from gpumem_client.profile.model import ProfiledDevice
from gpumem_client.wire.units import UNKNOWN, human_bytes, human_growth, human_ratio, human_seconds
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import (
    Group,
    Line,
    by_code,
    by_kind,
    by_owner,
    caller,
    kind_text,
    owner_name,
    place,
    user_frame,
)
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts, StoredProfile

# The rows of a table. The page's data has the others.
_SHOWN = 15
# Control characters, and characters that change the direction of the text that follows.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CAUSES = {"action": "requested", "out_of_memory": "out-of-memory error"}


class View(NamedTuple):
    """What one button of the page shows."""

    name: str
    label: str
    lines: Sequence[Line]
    size: Callable[[Line | Group], int]
    """The bytes that a line or a group has in this view; without any it is not shown."""


class _Cell(NamedTuple):
    text: str
    title: str = ""
    right: bool = False
    bar: str = ""
    """SVG in place of the text."""


def text(value: object) -> str:
    """Return a text from any source for HTML."""
    return escape(_UNSAFE.sub("\ufffd", str(value)))


def title(profile: StoredProfile | Difference) -> str:
    """Return the title of a page."""
    stored = profile.after if isinstance(profile, Difference) else profile
    name = stored.workload or f"pid {stored.pid}"
    rank = f" rank {stored.rank}" if stored.rank else ""
    return f"{'What changed in the memory' if isinstance(profile, Difference) else 'Memory'} of {name}{rank}"


def profile_head(stored: StoredProfile, devices: Sequence[str]) -> Iterator[str]:
    """Yield the head of a profile's page, and the table of its devices."""
    profile = stored.profile
    seconds = profile.recorded_seconds
    facts = [
        f"pid {stored.pid}",
        _time(stored),
        _CAUSES.get(profile.cause, profile.cause),
        f"recorded for {human_seconds(seconds)}" if seconds else "without a recording",
        *([] if profile.step is None else [f"step {profile.step}"]),
        *([f"the process stood still for {human_seconds(profile.pause_seconds)}"] if profile.pause_seconds else []),
    ]
    yield _header(title(stored), [" · ".join(facts)], profile.notes)
    columns = ("Device", "Allocated", "Highest", "Reserved", "Fragmented", "Segments", "Parts of reserved")
    rows = []
    for name, device in zip(devices, profile.devices, strict=True):
        sizes = (device.allocated_bytes, device.peak_bytes, device.reserved_bytes, device.fragmented_bytes)
        segments = UNKNOWN if device.segments is None else f"{device.segments:,}"
        rows.append((_Cell(name), *map(_size, sizes), _Cell(segments, right=True), _bar(device)))
    yield _section(_table("Devices", columns, rows))


def difference_head(change: Difference) -> Iterator[str]:
    """Yield the head of a difference's page."""
    before, after = (sum(line.before_bytes for line in change.lines), sum(line.bytes for line in change.lines))
    facts = (
        f"Before: {human_bytes(before)}, {_time(change.before)}, pid {change.before.pid}",
        f"After: {human_bytes(after)}, {_time(change.after)}, pid {change.after.pid}",
        f"Change: {human_growth(after - before)}{', at the highest moments' if change.moment == 'peak' else ''}",
    )
    yield _header(title(change), facts, change.notes)


def view_tables(view: View, *, hidden: bool, differs: bool) -> str:
    """Return the largest owners and the largest lines of code of a view."""
    kinds, owners, code = (
        sorted((each for each in group(view.lines) if view.size(each) > 0), key=view.size, reverse=True)
        for group in (by_kind, by_owner, by_code)
    )
    total = sum(line.bytes for line in view.lines)
    sizes = ("Before", "After", "Change") if differs else ("Bytes", "Share", "Blocks")

    def numbers(group: Group) -> tuple[_Cell, ...]:
        if differs:
            change = _Cell(human_growth(group.change_bytes), f"{group.change_bytes:,} bytes", right=True)
            return _size(group.before_bytes), _size(group.bytes), change
        return (
            _size(group.bytes),
            _Cell(_share(group, total), right=True),
            _Cell(f"{group.blocks:,}", right=True),
        )

    tables = [
        _kinds(kinds, total, differs=differs),
        _table(
            "Owners that changed the most" if differs else "Largest owners",
            ("Owner", "Kind", "Shape", *sizes, "Allocated by"),
            ((*_owner(group.largest), *numbers(group), _code(group.code)) for group in owners[:_SHOWN]),
            _rest(owners, view),
        ),
    ]
    if code:
        table = _table(
            "Lines that changed the most" if differs else "Lines that allocated the most",
            ("Line", "Called from", *sizes, "Mostly for"),
            (
                (
                    _code(g.largest),
                    _caller(g.largest),
                    *numbers(g),
                    _owner(g.largest)[0] if g.largest.owner else _Cell(UNKNOWN),
                )
                for g in code[:_SHOWN]
            ),
            _rest(code, view),
        )
        tables.append(table)
    if not owners:
        tables = ["<p>Nothing.</p>"]
    return f'<div data-view="{view.name}"{" hidden" if hidden else ""}>{"".join(map(_section, tables))}</div>'


def _kinds(kinds: Sequence[Group], total: int, *, differs: bool) -> str:
    """Return the sums of the kinds of owners."""
    items = []
    for group in kinds:
        size = human_growth(group.change_bytes) if differs else human_bytes(group.bytes)
        share = "" if differs else f" <small>{text(_share(group, total))}</small>"
        items.append(f"<div><dt>{text(_kind(group.largest))}</dt><dd>{size}{share}</dd></div>")
    return f'<h2>Whose memory it is</h2><dl class="kinds">{"".join(items)}</dl>'


def _share(group: Group, total: int) -> str:
    ratio = group.bytes / total
    return human_ratio(ratio) if ratio >= 0.005 else "< 1 %"


def _rest(groups: Sequence[Group], view: View) -> str:
    rest = groups[_SHOWN:]
    return f"{len(rest):,} more: {human_bytes(sum(map(view.size, rest)))}" if rest else ""


def _owner(line: Line) -> tuple[_Cell, _Cell, _Cell]:
    owner = line.owner
    if owner is None:
        return _Cell(f"allocated by {place(user_frame(line.stack))}"), _Cell(_kind(line)), _Cell("")
    return (
        _Cell(owner_name(owner) or _kind(line), owner.name),
        _Cell(_kind(line)),
        _Cell(f"{owner.dtype} {owner.shape}".strip()),
    )


def _kind(line: Line) -> str:
    return kind_text(line.owner.kind if line.owner else None)


def _code(line: Line) -> _Cell:
    frame = user_frame(line.stack)
    return _Cell(place(frame) or UNKNOWN, f"{frame.file}:{frame.line}" if frame else "")


def _caller(line: Line) -> _Cell:
    frame = caller(line.stack)
    return _Cell(place(frame) or UNKNOWN, f"{frame.file}:{frame.line}" if frame else "")


def _size(size: int | None) -> _Cell:
    return _Cell(human_bytes(size), "" if size is None else f"{size:,} bytes", right=True)


def _bar(device: ProfiledDevice) -> _Cell:
    """Return the reserved memory of a device as a bar: allocated, fragmented, and the rest."""
    if not device.reserved_bytes:
        return _Cell("")
    parts, left = [], 0.0
    for name, size in (("allocated", device.allocated_bytes), ("fragmented", device.fragmented_bytes or 0)):
        width = 100 * size / device.reserved_bytes
        parts.append(f'<rect class="{name}" x="{left:.3f}%" width="{width:.3f}%" height="100%"/>')
        left += width
    return _Cell("", "reserved: allocated, fragmented, other", bar=f'<svg class="bar">{"".join(parts)}</svg>')


def _time(stored: ProfileFacts) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stored.time_unix_seconds))


def _header(heading: str, facts: Iterable[str], notes: Iterable[str]) -> str:
    paragraphs = "".join(f'<p class="faint">{text(fact)}</p>' for fact in facts)
    listed = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f"<header><h1>{text(heading)}</h1>{paragraphs}</header>" + (
        f'<ul class="notes">{listed}</ul>' if listed else ""
    )


def _section(*parts: str) -> str:
    return f"<section>{''.join(parts)}</section>"


def _table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[_Cell]], rest: str = "") -> str:
    body = list(rows)
    right = [cell.right for cell in body[0]] if body else [False] * len(columns)
    head = "".join(
        f'<th scope="col"{_class(is_right)}>{column}</th>' for column, is_right in zip(columns, right, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in body)
    more = f'<p class="faint">{rest}</p>' if rest else ""
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<h2>{heading}</h2><div class="scroll">{whole}</div>{more}'


def _td(cell: _Cell) -> str:
    title_ = f' title="{text(cell.title)}"' if cell.title else ""
    return f"<td{_class(cell.right)}{title_}>{cell.bar or text(cell.text)}</td>"


def _class(right: bool) -> str:
    return ' class="number"' if right else ""
