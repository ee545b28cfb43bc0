"""Samples into lines of either text format: the two differ in the header of a counter and in `# EOF`, nowhere else."""

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
    """Samples of one metric whose labels are the same from page to page, as those of all processes on a device are.

    Their text is looked up once for all of them: that is what makes a page of a thousand such lines cheap.
    """

    metric: Metric
    head: tuple[str, ...]
    """The values of the leading labels, which all have. On a page no other column of the metric has the same."""
    rows: tuple[Any, ...]
    """What the other labels of each follow from: as long as these are the same, so is the text."""
    values: Sequence[int | float | None]
    """One for each of `rows`; None where there is no sample."""
    tail: Callable[[Any], tuple[str, ...]] = tuple
    """The values of the other labels of a row."""

    def labels(self) -> Iterator[tuple[str, ...]]:
        """The values of all labels of each."""
        return ((*self.head, *self.tail(row)) for row in self.rows)

    def samples(self) -> Iterator[Sample]:
        """One by one."""
        for labels, value in zip(self.labels(), self.values, strict=True):
            if value is not None:
                yield self.metric, labels, value


def single_samples(samples: Iterable[Sample | Column]) -> Iterator[Sample]:
    """The same, columns taken apart."""
    for sample in samples:
        if isinstance(sample, Column):
            yield from sample.samples()
        else:
            yield sample


def printable(text: str) -> str:
    """The text as UTF-8 can carry it: half of a surrogate pair (`os.fsdecode` makes them of odd bytes) becomes `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def escape(value: str) -> str:
    r"""A label's value between its quotes: `\`, newline and `"` are escaped, nothing else may be."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """`{name="value",…} `, or a blank where there are no labels."""
    if not names:
        return " "
    return "{" + ",".join([f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True)]) + "} "


def header(metric: Metric, *, openmetrics: bool) -> bytes:
    """HELP and TYPE of a family."""
    name = metric.family if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n".encode()


_ColumnKey: TypeAlias = "tuple[Metric, tuple[str, ...]]"
_ColumnTexts: TypeAlias = "tuple[tuple[Any, ...], list[str]]"
"""The rows that were written, and the texts of their labels."""


class LineWriter:
    """Writes lines and remembers the text of their labels from one page to the next.

    Bounded: of columns it remembers what its last page had, of other families at most about twice that. Not
    thread-safe.
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
        """The lines of each family, in the samples' order. A family is written in one call a page."""
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
        """Forget the columns that were not on this page, and the texts of a family of which more than half were not.

        The next page makes its own.
        """
        for metric, texts in list(self._texts.items()):
            if len(texts) > 2 * self._written.get(metric, 0):
                del self._texts[metric]
        self._written = {}
        self._columns, self._written_columns = self._written_columns, {}
