"""Draws a dashboard as one HTML page with the real results of its queries, in a simple form; not in Grafana."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpumem_dashboards.charts import bars, heat_map, line_chart, scatter
from gpumem_dashboards.frames import merged, named, table_of, transformed
from gpumem_dashboards.queries import Prometheus, Query, Scope, variable_values
from gpumem_dashboards.sizes import by_threshold, css, text_of

__all__ = ["PAGE_WIDTH", "render"]

PAGE_WIDTH = 1600
_UNIT = 36
_GAP = 6
_HEAD = 92
_STYLE = """
body{margin:0;font:12px/1.35 "DejaVu Sans",sans-serif;background:#f4f5f5;color:#24292e;position:relative}
header{padding:10px 14px}
h1{font-size:20px;margin:0 0 4px}
header p{margin:2px 0;color:#555}
header b{color:#a3162a}
section{position:absolute;background:#fff;border:1px solid #d8dadd;border-radius:3px;overflow:hidden;padding:5px 8px;
box-sizing:border-box}
h2{font-size:12px;margin:0 0 3px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
h3{position:absolute;font-size:14px;margin:0;padding:9px 4px;left:8px}
table{border-collapse:collapse;width:100%;font-size:11px}
td,th{padding:2px 5px;border-bottom:1px solid #eceef0;text-align:right;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis;max-width:170px}
th{color:#666;font-weight:600}
td.t,th.t{text-align:left}
.big{font-size:22px;font-weight:600;text-align:center;overflow:hidden}
.big small{font-size:11px;display:block;font-weight:400}
.none{color:#888;text-align:center;padding-top:12px}
.legend{font-size:10px;line-height:14px;display:flex;flex-wrap:wrap;align-content:flex-start;column-gap:14px;overflow:hidden}
.legend i{display:inline-block;width:9px;height:9px;margin-right:4px}
.bar{position:relative;margin-bottom:3px}
.bar div{height:13px}
.bar span{float:right;font-weight:600}
.meter{display:inline-block;height:9px;margin-right:5px;vertical-align:middle}
svg text{font-size:10px;fill:#666}
"""


def render(dashboard: Mapping[str, Any], prometheus: Prometheus, scope: Scope) -> tuple[str, int]:
    """Return the page and its height in pixels. The scope has a value for each variable of the dashboard."""
    placed, height = _placed(dashboard, prometheus, scope)
    marks = _marks(dashboard, prometheus, scope)
    parts = [_header(dashboard, scope)]
    for panel, x, y, chosen in placed:
        top = _HEAD + y * _UNIT
        if panel["type"] == "row":
            parts.append(f'<h3 style="top:{top}px">{html.escape(_titled(panel["title"], chosen))}</h3>')
            continue
        width = panel["gridPos"]["w"] * (PAGE_WIDTH - 16) // 24 - _GAP
        tall = panel["gridPos"]["h"] * _UNIT - _GAP
        left = 8 + x * (PAGE_WIDTH - 16) // 24
        inside = _panel(panel, prometheus, chosen, marks, width - 18, tall - 34)
        parts.append(
            f'<section style="left:{left}px;top:{top}px;width:{width}px;height:{tall}px">'
            f"<h2>{html.escape(_titled(panel['title'], chosen))}</h2>{inside}</section>"
        )
    total = _HEAD + height * _UNIT + 8
    title = html.escape(dashboard["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<body style="width:{PAGE_WIDTH}px;height:{total}px">{"".join(parts)}</body></html>',
        total,
    )


def _header(dashboard: Mapping[str, Any], scope: Scope) -> str:
    hidden = {variable["name"] for variable in dashboard["templating"]["list"] if variable.get("hide")}
    shown = " · ".join(
        f"{name}: {'all' if value == '.*' else value or 'none'}"
        for name, value in scope.variables.items()
        if name not in hidden
    )
    span = f"{text_of(scope.start * 1000, 'dateTimeAsIso')} to {text_of(scope.end * 1000, 'dateTimeAsIso')}"
    return (
        f"<header><h1>{html.escape(dashboard['title'])}</h1><p><b>The answers to this dashboard's queries, drawn by"
        f" grafana/preview.py. This is not Grafana, which looks different.</b></p>"
        f"<p>{html.escape(span)} · {html.escape(shown)}</p></header>"
    )


def _placed(
    dashboard: Mapping[str, Any], prometheus: Prometheus, scope: Scope
) -> tuple[list[tuple[dict[str, Any], int, int, Scope]], int]:
    """Yield each panel with its position and its variables; a repeated row appears once for each value."""
    rows: list[tuple[dict[str, Any] | None, list[dict[str, Any]]]] = [(None, [])]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append((panel, []))
        else:
            rows[-1][1].append(panel)
    placed: list[tuple[dict[str, Any], int, int, Scope]] = []
    offset = 0
    for row, panels in rows:
        top = row["gridPos"]["y"] if row else 0
        for place, chosen in enumerate(_repetitions(dashboard, row, prometheus, scope)):
            height = 1 + max((p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels), default=top + 1) - top - 1
            offset += height if place else 0
            placed += [
                (p, p["gridPos"]["x"], p["gridPos"]["y"] + offset, chosen) for p in ([row] if row else []) + panels
            ]
    return placed, max(y + panel["gridPos"]["h"] for panel, _, y, _ in placed)


def _repetitions(
    dashboard: Mapping[str, Any], row: Mapping[str, Any] | None, prometheus: Prometheus, scope: Scope
) -> list[Scope]:
    name = (row or {}).get("repeat")
    if not name or scope.variables[name] != ".*":
        return [scope]
    (variable,) = (v for v in dashboard["templating"]["list"] if v["name"] == name)
    values = variable_values(variable, prometheus, scope, scope.variables)
    return [replace(scope, variables={**scope.variables, name: value}) for value in values] or [scope]


def _titled(title: str, scope: Scope) -> str:
    return scope.fill(title)


def _marks(dashboard: Mapping[str, Any], prometheus: Prometheus, scope: Scope) -> list[tuple[float, str]]:
    """Return the times of the events and the color of their line."""
    marks = []
    for annotation in dashboard["annotations"]["list"]:
        answer = prometheus.ask(Query("", annotation["expr"]), scope)
        for series in answer:
            for moment, text in series["values"]:
                at = float(text) / 1000 if annotation.get("useValueForTime") else float(moment)
                marks.append((at, css(annotation["iconColor"])))
    return sorted({mark for mark in marks if scope.start <= mark[0] <= scope.end})


def _panel(
    panel: dict[str, Any], prometheus: Prometheus, scope: Scope, marks: list[tuple[float, str]], width: int, height: int
) -> str:
    if panel.get("timeFrom"):
        hours = int(panel["timeFrom"].removesuffix("h"))
        scope = replace(scope, range_seconds=hours * 3600)
    smallest = _smallest_seconds(panel)
    if panel.get("maxDataPoints"):
        scope = replace(scope, points=int(panel["maxDataPoints"]))
    answers = []
    for target in panel["targets"]:
        query = Query("", target["expr"], bool(target.get("instant")), legend=target.get("legendFormat", ""))
        answers.append((target, prometheus.ask(query, scope, smallest)))
    if not any(answer for _, answer in answers):
        nothing = panel["fieldConfig"]["defaults"].get("noValue", "No data")
        return f'<div class="none">{html.escape(nothing)}</div>'
    if panel["type"] == "table":
        return _table(panel, answers, height)
    series = [
        (named(one, target.get("legendFormat", ""), target["expr"]), [(float(t), float(v)) for t, v in one["values"]])
        for target, answer in answers
        for one in answer
    ]
    if panel["type"] == "stat":
        return _stat(panel, series, height)
    if panel["type"] == "bargauge":
        return bars(panel, series, height)
    if panel["type"] == "status-history":
        return heat_map(panel, series, scope, width, height)
    if panel["type"] == "xychart":
        return scatter(panel, series, width, height)
    return line_chart(panel, series, scope, max(scope.interval_seconds(smallest), 1.0), marks, width, height)


def _smallest_seconds(panel: Mapping[str, Any]) -> float:
    text = panel.get("interval") or "0s"
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def _stat(panel: Mapping[str, Any], series: list[tuple[str, list[tuple[float, float]]]], height: int) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    words = {k: v for mapping in defaults.get("mappings", ()) for k, v in mapping["options"].items()}
    mode = panel["options"].get("textMode", "auto")
    filled = panel["options"].get("colorMode") == "background"
    parts = []
    for name, points in series:
        value = points[-1][1]
        word = words.get(f"{value:g}", {})
        text = word.get("text") or text_of(value, defaults["unit"], defaults.get("decimals"))
        color = css(word.get("color") or by_threshold(value, defaults.get("thresholds")) or "text")
        style = f"background:{color};color:#fff" if filled and color != css("text") else ""
        shown = name if mode == "name" else text
        below = f"<small>{html.escape(name)}</small>" if mode == "value_and_name" else ""
        parts.append(f'<div class="big" style="flex:1;padding:8px 2px;{style}">{html.escape(shown)}{below}</div>')
    return f'<div style="display:flex;gap:4px;height:{height}px">{"".join(parts)}</div>'


def _table(panel: Mapping[str, Any], answers: list[tuple[dict[str, Any], list[dict[str, Any]]]], height: int) -> str:
    several = len(answers) > 1
    frames = [table_of(answer, f"Value #{target['refId']}" if several else "Value") for target, answer in answers]
    columns, rows = transformed(merged(frames), panel.get("transformations", ()))
    defaults = panel["fieldConfig"]["defaults"]
    overrides = {heading: {**defaults, **_override(panel, heading)} for _, heading in columns}
    shown = [(name, heading) for name, heading in columns if not overrides[heading].get("custom.hidden")]
    for by in panel["options"].get("sortBy") or ():
        field = next((name for name, heading in columns if heading == by["displayName"]), "")
        rows = sorted(rows, key=lambda row: _sortable(row.get(field)), reverse=bool(by.get("desc")))
    numbers = {name for name, _ in shown if any(isinstance(row.get(name), float) for row in rows)}
    room = max(1, (height - 20) // 21)
    titles = {name: html.escape(overrides[heading].get("displayName", heading)) for name, heading in shown}
    head = "".join(f'<th class="{"" if name in numbers else "t"}">{title}</th>' for name, title in titles.items())
    body = "".join(
        "<tr>" + "".join(_cell(row.get(name), overrides[heading]) for name, heading in shown) + "</tr>"
        for row in rows[:room]
    )
    more = f'<div class="none">and {len(rows) - room} more</div>' if len(rows) > room else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, float):
        return 1, value, ""
    text = value or ""
    return 0, float(text) if text.isdigit() else 0.0, text


def _override(panel: Mapping[str, Any], heading: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        fits = matcher["options"] == heading if matcher["id"] == "byName" else re.search(matcher["options"], heading)
        if fits:
            found.update({entry["id"]: entry["value"] for entry in override["properties"]})
    return found


def _cell(value: Any, options: Mapping[str, Any]) -> str:
    if isinstance(value, str) and options["unit"] != "string" and re.fullmatch(r"[0-9.]*[0-9]", value):
        value = float(value)  # as Grafana does
    if not isinstance(value, float):
        mapped = {k: v for mapping in options.get("mappings") or () for k, v in mapping["options"].items()}
        text = mapped.get(value, {}).get("text", value) or options.get("noValue", "")
        return f'<td class="t">{html.escape(text)}</td>'
    text = text_of(value, options["unit"], options.get("decimals"))
    kind = (options.get("custom.cellOptions") or {}).get("type", "")
    color = css(by_threshold(value, options.get("thresholds")))
    if kind == "gauge":
        length = round(60 * min(max(value, 0.0), 1.0))
        return f'<td><span class="meter" style="width:{length}px;background:{color}"></span>{text}</td>'
    if kind == "color-background" and color != "transparent":
        return f'<td style="background:{color};color:#fff">{text}</td>'
    return f"<td>{text}</td>"


def loads(path: Any) -> dict[str, Any]:
    """Return the path of a dashboard's file."""
    return dict(json.loads(path.read_text(encoding="utf-8")))
