from __future__ import annotations

import gzip
import http.client
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from urllib.parse import urljoin

import pytest

from gpumem_exporter.page.page_routes import Page
from tests.support.paths import REPOSITORY
from tests.support.servers.running_exporter import RunningExporter, running_exporter
from tests.support.waiting import patient

PAGE = Page("1.2.3", demo=False, telemetry_path="/metrics")
HTML = gzip.decompress(PAGE.compressed).decode()


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
    own = {name: text for name, text in files_of(PAGE).items() if not name.startswith("uplot/")}
    text = HTML.replace("http://www.w3.org/2000/svg", "") + "".join(own.values())
    assert re.findall(r"https?://[^\s'\"]+", text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []


def test_the_page_includes_every_static_file() -> None:
    folder = Path(str(files("gpumem_exporter.page").joinpath("static")))
    there = {str(file.relative_to(folder)) for file in folder.rglob("*.*")}
    assert there == {*PAGE.files, "index.html", "api.html", "runbook.html", "runbook.css", "uplot/LICENSE.uplot"}
    assert "<!--" not in HTML
    assert f'<meta name="page" content="{PAGE.digest}">' in HTML


def test_settings_are_escaped() -> None:
    page = Page("1.2.3", demo=False, telemetry_path='/<b onclick="x">')
    assert page.digest != PAGE.digest
    assert page.headers["ETag"] != PAGE.headers["ETag"]
    html = gzip.decompress(page.compressed).decode()
    assert "<b " not in html
    assert "&lt;b onclick=&quot;x&quot;&gt;" in html


def test_the_compressed_page_is_small() -> None:
    assert len(PAGE.compressed) + sum(map(len, PAGE.files.values())) < 80 << 10


RUNBOOKS = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "runbooks").glob("GpuMem*.md")}


@pytest.fixture(scope="module")
def exporter() -> Iterator[RunningExporter]:
    with running_exporter() as running:
        yield running


def page(exporter: RunningExporter, path: str) -> str:
    answer = exporter.request("GET", path)
    assert answer.status == 200, path
    return answer.body.decode()


def test_every_runbook_has_a_page_and_every_link_of_it_leads_to_one(exporter: RunningExporter) -> None:
    pages = {"/runbooks/": page(exporter, "/runbooks/")}
    pages |= {f"/runbooks/{name}": page(exporter, f"/runbooks/{name}") for name in RUNBOOKS}
    for path, html in pages.items():
        links = [urljoin(path, link) for link in re.findall(r'<a href="([^"]+)"', html)]
        assert "/runbooks/" in links
        for link in links:
            target, _, anchor = link.partition("#")
            if not target.startswith("https:") and target != "/":
                assert f'id="{anchor}"' in pages[target] or not anchor, link
    for name, source in RUNBOOKS.items():
        assert f'<a href="{name}">' in pages["/runbooks/"]
        assert pages[f"/runbooks/{name}"].count("<pre>") == source.count("```") // 2
        assert ("<table>" in pages[f"/runbooks/{name}"]) == ("| --- |" in source)


def test_a_page_loads_and_runs_nothing(exporter: RunningExporter) -> None:
    answer = exporter.request("GET", "/runbooks/GpuMemLeak")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert re.search(r"style-src 'sha256-[\w+/=]+'(;|$)", policy)
    assert "<script" not in answer.body.decode()


def test_the_commands_have_the_readers_address(exporter: RunningExporter) -> None:
    assert f"info --url {exporter.url}\n" in page(exporter, "/runbooks/GpuMemLeak")
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=patient(30))
    connection.request("GET", "/runbooks/GpuMemLeak", headers={"Host": "127.0.0.1:1<b>"})
    answer = connection.getresponse()
    assert (answer.status, b"<b>" in answer.read()) == (200, False)
    connection.close()


@pytest.mark.parametrize("name", ["GpuMemLeek", "README", "GpuMemLeak.md", "..%2f..%2fsecurity", "%2e%2e/metrics.md"])
def test_other_names_are_not_found(exporter: RunningExporter, name: str) -> None:
    assert exporter.request("GET", f"/runbooks/{name}").status == 404
