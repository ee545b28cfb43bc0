"""The metrics page of random nodes with conflicting pids, namespaces and devices."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumem_exporter.collectors.exposition import view_of
from gpumem_exporter.core.samples import Snapshot
from tests.support.exposition_builders import Read, exposition, read, text_of
from tests.support.random_snapshots import SNAPSHOTS


def sampled(known: Snapshot) -> Read:
    """Return the value of each series that the collectors yield."""
    samples: Read = {}
    view = view_of(known)
    for collector in exposition().collectors:
        for subject in collector.subjects(view):
            found = subject.samples(*subject.source)
            for (metric, labels), value in zip(found.series(*found.labels), found.values, strict=True):
                if value is not None:
                    series = metric.name, frozenset(zip(metric.labels, labels, strict=True))
                    assert series not in samples
                    samples[series] = float(value)
    return samples


@given(SNAPSHOTS)
@settings(deadline=None, max_examples=60)
def test_both_formats_parse_to_exactly_the_samples_of_the_collectors(known: Snapshot) -> None:
    writer = exposition()
    kinds, samples = read(parse_text(text_of(writer, known)))
    assert read(parse_openmetrics(text_of(writer, known, openmetrics=True))) == (kinds, samples)
    collected = {metric.name for collector in writer.collectors for metric in collector.families}
    assert {key: value for key, value in samples.items() if key[0] in collected} == sampled(known)


@given(st.lists(SNAPSHOTS, min_size=2, max_size=4))
@settings(deadline=None, max_examples=40)
def test_a_page_does_not_depend_on_earlier_pages(history: list[Snapshot]) -> None:
    writer = exposition()
    for known in history:
        shown = text_of(writer, known, openmetrics=True)
        assert shown == text_of(exposition(), known, openmetrics=True)


@given(SNAPSHOTS)
@settings(deadline=None, max_examples=40)
def test_lines_of_a_family_are_consecutive_below_one_header(known: Snapshot) -> None:
    text = text_of(exposition(), known)
    # The lines of a family are consecutive, so its name occurs once after equal neighbors are merged.
    names = [re.split("[{ ]", line)[0] for line in text.split("\n") if line and not line.startswith("#")]
    names = [re.sub("(?<=_duration_seconds)_(bucket|count|sum)$", "", name) for name in names]
    runs = [name for name, _ in itertools.groupby(names)]
    assert len(runs) == len(set(runs))
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# TYPE ")] == runs
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# HELP ")] == runs
