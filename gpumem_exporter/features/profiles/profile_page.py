"""A profile, or the difference of two, as one page without a network: tables first, then an interactive flame graph.

Names come from another user's process. The graph inserts them as text, and the policy of the page allows its own
scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from gpumem_client.profile.model import Frame, Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import OwnerPaths, has_peak, is_torch, kind_text
from gpumem_exporter.features.profiles.profile_tables import (
    View,
    difference_head,
    profile_head,
    text,
    title,
    view_tables,
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


def render(profile: StoredProfile | Difference) -> bytes:
    """Return the page."""
    views = tuple(_views(profile))
    differs = isinstance(profile, Difference)
    devices = device_names(profile.uuids, profile.gpus)
    parts = (
        *(difference_head(profile) if isinstance(profile, Difference) else profile_head(profile, devices)),
        _buttons(views),
        *(view_tables(view, hidden=view is not views[0], differs=differs) for view in views),
        _file("graph.html"),
        '<script id="data" type="application/json">',
        _graph_data(views, devices),
        "</script>",
        *(f"<script>{_file(name)}</script>" for name in _SCRIPTS),
    )
    # The body is last: it has texts that look like the other places.
    before, after = _file("page.html").split("<!--body-->")
    before = before.replace("<!--policy-->", escape(policy())).replace("<!--title-->", text(title(profile)))
    before = before.replace("<!--style-->", _file(_STYLE))
    return b"".join(part.encode("utf-8", "replace") for part in (before, *parts, after))


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


@cache
def _file(name: str) -> str:
    return files("gpumem_exporter.features.profiles").joinpath("static", name).read_text(encoding="utf-8")


def _views(profile: StoredProfile | Difference) -> Iterator[View]:
    if isinstance(profile, Difference):
        yield View("grew", "What grew", profile.lines, lambda each: each.change_bytes)
        yield View("shrank", "What shrank", profile.lines, lambda each: -each.change_bytes)
        yield View("after", "Everything afterwards", profile.lines, lambda each: each.bytes)
        return
    yield View("live", "At the end", profile.lines("live"), lambda each: each.bytes)
    if has_peak(profile.profile):
        yield View("peak", "At the highest moment", profile.lines("peak"), lambda each: each.bytes)


def _buttons(views: Sequence[View]) -> str:
    """Return the buttons of the views; a single view needs none."""
    if len(views) == 1:
        return ""
    states = ("true", *("false" for _ in views[1:]))
    buttons = (
        f'<button type="button" value="{view.name}" aria-pressed="{pressed}">{view.label}</button>'
        for view, pressed in zip(views, states, strict=True)
    )
    return f'<div id="views" role="group" aria-label="View">{"".join(buttons)}</div>'


def _graph_data(views: Sequence[View], devices: Sequence[str]) -> str:
    """Return what the flame graph is drawn from, as JSON that is safe in a script element."""
    frames: dict[Any, int] = {}
    # By the id of the stack, which the lines keep and share: a hash would read all frames of each line.
    stacks: dict[int, tuple[int, Sequence[Frame]]] = {}
    owners: dict[Any, int] = {}
    rows: dict[str, list[tuple[int, ...]]] = {view.name: [] for view in views}
    for view in views:
        for line in view.lines:
            if (size := view.size(line)) > 0:
                owner = line.owner or (None if line.stack else Owner("unseen"))
                number = stacks.setdefault(id(line.stack), (len(stacks), line.stack))[0] if line.stack else -1
                holder = -1 if owner is None else owners.setdefault(owner, len(owners))
                rows[view.name].append((line.device, number, holder, size, line.blocks, line.change_bytes))
    paths = OwnerPaths()
    indices = [[frames.setdefault(frame, len(frames)) for frame in stack] for _, stack in stacks.values()]
    document = {
        "devices": devices,
        "no_owner": kind_text(None),
        "frames": [[*frame, is_torch(frame)] for frame in frames],
        "stacks": indices,
        "owners": [[*paths.of(owner), f"{owner.dtype} {owner.shape}".strip()] for owner in owners],
        "views": rows,
    }
    # No text can end the element, or start a comment in it.
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
