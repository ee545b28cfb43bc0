"""The catalog of metrics is complete, has no duplicates, and follows Prometheus' naming rules."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from gpumem_exporter.collectors import catalog, engine_catalog
from gpumem_exporter.collectors.catalog import METRICS
from gpumem_exporter.collectors.subjects import Metric


def test_every_metric_that_is_defined_is_in_the_table_once() -> None:
    defined = [
        value for each in (catalog, engine_catalog) for value in vars(each).values() if isinstance(value, Metric)
    ]
    assert Counter(metric.name for metric in defined) == Counter(metric.name for metric in METRICS)
    assert max(Counter(metric.name for metric in METRICS).values()) == 1


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_name_help_and_labels_follow_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"(gpumem|process)_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert not re.search(r"_(ms|mib|mb|gib|kb|percent|milliseconds|megabytes)(_|$)", metric.name)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert re.fullmatch(r'(?:[^\\\n" ]+ )*[^\\\n" ]+\.', metric.help), "one sentence that neither format escapes"
    assert len(set(metric.labels)) == len(metric.labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.labels)
    added = {"job", "instance", "pod", "namespace", "container", "le", "quantile"}
    assert not added & set(metric.labels), "Prometheus and its service discovery add these"


def test_workload_metadata_is_on_info_series_only() -> None:
    metadata = {"command", "user", "container_id", "k8s_namespace", "k8s_pod", "k8s_container"}
    assert [metric.name for metric in METRICS if metadata & set(metric.labels)] == ["gpumem_process_info"]
