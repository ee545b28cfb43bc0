"""The parts of the page: a collector yields subjects, and each subject keeps its rendered lines until it changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

from gpumem_exporter.collectors.catalog import Metric
from gpumem_exporter.collectors.view import View

__all__ = ["Collector", "Samples", "Series", "Source", "Subject", "SubjectLines", "Value"]

Series: TypeAlias = "tuple[Metric, tuple[str, ...]]"
"""A metric and the values of its labels in the catalog's order."""
Value: TypeAlias = "int | float | str | None"
"""The value of a sample, or its text; None if there is no sample."""


class Samples(NamedTuple):
    """The samples of a subject. Labels and values are separate, because labels rarely change."""

    labels: tuple[Any, ...]
    """Everything that the series depend on."""
    series: Callable[..., Iterable[Series]]
    """Computes the series from the labels."""
    values: tuple[Value, ...]
    """The value of each series."""

    def samples(self) -> Samples:
        """Return the samples themselves."""
        return self


class Source(Protocol):
    """The immutable source of a subject's samples. Equal sources have equal samples."""

    def samples(self) -> Samples:
        """Compute the samples."""


Subject: TypeAlias = "tuple[Hashable, Source]"
"""A device, a process, or another part of the page whose lines change together: its key and its source.

The key identifies the subject among those of its collector.
"""


class Collector(NamedTuple):
    """A collector: its label value on the page, its families, and the function that reads a view."""

    name: str
    families: tuple[Metric, ...]
    subjects: Callable[[View], Iterator[Subject]]


class _Rendered(NamedTuple):
    source: Source
    samples: Samples
    prefixes: list[tuple[int, str]]
    """The index of each series' family, and the text of the line before the value."""
    lines: tuple[bytes, ...]
    """The lines of each family."""


class SubjectLines:
    """The rendered lines of a collector's subjects. Not thread-safe.

    Args:
        families: the families of the collector.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._indexes = {metric: index for index, metric in enumerate(families)}
        self._rendered: dict[Hashable, _Rendered] = {}

    def __len__(self) -> int:
        return len(self._rendered)

    def page(self, subjects: Iterable[Subject]) -> dict[Metric, tuple[bytes, ...]]:
        """Return the lines of each family in the order of the subjects; forgets all other subjects.

        Renders the subjects that are new or that have changed.
        """
        page = [(key, self._render(key, source)) for key, source in subjects]
        self._rendered = dict(page)
        rows = [rendered.lines for _, rendered in page]
        return dict(zip(self._indexes, zip(*rows, strict=True), strict=True)) if rows else {}

    def source(self, key: Hashable) -> Source | None:
        """Return the last source of a subject; None if the subject was not on the last page."""
        rendered = self._rendered.get(key)
        return rendered.source if rendered is not None else None

    def refresh(self, key: Hashable, source: Source) -> None:
        """Render a subject of the last page before the next page."""
        self._rendered[key] = self._render(key, source)

    def _render(self, key: Hashable, source: Source) -> _Rendered:
        last = self._rendered.get(key)
        if last is not None and last.source == source:
            return last
        samples = source.samples()
        same_series = last is not None and last.samples[:2] == samples[:2]
        prefixes = last.prefixes if last is not None and same_series else self._prefixes(samples)
        lines: list[list[str]] = [[] for _ in self._indexes]
        for (index, prefix), value in zip(prefixes, samples.values, strict=True):
            if value is not None:
                lines[index].append(f"{prefix}{value}\n")
        encoded = tuple(["".join(family).encode("utf-8", "replace") for family in lines])
        return _Rendered(source, samples, prefixes, encoded)

    def _prefixes(self, samples: Samples) -> list[tuple[int, str]]:
        prefixes = []
        text, last_labels = "", None
        for metric, labels in samples.series(*samples.labels):
            if labels is not last_labels:  # the series of an allocator share one tuple
                text, last_labels = _label_text(metric.labels, labels), labels
            prefixes.append((self._indexes[metric.part_of or metric], metric.name + text))
        return prefixes


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return `{name="value",…} `, or a space if there are no labels."""
    if not names:
        return " "
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]) + "} "


def _escaped(value: str) -> str:
    r"""Escape `\`, newline and `"` in a label value; the formats allow no other escapes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
