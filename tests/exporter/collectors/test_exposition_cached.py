"""The lines that a subject keeps: rendered once after a change, never shown after they have become outdated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_exporter.collectors.allocators import AllocatorSource
from gpumem_exporter.collectors.exposition import REFRESH_SECONDS
from gpumem_exporter.collectors.subjects import Samples
from tests.support.exposition_builders import SAMPLE, device, exposition, node, page, process, snapshot


def test_the_lines_of_a_report_are_rendered_when_it_arrives_and_not_in_the_scrape_that_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writer = node(device(processes={70: 150})), exposition()
    for _ in range(2):
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
    ("scrapes", "reported", "renders"),
    [
        ((0.0, 15.0), 16.0, False),
        ((0.0, 15.0), 30.0 - REFRESH_SECONDS, True),
        ((0.0, 15.0), 40.0, False),  # no page was read when one was expected
        ((0.0, 1.0), 1.5, True),
        ((0.0,), 1.0, False),
        ((), 1.0, False),
    ],
)
def test_a_report_is_rendered_only_if_a_scrape_is_due(
    monkeypatch: pytest.MonkeyPatch, scrapes: tuple[float, ...], reported: float, renders: bool
) -> None:
    now = 0.0
    writer = exposition(clock=lambda: now)
    for now in scrapes:  # noqa: B007 - the clock reads it
        writer.render(snapshot(process(7, SAMPLE)), openmetrics=False)
    rendered = []
    samples = AllocatorSource.samples

    def counted(source: AllocatorSource) -> Samples:
        rendered.append(source)
        return samples(source)

    monkeypatch.setattr(AllocatorSource, "samples", counted)
    now = reported
    writer.refresh(process(7, replace(SAMPLE, ooms=3)))

    assert bool(rendered) == renders


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
