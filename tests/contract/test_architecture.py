"""The functions and folders that docs/architecture.md names exist, and requests take the paths that it shows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.packages import PACKAGES, Package
from tests.support.paths import REPOSITORY
from tests.support.request_trace import POLLER, Trace, trace_requests

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PACKAGE = REPOSITORY / "gpumem_exporter"
STEP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def test_each_named_function_exists() -> None:
    steps = STEP.findall(PAGE)
    assert len(steps) > 30
    for module, name in steps:
        body = ast.parse(_path(module).read_text()).body
        for part in name.split("."):
            found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
            assert found, f"{module} has no {name}"
            body = found[0].body


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return trace_requests()


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("A report", "report"),
        ("A reading of the driver", "reading"),
        ("A scrape", "scrape"),
        ("An action", "submission"),
        ("A command", "command"),
        ("A result", "result"),
        ("A profile", "profile"),
        ("A finding", "finding"),
    ],
)
def test_a_request_runs_through_the_modules_in_the_order_of_the_page(
    title: str, kind: str, traces: dict[str, Trace]
) -> None:
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n##")[0]
    rows = [row for row in STEP.findall(section) if not row[0].startswith(("gpumem_client/", "cli/"))]
    known = set(traces["report"].calls) if kind in ("command", "result", "profile") else set()
    calls = [call for call in traces[kind].calls if call not in known]
    assert [module for module, _ in rows] == list(dict.fromkeys(call.module for call in calls))
    for module, name in rows:
        assert any(call.module == module and f"{call.function}.".startswith(f"{name}.") for call in calls), name


def test_the_poller_and_the_event_loop_alone_write_to_the_store(traces: dict[str, Trace]) -> None:
    readers = {"Store.snapshot", "Store.find", "Store.newest_reading"}
    threads = traces["report"].threads_in_store
    assert POLLER in threads["Store.put_reading"]
    assert "gpumem-second" in threads["Store.snapshot"]
    loop = {name for name in threads if re.fullmatch(r"Store\.[a-z]\w*", name)} - readers - {"Store.put_reading"}
    assert {"Store.put_report", "Store.beat", "Store.take_displaced"} <= loop
    assert {name: threads[name] for name in loop} == {name: {"exporter"} for name in loop}
    assert threads["Store.put_reading"] == {POLLER}


# A scrape also passes the features that have metrics.
@pytest.mark.parametrize(("kind", "most"), [("report", 13), ("scrape", 18), ("submission", 16)])
def test_a_request_runs_through_few_modules(kind: str, most: int, traces: dict[str, Trace]) -> None:
    assert len(traces[kind].modules) <= most


@pytest.mark.parametrize("kind", ["report", "scrape", "submission"])
def test_a_request_enters_no_module_more_than_twice(kind: str, traces: dict[str, Trace]) -> None:
    # The processes are selected, `timing` adds the other ranks of their jobs, and the selection goes on with these.
    # The page of metrics takes a part from each feature.
    entered = Counter(traces[kind].entries) - Counter(["actions/selection.py", "metrics/exposition.py"])
    # The transport calls the application, is called by it, and reports the end of the reply.
    assert {module: n for module, n in entered.items() if n > 2 and not module.startswith("edge/")} == {}


def test_each_named_folder_and_file_exists() -> None:
    roots = (REPOSITORY, *(folder for each in PACKAGES for folder in (each.root, each.root.parent)))
    for path in re.findall(r"`([a-z_]+/(?:[\w/]+\.py)?|deploy/[\w/]+)`", PAGE):
        assert any((root / path).exists() for root in roots), path


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_folder_is_described(package: Package) -> None:
    folders = {path.parent.name for path in package.root.glob("*/__init__.py")}
    section = PAGE.partition(f"Folders of `{package.name}`:")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert folders <= set(re.findall(r"`(\w+)/`", section))


def _path(module: str) -> Path:
    """Return the file of a module that the page names: relative to the exporter, or with the name of its package."""
    roots = {package.name: package.root for package in PACKAGES}
    first, _, rest = module.partition("/")
    return roots[first] / rest if first in roots else PACKAGE / module


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
