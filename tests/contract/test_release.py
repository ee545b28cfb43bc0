"""What a release consists of beside the package: locked dependencies, the mixin, the README of the package index."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.paths import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = REPOSITORY / "deploy" / "image"
RULES = REPOSITORY / "deploy" / "prometheus" / "rules"


def locked(name: str) -> dict[str, set[Version]]:
    """Return the locked versions of each package; a package has several where they depend on the version of Python."""
    versions: dict[str, set[Version]] = {}
    blocks = re.split(r"\n(?=\w)", (IMAGE / name).read_text(encoding="utf-8"))
    for block in blocks:
        if block.startswith("#"):
            continue
        assert "--hash=sha256:" in block, f"no hash: {block}"
        requirement = Requirement(block.partition("\\")[0].strip())
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", block
        versions.setdefault(requirement.name, set()).add(Version(specifier.version))
    return versions


@pytest.mark.parametrize(
    ("name", "required"),
    [
        (
            "requirements.txt",
            [
                *(text for text in PYPROJECT["project"]["dependencies"] if not text.startswith("gpumem-client")),
                *PYPROJECT["project"]["optional-dependencies"]["kubernetes"],
                *PYPROJECT["project"]["optional-dependencies"]["web"],
            ],
        ),
        ("build-requirements.txt", PYPROJECT["build-system"]["requires"]),
    ],
)
def test_the_image_installs_locked_versions_of_every_dependency(name: str, required: list[str]) -> None:
    versions = locked(name)
    for text in required:
        requirement = Requirement(text)
        assert versions.get(requirement.name), f"{text}: run sh deploy/image/lock.sh"
        for version in versions[requirement.name]:
            assert requirement.specifier.contains(version), f"{text}: run sh deploy/image/lock.sh"


def mixin(field: str, config: str = "{}") -> Any:
    jsonnet = pytest.importorskip("_jsonnet", reason="the package jsonnet is not installed")
    source = f"((import '{REPOSITORY}/deploy/mixin/mixin.libsonnet') + {{ _config+:: {config} }}).{field}"
    return json.loads(jsonnet.evaluate_snippet("test", source))


def test_the_mixin_has_the_dashboards_and_rules_of_the_repository() -> None:
    files = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))
    assert mixin("grafanaDashboards") == {f"gpumem-{path.name}": json.loads(path.read_text()) for path in files}
    assert mixin("prometheusAlerts") == yaml.safe_load((RULES / "alerts.yml").read_text())
    assert mixin("prometheusRules") == yaml.safe_load((RULES / "recording.yml").read_text())


def test_the_runbooks_of_the_mixin_can_be_elsewhere() -> None:
    def urls(config: str) -> dict[str, str]:
        groups = mixin("prometheusAlerts", config)["groups"]
        return {rule["alert"]: rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]}

    elsewhere = urls("{ runbookURL: 'https://wiki.example/', kvCacheAlert: true }")
    assert elsewhere == {name: f"https://wiki.example/{name}.md" for name in elsewhere}
    assert "GpuMemKvCacheUnused" in elsewhere
    behind_proxy = urls("{ livePageURL: 'https://{node}.gpumem.example/', coverageAlert: true }")
    url = "https://{{ $labels.instance }}.gpumem.example/runbooks/GpuMemCoverageLow"
    assert behind_proxy["GpuMemCoverageLow"] == url


def test_the_clusters_of_the_mixin_can_have_several_labels() -> None:
    for field in ("prometheusAlerts", "prometheusRules"):
        groups = mixin(field, "{ clusterLabels: 'region, cluster' }")["groups"]
        expressions = [rule["expr"] for group in groups for rule in group["rules"]]
        assert any("(region, cluster, job" in expression for expression in expressions)
        assert all("(cluster, " not in expression for expression in expressions)


def test_the_live_pages_of_the_mixin_can_be_elsewhere() -> None:
    dashboards = mixin("grafanaDashboards", "{ livePageURL: 'https://{node}.gpumem.example/' }")
    for dashboard in dashboards.values():
        values = {one["name"]: one["query"] for one in dashboard["templating"]["list"] if one["type"] == "constant"}
        assert values == {"live_page": "https://", "live_page_end": ".gpumem.example/"}


@pytest.mark.tools
def test_a_release_has_the_version_of_its_tag(tmp_path: Path) -> None:
    refused = subprocess.run(
        ["bash", ".ci/build-release", str(tmp_path), "v99.0.0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "v99.0.0" in refused.stderr
    assert list(tmp_path.iterdir()) == []
