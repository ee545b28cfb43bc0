"""README, docs/, CHANGELOG, deploy/ and grafana/ agree with the code."""

from __future__ import annotations

import contextlib
import re
import subprocess
from functools import cache

import pytest

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.commands import COMMANDS
from gpumem_exporter.features.policy.policy_routes import RULE
from tests.support.metrics_list import METRICS
from tests.support.packages import PACKAGES
from tests.support.paths import REPOSITORY
from tests.support.running_command import run_tool

FAMILIES = {metric.name: metric for metric in METRICS}
PAGES = ("README.md", *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/**/*.md")))
DOCUMENTS = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "deploy/helm/gpumem-exporter/README.md")


@cache
def texts() -> dict[str, str]:
    """Return every text file of the repository by path."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        if path.is_file() and not name.startswith("tests/data/"):
            with contextlib.suppress(UnicodeDecodeError):  # a picture
                found[name] = path.read_text(encoding="utf-8")
    return found


def found(expression: re.Pattern[str]) -> list[str]:
    """Return the occurrences of an expression in the repository as `path: text`."""
    return [f"{name}: {match[0]}" for name, text in texts().items() for match in expression.finditer(text)]


def test_no_text_has_a_path_of_one_machine_or_the_address_of_a_registry() -> None:
    paths = r"(?<![\w.-])/(work|farm|root|home/(?!kubernetes/bin)\w+|opt/gm)/"
    registries = r"pypi[.]org|python[h]osted|deb[.]debian|registry[.]npm|download[.]pytorch"
    assert found(re.compile(f"{paths}|{registries}")) == []


def test_no_text_installs_the_project_by_its_name_from_a_package_index() -> None:
    # Until the project has registered the name, anybody may. A wheel has a path.
    installer = r"\b(?:pip3?|pipx|uvx?)\b"
    words = r"(?:[\s#]+[\w.=:-]+)*[\s#]+"
    by_name = re.compile(rf"{installer}{words}['\"]?gpumem[-_](?:exporter|client|toolkit)\b(?!\S*[.]whl)")
    with_extra = re.compile(r"gpumem[-_](?:exporter|client|toolkit)\[\w")
    assert found(by_name) + found(with_extra) == []


def test_commands_and_scripts_in_the_documentation_exist() -> None:
    commands = set()
    for page in PAGES:
        text = texts()[page]
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
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", texts()[document]):
        target = here / path if path else REPOSITORY / document
        assert target.exists(), f"{document}: {path}"
        if anchor:
            assert anchor in headings(target.read_text(encoding="utf-8")), f"{document}: {path}#{anchor}"


def headings(markdown: str) -> set[str]:
    """Return the anchors of a Markdown text's headings, as on GitHub."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", markdown), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.tools
def test_the_configuration_of_prometheus_is_valid() -> None:
    configuration = REPOSITORY / "deploy" / "prometheus" / "prometheus.yml"
    checked = run_tool("promtool", "check", "config", configuration)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_uses_only_existing_metrics(page: str) -> None:
    for written in re.findall(r"`(gpumem_[a-z0-9_{},]+)`", texts()[page]):
        for name in set(_expanded(written)) - {RULE, "gpumem_action"} - {package.name for package in PACKAGES}:
            assert name in FAMILIES, written


def test_the_documentation_has_exactly_the_reason_codes() -> None:
    section = texts()["docs/actions.md"].partition("## Reason codes")[2].partition("\n## ")[0]
    first_column = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z0-9_]+)`", first_column)) == {"reason_code", *(code.value for code in ReasonCode)}


def _expanded(written: str) -> list[str]:
    """Expand `a_{b,c}_d` to `a_b_d` and `a_c_d`."""
    match = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", written)
    if match is None:
        return [written]
    before, choices, after = match.groups()
    return [name for choice in choices.split(",") for name in _expanded(before + choice + after)]
