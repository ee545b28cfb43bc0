"""Lines that were rendered when a report or a reading arrived are never shown after they have become outdated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_exporter.core.samples import (
    NodeReading,
    ReportingProcess,
)
from tests.support.exposition_builders import (
    SAMPLE,
    device,
    exposition,
    node,
    page,
    process,
    snapshot,
)

Change = Callable[[ReportingProcess, NodeReading], tuple[ReportingProcess, NodeReading]]


def test_the_lines_of_a_report_are_rendered_once_before_the_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reporter, reading = process(7, SAMPLE), node(device(processes={70: 150}))
    writer = exposition()
    writer.prepare(reporter, reading)
    expected = page(snapshot(reporter, on=reading))

    def write_again(*_: object) -> None:
        raise AssertionError("written at the scrape")

    monkeypatch.setattr("gpumem_exporter.collectors.prepared.report_samples", write_again)

    assert writer.render(snapshot(reporter, on=reading), openmetrics=False).decode().splitlines() == expected


def test_the_lines_of_a_reading_are_rendered_once_before_the_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = node(device("1", "GPU-1", {70: 150}), device("0", "GPU-0", {71: 5, 70: None}))
    writer = exposition()
    writer.prepare_reading(reading)
    expected = page(snapshot(process(7, SAMPLE), on=reading))

    def again(*_: object) -> None:
        raise AssertionError("done at the scrape")

    monkeypatch.setattr("gpumem_exporter.collectors.processes.used_samples", again)
    monkeypatch.setattr("gpumem_exporter.collectors.view.OrderedDevices.of", again)

    known = snapshot(process(7, SAMPLE), on=reading)
    assert writer.render(known, openmetrics=False).decode().splitlines() == expected


@pytest.mark.parametrize("later", [node(device(processes={70: 151})), node(up=False), None])
def test_the_lines_of_a_reading_are_not_used_for_another(later: NodeReading | None) -> None:
    writer = exposition()
    writer.prepare_reading(node(device(processes={70: 150, 72: 1})))
    known = snapshot(process(7, SAMPLE), on=later)
    assert writer.render(known, openmetrics=False).decode().splitlines() == page(known)


def test_a_reading_that_cannot_be_prepared_fails_in_the_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = node(device(processes={70: 150}))
    writer = exposition()
    writer.prepare_reading(reading)

    def broken(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr("gpumem_exporter.collectors.exposition.used_samples", broken)
        writer.prepare_reading(reading)
    assert writer.render(snapshot(on=reading), openmetrics=False).decode().splitlines() == page(snapshot(on=reading))


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
        lambda reporter, reading: (reporter, node(device(), up=False)),
    ],
    ids=["values", "host pid", "no host pid", "workload", "rank", "step", "pinned", "index", "no driver"],
)
@pytest.mark.parametrize("prepared_again", [True, False])
def test_prepared_lines_are_rendered_again_after_any_change(change: Change, prepared_again: bool) -> None:
    reporter, reading = process(7, SAMPLE), node(device())
    writer = exposition()
    writer.prepare(reporter, reading)
    before = writer.render(snapshot(reporter, on=reading), openmetrics=False)
    reporter, reading = change(reporter, reading)
    if prepared_again:
        writer.prepare(reporter, reading)

    after = writer.render(snapshot(reporter, on=reading), openmetrics=False)

    assert after == exposition().render(snapshot(reporter, on=reading), openmetrics=False)
    assert after != before


def test_lines_and_labels_of_a_removed_process_are_dropped() -> None:
    writer = exposition()
    everybody = [process(pid, SAMPLE, host_pid=pid) for pid in range(1, 50)]
    reading = node(device(processes=dict.fromkeys(range(1, 50), 200)))
    for reporter in everybody:
        writer.prepare(reporter, reading)
    writer.render(snapshot(*everybody, on=reading), openmetrics=False)

    writer.render(snapshot(everybody[0], on=node(device())), openmetrics=False)

    assert len(writer._prepared) == 1
    fresh = exposition()
    fresh.render(snapshot(everybody[0], on=node(device())), openmetrics=False)
    assert len(writer._writer) <= 2 * len(fresh._writer)


def test_prepared_lines_are_bounded_without_a_scrape_and_the_page_is_complete() -> None:
    writer = exposition(max_prepared_processes=3)
    everybody = [process(pid, SAMPLE, host_pid=pid) for pid in range(1, 11)]
    for reporter in everybody:
        writer.prepare(reporter, None)
    assert len(writer._prepared) == 3

    assert writer.render(snapshot(*everybody), openmetrics=False).decode().splitlines() == page(snapshot(*everybody))
    assert len(writer._prepared) == 3
