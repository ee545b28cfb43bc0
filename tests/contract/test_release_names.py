"""Image and chart of a release have one owner and one version, and the manifests refer to the pushed image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from gpumem_exporter import __version__
from tests.support.paths import REPOSITORY

CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
TAG = f"v{__version__}"


def run(*command: str, **environ: str) -> str:
    """Run a command as the release workflow runs it, and return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
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
    # The icon is a file of the repository, at its main branch.
    assert (REPOSITORY / chart["icon"].partition("/main/")[2]).is_file()
    assert chart["icon"].startswith("https://raw.githubusercontent.com/gpumem-exporter/gpumem-exporter/main/")
    assert chart["sources"] == [chart["home"]]
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
