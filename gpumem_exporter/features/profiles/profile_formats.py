"""A profile, or the difference of two, as a file: JSON, pprof, or a page.

The page needs no network: its script draws it from JSON documents. Names come from another user's process. The script
inserts them as text, and the policy of the page allows its own scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from heapq import nlargest
from html import escape
from importlib.resources import files
from typing import Any

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.pprof import encode
from gpumem_exporter.features.profiles.profile_lines import (
    KINDS,
    PATH_KINDS,
    TORCH,
    Format,
    Line,
    ShownProfile,
    bounded,
    by_code,
    by_kind,
    by_owner,
    frame_place,
    frame_text,
    owner_name,
    place,
    stacks_of,
)

SUFFIXES: Mapping[Format, str] = {"html": "html", "pprof": "pb.gz", "json": "json"}
"""The end of the name of a file in each format."""
MAX_LENGTH = 8 << 20
"""The length of a JSON document or of all documents of a page. A reply of this size keeps the exporter well below the
memory limit of the chart's pod."""
# .ci/fetch-libraries fetches the libraries again.
_SCRIPTS = ("d3-flame-graph/d3.min.js", "d3-flame-graph/d3-flamegraph.umd.min.js", "page.js")
_STYLE = "page.css"
# The style that d3-flame-graph adds to the page.
_LIBRARY_STYLE = re.compile(r"\.textContent=`([^`\\]*)`")
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
# The maximum number of owners and of lines of code in a document, and of their characters. The rows are complete.
_LARGEST = 100
_MAX_TABLE_LENGTH = 1 << 18
# The rows of a table in a view of a page, as in page.js.
_IN_VIEW = 15
# What identifies a profile in the document of a difference.
_IDENTITY = ("id", "time", "unix_seconds", "cause", "pid", "workload", "rank", "job", "process")


def render(shown: Sequence[ShownProfile], form: Format) -> tuple[bytes, str]:
    """Return a profile or a difference as a file, and its media type.

    A page has all moments in `shown`, another format has the first one. May take a second: call it in a thread.
    """
    if form == "html":
        before, after = _around_documents()
        documents = (json_document(each, MAX_LENGTH // len(shown), page=True) for each in shown)
        return b"".join((before, b",".join(documents), after)), "text/html; charset=utf-8"
    if form == "pprof":
        return encode(shown[0]), "application/octet-stream"
    return json_document(shown[0], MAX_LENGTH), "application/json"


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
def _around_documents() -> tuple[bytes, bytes]:
    """Return the parts that every page has before and after its documents."""
    before, after = _file("page.html").split("<!--documents-->")
    words = encoded({"kinds": KINDS, "path_kinds": PATH_KINDS, "torch": TORCH.pattern}).decode()
    before = before.replace("<!--policy-->", escape(policy())).replace("<!--style-->", _file(_STYLE))
    scripts = "".join(f"<script>{_file(name)}</script>\n" for name in _SCRIPTS)
    return before.replace("<!--words-->", words).encode(), after.replace("<!--scripts-->", scripts).encode()


def json_document(shown: ShownProfile, most_bytes: int, *, page: bool = False) -> bytes:
    """Return the document of a profile or of a difference, for whose length the smallest rows are merged.

    A difference has the rows that changed. The document of a page also has the others, what each of its views lists,
    and `all_owners` and `all_lines`, the sums of each view. Its rows share frames: a frame is `[function, place]` in
    the first stack that has it, and its number in later ones.
    """
    differs = shown.before is not None
    # The size of a group in each view of a page: what grew, what shrank, and everything afterwards.
    views: list[Callable[[Line], int]] = [lambda group: group.bytes]
    if differs:
        views = [lambda group: group.change_bytes, lambda group: -group.change_bytes, *views]
    head = _head(shown)
    head["kinds"] = [{"kind": each.kind, **_sizes(each, differs=differs)} for each in by_kind(shown.lines)]
    for name, groups in (("owners", by_owner(shown.lines)), ("lines", by_code(shown.lines))):
        changed = [group for group in groups if group.change_bytes]
        head[name] = listed = _table(changed[:_LARGEST], differs=differs)
        rest = changed[len(listed) :]
        head[f"more_{name}"] = {"count": len(rest), "bytes": sum(abs(group.change_bytes) for group in rest)}
        if page:
            sizes = [[size for group in groups if (size := size_of(group)) > 0] for size_of in views]
            head[f"all_{name}"] = [{"count": len(each), "bytes": sum(each)} for each in sizes]
            # What the tables of the views need besides the groups that changed the most.
            others = groups[len(listed) :] if differs else []
            shown_first = (nlargest(_IN_VIEW, (each for each in others if of(each) > 0), key=of) for of in views)
            listed += _table({id(each): each for view in shown_first for each in view}.values(), differs=differs)
    text = encoded(head)[:-1] + b',"rows":['
    frames: dict[Frame, int] = {}

    def shared(frame: Frame) -> int | list[str]:
        known = len(frames)
        number = frames.setdefault(frame, known)
        return [frame.function, frame_place(frame)] if number == known else number

    def row(line: Line) -> bytes:
        stack = line.stack.frames if line.stack else ()
        shown_stack = list(map(shared, stack)) if page else list(map(frame_text, stack))
        code = {} if page else _code(line)
        at = {"uuid": shown.devices[line.device]["uuid"], "pool": line.pool}
        # One by one: as objects, they take several times their size.
        return encoded({**_owner(line), **code, **at, **_sizes(line, differs=differs), "stack": shown_stack})

    rows = (line for line in shown.ranked() if line.change_bytes or page)
    return b"".join((text, b",".join(bounded(rows, row, most_bytes - len(text))), b"]}"))


def encoded(value: Any) -> bytes:
    """Return a value as compact JSON, in which no text can end a script element of a page, or start a comment in it."""
    return _ENCODER.encode(value).encode("utf-8", "replace").replace(b"<", b"\\u003c")


def _head(shown: ShownProfile) -> dict[str, Any]:
    if shown.before is None:
        head = dict(shown.about)
    else:
        both = ("before", shown.before), ("after", shown.about)
        head = {name: {key: about[key] for key in _IDENTITY} for name, about in both}
    return {**head, "moment": shown.moment, "notes": list(shown.notes), "devices": list(shown.devices)}


def _table(groups: Iterable[Line], *, differs: bool) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    length = 0
    for group in groups:
        listed = {"owner": owner_name(group.owner) or None if group.owner else None}
        row = {**_owner(group), **listed, **_code(group), **_sizes(group, differs=differs)}
        length += sum(len(value) for value in row.values() if isinstance(value, str))
        if length > _MAX_TABLE_LENGTH:
            break
        table.append(row)
    return table


def _sizes(of: Line, *, differs: bool) -> dict[str, int]:
    if not differs:
        return {"bytes": of.bytes, "blocks": of.blocks}
    return {"before_bytes": of.before_bytes, "after_bytes": of.bytes, "change_bytes": of.change_bytes}


def _owner(line: Line) -> dict[str, Any]:
    owner = line.owner or Owner("")
    return {
        "kind": owner.kind or None,
        "owner": owner.name or None,
        "shape": owner.shape or None,
        "dtype": owner.dtype or None,
    }


def _code(line: Line) -> dict[str, Any]:
    stack = line.stack
    if stack is None:
        return {"line": None, "file": None, "called_from": None}
    return {"line": place(stack.user), "file": stack.user.file, "called_from": place(stack.caller)}


def read_saved(document: Any) -> ShownProfile:
    """Return the profile of a document, to compare it with another one.

    Raises ProfileInvalidError if the document is not the document of one profile.
    """
    try:
        devices = document["devices"]
        places = {device["uuid"]: number for number, device in enumerate(devices)}
        texts = {tuple(row["stack"]): None for row in document["rows"]}
        stacks = dict(zip(texts, stacks_of([*map(_frame, each)] for each in texts), strict=True))
        lines = []
        for row in document["rows"]:
            owner = Owner(*(row[name] or "" for name in ("kind", "owner", "shape", "dtype"))) if row["kind"] else None
            stack = stacks[tuple(row["stack"])]
            lines.append(Line(places[row["uuid"]], row["pool"], owner, stack, row["bytes"], row["blocks"]))
        about = {name: document[name] for name in (*_IDENTITY, "recorded_seconds")}
        return ShownProfile(about, document["moment"], lines, devices)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileInvalidError(f"it is not the JSON of a profile: {error!r}") from None


def _frame(text: str) -> Frame:
    function, _, place = text.removesuffix(")").rpartition(" (")
    file, colon, line = place.rpartition(":")
    return Frame(function, file, int(line)) if colon and line.isdecimal() else Frame(function, place, 0)
