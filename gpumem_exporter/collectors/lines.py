"""Samples into lines of either text format: the two differ in the header of a counter and in `# EOF`, nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from gpumem_exporter.collectors.catalog import Metric

__all__ = ["LineWriter", "Sample", "header", "label_text", "printable"]

Sample: TypeAlias = "tuple[Metric, tuple[str, ...], int | float]"
"""A metric, the values of its labels in the catalog's order, and its value."""


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


class LineWriter:
    """Writes lines and remembers the text of their labels from one page to the next.

    Bounded: of each family it remembers at most about twice what its last page had. Not thread-safe.
    """

    def __init__(self) -> None:
        self._texts: dict[Metric, dict[tuple[str, ...], str]] = {}
        self._written: dict[Metric, int] = {}

    def __len__(self) -> int:
        return sum(len(texts) for texts in self._texts.values())

    def write(self, samples: Iterable[Sample]) -> dict[Metric, bytes]:
        """The lines of each family, in the samples' order. A family is written in one call a page."""
        lines: dict[Metric, list[str]] = {}
        current: Metric | None = None
        for metric, labels, value in samples:
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

    def end_page(self) -> None:
        """Forget the texts of a family of which more than half were not on this page: the next page makes its own."""
        for metric, texts in list(self._texts.items()):
            if len(texts) > 2 * self._written.get(metric, 0):
                del self._texts[metric]
        self._written = {}
