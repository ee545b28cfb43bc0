"""The queries of the dashboards' files, as Prometheus receives them."""

from __future__ import annotations

import json

from tests.support.panel_queries import Scope, all_panels
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "grafana" / "dashboards"


def expression(dashboard: str, title: str, letter: str = "A", range_seconds: int = 1800, **variables: str) -> str:
    """Return a panel's query with macros and variables replaced."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == title)
    (target,) = (target for target in panel["targets"] if target["refId"] == letter)
    standing = {variable["name"]: ".*" for variable in document["templating"]["list"]} | variables
    return Scope(0.0, range_seconds, scrape_seconds=15, variables=standing).fill(target["expr"])


def letter_of(dashboard: str, title: str, heading: str) -> str:
    """Return the letter of the query of a table's column."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == title)
    (organize,) = (change for change in panel["transformations"] if change["id"] == "organize")
    (name,) = (name for name, shown in organize["options"]["renameByName"].items() if shown == heading)
    return str(name).removeprefix("Value #")
