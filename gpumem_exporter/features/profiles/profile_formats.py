"""A profile, or the difference of two, as a file: JSON, pprof, or a page.

The page needs no network: its script draws it from JSON documents. Names come from another user's process. The script
inserts them as text, and the policy of the page allows its own scripts only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from gpumem_exporter.features.profiles.pprof import encode
from gpumem_exporter.features.profiles.profile_json import encoded, json_document
from gpumem_exporter.features.profiles.profile_lines import KINDS, PATH_KINDS, TORCH
from gpumem_exporter.features.profiles.stored_profile import Format, ShownProfile

SUFFIXES: Mapping[Format, str] = {"html": "html", "pprof": "pb.gz", "json": "json"}
"""The end of the name of a file in each format."""
MAX_LENGTH = 8 << 20
"""The length of a JSON document or of all documents of a page. A reply of this size keeps the exporter well below the
memory limit of the chart's pod."""
_SCRIPTS = (  # .ci/fetch-libraries fetches the libraries again
    "d3-flame-graph/d3.min.js",
    "d3-flame-graph/d3-flamegraph.umd.min.js",
    "page.js",
)
_STYLE = "page.css"
# The style that d3-flame-graph adds to the page.
_LIBRARY_STYLE = re.compile(r"\.textContent=`([^`\\]*)`")


def render(shown: Sequence[ShownProfile], form: Format) -> tuple[bytes, str]:
    """Return a profile or a difference as a file, and its media type.

    A page has all moments in `shown`, another format has the first one. May take a second: call it in a thread.
    """
    if form == "html":
        return _page(shown), "text/html; charset=utf-8"
    if form == "pprof":
        return encode(shown[0]), "application/octet-stream"
    return json_document(shown[0], MAX_LENGTH), "application/json"


def _page(shown: Sequence[ShownProfile]) -> bytes:
    before, after = _around_documents()
    documents = (json_document(each, MAX_LENGTH // len(shown), page=True) for each in shown)
    return b"".join((before, b",".join(documents), after))


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
