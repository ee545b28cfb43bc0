"""What every dashboard must keep to. Each rule takes a dashboard's JSON and yields what is wrong, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser as promql
from gpumem_dashboards.queries import Query, Scope, all_panels, queries

from gpumem_exporter.collectors.catalog import METRICS

__all__ = ["RULES", "UNITS", "parsed", "selectors"]

Dashboard = dict[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"binBps", "bytes", "cps", "dateTimeAsIso", "none", "percentunit", "s", "short", "string"}
VARIABLES = {
    "gpumem-fleet": ["datasource", "node", "gpu", "workload"],
    "gpumem-node": ["datasource", "node", "gpu", "workload", "rank"],
    "gpumem-workload": ["datasource", "node", "workload", "rank", "gpu"],
    "gpumem-oom": ["datasource", "node", "gpu", "workload", "rank", "pid"],
    "gpumem-exporter": ["datasource", "node"],
}
ONE_OF = {
    "gpumem-fleet": ["one_node", "one_workload"],
    "gpumem-node": ["one_workload"],
    "gpumem-workload": ["one_node"],
    "gpumem-oom": ["one_workload"],
    "gpumem-exporter": ["one_node"],
}
"""Hidden variables for links from a variable of several to one of a single value."""
SINGLE = {
    "gpumem-fleet": set(),
    "gpumem-node": {"node"},
    "gpumem-workload": {"workload"},
    "gpumem-oom": {"node", "pid"},
    "gpumem-exporter": set(),
}
COUNTERS = {metric.name for metric in METRICS if metric.type == "counter"} | {"process_cpu_seconds_total"}
LABELS = {label for metric in METRICS for label in metric.labels} | {"instance", "job", "le", "x_from", "x_to"}
RATES = {"rate", "increase"}
WITH_LEGEND = {"timeseries", "status-history", "xychart"}
AT_THE_END = {"stat", "bargauge", "table"}


class _Sentinel(dict[str, str]):
    """Stands at a word of its own for each variable."""

    def __missing__(self, name: str) -> str:
        return f"<{name}>"


def parsed(expression: str) -> Any:
    """The expression's tree; each variable in it is its name in angle brackets."""
    lists = (*VARIABLES.values(), *ONE_OF.values())
    names = {name: f"<{name}>" for names in lists for name in names}
    return promql.parse(Scope(0.0, variables=names).fill(expression))


def nodes(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every node with those above it, the nearest last."""
    yield tree, above
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        inner = getattr(tree, name, None)
        if isinstance(inner, promql.Expr):
            yield from nodes(inner, (*above, tree))
    for inner in getattr(tree, "args", None) or ():
        yield from nodes(inner, (*above, tree))


def selectors(tree: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every selector of series with what is above it."""
    return ((node, above) for node, above in nodes(tree) if isinstance(node, promql.VectorSelector))


def asked(dashboard: Dashboard) -> Iterator[Query]:
    """Every query, those of variables included."""
    yield from queries(dashboard)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"], re.DOTALL)
            yield Query(f"{dashboard['uid']} / variable {variable['name']}", selector[1] if selector else "")


def panels_say_what_they_show(dashboard: Dashboard) -> Iterator[str]:
    titles: set[str] = set()
    for panel in all_panels(dashboard):
        title = panel.get("title", "")
        if not title:
            yield f"panel {panel.get('id')} has no title"
        if title in titles:
            yield f"{title}: two panels have this title"
        titles.add(title)
        description = panel.get("description") or ""
        if len(description) < 40 or not description.endswith("."):
            yield f"{title}: the description does not say in a sentence how to read it: {description!r}"
        unit = panel["fieldConfig"]["defaults"].get("unit")
        if unit not in UNITS:
            yield f"{title}: the unit {unit!r} is none of {sorted(UNITS)}"
        for override in panel["fieldConfig"]["overrides"]:
            for entry in override["properties"]:
                if entry["id"] == "unit" and entry["value"] not in UNITS:
                    yield f"{title}: the unit {entry['value']!r} of {override['matcher']['options']!r} is not known"


def everything_is_numbered(dashboard: Dashboard) -> Iterator[str]:
    ids = [panel.get("id") for panel in dashboard["panels"]]
    if None in ids or len(set(ids)) != len(ids):
        yield f"panels need an id each: {ids}"
    for panel in all_panels(dashboard):
        letters = [target.get("refId") for target in panel["targets"]]
        if not letters:
            yield f"{panel['title']}: asks nothing"
        if None in letters or "" in letters or len(set(letters)) != len(letters):
            yield f"{panel['title']}: queries need a refId each: {letters}"


def all_data_comes_from_the_chosen_source(dashboard: Dashboard) -> Iterator[str]:
    sources = [(panel["title"], panel.get("datasource")) for panel in all_panels(dashboard)]
    sources += [(p["title"], target.get("datasource")) for p in all_panels(dashboard) for target in p["targets"]]
    sources += [(v["name"], v.get("datasource")) for v in dashboard["templating"]["list"] if v["type"] == "query"]
    sources += [(a["name"], a.get("datasource")) for a in dashboard["annotations"]["list"]]
    for where, source in sources:
        if source != SOURCE:
            yield f"{where}: the data source is {source}, not the variable's"


def panels_lie_side_by_side(dashboard: Dashboard) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if x >= 24 or (x, y) in taken:
                    yield f"{panel['title']}: lies over {taken.get((x, y), 'the edge')}"
                    return
                taken[x, y] = panel["title"]


def panels_ask_and_show_what_their_kind_needs(dashboard: Dashboard) -> Iterator[str]:
    for panel in all_panels(dashboard):
        title, kind = panel["title"], panel["type"]
        for target in panel["targets"]:
            wanted = ("instant", "range") if kind in AT_THE_END else ("range", "instant")
            if not target.get(wanted[0]) or target.get(wanted[1]):
                yield f"{title} / {target['refId']}: a {kind} asks {wanted[0]} queries only"
            if (kind == "table") != (target.get("format") == "table"):
                yield f"{title} / {target['refId']}: the format {target.get('format')} is not for a {kind}"
        if kind in ("stat", "bargauge") and panel["options"]["reduceOptions"]["calcs"] != ["lastNotNull"]:
            yield f"{title}: shows something else than the last value"
        if kind in WITH_LEGEND and not panel["options"]["legend"].get("showLegend"):
            yield f"{title}: the legend is not shown"
        for transformation in panel.get("transformations") or ():
            if transformation.get("options") is None or transformation.get("disabled"):
                yield f"{title}: the transformation {transformation['id']} has no options"


def variables_are_the_agreed_ones_and_follow_the_time(dashboard: Dashboard) -> Iterator[str]:
    listed = dashboard["templating"]["list"]
    names = [variable["name"] for variable in listed]
    wanted = VARIABLES[dashboard["uid"]] + ONE_OF[dashboard["uid"]]
    if names != wanted:
        yield f"the variables are {names}, not {wanted}"
    single = {v["name"] for v in listed if v["type"] == "query" and not v.get("multi") and not v.get("hide")}
    if single != SINGLE[dashboard["uid"]]:
        yield f"one value alone can be chosen of {single}, not of {SINGLE[dashboard['uid']]}"
    if listed[0]["type"] != "datasource" or listed[0]["query"] != "prometheus":
        yield "the first variable is not the data source"
    for variable in listed[1:]:
        name = variable["name"]
        if not re.fullmatch(r"label_values\(.+, \w+\)", variable.get("query", ""), re.DOTALL):
            yield f"{name}: not filled from a label: {variable.get('query')}"
        if variable.get("refresh") != 2:
            yield f"{name}: does not follow the time that is shown"
        if variable.get("multi") != variable.get("includeAll"):
            yield f"{name}: several may be chosen, or all, but not both"
        if variable.get("includeAll") and variable.get("allValue") != ".*":
            yield f"{name}: all leaves out series without the label"
        if not variable.get("label"):
            yield f"{name}: has no label"
        if name.startswith("one_") != (variable.get("hide") == 2 and bool(variable.get("skipUrlSync"))):
            yield f"{name}: shown, or kept in the address, though it only follows another one; or the other way round"


def variables_are_matched_as_they_are_chosen(dashboard: Dashboard) -> Iterator[str]:
    several = {variable["name"]: bool(variable.get("multi")) for variable in dashboard["templating"]["list"]}
    for query in asked(dashboard):
        for name in re.findall(r"\$\{?([a-z]+)", query.expression):
            if name not in several:
                yield f"{query.where}: there is no variable {name}"
            wanted = rf'=~"\${name}"' if several.get(name) else rf'!?="\${name}"'
            if len(re.findall(wanted, query.expression)) != len(re.findall(rf"\${name}\b", query.expression)):
                yield f"{query.where}: ${name} is not matched by {'=~' if several.get(name) else '='}"


def every_selector_names_its_nodes(dashboard: Dashboard) -> Iterator[str]:
    of_variable = f"{dashboard['uid']} / variable node"
    for query in asked(dashboard):
        for selector, _ in selectors(parsed(query.expression)):
            chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            if chosen.get("instance") != "<node>" and query.where != of_variable:
                yield f"{query.where}: {selector.name} is asked of every node"


def counters_are_only_asked_for_their_increase(dashboard: Dashboard) -> Iterator[str]:
    for query in asked(dashboard):
        if "$__interval" in query.expression:
            yield f"{query.where}: $__interval may be shorter than two scrapes; $__rate_interval never is"
        for selector, above in selectors(parsed(query.expression)):
            name = (selector.name or "").removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            is_counter = selector.name in COUNTERS or name == "gpumem_action_duration_seconds"
            calls = [node.func.name for node in above if isinstance(node, promql.Call)]
            if is_counter and not (calls and calls[-1] in RATES):
                yield f"{query.where}: {selector.name} is a counter, asked without rate() or increase()"
            if not is_counter and calls and calls[-1] in RATES:
                yield f"{query.where}: {selector.name} is no counter, asked with {calls[-1]}()"
        for window in re.findall(r"\[([^\]]*)\]", query.expression):
            if window.split(":")[0] not in ("$__rate_interval", "$__range"):
                yield f"{query.where}: the window [{window}] does not follow what is shown"


def a_pid_is_one_process_of_one_node(dashboard: Dashboard) -> Iterator[str]:
    """Joins and groups: without the node, two processes of one pid become one."""
    for query in asked(dashboard):
        for node, _ in nodes(parsed(query.expression)):
            grouping = isinstance(node, promql.AggregateExpr) and node.modifier is not None
            if grouping and "pid" in node.modifier.labels and "instance" not in node.modifier.labels:
                yield f"{query.where}: grouped by pid without instance"
            matching = node.modifier.matching if isinstance(node, promql.BinaryExpr) and node.modifier else None
            if matching is not None:
                on = set(matching.labels)
                if "instance" not in on and "workload" not in on:
                    yield f"{query.where}: joined on {sorted(on)}, which leaves out the node"
                about = [selector.name for selector, _ in selectors(node.rhs)]
                if about == ["gpumem_process_info"] and on != {"instance", "pid"}:
                    yield f"{query.where}: the info of a process is joined on {sorted(on)}"


def count_values_survives_a_known_bug(dashboard: Dashboard) -> Iterator[str]:
    """Prometheus to 2.42 sorts the grouping of a count_values in place, its new label included."""
    for query in asked(dashboard):
        for grouping, label in re.findall(r'count_values by \(([^)]*)\) \("(\w+)"', query.expression):
            names = [*re.split(r",\s*", grouping), label]
            if names != sorted(names):
                yield f"{query.where}: {names} is not in order, which breaks range queries"


def no_recording_rule_and_no_unknown_label(dashboard: Dashboard) -> Iterator[str]:
    for query in asked(dashboard):
        tree = parsed(query.expression)
        for selector, _ in selectors(tree):
            if ":" in (selector.name or ""):
                yield f"{query.where}: {selector.name} is there only where recording rules are loaded"
            used = {matcher.name for matcher in selector.matchers.matchers} - {"__name__"}
            if used - LABELS:
                yield f"{query.where}: no metric has the label {sorted(used - LABELS)}"
        shown = set(re.findall(r"{{(\w+)}}", query.legend))
        if shown - LABELS:
            yield f"{query.where}: the legend shows labels that are not there: {sorted(shown - LABELS)}"


def links_at_the_top_lead_to_every_other_dashboard_with_time_and_variables(dashboard: Dashboard) -> Iterator[str]:
    here = dashboard["uid"]
    by_target = {link["url"].removeprefix("/d/").partition("?")[0]: link for link in dashboard["links"]}
    if by_target.keys() != VARIABLES.keys() - {here}:
        yield f"the links lead to {sorted(by_target)}"
    for target, link in by_target.items():
        if not link.get("keepTime") or link.get("includeVars"):
            yield f"the link to {target} loses the time, or takes along all of several where one alone can be chosen"
        chosen = link["url"].partition("?")[2].split("&")
        for name in VARIABLES[target]:
            if name not in VARIABLES[here]:
                continue
            narrowed = name in SINGLE[target] - SINGLE[here]
            # A post-mortem of all nodes' errors begins with the first that has one.
            wanted = f"var-{name}=${{one_{name}:percentencode}}" if narrowed else f"${{{name}:queryparam}}"
            if wanted not in chosen and not (narrowed and target == "gpumem-oom"):
                yield f"the link to {target} does not say {wanted}"
        if len(set(chosen)) != len(chosen):
            yield f"the link to {target} says something twice: {chosen}"


def links_lead_to_a_dashboard_with_time_and_variables(dashboard: Dashboard) -> Iterator[str]:
    addresses = [
        (panel["title"], link["url"])
        for panel in all_panels(dashboard)
        for link in (
            *(panel["fieldConfig"]["defaults"].get("links") or ()),
            *(
                link
                for override in panel["fieldConfig"]["overrides"]
                for entry in override["properties"]
                if entry["id"] == "links"
                for link in entry["value"]
            ),
        )
    ]
    for annotation in dashboard["annotations"]["list"]:
        addresses += [(annotation["name"], url) for url in re.findall(r'href="([^"]+)"', annotation["textFormat"])]
    for where, url in addresses:
        target = re.match(r"/d/([\w-]+)\?", url)
        if target is None or target[1] not in VARIABLES:
            yield f"{where}: leads to no dashboard: {url}"
            continue
        if "${__url_time_range}" not in url and not ("&from=" in url or ("?from=" in url and "&to=" in url)):
            yield f"{where}: loses the time: {url}"
        if "${datasource:queryparam}" not in url and "href" not in where and where != "Out of memory":
            yield f"{where}: loses the data source: {url}"
        if not re.search(r"var-node=|\$\{node:queryparam\}", url) and target[1] != "gpumem-workload":
            yield f"{where}: does not say which node: {url}"
        for name in re.findall(r"var-(\w+)=", url):
            if name not in VARIABLES[target[1]]:
                yield f"{where}: {target[1]} has no variable {name}"


def links_are_filled_from_what_is_there(dashboard: Dashboard) -> Iterator[str]:
    """Grafana looks for a column by name, by number and by heading, in that order; what is not found is empty."""
    for panel in all_panels(dashboard):
        names = _columns(panel)
        for override in panel["fieldConfig"]["overrides"]:
            for entry in override["properties"]:
                for url in (link["url"] for link in entry["value"]) if entry["id"] == "links" else ():
                    for field in re.findall(r"\$\{__data\.fields([^:}]*)", url):
                        if field.lstrip(".").partition(".")[0] not in names:
                            yield f"{panel['title']}: a link asks for the column {field!r}, of {sorted(names)}"


def cells_say_what_their_labels_say(dashboard: Dashboard) -> Iterator[str]:
    """Grafana formats a label that looks like a number by the unit of its column, and an empty one as "no value"."""
    for panel in all_panels(dashboard):
        if panel["type"] != "table":
            continue
        shown = {
            override["matcher"]["options"]: {entry["id"]: entry["value"] for entry in override["properties"]}
            for override in panel["fieldConfig"]["overrides"]
        }
        for heading in _labels(panel):
            if shown.get(heading, {}).get("unit") != "string":
                yield f"{panel['title']}: {heading} is shown with a unit where it is a number"
        if panel["fieldConfig"]["defaults"].get("noValue") and shown.get(".*", {}).get("noValue") != "":
            yield f"{panel['title']}: an empty cell says what an empty table says"


def _columns(panel: dict[str, Any]) -> set[str]:
    """What the columns of a table are called, by name and by heading."""
    names: set[str] = set()
    for transformation in panel.get("transformations") or ():
        options = transformation["options"]
        if transformation["id"] == "organize":
            names |= {*options["indexByName"], *options["renameByName"].values()}
    headed = (override["properties"] for override in panel["fieldConfig"]["overrides"])
    return names | {entry["value"] for entries in headed for entry in entries if entry["id"] == "displayName"}


def _labels(panel: dict[str, Any]) -> Iterator[str]:
    """By what a table's columns of labels are matched."""
    for transformation in panel["transformations"]:
        options = transformation["options"]
        if transformation["id"] == "organize":
            labels = (name for name in options["indexByName"] if not name.startswith("Value"))
            yield from (options["renameByName"].get(name, name) for name in labels)
        if transformation["id"] == "groupingToMatrix":
            yield f"{options['rowField']}\\{options['columnField']}"


def downward_links_are_there(dashboard: Dashboard) -> Iterator[str]:
    wanted = {
        "gpumem-fleet": {"gpumem-node", "gpumem-workload", "gpumem-oom"},
        "gpumem-node": {"gpumem-workload", "gpumem-oom"},
        "gpumem-workload": {"gpumem-node", "gpumem-oom"},
        "gpumem-oom": {"gpumem-workload", "gpumem-oom"},
        "gpumem-exporter": set(),
    }
    inside = {**dashboard, "links": []}
    missing = wanted[dashboard["uid"]] - set(re.findall(r"/d/([\w-]+)\?", str(inside)))
    if missing:
        yield f"nothing leads to {sorted(missing)}"


def events_are_marked(dashboard: Dashboard) -> Iterator[str]:
    by_name = {annotation["name"]: annotation for annotation in dashboard["annotations"]["list"]}
    wanted = {"Actions": "gpumem_actions_total"}
    if dashboard["uid"] != "gpumem-exporter":
        wanted["Out of memory"] = "gpumem_last_oom_timestamp_seconds"
    for name, metric in wanted.items():
        annotation = by_name.get(name, {})
        if metric not in annotation.get("expr", "") or not annotation.get("enable"):
            yield f"{name} is not marked"
        if name == "Out of memory" and not annotation.get("useValueForTime"):
            yield "errors are marked where they are known of, not where they happened"


def it_can_be_found_and_edited(dashboard: Dashboard) -> Iterator[str]:
    if dashboard.get("uid") not in VARIABLES:
        yield f"unknown uid {dashboard.get('uid')}"
    if "gpumem" not in dashboard.get("tags", ()) or not dashboard.get("title") or not dashboard.get("description"):
        yield "needs the tag gpumem, a title and a description"
    if not dashboard.get("editable"):
        yield "cannot be edited by whoever copies it"
    if dashboard.get("schemaVersion") != 42:
        yield f"schema version {dashboard.get('schemaVersion')}"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        panels_say_what_they_show,
        everything_is_numbered,
        all_data_comes_from_the_chosen_source,
        panels_lie_side_by_side,
        panels_ask_and_show_what_their_kind_needs,
        variables_are_the_agreed_ones_and_follow_the_time,
        variables_are_matched_as_they_are_chosen,
        every_selector_names_its_nodes,
        counters_are_only_asked_for_their_increase,
        a_pid_is_one_process_of_one_node,
        count_values_survives_a_known_bug,
        no_recording_rule_and_no_unknown_label,
        links_at_the_top_lead_to_every_other_dashboard_with_time_and_variables,
        links_lead_to_a_dashboard_with_time_and_variables,
        links_are_filled_from_what_is_there,
        cells_say_what_their_labels_say,
        downward_links_are_there,
        events_are_marked,
        it_can_be_found_and_edited,
    )
}
