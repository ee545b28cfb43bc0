"""README, docs/, CHANGELOG, deploy/ and grafana/ agree with the code."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from gpumem_exporter import __version__
from gpumem_exporter.cli.program import COMMANDS
from gpumem_exporter.collectors.catalog import METRICS
from gpumem_exporter.server.api.alerts import ALERT_KEYS
from tests.support.packages import PACKAGES
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_tool

ENTRY_SCRIPTS = (
    "deploy/quickstart.sh",
    "tests/run.sh",
    "tests/stack/run.sh",
    "tests/grafana/run.sh",
    "tests/engines/run.sh",
    "deploy/image/lock.sh",
    ".ci/run",
    ".ci/build-docs",
    ".ci/build-release",
    ".ci/release-names",
    ".ci/check-wheel",
)
SHELL = (*ENTRY_SCRIPTS, "deploy/environment.sh")
FAMILIES = {metric.name: metric for metric in METRICS}
PAGES = ("README.md", *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/**/*.md")))
DOCUMENTS = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "deploy/helm/gpumem-exporter/README.md")


@cache
def tracked_texts() -> dict[str, str]:
    """Return every text file of the repository by path, without the output of tools."""
    texts = {}
    for folder, folders, files in os.walk(REPOSITORY):
        here = Path(folder)
        folders[:] = [name for name in folders if _is_ours(here / name)]
        for path in (here / name for name in files if name != ".git"):  # a file in a work tree
            try:
                texts[path.relative_to(REPOSITORY).as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def _is_ours(folder: Path) -> bool:
    made = {"__pycache__", "build", "dist", "node_modules"}
    hidden = folder.name.startswith(".") and folder.name not in (".ci", ".github")
    captured = folder == REPOSITORY / "tests" / "data"
    return not (
        hidden or captured or folder.name in made or folder.suffix == ".egg-info" or (folder / "pyvenv.cfg").exists()
    )


def found(pattern: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """Return the occurrences of a pattern in the repository as `path:line: text`."""
    expression = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        if name not in but
        for number, line in enumerate(text.splitlines(), start=1)
        if expression.search(line)
    ]


def test_no_text_has_a_path_of_one_machine_or_the_address_of_a_registry() -> None:
    paths = r"(?<![\w.-])/(work|farm|root|home/(?!kubernetes/bin)\w+|opt/gm)/"
    registries = r"pypi[.]org|python[h]osted|deb[.]debian|registry[.]npm|download[.]pytorch"
    assert found(f"{paths}|{registries}") == []


def test_no_text_installs_the_project_by_its_name_from_a_package_index() -> None:
    # Until the project has registered the name, anybody may. A wheel has a path.
    installer = r"\b(?:pip3?|pipx|uvx?)\b"
    words = r"(?:[\s#]+[\w.=:-]+)*[\s#]+"
    expression = re.compile(rf"{installer}{words}['\"]?gpumem[-_](?:exporter|client|toolkit)\b(?!\S*[.]whl)")
    extra = re.compile(r"gpumem[-_](?:exporter|client|toolkit)\[\w")
    texts = tracked_texts().items()
    assert [(name, match[0]) for name, text in texts for match in expression.finditer(text)] == []
    assert [(name, match[0]) for name, text in texts for match in extra.finditer(text)] == []


def test_the_readme_links_to_each_page_of_the_documentation() -> None:
    readme = tracked_texts()["README.md"]
    pages = {page for page in PAGES if re.fullmatch(r"docs/[^/]+[.]md", page)} | {"docs/runbooks/README.md"}
    assert len(pages) > 10
    assert {page for page in pages if f"]({page})" not in readme} == set()


def test_commands_and_scripts_in_the_documentation_exist() -> None:
    commands = set()
    for page in PAGES:
        text = tracked_texts()[page]
        for script in re.findall(r"^(?:sh|bash) (\S+)", text, flags=re.MULTILINE):
            assert (REPOSITORY / script).is_file(), f"{page}: {script}"
        commands |= set(re.findall(r"gpumem-exporter ([a-z][a-z-]+)(?![\w./])", "\n".join(code_blocks(text))))
    assert {"serve", "info", "clear"} <= commands
    assert commands <= set(COMMANDS)


def code_blocks(markdown: str) -> list[str]:
    """Return the fenced shell blocks of a Markdown text."""
    return re.findall(r"^```sh\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_of_a_document_have_targets(document: str) -> None:
    here = (REPOSITORY / document).parent
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", tracked_texts()[document]):
        target = here / path if path else REPOSITORY / document
        assert target.exists(), f"{document}: {path}"
        if anchor:
            assert anchor in headings(target.read_text(encoding="utf-8")), f"{document}: {path}#{anchor}"


def headings(markdown: str) -> set[str]:
    """Return the anchors of a Markdown text's headings, as on GitHub."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", markdown), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", tracked_texts()["CHANGELOG.md"], flags=re.MULTILINE)


def test_every_address_has_the_owner_of_the_repository() -> None:
    texts = tracked_texts()
    (owner,) = re.findall(r'^Homepage = "https://github.com/([\w-]+)/', texts["pyproject.toml"], flags=re.MULTILINE)
    address = re.compile(r"(?:github\.com|ghcr\.io)/([\w-]+)/(?:gpumem-exporter|charts)\b")
    found = {name: set(address.findall(text)) - {owner} for name, text in texts.items()}
    assert {name: owners for name, owners in found.items() if owners} == {}


@pytest.mark.parametrize("script", SHELL)
def test_every_script_is_valid_in_its_shell(script: str) -> None:
    text = (REPOSITORY / script).read_text()
    shell = "bash" if text.startswith("#!/usr/bin/env bash") else "sh"
    checked = subprocess.run([shell, "-n", str(REPOSITORY / script)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.tools
def test_the_configuration_of_prometheus_is_valid() -> None:
    configuration = REPOSITORY / "deploy" / "prometheus" / "prometheus.yml"
    checked = run_tool("promtool", "check", "config", configuration)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_uses_only_existing_metrics(page: str) -> None:
    for written in re.findall(r"`(gpumem_[a-z0-9_{},]+)`", tracked_texts()[page]):
        for name in set(_expanded(written)) - ALERT_KEYS - {package.name for package in PACKAGES}:
            assert name in FAMILIES, written


def _expanded(written: str) -> list[str]:
    """Expand `a_{b,c}_d` to `a_b_d` and `a_c_d`."""
    match = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", written)
    if match is None:
        return [written]
    before, choices, after = match.groups()
    return [name for choice in choices.split(",") for name in _expanded(before + choice + after)]
