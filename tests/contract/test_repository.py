"""README, docs/, CHANGELOG, deploy/ and grafana/ agree with the code, and what is generated from it is up to date."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
from functools import cache
from importlib.metadata import version

import pytest
import yaml

from gpumem_client.profile.owners import TESTED_TORCH
from gpumem_client.wire.protocol import ACTION_OF_COMMAND
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.application import COMMANDS
from gpumem_exporter.features.policy.policy_routes import RULE
from gpumem_exporter.serve_command import settings_model
from gpumem_exporter.settings import setting_key
from tests.support.packages import PACKAGES
from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import run_tool
from tests.support.truth.metrics_list import METRICS

FAMILIES = {metric.name: metric for metric in METRICS}
PAGES = ("README.md", *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/**/*.md")))
CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
GENERATE = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))
"""The names of docs/generate.py."""
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


# --- What is generated from the code


def without_types_of_options(page: str) -> list[str]:
    """Return the words of a page without placeholders of values, which differ between releases of click."""
    return re.sub(r"<(?:str|int|float)>|\b(?:TEXT|INTEGER|FLOAT)\b|[{}\[\]]", " ", page).split()


@pytest.mark.parametrize("name", ["metrics.md", "command-line.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    made = GENERATE["PAGES"][name]()
    assert without_types_of_options(made) == without_types_of_options(texts()[f"docs/{name}"]), "run docs/generate.py"


def test_the_chart_describes_and_checks_every_value_and_setting_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert readme == runpy.run_path(str(CHART.parent / "build_readme.py"))["readme"](), "run build_readme.py"
    assert [name for name in values if f"| `{name}" not in readme] == []
    written = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert written == GENERATE["chart_schema"](), "run docs/generate.py"
    schema = json.loads(written)["properties"]
    assert schema.keys() - {"global"} == values.keys()
    keys = {setting_key(field) for field in settings_model().model_fields}
    fixed = GENERATE["FIXED_BY_THE_CHART"]
    assert fixed - keys <= {"client.directory"}
    assert schema["settings"]["properties"].keys() == keys - fixed
    rules = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(schema["prometheusRule"]["properties"]["disabled"]["items"]["enum"]) == alerts


# --- Actions, and releases of torch

PLAIN = "reset_peak"
"""An action without options of its own, and with a function of the same name in the client's public API."""
PRODUCT = {"": REPOSITORY / "gpumem_exporter", "gpumem_client/": REPOSITORY / "client" / "gpumem_client"}


def test_the_page_lists_the_files_that_name_a_plain_action() -> None:
    (row,) = (line for line in texts()["docs/architecture.md"].splitlines() if line.startswith("| an action |"))
    named = re.compile(rf'["\']({PLAIN}|{PLAIN.replace("_", "-")})["\']')
    found = {
        prefix + path.relative_to(folder).as_posix()
        for prefix, folder in PRODUCT.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".js", ".html") and named.search(path.read_text())
    }
    # Its public function, and the example of `start(actions=...)`.
    api = {"gpumem_client/__init__.py", "gpumem_client/release.py", "gpumem_client/api.py"}
    assert found - api == set(re.findall(r"`([^`]+)`", row))


def test_the_client_knows_the_commands_of_the_declarations() -> None:
    assert {action: name for name, action in ACTION_OF_COMMAND.items()} == {
        action: name for action, name in COMMAND_NAMES.items() if name != action
    }


def test_documents_and_tests_name_the_releases_of_torch_that_the_client_acts_on() -> None:
    oldest, newest = (".".join(map(str, release)) for release in TESTED_TORCH)
    versions = texts()["docs/versions.md"]
    assert f"name owners with torch {oldest} to {newest} only" in versions
    (row,) = re.findall(r"^\| torch, CUDA build \|.*$", versions, re.MULTILINE)
    assert f"{newest} in" in row
    assert f"| {oldest}.0 |" in row
    assert f'"torch>={oldest}"' in texts()["pyproject.toml"]


@pytest.mark.tools
def test_the_tests_run_with_a_release_in_the_range() -> None:
    """A newer release fails here until TESTED_TORCH has it: profiles would come without owners."""
    installed = tuple(map(int, version("torch").split(".")[:2]))
    assert TESTED_TORCH[0] <= installed <= TESTED_TORCH[1]
