"""Draws panels as SVG: lines, stacks and columns over time, heat maps, bars, points."""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping, Sequence
from typing import Any

from gpumem_dashboards.queries import Scope
from gpumem_dashboards.sizes import SERIES, by_threshold, css, text_of, ticks

__all__ = ["bars", "heat_map", "line_chart", "scatter"]

Points = list[tuple[float, float]]
Named = Sequence[tuple[str, Points]]
_LEFT, _BOTTOM, _TOP = 62, 16, 6


def line_chart(
    panel: Mapping[str, Any],
    series: Named,
    scope: Scope,
    step_seconds: float,
    marks: Sequence[tuple[float, str]],
    width: int,
    height: int,
) -> str:
    """Draw series over time with their legend, stacked or as columns if the panel is, with a line for each event."""
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    own = {name: _properties(panel, name) for name, _ in series}
    legend_height = min(14 * len(series), max(28, height // 3))
    tall = height - legend_height - 4
    apart = {name for name, _ in series if "custom.stacking" in own[name] or "unit" in own[name]}
    stacks = (custom.get("stacking") or {}).get("mode") == "normal"
    drawn = _stacked([one for one in series if one[0] not in apart]) if stacks else {}
    values = [
        v
        for name, points in series
        if "unit" not in own[name]
        for v in (
            [edge for _, low, high in drawn[name] for edge in (low, high)] if name in drawn else [v for _, v in points]
        )
    ]
    low, highest = min([*values, 0.0]), max([*values, 0.0])
    high = defaults.get("max") or (highest + (highest - low) * 0.04 if highest > low else 1.0)

    def x(at: float) -> float:
        return _LEFT + (at - scope.start) / scope.range_seconds * (width - _LEFT - 4)

    def y(value: float) -> float:
        return _TOP + (high - value) / ((high - low) or 1) * (tall - _TOP - _BOTTOM)

    parts = [_grid(low, high, defaults["unit"], y, width), _time_axis(scope, x, tall)]
    parts += [
        f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{tall - _BOTTOM}" stroke="{color}"'
        ' stroke-dasharray="3 3"/>'
        for at, color in marks
    ]
    legend = []
    columns = custom.get("drawStyle") == "bars"
    for at, (name, points) in enumerate(series):
        color = _color(own[name], at)
        if name in drawn:
            parts.append(
                _columns(drawn[name], x, y, step_seconds, color)
                if columns
                else _areas(drawn[name], x, y, step_seconds, color)
            )
        else:
            scale = y if "unit" not in own[name] else _own_scale(points, tall)
            dashes = ' stroke-dasharray="6 4"' if "custom.lineStyle" in own[name] else ""
            for piece in _pieces(points, step_seconds):
                line = " ".join(f"{x(t):.1f},{scale(v):.1f}" for t, v in piece)
                parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"{dashes}/>')
        unit = own[name].get("unit", defaults["unit"])
        last, most = text_of(points[-1][1], unit), text_of(max(v for _, v in points), unit)
        legend.append(f'<span><i style="background:{color}"></i>{html.escape(name)} <b>{last}</b> (max {most})</span>')
    return (
        f'<svg width="{width}" height="{tall}">{"".join(parts)}</svg>'
        f'<div class="legend" style="height:{legend_height}px">{"".join(legend)}</div>'
    )


def heat_map(panel: Mapping[str, Any], series: Named, scope: Scope, width: int, height: int) -> str:
    """Draw a heat map with one row per series."""
    thresholds = panel["fieldConfig"]["defaults"]["thresholds"]
    left, row = 170, max(6.0, min(26.0, (height - _BOTTOM - 4) / max(len(series), 1)))
    step = scope.interval_seconds()
    cell = step / scope.range_seconds * (width - left - 4)

    def x(at: float) -> float:
        return left + (at - scope.start) / scope.range_seconds * (width - left - 4)

    parts = []
    for at, (name, points) in enumerate(sorted(series)):
        top = at * row
        if row >= 10:
            parts.append(f'<text x="{left - 6}" y="{top + row * 0.7:.1f}" text-anchor="end">{html.escape(name)}</text>')
        parts += [
            f'<rect x="{max(left, x(t) - cell):.1f}" y="{top:.1f}" width="{cell + 0.3:.1f}" height="{row * 0.9:.1f}"'
            f' fill="{css(by_threshold(v, thresholds))}"/>'
            for t, v in points
        ]
    tall = round(row * len(series)) + _BOTTOM + 4
    return f'<svg width="{width}" height="{tall}">{"".join(parts)}{_time_axis(scope, x, tall)}</svg>'


def bars(panel: Mapping[str, Any], series: Named, height: int) -> str:
    """Draw one bar per series; the longest is as wide as the panel."""
    defaults = panel["fieldConfig"]["defaults"]
    most = max([points[-1][1] for _, points in series] + [1e-9])
    parts = []
    for name, points in series[: max(1, height // 34)]:
        value = points[-1][1]
        fixed = _properties(panel, name).get("color", {}).get("fixedColor")
        color = css(fixed or by_threshold(value, defaults.get("thresholds")) or "green")
        length = max(0.0, value / most * 100)
        parts.append(
            f'<div class="bar"><span>{text_of(value, defaults["unit"])}</span>{html.escape(name)}'
            f'<div style="background:#eceef0"><div style="width:{length:.1f}%;background:{color}"></div></div></div>'
        )
    return "".join(parts)


def scatter(panel: Mapping[str, Any], series: Named, width: int, height: int) -> str:
    """Draw points; the first series is the x value of all others, joined by time."""
    (x_name, across), *others = series
    at_time = dict(across)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    pairs = {name: [(at_time[t], v) for t, v in points if t in at_time] for name, points in others}
    every = [pair for points in pairs.values() for pair in points]
    if not every:
        return '<div class="none">No data</div>'
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    high = max(v for _, v in every) * 1.04
    tall = height - 34

    def x(value: float) -> float:
        return _LEFT + (value - left) / ((right - left) or 1) * (width - _LEFT - 8)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high or 1) * (tall - _TOP - _BOTTOM)

    parts = [_grid(0.0, high, unit, y, width)]
    parts += [
        f'<text x="{x(at):.0f}" y="{tall - 3}" text-anchor="middle">{at:.0f}</text>'
        for at in ticks(left, right, "short", 8)
    ]
    legend = [f"<span>across: {html.escape(x_name)}</span>"]
    for number, (name, points) in enumerate(pairs.items()):
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(v):.1f}" r="1.6" fill="{SERIES[number]}"/>' for a, v in points]
        legend.append(f'<span><i style="background:{SERIES[number]}"></i>{html.escape(name)}</span>')
    return f'<svg width="{width}" height="{tall}">{"".join(parts)}</svg><div class="legend">{"".join(legend)}</div>'


def _properties(panel: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        entry["id"]: entry["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"] == {"id": "byName", "options": name}
        for entry in override["properties"]
    }


def _color(properties: Mapping[str, Any], at: int) -> str:
    fixed = properties.get("color", {}).get("fixedColor")
    return css(fixed) if fixed else SERIES[at % len(SERIES)]


def _stacked(series: Named) -> dict[str, list[tuple[float, float, float]]]:
    """Return (time, lower edge, upper edge) for each series.

    Like Grafana: a series that is mostly negative is stacked down from zero. Any other series is stacked on those
    before it, and reduces the stack where it is negative.
    """
    up: dict[float, float] = {}
    down: dict[float, float] = {}
    made: dict[str, list[tuple[float, float, float]]] = {}
    for name, points in series:
        side = down if sum((v < 0) - (v > 0) for _, v in points) > 0 else up
        edges = made.setdefault(name, [])
        for t, v in points:
            from_edge = side.get(t, 0.0)
            side[t] = from_edge + v
            edges.append((t, min(from_edge, side[t]), max(from_edge, side[t])))
    return made


def _areas(edges: list[tuple[float, float, float]], x: Any, y: Any, step: float, color: str) -> str:
    made = []
    for piece in _pieces(edges, step):
        upper = [f"{x(t):.1f},{y(high):.1f}" for t, _, high in piece]
        lower = [f"{x(t):.1f},{y(low):.1f}" for t, low, _ in reversed(piece)]
        made.append(f'<polygon points="{" ".join(upper + lower)}" fill="{color}" fill-opacity="0.8"/>')
    return "".join(made)


def _columns(edges: list[tuple[float, float, float]], x: Any, y: Any, step: float, color: str) -> str:
    wide = max(1.5, (x(step) - x(0)) * 0.8)
    return "".join(
        f'<rect x="{x(t) - wide:.1f}" y="{y(high):.1f}" width="{wide:.1f}" height="{y(low) - y(high):.1f}"'
        f' fill="{color}"/>'
        for t, low, high in edges
    )


def _pieces(points: Sequence[Any], step: float) -> list[list[Any]]:
    """Split the points into runs without a gap."""
    runs: list[list[Any]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= 1.5 * step:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _own_scale(points: Points, tall: int) -> Any:
    low, high = min(v for _, v in points), max(v for _, v in points)
    return lambda value: _TOP + (high - value) / ((high - low) or 1) * (tall - _TOP - _BOTTOM)


def _grid(low: float, high: float, unit: str, y: Any, width: int) -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{width - 4}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="#eceef0"/>'
        f'<text x="{_LEFT - 5}" y="{y(at) + 3:.1f}" text-anchor="end">{text_of(at, unit)}</text>'
        for at in ticks(low, high, unit)
    )


def _time_axis(scope: Scope, x: Any, tall: int) -> str:
    step = next(
        s
        for s in (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 86400)
        if scope.range_seconds / s <= 9
    )
    first = -(-scope.start // step) * step
    form = "%H:%M:%S" if step < 60 else "%H:%M"
    made = []
    while first <= scope.end:
        text = datetime.datetime.fromtimestamp(first, datetime.timezone.utc).strftime(form)
        made.append(f'<text x="{x(first):.0f}" y="{tall - 3}" text-anchor="middle">{text}</text>')
        first += step
    return "".join(made)
