"""A profile, or the difference of two, as one page without a network, which its script draws from a JSON document.

Names come from another user's process. The script inserts them as text, and the policy of the page allows its own
scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from gpumem_client.profile.model import Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_json import MAX_LENGTH, document_head, document_tables, encoded
from gpumem_exporter.features.profiles.profile_lines import (
    KINDS,
    Group,
    Line,
    Stack,
    bounded,
    has_peak,
    is_torch,
    owner_path,
)
from gpumem_exporter.features.profiles.stored_profile import StoredProfile, device_names

T = TypeVar("T")
_SCRIPTS = (  # .ci/fetch-libraries fetches the libraries again
    "d3-flame-graph/d3.min.js",
    "d3-flame-graph/d3-flamegraph.umd.min.js",
    "page.js",
)
_STYLE = "page.css"
# The style that d3-flame-graph adds to the page.
_LIBRARY_STYLE = re.compile(r"\.textContent=`([^`\\]*)`")
# The rows of a table. The flame graph has the others.
_SHOWN = 15


class _View(NamedTuple):
    """What one button of the page shows."""

    name: str
    label: str
    lines: Sequence[Line]
    size: Callable[[Group], int]
    """The bytes of a group in this view; without any it is not shown."""


def render(profile: StoredProfile | Difference) -> bytes:
    """Return the page."""
    before, after = _frame_of_page()
    page = bytearray(before)
    for part in _document(profile):
        # No text can end the script element, or start a comment in it.
        page += part.replace(b"<", b"\\u003c")
    return bytes(page + after)


@cache
def policy() -> str:
    """Return the content policy of every page: its own scripts and styles, and no request."""
    styles = (_file(_STYLE), *_LIBRARY_STYLE.findall(_file(_SCRIPTS[1])))
    allowed = {
        **dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'"),
        "img-src": "data:",
        "script-src": " ".join(_source(_file(name)) for name in _SCRIPTS),
        "style-src": " ".join(map(_source, styles)),
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _source(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return files("gpumem_exporter.features.profiles").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _frame_of_page() -> tuple[bytes, bytes]:
    """Return what is before the document in every page, and what is behind it."""
    before, after = _file("page.html").split("<!--document-->")
    before = before.replace("<!--policy-->", escape(policy())).replace("<!--style-->", _file(_STYLE))
    scripts = "".join(f"<script>{_file(name)}</script>\n" for name in _SCRIPTS)
    return before.encode(), after.replace("<!--scripts-->", scripts).encode()


def _document(profile: StoredProfile | Difference) -> Iterator[bytes]:
    """Yield the parts of the document: the head, the tables of each view, and the rows of the flame graph."""
    differs = isinstance(profile, Difference)
    views = _views(profile)
    # The views of a difference have their rows in common.
    rows = {"change" if differs else view.name: view.lines for view in views}
    head = {
        **document_head(profile, "live"),
        "names_of_devices": device_names(profile.uuids, profile.gpus),
        "names_of_kinds": KINDS,
        "count": {name: len(lines) for name, lines in rows.items()},
        "views": {
            view.name: {"label": view.label, **document_tables(view.lines, view.size, _SHOWN, differs=differs)}
            for view in views
        },
    }
    text = encoded(head)[:-1] + b',"records":[["views"]'
    yield text
    records = _Records()
    for name, lines in rows.items():
        largest_first = sorted(lines, key=lambda line: (-abs(line.change_bytes), -line.bytes))
        for record in bounded(largest_first, partial(records.of, name), (MAX_LENGTH - len(text)) // len(rows)):
            yield b"," + record
    yield b"]}"


def _views(profile: StoredProfile | Difference) -> list[_View]:
    if isinstance(profile, Difference):
        return [
            _View("grew", "What grew", profile.lines, lambda group: group.change_bytes),
            _View("shrank", "What shrank", profile.lines, lambda group: -group.change_bytes),
            _View("after", "Everything afterwards", profile.lines, lambda group: group.bytes),
        ]
    views = [_View("live", "At the end", profile.lines("live"), lambda group: group.bytes)]
    if has_peak(profile.profile):
        views.append(_View("peak", "At the highest moment", profile.lines("peak"), lambda group: group.bytes))
    return views


class _Records:
    """The rows of the flame graph as JSON: lists that start with the name of their table.

    Each frame, stack and owner is a record, too, before the first record that has its number.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Any, int]] = {"frames": {}, "stacks": {}, "owners": {}}
        self._new: list[Any] = []

    def of(self, rows: str, line: Line) -> bytes:
        """Return the record of a line, and before it the new records that it needs."""
        stack = -1 if line.stack is None else self._number("stacks", line.stack, self._stack)
        owner = -1 if line.owner is None else self._number("owners", line.owner, _owner)
        new = [*self._new, [rows, line.device, stack, owner, line.blocks, line.bytes, line.before_bytes]]
        self._new.clear()
        return encoded(new)[1:-1]

    def _number(self, table: str, value: T, values: Callable[[T], Sequence[Any]]) -> int:
        numbers = self._numbers[table]
        if value not in numbers:
            self._new.append([table, *values(value)])  # after the records that it needs itself
            numbers[value] = len(numbers)
        return numbers[value]

    def _stack(self, stack: Stack) -> list[int]:
        return [self._number("frames", frame, lambda each: (*each, is_torch(each))) for frame in stack.frames]


def _owner(owner: Owner) -> Sequence[Any]:
    names, path = owner_path(owner)
    return names, path, f"{owner.dtype} {owner.shape}".strip()
