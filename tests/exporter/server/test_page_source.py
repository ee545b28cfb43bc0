from __future__ import annotations

import gzip
import re
from importlib.resources import files
from pathlib import Path

from gpumem_exporter.server.web.page import LIBRARY, SCRIPTS, STYLES, Page

PAGE = Page("1.2.3", demo=False, telemetry_path="/metrics")


def policy(page: Page) -> dict[str, str]:
    parts = (part.partition(" ") for part in page.headers["Content-Security-Policy"].split("; "))
    return {name: value for name, _, value in parts}


def files_of(page: Page) -> dict[str, str]:
    return {name: gzip.decompress(body).decode() for name, body in page.files.items()}


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


def test_the_page_names_no_other_host() -> None:
    own = {name: text for name, text in files_of(PAGE).items() if not name.startswith("uPlot")}
    text = PAGE.body.decode().replace("http://www.w3.org/2000/svg", "") + "".join(own.values())
    assert re.findall(r"https?://[^\s'\"]+", text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []


def test_the_page_includes_every_static_file() -> None:
    folder = Path(str(files("gpumem_exporter.server.web").joinpath("static")))
    there = {str(file.relative_to(folder)) for file in folder.rglob("*.*")}
    assert there == {*STYLES, *SCRIPTS, LIBRARY, "index.html", "uplot/LICENSE.uplot"}
    assert "<!--" not in PAGE.body.decode()
    assert f'<meta name="page" content="{PAGE.digest}">' in PAGE.body.decode()
    assert set(re.findall(rf"page/{PAGE.digest}/([\w.]+)", PAGE.body.decode())) == set(PAGE.files)


def test_settings_are_escaped() -> None:
    page = Page("1.2.3", demo=False, telemetry_path='/<b onclick="x">')
    assert page.digest != PAGE.digest
    assert page.headers["ETag"] != PAGE.headers["ETag"]
    assert "<b " not in page.body.decode()
    assert "&lt;b onclick=&quot;x&quot;&gt;" in page.body.decode()


def test_the_compressed_page_is_small() -> None:
    assert gzip.decompress(PAGE.compressed) == PAGE.body
    assert len(PAGE.compressed) + sum(map(len, PAGE.files.values())) < 80 << 10
