"""Exporter: whether the figures on the other dashboards can be trusted, and what the exporter itself costs."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units

from gpumem_dashboards.frame import actions_annotation, board, first_of, variable
from gpumem_dashboards.palette import UP, none_is_good
from gpumem_dashboards.panels import columns, count, graph, history, number
from gpumem_dashboards.promql import EXPORTER_UP, IS_EXPORTER, NODE
from gpumem_dashboards.tables import Column, table

__all__ = ["exporter"]


def exporter() -> Any:
    """The dashboard of the exporters."""
    made = (
        board(
            "GPU memory: exporter",
            "gpumem-exporter",
            "Whether the figures can be trusted: polls of the driver, reports of processes, scrapes, what was turned"
            " away; what actions did; and what the exporter itself takes.",
            time="now-1h",
            refresh="30s",
        )
        .with_variable(variable("node", "Node", "gpumem_exporter_build_info", "instance"))
        .with_variable(first_of("node", f"gpumem_exporter_build_info{{{NODE}}}", "instance"))
        .annotation(actions_annotation())
    )
    for title, panels in (
        ("Now", [*_figures(), _exporters()]),
        ("Polls and scrapes", _polls_and_scrapes()),
        ("Reports and events", _reports_and_events()),
        ("Actions", _actions()),
        ("What it takes itself", _itself()),
    ):
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _figures() -> list[Any]:
    return [
        count(
            "Exporters down",
            "Exporters that Prometheus knew in the time shown and cannot scrape now: their nodes are blind.",
            f"sum(1 - ({EXPORTER_UP}))",
        ),
        count(
            "Drivers not answering",
            "Exporters whose driver does not answer, or whose last poll is too old to be shown: they show processes'"
            " reports and no devices.",
            f"sum(1 - gpumem_nvml_up{{{NODE}}})",
        ),
        number(
            "Oldest reading",
            "Age of the oldest reading of the devices that a page shows. More than a few seconds: the driver is slow,"
            " or the poller is stuck.",
            units.Seconds,
            f"max(time() - gpumem_poll_timestamp_seconds{{{NODE}}})",
            limits=((None, "green"), (30, "yellow"), (60, "red")),
        ),
        count(
            "Processes turned away",
            "Reports turned away in the time shown because as many processes report as are allowed"
            " (--report.max-processes): those processes are on no dashboard.",
            f"round(sum(increase(gpumem_processes_dropped_total{{{NODE}}}[$__range])))",
        ),
        count(
            "Events lost",
            "Events of the time shown that could not be kept: the disk took none, and too many waited.",
            f"round(sum(increase(gpumem_events_dropped_total{{{NODE}}}[$__range])))",
        ),
        count(
            "Actions that did not succeed",
            "Processes in which an action of the time shown did not end as done: refused, failed, expired, unsupported,"
            " or the process was gone.",
            f'round(sum(increase(gpumem_actions_total{{{NODE}, outcome!="done"}}[$__range])))',
            bad="orange",
        ),
    ]


def _exporters() -> Any:
    by = "instance"

    def per_exporter(expression: str) -> str:
        return f"sum by ({by}) ({expression})"

    return table(
        "Exporters",
        "One row an exporter: what it is, whether its driver answers, what it shows and what it takes. Up says whether"
        " Prometheus could scrape it; the other cells of one that is down are empty.",
        units.Short,
        [
            Column("instance", heading="Node"),
            Column("version", heading="Version"),
            Column("source", heading="Source"),
            Column("python", heading="Python"),
            Column(
                "What", f"group by ({by}, version, source, python) (gpumem_exporter_build_info{{{NODE}}})", hidden=True
            ),
            Column("Up", per_exporter(EXPORTER_UP), limits=UP, width=60),
            Column("Driver up", per_exporter(f"gpumem_nvml_up{{{NODE}}}"), limits=UP, width=90),
            Column("Devices up", per_exporter(f"gpumem_device_up{{{NODE}}}"), width=100),
            Column("Devices down", per_exporter(f"1 - gpumem_device_up{{{NODE}}}"), limits=none_is_good(), width=110),
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
        sort_by="Node",
        descending=False,
        height=7,
    )


def _polls_and_scrapes() -> list[Any]:
    return [
        graph(
            "Poll of the driver",
            "Duration of the last poll of all devices. Absent while the driver does not answer.",
            units.Seconds,
            [(f"gpumem_poll_duration_seconds{{{NODE}}}", "{{instance}}")],
        ).min(0),
        graph(
            "Scrape, as Prometheus sees it",
            "From Prometheus' request to the last byte of the page. Near the scrape timeout, scrapes begin to fail.",
            units.Seconds,
            [(f"scrape_duration_seconds{{{NODE}}} {IS_EXPORTER}", "{{instance}}")],
        ).min(0),
        graph(
            "Making the page, by part",
            "How long each part of the page took, the slowest exporter. Reports are prepared as they come in; that is"
            " not in it.",
            units.Seconds,
            [(f"max by (collector) (gpumem_scrape_collector_duration_seconds{{{NODE}}})", "{{collector}}")],
        ).min(0),
        graph(
            "Series on the page",
            "Series that Prometheus took at each scrape. It follows the number of processes and devices.",
            units.Short,
            [(f"scrape_samples_scraped{{{NODE}}} {IS_EXPORTER}", "{{instance}}")],
        ).min(0),
        history(
            "Parts of the page that could be made",
            "Green: the part was made. Red: it failed, its series are absent, and the exporter's log says why.",
            units.Short,
            [(f"min by (collector) (gpumem_scrape_collector_success{{{NODE}}})", "{{collector}}")],
            UP,
            height=7,
        ),
    ]


def _reports_and_events() -> list[Any]:
    dropped = f"rate(gpumem_processes_dropped_total{{{NODE}}}[$__rate_interval])"
    events = graph(
        "Events, by type",
        "What happened on the nodes, as the exporters learnt of it: errors, lost devices, processes that came and went,"
        " actions. /api/v1/events has them one by one.",
        units.Short,
        [(f"sum by (type) (increase(gpumem_events_total{{{NODE}}}[$__rate_interval]))", "{{type}}")],
    )
    return [
        graph(
            "Reports, by outcome",
            "Reports a second that the exporters took or turned away. Each process sends about one a second.",
            units.CountsPerSecond,
            [(f"sum by (outcome) (rate(gpumem_reports_total{{{NODE}}}[$__rate_interval]))", "{{outcome}}")],
        ).min(0),
        graph(
            "Turned away and lost",
            "Reports a second of processes for which there was no room, and events a second that could not be kept."
            " Both ought to be 0.",
            units.CountsPerSecond,
            [
                (f"sum({dropped})", "processes"),
                (f"sum(rate(gpumem_events_dropped_total{{{NODE}}}[$__rate_interval]))", "events"),
            ],
        ).min(0),
        columns(events, "1m").min(0),
        graph(
            "Age of the last report, oldest by workload",
            "How long ago the process of each workload that has been quiet longest reported. It rises when a process"
            " hangs, or has no exporter to talk to.",
            units.Seconds,
            [
                (
                    f"max by (workload) (time() - gpumem_reporter_last_report_timestamp_seconds{{{NODE}}})",
                    "{{workload}}",
                )
            ],
        ).min(0),
        graph(
            "Age of the samples, oldest by workload",
            "How old the figures on the page are. While training steps run a sample is of the last step's end, so with"
            " long steps this is a sawtooth as high as a step.",
            units.Seconds,
            [(f"max by (workload) (time() - gpumem_reporter_sample_timestamp_seconds{{{NODE}}})", "{{workload}}")],
        ).min(0),
        graph(
            "Held requests",
            "Requests that the exporters hold open until there is something to say: reports that wait for commands,"
            " actions that wait for their end, live pages. About one for each process.",
            units.Short,
            [(f"gpumem_held_requests{{{NODE}}}", "{{instance}}")],
        ).min(0),
    ]


def _actions() -> list[Any]:
    def seconds(quantile: float) -> str:
        buckets = f"sum by (le, action) (rate(gpumem_action_duration_seconds_bucket{{{NODE}}}[$__range]))"
        return f"histogram_quantile({quantile}, {buckets}) >= 0"  # of no actions it is no number

    outcomes = graph(
        "Actions, by outcome",
        "Actions by outcome, counted once per target process, without dry runs.",
        units.Short,
        [
            (
                f"sum by (action, outcome) (increase(gpumem_actions_total{{{NODE}}}[$__rate_interval])) > 0",
                "{{action}} {{outcome}}",
            )
        ],
        span=8,
    )
    freed = graph(
        "Given back by actions",
        "Bytes that actions returned to the driver, as measured in the processes.",
        units.BytesIEC,
        [(f"sum by (action) (increase(gpumem_action_freed_bytes_total{{{NODE}}}[$__rate_interval]))", "{{action}}")],
        span=8,
    )
    evaluations = f'gpumem_policy_evaluations_total{{{NODE}, result!="unmet"}}'
    rules = graph(
        "Rules of the policy file, by result",
        "Evaluations a second, each of a rule on a process on a device, but for those whose conditions were not met. A"
        " dry run is seen here alone: it asks nothing of the processes. A rule that only ever says stopped, limited or"
        " cooling would act, and is held back.",
        units.CountsPerSecond,
        [(f"sum by (rule, result) (rate({evaluations}[$__rate_interval])) > 0", "{{rule}} {{result}}")],
    ).no_value("No rules, or none whose conditions were met.")
    alerts = graph(
        "Alerts that came as requests, by outcome",
        "Alerts that Alertmanager sent to the exporters, by what became of them. Refused: the exporter's log says why."
        " Flat while alerts fire: Alertmanager does not know the receiver, or nobody may act.",
        units.Short,
        [(f"sum by (outcome) (increase(gpumem_alerts_total{{{NODE}}}[$__rate_interval]))", "{{outcome}}")],
    )
    return [
        columns(outcomes, "1m").min(0),
        columns(freed, "1m").min(0),
        table(
            "How long actions take",
            "From the request to the last result, of the actions of the time shown: half were done within the one"
            " figure, nineteen of twenty within the other. Long ones waited for a process that was busy or gone.",
            units.Seconds,
            [
                Column("action", heading="Action"),
                Column("Half within", seconds(0.5)),
                Column("95 % within", seconds(0.95)),
                Column(
                    "Actions",
                    f"round(sum by (action) (increase(gpumem_action_duration_seconds_count{{{NODE}}}[$__range])))",
                    units.Short,
                ),
            ],
            sort_by="Actions",
            span=8,
            height=8,
        ),
        rules.min(0),
        columns(alerts, "1m").min(0),
    ]


def _itself() -> list[Any]:
    return [
        graph(
            "Memory of the exporter",
            "Resident bytes of each exporter's process. Level; it grows with the number of processes that report.",
            units.BytesIEC,
            [(f"process_resident_memory_bytes{{{NODE}}} {IS_EXPORTER}", "{{instance}}")],
            span=8,
        ).min(0),
        graph(
            "CPU of the exporter",
            "Share of one core that each exporter uses.",
            units.PercentUnit,
            [(f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval]) {IS_EXPORTER}", "{{instance}}")],
            span=8,
        ).min(0),
        graph(
            "Open files of the exporter",
            "Files and sockets that each exporter has open. Each reporter has one.",
            units.Short,
            [
                (f"process_open_fds{{{NODE}}} {IS_EXPORTER}", "{{instance}}"),
            ],
            span=8,
        ).min(0),
    ]
