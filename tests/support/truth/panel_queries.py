"""Reads a dashboard's JSON as Grafana does: its variables, its queries with all macros replaced, and their results."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import promql_parser as promql

from tests.support.paths import REPOSITORY

_LABEL_VALUES = re.compile(r"label_values\((?:(?P<match>.+),\s*)?(?P<label>\w+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a dashboard."""

    where: str
    """The dashboard, the panel (or variable, annotation) and the query's letter."""
    expression: str
    """PromQL with Grafana's macros and variables."""
    instant: bool = False
    """Evaluated only at the end of the time range."""
    legend: str = ""
    """The pattern of a series's name."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A time range and the values of the variables."""

    end: float
    """Unix seconds."""
    range_seconds: int = 3600
    scrape_seconds: float = 15.0
    """The scrape interval of the data source."""
    points: int = 240
    """The maximum number of points in a panel."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The values by name; `.*` for all."""

    @property
    def start(self) -> float:
        """The start of the time range in Unix seconds."""
        return self.end - self.range_seconds

    @property
    def interval_seconds(self) -> float:
        """The time between two points, in whole scrapes."""
        scrapes = -(-self.range_seconds // (self.points * self.scrape_seconds))
        return scrapes * self.scrape_seconds

    def fill(self, expression: str) -> str:
        """Return the expression with all macros and variables replaced."""
        interval = self.interval_seconds
        macros = {
            "__range_s": f"{self.range_seconds}",
            "__range": f"{self.range_seconds}s",
            "__interval": _duration(interval),
            "__rate_interval": _duration(max(interval + self.scrape_seconds, 4 * self.scrape_seconds)),
            **self.variables,
        }
        return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda found: macros[found[1] or found[2]], expression)


def all_panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel that is not a row, including the panels in collapsed rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    """Yield every query of panels and annotations; `resolve` evaluates the queries of variables."""
    for panel in all_panels(dashboard):
        for target in panel["targets"]:
            where = f"{dashboard['uid']} / {panel['title']} / {target['refId']}"
            yield Query(where, target["expr"], bool(target.get("instant")), target.get("legendFormat", ""))
    for annotation in dashboard["annotations"]["list"]:
        yield Query(f"{dashboard['uid']} / annotation {annotation['name']}", annotation["expr"])


def nodes(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every node with its ancestors, the parent last."""
    yield tree, above
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        inner = getattr(tree, name, None)
        if isinstance(inner, promql.Expr):
            yield from nodes(inner, (*above, tree))
    for inner in getattr(tree, "args", None) or ():
        yield from nodes(inner, (*above, tree))


def selectors(tree: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every selector of series with its ancestors."""
    return ((node, above) for node, above in nodes(tree) if isinstance(node, promql.VectorSelector))


class Prometheus:
    """A Prometheus server's API.

    Args:
        url: `http://host:port`.
        timeout_seconds: the timeout of each request.
    """

    def __init__(self, url: str, timeout_seconds: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds

    def instant(self, expression: str, at: float) -> list[dict[str, Any]]:
        """Return the series of an instant query: `metric` and `values`, a list of one (time, text)."""
        data = self._ask("query", query=expression, time=f"{at:.3f}")
        if data["resultType"] == "scalar":
            return [{"metric": {}, "values": [data["result"]]}]
        return [{"metric": series["metric"], "values": [series["value"]]} for series in data["result"]]

    def label_values(self, selector: str, label: str, start: float, end: float) -> list[str]:
        """Return the values of a label on the series of a selector, in natural order."""
        parameters = {"match[]": selector, "start": f"{start:.3f}", "end": f"{end:.3f}"}
        return sorted(self._ask(f"label/{label}/values", **parameters), key=_natural)

    def ask(self, query: Query, scope: Scope) -> list[dict[str, Any]]:
        """Return the series of a dashboard's query: `metric` and `values`, a list of (time, text)."""
        expression = scope.fill(query.expression)
        if query.instant:
            return self.instant(expression, scope.end)
        step = scope.interval_seconds
        # Like Grafana: points at whole steps, so that they do not move with each refresh.
        start, end = scope.start // step * step, scope.end // step * step
        return self.points(expression, start, max(start, end), step)

    def points(self, expression: str, start: float, end: float, step_seconds: float) -> list[dict[str, Any]]:
        """Return the series of a range query: `metric` and `values`, a list of (time, text)."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_seconds:g}"}
        return list(self._ask("query_range", query=expression, **times)["result"])

    def _ask(self, what: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_seconds) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.read().decode(errors='replace')}\n{parameters}") from error


def resolve(dashboard: Mapping[str, Any], prometheus: Prometheus, scope: Scope) -> dict[str, str]:
    """Return the value of each variable when the dashboard is opened, unless the scope has one.

    A variable with multiple values is set to all, another one to its first value, or empty if there is none.
    """
    chosen: dict[str, str] = dict(scope.variables)
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] != "query" or name in chosen:
            continue
        if variable.get("includeAll"):
            chosen[name] = variable["allValue"]
            continue
        match = _LABEL_VALUES.fullmatch(variable["query"])
        assert match is not None, f"no label_values: {variable['query']}"
        selector = replace(scope, variables=chosen).fill(match["match"])
        values = prometheus.label_values(selector, match["label"], scope.start, scope.end)
        chosen[name] = values[0] if values else ""
    return chosen


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


# The project's dashboards


def load_dashboard(name: str) -> dict[str, Any]:
    """Return the JSON of a dashboard of the project."""
    return dict(json.loads((REPOSITORY / "grafana" / "dashboards" / f"{name}.json").read_text(encoding="utf-8")))


def panel_of(document: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the panel with a title."""
    (panel,) = (panel for panel in all_panels(document) if panel["title"] == title)
    return dict(panel)


def expression(name: str, title: str, letter: str = "A", range_seconds: int = 1800, **variables: str) -> str:
    """Return a query of a panel, as Prometheus receives it."""
    document = load_dashboard(name)
    (target,) = (target for target in panel_of(document, title)["targets"] if target["refId"] == letter)
    standing = {variable["name"]: ".*" for variable in document["templating"]["list"]} | variables
    return Scope(0.0, range_seconds, scrape_seconds=15, variables=standing).fill(target["expr"])


def letter_of(name: str, title: str, heading: str) -> str:
    """Return the letter of the query of a table's column."""
    changes = panel_of(load_dashboard(name), title)["transformations"]
    (organize,) = (change for change in changes if change["id"] == "organize")
    (column,) = (column for column, shown in organize["options"]["renameByName"].items() if shown == heading)
    return str(column).removeprefix("Value #")
