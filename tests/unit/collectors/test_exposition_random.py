"""The metrics page of random nodes with conflicting pids, namespaces and devices."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumem_exporter.collectors.collector import GpumemCollector
from gpumem_exporter.core.samples import (
    Snapshot,
)
from tests.support.exposition_builders import exposition, read
from tests.support.random_snapshots import SNAPSHOTS


@given(SNAPSHOTS)
@settings(deadline=None, max_examples=60)
def test_both_formats_parse_to_exactly_the_samples_of_the_collector(known: Snapshot) -> None:
    expected = read(iter(GpumemCollector(lambda: known, version="1", source="nvml", clock=lambda: 0.0).collect()))
    writer = exposition()

    text = writer.render(known, openmetrics=False).decode()
    openmetrics = writer.render(known, openmetrics=True).decode()

    kinds, samples = expected
    own = {("gpumem_scrape_collector_success", "own"): 1.0, ("gpumem_scrape_collector_duration_seconds", "own"): 0.0}
    samples |= {(name, frozenset({("collector", label)})): value for (name, label), value in own.items()}
    assert read(parse_text(text)) == (kinds, samples)
    assert read(parse_openmetrics(openmetrics)) == (kinds, samples)


@given(st.lists(st.tuples(SNAPSHOTS, st.sets(st.integers(0, 3)), st.booleans()), min_size=2, max_size=4))
@settings(deadline=None, max_examples=40)
def test_a_page_does_not_depend_on_what_was_prepared_or_rendered_before(
    history: list[tuple[Snapshot, set[int], bool]],
) -> None:
    writer = exposition()
    for known, prepared, with_node in history:
        for i, reporter in enumerate(known.processes):
            if i in prepared:
                writer.prepare(reporter, known.node if with_node else None)
        if known.node is not None and with_node != bool(prepared):
            writer.prepare_reading(known.node)

        shown = writer.render(known, openmetrics=True)

        assert shown == exposition().render(known, openmetrics=True)


@given(SNAPSHOTS)
@settings(deadline=None, max_examples=40)
def test_each_pid_has_one_info_series(known: Snapshot) -> None:
    text = exposition().render(known, openmetrics=False).decode()

    pids = [
        sample.labels["pid"]
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "gpumem_process_info"
    ]

    assert len(pids) == len(set(pids))


@given(SNAPSHOTS)
@settings(deadline=None, max_examples=40)
def test_lines_of_a_family_are_consecutive_below_one_header(known: Snapshot) -> None:
    text = exposition().render(known, openmetrics=False).decode()

    # The lines of a family are consecutive, so its name occurs once after equal neighbors are merged.
    names = [line.split("{")[0].split(" ")[0] for line in text.split("\n") if line and not line.startswith("#")]
    runs = [name for name, _ in itertools.groupby(names)]
    assert len(runs) == len(set(runs))
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# TYPE ")] == runs
    assert [line.split(" ")[2] for line in text.split("\n") if line.startswith("# HELP ")] == runs
