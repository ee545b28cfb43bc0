"""The common parts of the dashboards: variables, links between them, and annotations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from gpumem_dashboards.panels import SOURCE

TAGS = ["gpu", "pytorch", "gpumem"]
# Sorted, and before the added labels: Prometheus up to 2.42 sorts the list of a count_values in place, including the
# new label, and groups differently at each further point.
_OOM = "cluster, gpu, instance, pid, rank, uuid, workload"
BOARDS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "gpumem-fleet": (
        "Fleet",
        {"cluster": True, "node": True, "gpu": True, "workload": True, "user": True, "namespace": True},
    ),
    "gpumem-node": ("Node", {"cluster": True, "node": False, "gpu": True, "workload": True, "rank": True}),
    "gpumem-workload": ("Workload", {"cluster": True, "node": True, "workload": False, "rank": True, "gpu": True}),
    "gpumem-oom": (
        "OOM post-mortem",
        {"cluster": True, "node": False, "gpu": True, "workload": True, "rank": True, "pid": False},
    ),
    "gpumem-usage": ("Usage", {"cluster": True, "user": True, "namespace": True, "account": True}),
    "gpumem-exporter": ("Exporter", {"cluster": True, "node": True}),
}
"""Each dashboard by uid: the title of links to it, and for each variable whether it has multiple values."""
_LIVE_PAGE = {"live_page": "http://", "live_page_end": "/"}
"""The URL of a node's live page before and after the label `instance`. The Helm chart and the mixin replace both."""
_FROM, _TO = "x_from", "x_to"
_BEFORE_SECONDS, _AFTER_SECONDS = 600, 60


def board(
    title: str,
    uid: str,
    description: str,
    *,
    time: str,
    refresh: str,
    variables: Iterable[tuple[str, str, str, str]],
    first: Iterable[tuple[str, str, str]] = (),
    ooms: str = "",
    actions: str = "",
) -> Any:
    """Build a dashboard without panels: with its variables and annotations, and links to the others.

    The links keep time range and variables. `variables` are name, label, metric and the metric's label of each
    variable after the cluster; `first` are name, metric and the metric's label of each hidden variable `one_NAME`. The
    errors and actions of the selectors `ooms` and `actions` are marked; an empty one marks none.
    """
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(TAGS)
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(time, "now")
        .refresh(refresh)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("cluster", "Cluster", "gpumem_exporter_build_info", "cluster"))
    )
    for name, value in _LIVE_PAGE.items():
        made = made.with_variable(dashboard.ConstantVariable(name).value(value))
    for name, label, metric, value_of in variables:
        made = made.with_variable(_variable(name, label, metric, value_of, several=BOARDS[uid][1][name]))
    for name, metric, value_of in first:
        made = made.with_variable(_first_of(name, metric, value_of))
    if ooms:
        made = made.annotation(_ooms_annotation(ooms))
    if actions:
        made = made.annotation(_actions_annotation(actions))
    for other in BOARDS:
        if other != uid:
            made = made.link(_link_to(other, uid))
    return made


def with_rows(made: Any, *rows: tuple[str, Iterable[Any]], open_rows: int = 100) -> Any:
    """Add rows, each with a title and its panels, to a dashboard. The rows after the first `open_rows` are collapsed.

    A collapsed row queries nothing until it is opened.
    """
    for number, (title, panels) in enumerate(rows):
        if number >= open_rows:
            made = made.with_row(collapsed_row(title, panels))
            continue
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def collapsed_row(title: str, panels: Iterable[Any]) -> Any:
    """Build a collapsed row, which has its panels inside."""
    row = dashboard.Row(title)
    for panel in panels:
        row = row.with_panel(panel)
    return row


def with_live_page(made: Any) -> Any:
    """Add a link to the live page of the dashboard's node."""
    link_ = (
        dashboard.DashboardLink("Live page")
        .type(models.DashboardLinkType.LINK)
        .icon("external link")
        .target_blank(True)
    )
    return made.link(link_.url(live_page("node")))


def live_page(node: str, **values: str) -> str:
    """Return the URL of the live page of a node, with what it selects: Grafana's expressions, as in `link`."""
    chosen = "&".join(f"{name}=${{{value}:percentencode}}" for name, value in values.items())
    return f"${{live_page}}${{{node}}}${{live_page_end}}{'?' if chosen else ''}{chosen}"


def _first_of(name: str, metric: str, value_of: str) -> Any:
    """Build a hidden variable `one_NAME`: the first value of a variable with multiple values.

    Links to a dashboard with a single value use it, because Grafana would pass "all" as "a,b,c".
    """
    made = _variable(f"one_{name}", f"First {name}", metric, value_of, several=False)
    return made.hide(models.VariableHide.HIDE_VARIABLE)


def _variable(name: str, label: str, metric: str, value_of: str, *, several: bool = True) -> Any:
    """Build a variable with the values of a label; with `several`, multiple values and all by default.

    All is `.*`, which includes series without the label.
    """
    query = f"label_values({metric}, {value_of})"
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )
    if not several:
        return made
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def link(uid: str, *kept: str, **values: str) -> str:
    """Return the URL of another dashboard with the same data source and time range, and these variables.

    `kept` are variables of both dashboards. Values are Grafana's expressions, such as `__field.labels.gpu`; other
    variables keep their defaults.
    """
    chosen = "".join(f"&${{{name}:queryparam}}" for name in kept)
    chosen += "".join(f"&var-{name}=${{{value}:percentencode}}" for name, value in values.items())
    return f"/d/{uid}?${{datasource:queryparam}}&${{__url_time_range}}{chosen}"


def post_mortem_times(timestamp: str) -> tuple[str, str]:
    """Return the time range of a post-mortem in milliseconds: from ten minutes before the error to one after it."""
    return (f"floor({timestamp} - {_BEFORE_SECONDS}) * 1000", f"ceil({timestamp} + {_AFTER_SECONDS}) * 1000")


def _ooms_annotation(selector: str) -> Any:
    """Build the annotation of each error at its time, with a link to its post-mortem."""
    happened = f"gpumem_last_oom_timestamp_seconds{{{selector}}}"
    expression = f"{happened} * 1000"
    # Links can only use labels, so both ends of the time range become labels.
    for name, moment in zip((_FROM, _TO), post_mortem_times(happened), strict=True):
        expression += f' * on ({_OOM}) group_left ({name}) count_values by ({_OOM}) ("{name}", {moment})'
    values = {"cluster": "cluster", "node": "instance", "gpu": "gpu", "workload": "workload", "pid": "pid"}
    address = f"/d/gpumem-oom?from={{{{{_FROM}}}}}&to={{{{{_TO}}}}}" + "".join(
        f"&var-{name}={{{{{label}}}}}" for name, label in values.items()
    )
    return (
        _annotation("Out of memory", "orange", expression)
        .title_format("Out of memory: {{workload}} {{rank}} (pid {{pid}})")
        .text_format(f'GPU {{{{gpu}}}} of {{{{instance}}}}. <a href="{address}">Post-mortem</a>')
        .tag_keys("workload,rank")
        .use_value_for_time(True)
    )


def _actions_annotation(selector: str) -> Any:
    """Build the annotation of actions by outcome; they are not counted by device or process."""
    increase = f"increase(gpumem_actions_total{{{selector}}}[$__rate_interval])"
    return (
        _annotation("Actions", "blue", f"sum by (cluster, instance, action, outcome) ({increase}) > 0")
        .title_format("{{action}}: {{outcome}}")
        .text_format("On {{instance}}.")
        .tag_keys("action,outcome")
    )


def encoded(made: Any) -> str:
    """Return the dashboard as Grafana's JSON with numbered panels and a final newline."""
    model = made.build()
    model.annotations.list_val = model.annotations.list_val or []
    for hidden in model.templating.list_val:
        if hidden.hide is models.VariableHide.HIDE_VARIABLE:
            hidden.skip_url_sync = True  # must not be kept longer than the variable it follows; no builder sets it
    panels = [one for panel in model.panels or [] for one in (panel, *(getattr(panel, "panels", None) or ()))]
    for number, panel in enumerate(panels, start=1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2).encode(model) + "\n"


def _link_to(uid: str, here: str) -> Any:
    title, wanted = BOARDS[uid]
    chosen = ["${datasource:queryparam}"]
    for name, several in wanted.items():
        several_here = BOARDS[here][1].get(name)
        if several_here is None:
            continue
        if several or not several_here:
            chosen.append(f"${{{name}:queryparam}}")
        elif uid != "gpumem-oom":  # there, the first one with an error
            chosen.append(f"var-{name}=${{one_{name}:percentencode}}")
    return (
        dashboard.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .icon("dashboard")
        .url(f"/d/{uid}?{'&'.join(chosen)}")
        .keep_time(True)
    )


def _annotation(name: str, color: str, expression: str) -> Any:
    return dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color).expr(expression)
