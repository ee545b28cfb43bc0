"""Renders samples as lines of the text formats, which differ only in the header of a counter and in `# EOF`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpumem_exporter.collectors.catalog import Metric

__all__ = ["Column", "LineWriter", "Sample", "header", "label_text", "printable", "single_samples"]

Sample: TypeAlias = "tuple[Metric, tuple[str, ...], int | float]"
"""A metric, the values of its labels in the catalog's order, and its value."""


@dataclass(frozen=True, slots=True)
class Column:
    """Samples of one metric with labels that rarely change, such as those of all processes on a device.

    The label texts of a column are cached together, so one lookup serves all its lines.
    """

    metric: Metric
    head: tuple[str, ...]
    """The values of the leading labels, which all samples share; unique among the metric's columns on a page."""
    rows: tuple[Any, ...]
    """One key per sample, from which `tail` computes the other labels; equal keys have equal label texts."""
    values: Sequence[int | float | None]
    """One value for each of `rows`; None where there is no sample."""
    tail: Callable[[Any], tuple[str, ...]] = tuple
    """Computes the values of the other labels from a row."""

    def labels(self) -> Iterator[tuple[str, ...]]:
        """Yield the values of all labels of each row."""
        return ((*self.head, *self.tail(row)) for row in self.rows)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples one by one."""
        for labels, value in zip(self.labels(), self.values, strict=True):
            if value is not None:
                yield self.metric, labels, value


def single_samples(samples: Iterable[Sample | Column]) -> Iterator[Sample]:
    """Yield samples, with each column expanded to its samples."""
    for sample in samples:
        if isinstance(sample, Column):
            yield from sample.samples()
        else:
            yield sample


def printable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by `?`; `os.fsdecode` creates them for invalid bytes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def escape(value: str) -> str:
    r"""Escape `\`, newline and `"` in a label value; the formats allow no other escapes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return `{name="value",…} `, or a space if there are no labels."""
    if not names:
        return " "
    return "{" + ",".join([f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True)]) + "} "


def header(metric: Metric, *, openmetrics: bool) -> bytes:
    """Return the HELP and TYPE lines of a family."""
    name = metric.family if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n".encode()


_ColumnKey: TypeAlias = "tuple[Metric, tuple[str, ...]]"
_ColumnTexts: TypeAlias = "tuple[tuple[Any, ...], list[str]]"
"""The rendered rows and their label texts."""


class LineWriter:
    """Renders lines and caches their label texts from page to page. Not thread-safe.

    The cache is bounded. It has the columns of the last page, and at most about twice the series of other families.
    """

    def __init__(self) -> None:
        self._texts: dict[Metric, dict[tuple[str, ...], str]] = {}
        self._columns: dict[_ColumnKey, _ColumnTexts] = {}
        self._written: dict[Metric, int] = {}
        self._written_columns: dict[_ColumnKey, _ColumnTexts] = {}

    def __len__(self) -> int:
        texts: list[Sized] = [*self._texts.values(), *(texts for _, texts in self._columns.values())]
        return sum(map(len, texts))

    def write(self, samples: Iterable[Sample | Column]) -> dict[Metric, bytes]:
        """Render the lines of each family in the order of the samples. All samples of a family must be in one call."""
        lines: dict[Metric, list[str]] = {}
        current: Metric | None = None
        for sample in samples:
            if isinstance(sample, Column):
                lines.setdefault(sample.metric, []).extend(self._column(sample))
                continue
            metric, labels, value = sample
            if metric is not current:
                current = metric
                family = lines.setdefault(metric, [])
                texts = self._texts.setdefault(metric, {})
            text = texts.get(labels)
            if text is None:
                text = texts[labels] = metric.name + label_text(metric.labels, labels)
            family.append(f"{text}{value}\n")
        for metric, family in lines.items():
            self._written[metric] = len(family)
        return {metric: "".join(family).encode("utf-8", "replace") for metric, family in lines.items()}

    def _column(self, column: Column) -> list[str]:
        key = column.metric, column.head
        known = self._columns.get(key)
        if known is None or known[0] != column.rows:
            metric = column.metric
            known = column.rows, [metric.name + label_text(metric.labels, labels) for labels in column.labels()]
        self._written_columns[key] = known
        return [f"{text}{value}\n" for text, value in zip(known[1], column.values, strict=True) if value is not None]

    def end_page(self) -> None:
        """Drop cached columns that were not on this page, and families of which less than half was on this page."""
        for metric, texts in list(self._texts.items()):
            if len(texts) > 2 * self._written.get(metric, 0):
                del self._texts[metric]
        self._written = {}
        self._columns, self._written_columns = self._written_columns, {}
