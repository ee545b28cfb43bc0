"""The pages of the runbooks, as the exporter serves them from its package."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import pytest

from tests.support.paths import REPOSITORY
from tests.support.running_exporter import RunningExporter, running_exporter
from tests.support.waiting import patient

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
