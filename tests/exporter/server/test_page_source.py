from __future__ import annotations

import base64
import gzip
import hashlib
import re
from importlib.resources import files

import pytest

from gpumem_exporter.events import EVENT_TYPES
from gpumem_exporter.server.web.page import SCRIPTS, STYLES, Page

PAGE = Page("1.2.3", demo=False, telemetry_path="/metrics")


def policy(page: Page) -> dict[str, str]:
    parts = (part.partition(" ") for part in page.headers["Content-Security-Policy"].split("; "))
    return {name: value for name, _, value in parts}


def between(page: Page, tag: str) -> str:
    (found,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.body.decode(), flags=re.DOTALL)
    return str(found)


@pytest.mark.parametrize(("tag", "directive"), [("style", "style-src"), ("script", "script-src")])
def test_only_its_own_style_and_script_are_allowed(tag: str, directive: str) -> None:
    digest = base64.b64encode(hashlib.sha256(between(PAGE, tag).encode()).digest()).decode()
    assert policy(PAGE)[directive] == f"'sha256-{digest}'"


def test_the_policy_allows_only_requests_to_the_exporter() -> None:
    allowed = policy(PAGE)
    assert (
        allowed["default-src"]
        == allowed["base-uri"]
        == allowed["form-action"]
        == allowed["frame-ancestors"]
        == "'none'"
    )
    assert allowed["connect-src"] == "'self'"
    assert "unsafe" not in PAGE.headers["Content-Security-Policy"]


def test_the_page_has_no_external_urls() -> None:
    text = PAGE.body.decode().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://[^\s'\"]+", text) == []
    assert re.findall(r"\b(?:src|srcset|action)=|@import|url\(", text) == []


def test_the_script_never_creates_markup_from_text() -> None:
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", between(PAGE, "script")
        )
        == []
    )


@pytest.mark.parametrize("table", ["EVENT_WORDS", "EVENT_NAMES"])
def test_each_event_type_has_a_text(table: str) -> None:
    (entries,) = re.findall(rf"const {table} = {{\n(.*?)\n}};", between(PAGE, "script"), flags=re.DOTALL)
    assert set(re.findall(r"^  (\w+):", entries, flags=re.MULTILINE)) == set(EVENT_TYPES)


def test_the_page_includes_every_static_file() -> None:
    folder = files("gpumem_exporter.server.web").joinpath("static")
    there = {file.name for file in folder.iterdir() if not file.name.startswith("_")}
    assert there == {*STYLES, *SCRIPTS, "index.html"}
    assert "<!--" not in PAGE.body.decode()


def test_settings_are_escaped() -> None:
    page = Page("1.2.3", demo=False, telemetry_path='/<b onclick="x">')
    assert "<b " not in page.body.decode()
    assert "&lt;b onclick=&quot;x&quot;&gt;" in page.body.decode()


def test_the_digest_differs_for_each_version_and_setting() -> None:
    assert f'<meta name="page" content="{PAGE.digest}">' in PAGE.body.decode()
    others = (
        Page("1.2.4", demo=False, telemetry_path="/metrics"),
        Page("1.2.3", demo=True, telemetry_path="/metrics"),
        Page("1.2.3", demo=False, telemetry_path="/other"),
    )
    assert (
        len({page.digest for page in (PAGE, *others)}) == len({page.headers["ETag"] for page in (PAGE, *others)}) == 4
    )


def test_the_compressed_page_is_small() -> None:
    assert gzip.decompress(PAGE.compressed) == PAGE.body
    assert len(PAGE.compressed) < 27_000
