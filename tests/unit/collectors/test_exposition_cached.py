"""The lines that a subject keeps: rendered once after a change, never shown after they have become outdated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_exporter.collectors.allocators import AllocatorSource
from tests.support.exposition_builders import SAMPLE, device, exposition, node, page, process, snapshot


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
