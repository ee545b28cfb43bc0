"""A release: its owner, version and image, its locked dependencies, and the mixin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from gpumem_exporter import __version__
from tests.support.paths import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = REPOSITORY / "deploy" / "image"
RULES = REPOSITORY / "deploy" / "prometheus" / "rules"
CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
TAG = f"v{__version__}"


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


# --- Owner, version and image


def run(*command: str, refused: str = "", **environ: str) -> str:
    """Run a command as the release workflow runs it, and return its output; it names what it refuses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**kept, "GPUMEM_VENV": sys.prefix, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, refused in done.stderr) == (int(bool(refused)), True), done.stderr
    return done.stdout


def names() -> dict[str, str]:
    return dict(line.split("=", 1) for line in run(".ci/release-names").splitlines())


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_chart_and_the_manifests_name_the_image_of_their_version() -> None:
    published = names()
    assert read(CHART / "values.yaml")["image"]["repository"] == published["repository"]
    chart = read(CHART / "Chart.yaml")
    assert chart["appVersion"] == chart["version"] == published["version"] == __version__
    # The icon is a file of the repository, at its main branch.
    assert (REPOSITORY / chart["icon"].partition("/main/")[2]).is_file()
    assert chart["icon"].startswith("https://raw.githubusercontent.com/gpumem-exporter/gpumem-exporter/main/")
    assert chart["sources"] == [chart["home"]]
    for name in ("exporter.yaml", "sidecar.yaml"):
        text = (REPOSITORY / "deploy" / "kubernetes" / name).read_text(encoding="utf-8")
        assert published["image"] in re.findall(r"image: (\S+)", text), name


@pytest.mark.tools
def test_a_release_of_another_repository_or_with_another_version_than_its_tag_is_refused(tmp_path: Path) -> None:
    other = "fork/gpumem-exporter"
    assert run(".ci/release-names", refused=other, GITHUB_REPOSITORY=other) == ""
    run("bash", ".ci/build-release", str(tmp_path), "v99.0.0", refused="v99.0.0")
    assert list(tmp_path.iterdir()) == []


def workflow_job(name: str) -> dict[str, Any]:
    return dict(read(REPOSITORY / ".github" / "workflows" / "release.yml")["jobs"][name])


def pushed_image(tmp_path: Path) -> str:
    """Return the reference that the release workflow pushes for the tag, from its steps and their real output."""
    build, image = workflow_job("build"), workflow_job("image")
    (step,) = (step for step in build["steps"] if step.get("id") == "names")
    output = tmp_path / "output"
    run("bash", "-e", "-c", step["run"], GITHUB_OUTPUT=str(output), GITHUB_REF_NAME=TAG)
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    values = {
        f"needs.build.outputs.{name}": outputs[re.fullmatch(r"\$\{\{ steps\.names\.outputs\.(\w+) \}\}", text)[1]]  # type: ignore[index]
        for name, text in build["outputs"].items()
    }
    (tags,) = (step["with"]["tags"] for step in image["steps"] if "build-push-action" in step.get("uses", ""))
    assert "build" in (image["needs"] if isinstance(image["needs"], list) else [image["needs"]])
    return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda match: values[match[1]], tags)


def test_a_release_pushes_the_image_that_the_manifests_pull(tmp_path: Path) -> None:
    assert pushed_image(tmp_path) == names()["image"]
