"""Renders the metrics page.

`prometheus_client` takes 8 to 10 µs per series, and a node with 64 processes on 8 devices has 20,000 series. Here each
subject (a device, a process, the allocator of a process) keeps its lines until it changes, and a page joins the lines
of all subjects family by family.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import NamedTuple

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.allocators import torch_collector
from gpumem_exporter.collectors.catalog import Metric
from gpumem_exporter.collectors.devices import DEVICE, LEDGER, POLL
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.collectors.own_process import own_process
from gpumem_exporter.collectors.processes import OOM, PROCESS, REPORTER
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject, View
from gpumem_exporter.core.samples import DeviceReading, Snapshot

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_log = logging.getLogger(__name__)


class Exposition:
    """Renders the page. Thread-safe.

    With `hide_identities`, the labels with a user, a command or a pod are empty.
    """

    def __init__(
        self,
        instruments: Instruments,
        *,
        version: str,
        source: str,
        hide_identities: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build = (version, source, platform.python_version())
        self._hide_identities = hide_identities
        self._clock = clock
        self.collectors = (POLL, DEVICE, LEDGER, PROCESS, OOM, REPORTER, torch_collector())
        own_families = (*catalog.OWN, *catalog.OWN_PROCESS)
        own = Collector("own", own_families, lambda view: chain(instruments.subjects(view), own_process()))
        self._collectors = (*self.collectors, own)
        self._lines = {collector.name: SubjectLines(collector.families) for collector in self._collectors}
        self._scrape_lines = SubjectLines((catalog.BUILD_INFO, catalog.COLLECTOR_SUCCESS, catalog.COLLECTOR_DURATION))
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> list[bytes]:
        """Return the lines of the page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4, to be joined.

        A collector that fails is left out and does not affect the others. Its first failure is logged.
        """
        with self._lock:
            view = view_of(snapshot, hide_identities=self._hide_identities)
            seconds: dict[str, float] = {}
            subjects: dict[str, list[Subject]] = {}
            families: dict[Metric, tuple[bytes, ...]] = {}
            failed: set[str] = set()
            for name, _, collect in self._collectors:
                started = self._clock()
                try:
                    subjects[name] = list(collect(view))
                except Exception:  # noqa: BLE001 - logged there
                    self._fail(name, failed)
                seconds[name] = self._clock() - started
            for name, collected in subjects.items():
                started = self._clock()
                try:
                    families.update(self._lines[name].page(collected))
                except Exception:  # noqa: BLE001 - logged there
                    self._fail(name, failed)
                seconds[name] += self._clock() - started
            self._failing &= failed
            outcomes = [value for name in seconds for value in (int(name not in failed), seconds[name])]
            scrape = Samples((self._build, *seconds), _scrape_series, (1, *outcomes))
            families.update(self._scrape_lines.page([("scrape", scrape)]))
            return _page(families, openmetrics=openmetrics)

    def _fail(self, name: str, failed: set[str]) -> None:
        failed.add(name)
        if name not in self._failing:
            self._failing.add(name)
            _log.exception("collector %r failed; its metrics are left out until it succeeds", name)


def _scrape_series(build: tuple[str, str, str], *names: str) -> Iterator[Series]:
    yield catalog.BUILD_INFO, build
    for name in names:
        yield catalog.COLLECTOR_SUCCESS, (name,)
        yield catalog.COLLECTOR_DURATION, (name,)


def _page(families: Mapping[Metric, tuple[bytes, ...]], *, openmetrics: bool) -> list[bytes]:
    """Return the lines of each family below its header, in the order of the catalog."""
    page: list[bytes] = []
    for metric in catalog.METRICS:
        pieces = families.get(metric, ())
        if any(pieces):
            page.append(_header(metric, openmetrics=openmetrics))
            page.extend(pieces)
    if openmetrics:
        page.append(b"# EOF\n")
    return page


@cache
def _header(metric: Metric, *, openmetrics: bool) -> bytes:
    """Return the HELP and TYPE lines of a family."""
    name = metric.family if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n".encode()


def view_of(snapshot: Snapshot, *, hide_identities: bool = False) -> View:
    """Sort a snapshot."""
    node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
    devices = tuple(sorted(node.devices, key=_device_order)) if node is not None else ()
    gpu_by_uuid = {device.uuid: device.gpu for device in devices}
    return View(snapshot, node, devices, gpu_by_uuid, snapshot.names, hide_identities)


def _device_order(device: DeviceReading) -> tuple[tuple[int, ...], str, str]:
    """Return a sort key: by number, with `0:2` (a MIG device) after `0` and before `1`; other texts come first."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid


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
