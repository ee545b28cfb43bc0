"""The two formats of the metrics page, the series that are left out, and the page when a part of it fails."""

from __future__ import annotations

import itertools
import logging
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.features.events.event_log import EventLog
from gpumem_exporter.features.policy import policy_routes
from gpumem_exporter.features.policy.policy_runner import EVALUATIONS
from gpumem_exporter.metrics.instruments import Counter as CounterMetric
from gpumem_exporter.metrics.instruments import Instruments, Registry
from gpumem_exporter.settings import COLLECTORS
from tests.support.builders.builders import UUIDS, device, node, reporting
from tests.support.builders.exposition_builders import exposition, read, text_of, whole_text_of
from tests.support.builders.random_snapshots import SNAPSHOTS
from tests.support.truth.metrics_list import METRICS, SCRAPED

EMPTY = Snapshot(10.0, None)
SAMPLE = DeviceSample(UUIDS[0], allocated_bytes=60, reserved_bytes=100, reclaimable_bytes=30, ooms=2)


def known(*processes: ReportingProcess, on: NodeReading | None = None) -> Snapshot:
    return Snapshot(10.0, on, processes)


def own(registry: Registry) -> tuple[Instruments, CounterMetric]:
    no_storage: Any = None
    EventLog(no_storage, registry)
    return Instruments(registry), CounterMetric.of(EVALUATIONS, registry)


def test_a_collector_of_the_registry_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def collect(self) -> Iterator[Family]:
            raise ValueError("no such file")

    registry = Registry()
    registry.register(Failing())
    Instruments(registry)
    writer = exposition(registry)
    for _ in range(2):
        page = text_of(writer, EMPTY)
    assert 'gpumem_scrape_collector_success{collector="exporter"} 0' in page
    assert 'gpumem_reports_total{outcome="accepted"} 0.0' in page
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_value_is_shown_until_its_check_or_its_rule_is_gone() -> None:
    registry = Registry()
    instruments, policy = own(registry)
    writer = exposition(registry)
    policy.labels("acted", "a")
    for checks in ({"poller": True, "tokens": False}, {"poller": False}):
        instruments.show_health(checks)
        page = text_of(writer, EMPTY)
        shown = re.findall(r'gpumem_health_check_ok\{check="(\w+)"\} (.*)', page)
        assert dict(shown) == {name: str(float(ok)) for name, ok in checks.items()}
    assert 'rule="a"' in page
    policy.remove("acted", "a")
    assert 'rule="a"' not in text_of(writer, EMPTY)


class Label(str):
    """A label value whose lifetime can be watched."""


def test_a_process_that_is_no_longer_on_the_page_is_forgotten() -> None:
    writer, label = exposition(), Label("w")
    text_of(writer, known(reporting(7, devices=(SAMPLE,), workload=label)))
    forgotten = weakref.ref(label)
    del label
    text_of(writer, EMPTY)
    assert forgotten() is None


class _Broken:
    """Facts of a process whose attributes raise."""

    start_time_ticks = 1000

    def __getattr__(self, name: str) -> str:
        raise RuntimeError("broken")


def test_a_failing_subject_is_left_out_and_logged_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    writer = exposition()
    valid = known(reporting(70, devices=(SAMPLE,)), on=node(device(processes={70: 50})))
    broken = replace(valid, node=replace(valid.node, facts={70: _Broken()}))  # type: ignore[type-var, dict-item]
    whole = text_of(writer, valid).splitlines()
    with caplog.at_level(logging.ERROR):
        partly = text_of(writer, broken).splitlines()
        text_of(writer, broken)
    success = "gpumem_scrape_collector_success{collector="
    remaining = [line for line in whole if "gpumem_process_" not in line and not line.startswith(success)]
    assert [line for line in partly if not line.startswith(success)] == remaining
    assert len(remaining) < len(whole)
    assert 'gpumem_scrape_collector_success{collector="processes"} 0' in partly
    assert 'gpumem_scrape_collector_success{collector="torch"} 1' in partly
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert text_of(writer, valid).splitlines() == whole


@given(st.lists(SNAPSHOTS, min_size=1, max_size=3))
@settings(max_examples=25)
def test_both_formats_have_the_same_samples_whatever_earlier_pages_had(history: list[Snapshot]) -> None:
    writer = exposition()
    for known in history:
        openmetrics = text_of(writer, known, openmetrics=True)
        assert openmetrics == text_of(exposition(), known, openmetrics=True)
    text = text_of(writer, known)
    assert read(parse_text(text)) == read(parse_openmetrics(openmetrics))
    # The lines of a family are consecutive, so its name occurs once after equal neighbors are merged.
    names = [re.split("[{ ]", line)[0] for line in text.split("\n") if line and not line.startswith("#")]
    names = [re.sub("(?<=_duration_seconds)_(bucket|count|sum)$", "", name) for name in names]
    families = [name for name, _ in itertools.groupby(names)]
    for header in ("# TYPE ", "# HELP "):
        assert [line.split(" ")[2] for line in text.split("\n") if line.startswith(header)] == families
    assert len(families) == len(set(families))


@given(SNAPSHOTS, st.sets(st.sampled_from(sorted(COLLECTORS)), min_size=1))
@settings(max_examples=25)
def test_a_page_of_some_collectors_has_their_series_only(known: Snapshot, chosen: set[str]) -> None:
    writer = exposition()
    assert writer.collectors == tuple(COLLECTORS)
    some = whole_text_of(writer, known, collectors=chosen)
    off = whole_text_of(exposition(off=COLLECTORS.keys() - chosen), known)
    samples = [read(parse_text(page))[1] for page in (some, off, whole_text_of(writer, known))]
    names = [
        {label["collector"] for name, labels in page if "collector" in (label := dict(labels))} for page in samples
    ]
    assert names == [chosen, chosen, COLLECTORS.keys()]
    # The process of the test changes between two pages.
    stable = [{each for each in page if not each[0].startswith(("process_", "python_gc_"))} for page in samples]
    assert stable[0] == stable[1] <= stable[2]


def test_workload_metadata_is_on_info_series_only() -> None:
    metadata = {"command", "user", "container_id", "k8s_namespace", "k8s_pod", "k8s_container"}
    assert [metric.name for metric in METRICS if metadata & set(metric.labels)] == ["gpumem_process_info"]


def test_what_alerts_read_starts_at_0() -> None:
    registry = Registry()
    own(registry)
    shown = read(parse_text(text_of(exposition(registry), EMPTY)))[1]
    of_policies = {each.name for each in policy_routes.METRICS}
    of_snapshots = {each.name for each in SCRAPED}
    counters = {metric.name for metric in METRICS if metric.type == "counter"} - of_snapshots - of_policies
    assert counters <= {name for (name, _), count in shown.items() if count == 0}
    assert ("gpumem_events_total", frozenset({("type", "policy_stopped")})) in shown
    assert "gpumem_action_duration_seconds_count" not in {name for name, _ in shown}, "18 series for each action"
    assert ("gpumem_actions_total", frozenset({("action", "empty_cache"), ("outcome", "failed")})) in shown
