"""Query results in the form of Grafana's panels: named series, and tables after their transformations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Series = Mapping[str, Any]
Row = dict[str, Any]


def named(series: Series, legend: str, expression: str) -> str:
    """Return the name of a series by a legend's pattern."""
    if not legend:
        labels = {name: value for name, value in series["metric"].items() if name != "__name__"}
        return ", ".join(f"{name}={value}" for name, value in labels.items()) or expression[:40]
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: series["metric"].get(found[1], ""), legend).strip()


def table_of(answer: Sequence[Series], value_name: str) -> list[Row]:
    """Return the rows of one table query: its labels, and its value under the given name."""
    rows = []
    for series in answer:
        moment, text = series["values"][-1]
        rows.append({"Time": moment, **series["metric"], value_name: float(text)})
    return rows


def merged(frames: Sequence[Sequence[Row]]) -> list[Row]:
    """Do what Grafana's `merge` does: rows with equal common fields become one, unless they conflict."""
    filled = [frame for frame in frames if frame]
    if not filled:
        return []
    shared = set.intersection(*({name for row in frame for name in row} for frame in filled))
    rows: dict[tuple[Any, ...], list[Row]] = {}
    for frame in filled:
        for row in frame:
            found = rows.setdefault(tuple(row.get(name) for name in sorted(shared)), [])
            for there in found:
                if all(there.get(name, value) == value for name, value in row.items()):
                    there.update(row)
                    break
            else:
                found.append(dict(row))
    return [row for found in rows.values() for row in found]


def transformed(
    rows: list[Row], transformations: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[str, str]], list[Row]]:
    """Return the columns (field, heading) and rows after a panel's transformations except `merge`."""
    columns = [(name, name) for name in dict.fromkeys(name for row in rows for name in row)]
    for transformation in transformations:
        options = transformation["options"]
        if transformation["id"] == "sortBy":
            (by,) = options["sort"]
            rows = sorted(rows, key=lambda row: str(row.get(by["field"], "")))
        elif transformation["id"] == "groupingToMatrix":
            rows, columns = _matrix(rows, options)
        elif transformation["id"] == "organize":
            order, renamed = options["indexByName"], options["renameByName"]
            kept = [name for name, _ in columns if not options["excludeByName"].get(name)]
            kept.sort(key=lambda name: order.get(name, len(order)))
            columns = [(name, renamed.get(name, name)) for name in kept]
    return columns, rows


def _matrix(rows: list[Row], options: Mapping[str, Any]) -> tuple[list[Row], list[tuple[str, str]]]:
    across, down, value = options["columnField"], options["rowField"], options["valueField"]
    corner = f"{down}\\{across}"
    made: dict[str, Row] = {}
    for row in rows:
        made.setdefault(row[down], {corner: row[down]})[row[across]] = row[value]
    headings = dict.fromkeys(row[across] for row in rows)
    return list(made.values()), [(corner, corner), *((name, name) for name in headings)]
