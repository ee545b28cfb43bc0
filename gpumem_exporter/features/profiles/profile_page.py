"""A profile, or the difference of two, as one page without a network, which its script draws from a JSON document.

Names come from another user's process. The script inserts them as text, and the policy of the page allows its own
scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_json import MAX_LENGTH, document_head, encoded, kinds, largest
from gpumem_exporter.features.profiles.profile_lines import (
    KINDS,
    Group,
    Line,
    Numbers,
    Stack,
    bounded,
    by_code,
    by_owner,
    has_peak,
    is_torch,
    owner_path,
)
from gpumem_exporter.features.profiles.stored_profile import StoredProfile, device_names

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
    size: Callable[[Group], int] = lambda group: group.bytes
    """The bytes of a group in this view; without any it is not shown."""


_OF_PROFILE = {"live": _View("live", "At the end"), "peak": _View("peak", "At the highest moment")}
_OF_DIFFERENCE = (
    _View("grew", "What grew", lambda group: group.change_bytes),
    _View("shrank", "What shrank", lambda group: -group.change_bytes),
    _View("after", "Everything afterwards"),
)


def render(profile: StoredProfile | Difference) -> bytes:
    """Return the page."""
    before, after = _around_document()
    return b"".join((before, *_document(profile), after))


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
def _around_document() -> tuple[bytes, bytes]:
    """Return the parts that every page has before and after its document."""
    before, after = _file("page.html").split("<!--document-->")
    before = before.replace("<!--policy-->", escape(policy())).replace("<!--style-->", _file(_STYLE))
    scripts = "".join(f"<script>{_file(name)}</script>\n" for name in _SCRIPTS)
    return before.encode(), after.replace("<!--scripts-->", scripts).encode()


def _document(profile: StoredProfile | Difference) -> Sequence[bytes]:
    """Return the parts of the document: the head, the tables of each view, and the rows of the flame graph."""
    differs = isinstance(profile, Difference)
    lines: dict[str, Sequence[Line]] = {}
    if isinstance(profile, Difference):
        lines["change"] = profile.lines
    else:
        lines["live"] = profile.lines("live")
        if has_peak(profile.profile):
            lines["peak"] = profile.lines("peak")
    views = {}
    for name, each in lines.items():
        groups = by_owner(each), by_code(each)
        for view in _OF_DIFFERENCE if differs else (_OF_PROFILE[name],):
            tables = largest(*groups, view.size, _SHOWN, differs=differs)
            views[view.name] = {"label": view.label, "rows": name, **tables}
    head = _escaped(
        {
            **document_head(profile, "live"),
            "names_of_devices": device_names(profile.uuids, profile.gpus),
            "names_of_kinds": KINDS,
            "kinds": {name: kinds(each, differs=differs) for name, each in lines.items()},
            "count": {name: len(each) for name, each in lines.items()},
            "views": views,
        }
    )
    records = _Records()
    room = (MAX_LENGTH - len(head)) // len(lines)
    rows = (bounded(sorted(each, key=_rank), partial(records.of, name), room) for name, each in lines.items())
    return head[:-1], b',"records":[', b",".join(chain.from_iterable(rows)), b"]}"


def _rank(line: Line) -> tuple[int, int]:
    return -abs(line.change_bytes), -line.bytes


def _escaped(value: Any) -> bytes:
    """Return JSON in which no text can end a script element, or start a comment in it."""
    return encoded(value).replace(b"<", b"\\u003c")


class _Records:
    """The rows of the flame graph as JSON: lists that start with the name of their table.

    Each frame, stack and owner is a record, too, before the first record that has its number.
    """

    def __init__(self) -> None:
        self._new: list[Any] = []
        self._frames = Numbers[Frame](lambda frame, _: self._new.append(["frames", *frame, is_torch(frame)]))
        self._stacks = Numbers[Stack](
            lambda stack, _: self._new.append(["stacks", *map(self._frames.of, stack.frames)])
        )
        self._owners = Numbers[Owner](lambda owner, _: self._new.append(["owners", *_owner(owner)]))

    def of(self, rows: str, line: Line) -> bytes:
        """Return the record of a line, and before it the new records that it needs."""
        stack = -1 if line.stack is None else self._stacks.of(line.stack)
        owner = -1 if line.owner is None else self._owners.of(line.owner)
        new = [*self._new, [rows, line.device, stack, owner, line.blocks, line.bytes, line.before_bytes]]
        self._new.clear()
        return _escaped(new)[1:-1]


def _owner(owner: Owner) -> Sequence[Any]:
    names, path = owner_path(owner)
    return names, path, f"{owner.dtype} {owner.shape}".strip()
