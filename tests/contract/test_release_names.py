"""Image, chart and packages of a release have one owner and one version, and the chart refers to the pushed image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumem_exporter import __version__
from tests.support.paths import REPOSITORY

CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
TAG = f"v{__version__}"


def run(*command: str, cwd: Path = REPOSITORY, **environ: str) -> str:
    """Run a command as the release workflow runs it, and return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "GPUMEM_VENV": sys.prefix, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
    for name in ("exporter.yaml", "sidecar.yaml"):
        text = (REPOSITORY / "deploy" / "kubernetes" / name).read_text(encoding="utf-8")
        assert published["image"] in re.findall(r"image: (\S+)", text), name


def test_a_release_of_another_repository_is_refused() -> None:
    refused = subprocess.run(
        [".ci/release-names"],
        cwd=REPOSITORY,
        env={**os.environ, "GITHUB_REPOSITORY": "fork/gpumem-exporter"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "fork/gpumem-exporter" in refused.stderr


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what `.ci/build-release` builds from the tag, in a copy with a dated changelog."""
    copy = tmp_path_factory.mktemp("release") / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "dist", "build")
    for folder in (".ci", "client", "deploy", "docs", "gpumem_exporter", "grafana", "toolkit"):
        shutil.copytree(REPOSITORY / folder, copy / folder, symlinks=True, ignore=ignored)
    for path in REPOSITORY.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, copy)
    changelog = copy / "CHANGELOG.md"
    heading = re.compile(rf"^## {re.escape(__version__)} - .*$", re.MULTILINE)
    changelog.write_text(heading.sub(f"## {__version__} - 2026-01-31", changelog.read_text()))
    run(".ci/build-release", "dist", TAG, cwd=copy)
    return copy / "dist"


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


@pytest.mark.tools
def test_the_chart_of_a_release_pulls_the_image_that_the_release_pushes(released: Path, tmp_path: Path) -> None:
    pytest.importorskip("helm_sdkpy", reason="Helm's engine is not installed")
    from tests.support.helm import running_cluster

    chart = released / f"gpumem-exporter-chart-{__version__}.tgz"
    with running_cluster() as cluster:
        release = cluster.install(chart, {})
    documents = [document for document in yaml.safe_load_all(release["manifest"]) if document]
    (daemons,) = (document for document in documents if document["kind"] == "DaemonSet")
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    assert container["image"] == pushed_image(tmp_path)


@pytest.mark.tools
def test_a_release_has_every_package_with_the_version_of_the_tag_and_their_checksums(released: Path) -> None:
    packages = [f"gpumem_{name}-{__version__}" for name in ("client", "exporter", "toolkit")]
    files = {f"{package}{end}" for package in packages for end in ("-py3-none-any.whl", ".tar.gz")}
    files.add(f"gpumem-exporter-chart-{__version__}.tgz")
    assert {path.name for path in released.iterdir()} == {*files, "SHA256SUMS"}
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=released)
    with tarfile.open(released / f"gpumem-exporter-chart-{__version__}.tgz") as archive:
        member = archive.extractfile("gpumem-exporter/Chart.yaml")
        assert member is not None
        assert yaml.safe_load(member)["version"] == __version__
