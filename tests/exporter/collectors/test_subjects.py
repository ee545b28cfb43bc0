"""The lines that a subject keeps: as long as it is on the page, and never longer than they are true."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.exposition import Sampled, SubjectLines
from gpumem_exporter.collectors.subjects import Metric, Samples, Series, Value

FAMILIES = (catalog.REPORTER_UP, catalog.SAMPLE_TIMESTAMP)


class Label(str):
    """A label value whose lifetime can be watched."""


def series(*labels: str) -> Iterator[Series]:
    for metric in FAMILIES:
        yield metric, labels


def subject(key: str, workload: str, *values: Value) -> Sampled:
    return Sampled(key, (), Samples(("7", workload, "0"), series, values))


def page_of(lines: SubjectLines, subjects: list[Sampled]) -> dict[Metric, tuple[bytes, ...]]:
    return lines.page(list(lines.render(subjects)))


def test_lines_are_rendered_once_while_the_samples_are_equal() -> None:
    lines = SubjectLines(FAMILIES)
    first, again = (page_of(lines, [subject("one", "w", 1, 5)]) for _ in range(2))
    assert first[FAMILIES[0]] == (b'gpumem_reporter_up{pid="7",workload="w",rank="0"} 1\n',)
    assert all(first[family][0] is again[family][0] for family in FAMILIES)


def test_a_subject_that_is_no_longer_on_the_page_is_forgotten() -> None:
    lines = SubjectLines(FAMILIES)
    label = Label("w")
    forgotten = weakref.ref(label)
    page_of(lines, [subject("one", label, 1, 5), subject("other", "w", 1, 5)])
    del label
    page_of(lines, [subject("other", "w", 1, 5)])
    assert forgotten() is None
