"""The lines that a subject keeps: rendered once after a change, never shown after they have become outdated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_exporter.collectors.allocators import AllocatorSource
from gpumem_exporter.core.samples import NodeReading, ReportingProcess
from tests.support.exposition_builders import SAMPLE, device, exposition, node, page, process, snapshot

Change = Callable[[ReportingProcess, NodeReading], tuple[ReportingProcess, NodeReading]]


def test_the_lines_of_a_report_are_rendered_when_it_arrives_and_not_in_the_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writer = node(device(processes={70: 150})), exposition()
    writer.render(snapshot(process(7, SAMPLE), on=reading), openmetrics=False)
    reporter = process(7, replace(SAMPLE, ooms=3))
    expected = page(snapshot(reporter, on=reading))
    writer.refresh(reporter)

    def samples(_: AllocatorSource) -> None:
        raise AssertionError("rendered again")

    monkeypatch.setattr(AllocatorSource, "samples", samples)
    equal_report = replace(reporter, report=replace(reporter.report, sequence=2))

    for latest in (reporter, equal_report):
        writer.refresh(latest)
        shown = writer.render(snapshot(latest, on=reading), openmetrics=False)
        assert shown.decode().splitlines() == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda reporter, reading: (process(7, replace(SAMPLE, ooms=3)), reading),
        lambda reporter, reading: (replace(reporter, host_pid=71), reading),
        lambda reporter, reading: (replace(reporter, host_pid=None), reading),
        lambda reporter, reading: (process(7, SAMPLE, workload="v"), reading),
        lambda reporter, reading: (process(7, SAMPLE, rank="1"), reading),
        lambda reporter, reading: (process(7, SAMPLE, step=4), reading),
        lambda reporter, reading: (process(7, SAMPLE, pinned=4), reading),
        lambda reporter, reading: (reporter, node(device("5"))),
        lambda reporter, reading: (reporter, node(device(processes={70: 151}))),
        lambda reporter, reading: (reporter, node(device(), up=False)),
    ],
    ids=["values", "host pid", "no host pid", "workload", "rank", "step", "pinned", "index", "used", "no driver"],
)
@pytest.mark.parametrize("refreshed", [True, False])
def test_lines_are_rendered_again_after_any_change(change: Change, refreshed: bool) -> None:
    reporter, reading, writer = process(7, SAMPLE), node(device()), exposition()
    before = writer.render(snapshot(reporter, on=reading), openmetrics=False)
    reporter, reading = change(reporter, reading)
    if refreshed:
        writer.refresh(reporter)

    after = writer.render(snapshot(reporter, on=reading), openmetrics=False)

    assert after == exposition().render(snapshot(reporter, on=reading), openmetrics=False)
    assert after != before


def test_only_the_lines_of_the_last_page_are_kept() -> None:
    writer = exposition()
    everybody = [process(pid, SAMPLE, host_pid=pid) for pid in range(1, 50)]
    for reporter in everybody:
        writer.refresh(reporter)  # before the first page
    assert writer.cached_subjects() == 0
    reading = node(device(processes=dict.fromkeys(range(1, 50), 200)))
    writer.render(snapshot(*everybody, on=reading), openmetrics=False)
    many = writer.cached_subjects()

    writer.render(snapshot(everybody[0], on=node(device())), openmetrics=False)

    fresh = exposition()
    fresh.render(snapshot(everybody[0], on=node(device())), openmetrics=False)
    assert many > 49 * 3 > writer.cached_subjects() == fresh.cached_subjects()
