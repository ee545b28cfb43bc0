"""Exporter: whether the values can be trusted, and the exporter's own resources."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import units

from gpumem_dashboards.frame import board, live_page, with_rows
from gpumem_dashboards.palette import UP, none_is_good
from gpumem_dashboards.panels import columns, count, graph, history, number
from gpumem_dashboards.promql import CLUSTER, EXPORTER_UP, IS_EXPORTER, NODE
from gpumem_dashboards.tables import Column, table

TO_PAGE = ("Live page", live_page("__data.fields.instance"))


def exporter() -> Any:
    """Build the dashboard of the exporters."""
    made = board(
        "GPU memory: exporter",
        "gpumem-exporter",
        "Whether the values can be trusted: polls of the driver, reports, scrapes and rejected data; the"
        " results of actions; and the exporter's own resources.",
        time="now-1h",
        refresh="30s",
        variables=[("node", "Node", f"gpumem_exporter_build_info{{{CLUSTER}}}", "instance")],
        first=[("node", f"gpumem_exporter_build_info{{{NODE}}}", "instance")],
        actions=NODE,
    )
    return with_rows(
        made,
        ("Now", [*_overview(), _exporters()]),
        ("Polls and scrapes", _polls_and_scrapes()),
        ("Reports and events", _reports_and_events()),
        ("Actions", _actions()),
        ("Resources of the exporter", _itself()),
        open_rows=3,
    )


def _overview() -> list[Any]:
    return [
        count(
            "Exporters down",
            "Exporters that Prometheus knew in the time range and cannot scrape now. Nothing is known about"
            " their nodes.",
            f"sum(1 - ({EXPORTER_UP}))",
            bad="red",
        ),
        count(
            "Drivers not answering",
            "Exporters whose driver does not answer, or whose last poll has expired. They show reports of"
            " processes and no devices.",
            f"sum(1 - gpumem_nvml_up{{{NODE}}})",
            bad="red",
        ),
        number(
            "Oldest reading",
            "The age of the oldest driver reading. If it is more than a few seconds, the driver is slow or hangs.",
            f"max(time() - gpumem_poll_timestamp_seconds{{{NODE}}})",
            unit=units.Seconds,
            limits=((None, "green"), (30, "yellow"), (60, "orange")),
        ),
        count(
            "Failed checks",
            "Parts of exporters that are degraded or failing, such as an invalid token file or certificate, or a lost"
            " device. /health of the exporter has the reasons.",
            f"sum(1 - gpumem_health_check_ok{{{NODE}}})",
        ),
        count(
            "Rejected processes",
            "Reports rejected in the time range because the maximum number of processes reports"
            " (--report.max-processes). The rejected processes are on no dashboard.",
            f"round(sum(increase(gpumem_processes_dropped_total{{{NODE}}}[$__range])))",
        ),
        count(
            "Events lost",
            "Events of the time range that could not be stored, because the disk failed and the queue was full.",
            f"round(sum(increase(gpumem_events_dropped_total{{{NODE}}}[$__range])))",
        ),
        count(
            "Unsuccessful actions",
            "Target processes whose action in the time range did not end as done: refused, failed, expired,"
            " unsupported, or the process exited.",
            f'round(sum(increase(gpumem_actions_total{{{NODE}, outcome!="done"}}[$__range])))',
        ),
    ]


def _exporters() -> Any:
    def per_exporter(expression: str) -> str:
        return f"sum by (cluster, instance) ({expression})"

    described = f"group by (cluster, instance, version, source, python) (gpumem_exporter_build_info{{{NODE}}})"

    return table(
        "Exporters",
        "One row per exporter: its version, the state of its driver, its series and its resources. Up says"
        " whether Prometheus can scrape it; if not, the other cells are empty.",
        [
            Column("cluster", heading="Cluster"),
            Column("instance", heading="Node", links=[TO_PAGE]),
            Column("version", heading="Version"),
            Column("source", heading="Source"),
            Column("python", heading="Python"),
            Column("What", described, hidden=True),
            Column("Up", per_exporter(EXPORTER_UP), limits=UP, width=60),
            Column("Driver up", per_exporter(f"gpumem_nvml_up{{{NODE}}}"), limits=UP, width=90),
            Column("Devices up", per_exporter(f"gpumem_device_up{{{NODE}}}"), width=100),
            Column("Devices down", per_exporter(f"1 - gpumem_device_up{{{NODE}}}"), "", none_is_good("red"), width=110),
            Column("Reporters", per_exporter(f"gpumem_reporter_up{{{NODE}}}"), width=100),
            Column("Series", per_exporter(f"scrape_samples_scraped{{{NODE}}} {IS_EXPORTER}"), width=90),
            Column("Scrape", per_exporter(f"scrape_duration_seconds{{{NODE}}} {IS_EXPORTER}"), units.Seconds, width=90),
            Column("Poll", per_exporter(f"gpumem_poll_duration_seconds{{{NODE}}}"), units.Seconds, width=90),
            Column(
                "Memory",
                per_exporter(f"process_resident_memory_bytes{{{NODE}}} {IS_EXPORTER}"),
                units.BytesIEC,
                width=100,
            ),
        ],
        unit=units.Short,
        sort_by="Node",
        descending=False,
        height=7,
    )


def _polls_and_scrapes() -> list[Any]:
    return [
        graph(
            "Poll of the driver",
            "The duration of the last poll of all devices. Absent while the driver does not answer.",
            (f"gpumem_poll_duration_seconds{{{NODE}}}", "{{instance}}"),
            unit=units.Seconds,
        ),
        graph(
            "Scrape duration",
            "The time from Prometheus's request to the last byte of the page. Scrapes start to fail near the"
            " scrape timeout.",
            (f"scrape_duration_seconds{{{NODE}}} {IS_EXPORTER}", "{{instance}}"),
            unit=units.Seconds,
        ),
        graph(
            "Collector duration",
            "The duration of each collector in the slowest exporter. It does not include the preparation of"
            " reports when they arrive.",
            (f"max by (collector) (gpumem_scrape_collector_duration_seconds{{{NODE}}})", "{{collector}}"),
            unit=units.Seconds,
        ),
        graph(
            "Series on the page",
            "The number of series in each scrape. It follows the number of processes and devices.",
            (f"scrape_samples_scraped{{{NODE}}} {IS_EXPORTER}", "{{instance}}"),
            unit=units.Short,
        ),
        history(
            "Collector success",
            "Green: the collector succeeded. Red: it failed, its series are absent, and the exporter's log has"
            " the reason.",
            (f"min by (collector) (gpumem_scrape_collector_success{{{NODE}}})", "{{collector}}"),
            unit=units.Short,
            limits=UP,
            height=7,
        ),
    ]


def _reports_and_events() -> list[Any]:
    dropped = f"rate(gpumem_processes_dropped_total{{{NODE}}}[$__rate_interval])"
    events = graph(
        "Events, by type",
        "Events that the exporters recorded: errors, lost devices, processes that started and exited, actions."
        " /api/v1/events lists them.",
        (f"sum by (type) (increase(gpumem_events_total{{{NODE}}}[$__rate_interval]))", "{{type}}"),
        unit=units.Short,
    )
    return [
        graph(
            "Reports, by outcome",
            "Reports per second that the exporters accepted or rejected. Each process sends about one per second.",
            (f"sum by (outcome) (rate(gpumem_reports_total{{{NODE}}}[$__rate_interval]))", "{{outcome}}"),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Rejected and lost",
            "Reports per second of processes above the maximum number, and events per second that could not be"
            " stored. Both should be 0.",
            (f"sum({dropped})", "processes"),
            (f"sum(rate(gpumem_events_dropped_total{{{NODE}}}[$__rate_interval]))", "events"),
            unit=units.CountsPerSecond,
        ),
        columns(events, "1m"),
        graph(
            "Age of the last report, by workload",
            "The age of the oldest last report in each workload. It increases when a process hangs or cannot"
            " reach its exporter.",
            (f"max by (workload) (time() - gpumem_reporter_last_report_timestamp_seconds{{{NODE}}})", "{{workload}}"),
            unit=units.Seconds,
        ),
        graph(
            "Sample age, by workload",
            "The age of the values in the scrape. During training a sample is taken at the end of a step, so"
            " with long steps this is a sawtooth with the height of a step.",
            (f"max by (workload) (time() - gpumem_reporter_sample_timestamp_seconds{{{NODE}}})", "{{workload}}"),
            unit=units.Seconds,
        ),
        graph(
            "Held requests",
            "Requests that the exporters keep open: reports that wait for commands, actions that wait for their"
            " results, live pages. About one for each process.",
            (f"gpumem_held_requests{{{NODE}}}", "{{instance}}"),
            unit=units.Short,
        ),
    ]


def _actions() -> list[Any]:
    def seconds(quantile: float) -> str:
        buckets = f"sum by (le, action) (rate(gpumem_action_duration_seconds_bucket{{{NODE}}}[$__range]))"
        return f"histogram_quantile({quantile}, {buckets}) >= 0"  # NaN without actions

    outcomes = graph(
        "Actions, by outcome",
        "Actions by outcome, counted once per target process, without dry runs.",
        (
            f"sum by (action, outcome) (increase(gpumem_actions_total{{{NODE}}}[$__rate_interval])) > 0",
            "{{action}} {{outcome}}",
        ),
        unit=units.Short,
        span=8,
    )
    freed = graph(
        "Freed by actions",
        "Bytes that actions released to the driver, measured in the processes.",
        (f"sum by (action) (increase(gpumem_action_freed_bytes_total{{{NODE}}}[$__rate_interval]))", "{{action}}"),
        span=8,
    )
    evaluations = f'gpumem_policy_evaluations_total{{{NODE}, result!="unmet"}}'
    rules = graph(
        "Policy rules, by result",
        "Evaluations per second of a rule for a process on a device, without the evaluations whose conditions were"
        " not met. Dry runs appear only here. A rule with only the results stopped, limited, held_back or cooling is"
        " met and is held back. A rule for alerts is pending until an alert names it.",
        (f"sum by (rule, result) (rate({evaluations}[$__rate_interval])) > 0", "{{rule}} {{result}}"),
        unit=units.CountsPerSecond,
    ).no_value("No rule, or no rule whose conditions were met.")
    alerts = graph(
        "Alerts as action requests, by outcome",
        "Alerts that Alertmanager sent to the exporters, by outcome. For refused alerts, the exporter's log has"
        " the reason. If it stays at zero while alerts fire, Alertmanager has no such receiver or is not"
        " authorized.",
        (f"sum by (outcome) (increase(gpumem_alerts_total{{{NODE}}}[$__rate_interval]))", "{{outcome}}"),
        unit=units.Short,
    )
    return [
        columns(outcomes, "1m"),
        columns(freed, "1m"),
        table(
            "Action duration",
            "The time from the request to the last result of the actions in the time range: the median and the"
            " 95th percentile; and the number of target processes. Long actions waited for a process that was busy or"
            " had exited. The first action of a kind since an exporter's start has no duration.",
            [
                Column("action", heading="Action"),
                Column("Median", seconds(0.5)),
                Column("95th percentile", seconds(0.95)),
                Column(
                    "Processes",
                    f"round(sum by (action) (increase(gpumem_actions_total{{{NODE}}}[$__range])))",
                    units.Short,
                ),
            ],
            unit=units.Seconds,
            sort_by="Processes",
            span=8,
            height=8,
        ),
        rules,
        columns(alerts, "1m"),
    ]


def _itself() -> list[Any]:
    return [
        graph(
            "Memory of the exporter",
            "Resident bytes of each exporter. They are constant, and depend on the number of reporting processes.",
            (f"process_resident_memory_bytes{{{NODE}}} {IS_EXPORTER}", "{{instance}}"),
            span=8,
        ),
        graph(
            "CPU of the exporter",
            "The share of one core that each exporter uses.",
            (f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval]) {IS_EXPORTER}", "{{instance}}"),
            unit=units.PercentUnit,
            span=8,
        ),
        graph(
            "Open files of the exporter",
            "The open files and sockets of each exporter. Each reporter uses one.",
            (f"process_open_fds{{{NODE}}} {IS_EXPORTER}", "{{instance}}"),
            unit=units.Short,
            span=8,
        ),
    ]
