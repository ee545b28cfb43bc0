"""Without a feature's folder and its line in the list, the exporter starts, and everything else works."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from gpumem_exporter.application import COMMANDS
from gpumem_exporter.features import NAMES, features
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import run_python

SERVED = """
import json, sys
sys.path.insert(0, {copy!r})
import gpumem_exporter
assert gpumem_exporter.__file__.startswith({copy!r}), gpumem_exporter.__file__
from gpumem_exporter.application import COMMANDS
from gpumem_exporter.demo import DemoNode
from tests.support.servers.running_exporter import running_exporter

node = DemoNode()
with running_exporter(provider=node.provider, host=node.host) as exporter:
    metrics = exporter.metrics()
    assert metrics.values("gpumem_exporter_build_info")
    succeeded = metrics.values("gpumem_scrape_collector_success")
    assert len(succeeded) > 3 and set(succeeded) == {{1.0}}, metrics.text
    assert b"<title>" in exporter.get("/").body
    live = exporter.document("/api/v1/live")
    assert {{"devices", "jobs", "findings"}} <= live.keys(), live
    paths, status = sorted(exporter.document("/openapi.json")["paths"]), exporter.document("/health")["status"]
print(json.dumps({{"commands": sorted(COMMANDS), "paths": paths, "status": status}}))
"""


def without(tmp_path: Path, name: str) -> Path:
    """Return a folder with a copy of the exporter that lacks a feature."""
    package = tmp_path / "gpumem_exporter"
    shutil.copytree(REPOSITORY / "gpumem_exporter", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "features" / name)
    listed = package / "features" / "__init__.py"
    text = listed.read_text()
    line = re.search(r"^NAMES = \(.*\)$", text, re.MULTILINE)
    assert line is not None
    assert f'"{name}"' in line[0]
    kept = tuple(each for each in NAMES if each != name)
    listed.write_text(text.replace(line[0], f"NAMES = {kept!r}"))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_the_exporter_starts_without_a_feature(name: str, tmp_path: Path) -> None:
    done = run_python(SERVED.format(copy=str(without(tmp_path, name))))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["status"] in ("ok", "degraded")
    assert set(shown["commands"]) == COMMANDS.keys() - features()[name].commands.keys()
    assert {"/api/v1/actions", "/api/v1/live", "/api/v1/processes"} <= set(shown["paths"])
