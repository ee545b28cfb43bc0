"""What a collector reads and yields: metrics, the view of a snapshot, and the samples of subjects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from gpumem_exporter.core.readings import DeviceReading, NodeReading
from gpumem_exporter.core.samples import Names, Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric family. Each family has one object; families are compared and hashed by identity."""

    name: str
    """The name of the series in both formats; the name of a counter ends in `_total`."""
    type: Literal["gauge", "counter", "histogram"]
    help: str
    """The HELP text. It has no characters that either format escapes."""
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name of the family in OpenMetrics: for a counter, without `_total`."""
        return self.name.removesuffix("_total") if self.type == "counter" else self.name


Series: TypeAlias = "tuple[Metric, tuple[str, ...]]"
"""A metric and the values of its labels in the catalog's order."""
Value: TypeAlias = "int | float | None"
"""The value of a sample; None if there is no sample."""
Sample: TypeAlias = "tuple[Metric, tuple[str, ...], Value]"
"""A metric, the values of its labels, and its value."""


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot in the order of the page: its devices by index and its processes by pid."""

    snapshot: Snapshot
    node: NodeReading | None
    """The last poll, if it has not expired and the driver answered."""
    devices: tuple[DeviceReading, ...]
    """The devices of `node`."""
    gpu_by_uuid: Mapping[str, str]
    """The `gpu` label of each device; empty if the driver does not answer."""
    names: Names
    """The reporters. Their names are unique, because Prometheus rejects a page with a duplicate series."""
    hide_identities: bool = False
    """The labels with a user, a command or a pod are empty."""


class Samples(NamedTuple):
    """The samples of a subject. Labels and values are separate, because labels rarely change."""

    labels: tuple[Any, ...]
    """Everything that the series depend on."""
    series: Callable[..., Iterable[Series]]
    """Computes the series from the labels."""
    values: tuple[Value, ...]
    """The value of each series."""


class Subject(NamedTuple):
    """A device, a process, or another part of the page whose lines change together."""

    key: Hashable
    """Identifies the subject within its collector."""
    samples: Callable[..., Samples]
    source: tuple[Any, ...]
    """The arguments of `samples`, and everything that the samples depend on. While it equals the last page's source,
    the lines of the last page are used: between two scrapes, most processes have not reported."""


class Collector(NamedTuple):
    """A collector: its label value on the page, its families, and the function that reads a view."""

    name: str
    families: tuple[Metric, ...]
    subjects: Callable[[View], Iterator[Subject]]


def listed(samples: Iterable[Sample]) -> Samples:
    """Return the samples of a subject with few series, or whose values rarely change."""
    rows = tuple(samples)
    return Samples(tuple([row[:2] for row in rows]), _series, tuple([row[2] for row in rows]))


def _series(*series: Series) -> tuple[Series, ...]:
    return series


def label_text(labels: Iterable[tuple[str, str]]) -> str:
    """Return `{name="value",…} `, or a space if there are no labels."""
    text = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])
    return f"{{{text}}} " if text else " "


def _escaped(value: str) -> str:
    r"""Escape `\`, newline and `"` in a label value; the formats allow no other escapes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
