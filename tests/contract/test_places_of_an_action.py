"""Adding an action touches the files that docs/architecture.md lists, and no others."""

from __future__ import annotations

import re

from gpumem_client.wire.protocol import ACTION_OF_COMMAND
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from tests.support.paths import REPOSITORY

PLAIN = "reset_peak"
"""An action without options of its own, and with a function of the same name in the client's public API."""
PRODUCT = {"": REPOSITORY / "gpumem_exporter", "gpumem_client/": REPOSITORY / "client" / "gpumem_client"}


def test_the_page_lists_the_files_that_name_a_plain_action() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| an action |"))
    named = re.compile(rf'["\']({PLAIN}|{PLAIN.replace("_", "-")})["\']')
    found = set()
    for prefix, folder in PRODUCT.items():
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".js", ".html") and named.search(path.read_text()):
                found.add(prefix + path.relative_to(folder).as_posix())
    # Its public function, and the example of `start(actions=...)`.
    api = {"gpumem_client/__init__.py", "gpumem_client/release.py", "gpumem_client/api.py"}
    assert found - api == set(re.findall(r"`([^`]+)`", row))


def test_the_client_knows_the_commands_of_the_declarations() -> None:
    assert {action: name for name, action in ACTION_OF_COMMAND.items()} == {
        action: name for action, name in COMMAND_NAMES.items() if name != action
    }
