"""The parts of the page: a collector yields subjects, and each subject keeps its rendered lines until it changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from gpumem_exporter.collectors.catalog import Metric
from gpumem_exporter.core.samples import DeviceReading, Names, NodeReading, Snapshot

Series: TypeAlias = "tuple[Metric, tuple[str, ...]]"
"""A metric and the values of its labels in the catalog's order."""
Value: TypeAlias = "int | float | None"
"""The value of a sample; None if there is no sample."""


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

    @classmethod
    def of(cls, snapshot: Snapshot, *, hide_identities: bool = False) -> View:
        """Sort a snapshot."""
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        devices = tuple(sorted(node.devices, key=_device_order)) if node is not None else ()
        gpu_by_uuid = {device.uuid: device.gpu for device in devices}
        return cls(snapshot, node, devices, gpu_by_uuid, snapshot.names, hide_identities)


def _device_order(device: DeviceReading) -> tuple[tuple[int, ...], str, str]:
    """Return a sort key: by number, with `0:2` (a MIG device) after `0` and before `1`; other texts come first."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid


class Samples(NamedTuple):
    """The samples of a subject. Labels and values are separate, because labels rarely change."""

    labels: tuple[Any, ...]
    """Everything that the series depend on."""
    series: Callable[..., Iterable[Series]]
    """Computes the series from the labels."""
    values: tuple[Value, ...]
    """The value of each series."""


Subject: TypeAlias = "tuple[Hashable, Samples]"
"""A device, a process, or another part of the page whose lines change together.

The key identifies the subject among those of its collector.
"""


class Collector(NamedTuple):
    """A collector: its label value on the page, its families, and the function that reads a view."""

    name: str
    families: tuple[Metric, ...]
    subjects: Callable[[View], Iterator[Subject]]


class _Family(NamedTuple):
    """The lines of one family of a subject, with a place for each value."""

    template: bytes
    indexes: tuple[int, ...]
    """The indexes of the values among the values of the subject. None has no place."""


class _Rendered(NamedTuple):
    samples: Samples
    shape: tuple[type, ...]
    """The type of each value."""
    families: list[_Family]
    lines: list[bytes]
    """The lines of each family."""


class SubjectLines:
    """The rendered lines of a collector's subjects. Not thread-safe."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._indexes = {metric: index for index, metric in enumerate(families)}
        self._rendered: dict[Hashable, _Rendered] = {}

    def page(self, subjects: Iterable[Subject]) -> dict[Metric, tuple[bytes, ...]]:
        """Return the lines of each family in the order of the subjects; forgets all other subjects.

        Renders the subjects that are new or that have changed.
        """
        page = [(key, self._render(self._rendered.get(key), samples)) for key, samples in subjects]
        self._rendered = dict(page)
        rows = [rendered.lines for _, rendered in page]
        return dict(zip(self._indexes, zip(*rows, strict=True), strict=True)) if rows else {}

    def _render(self, last: _Rendered | None, samples: Samples) -> _Rendered:
        if last is not None and last.samples == samples:
            return last
        shape = tuple(map(type, samples.values))
        if last is not None and last.shape == shape and last.samples[:2] == samples[:2]:
            families = last.families
        else:
            families = self._families(samples)
        # One formatting for all lines of a family takes a third of the time of one for each line.
        value = samples.values.__getitem__
        lines = [template % tuple(map(value, indexes)) for template, indexes in families]
        return _Rendered(samples, shape, families, lines)

    def _families(self, samples: Samples) -> list[_Family]:
        lines: list[list[str]] = [[] for _ in self._indexes]
        places: list[list[int]] = [[] for _ in self._indexes]
        text, last_labels = "", None
        for place, (metric, labels) in enumerate(samples.series(*samples.labels)):
            if labels is not last_labels:  # the series of an allocator share one tuple
                text, last_labels = _label_text(metric.labels, labels).replace("%", "%%"), labels
            value = samples.values[place]
            if value is not None:
                family = self._indexes[metric.part_of or metric]
                lines[family].append(f"{metric.name}{text}%{'d' if isinstance(value, int) else 'a'}\n")
                places[family].append(place)
        encoded = ["".join(family).encode("utf-8", "replace") for family in lines]
        return list(map(_Family, encoded, map(tuple, places)))


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return `{name="value",…} `, or a space if there are no labels."""
    if not names:
        return " "
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]) + "} "


def _escaped(value: str) -> str:
    r"""Escape `\`, newline and `"` in a label value; the formats allow no other escapes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
