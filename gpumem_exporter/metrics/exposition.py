"""Renders the metrics page.

Each subject (a device, a process, the allocator of a process) keeps its lines until it changes, and a page joins the
lines of all subjects family by family.
"""

# Not with prometheus_client's encoders: they take 8 to 10 µs per series, and a node with 64 processes on 8 devices has
# 20,000.

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.allocators import TORCH
from gpumem_exporter.metrics.collector_types import (
    Collector,
    Metric,
    Sample,
    Samples,
    Subject,
    Value,
    View,
    label_text,
    listed,
)
from gpumem_exporter.metrics.devices import DEVICE, LEDGER, POLL
from gpumem_exporter.metrics.instruments import Registry
from gpumem_exporter.metrics.processes import PROCESS, REPORTER
from gpumem_exporter.metrics.registry import RegistryLines

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_log = logging.getLogger(__name__)

T = TypeVar("T")
# The number of subjects between two pauses. One process on eight devices takes a fifth of a millisecond.
_STEPS = 4
# The end of a family in a template; no UTF-8 text has this byte.
_END = b"\xff"
OWN = "exporter"
"""The name of the collector of the registry."""


class Exposition:
    """Renders one page after another: the series of a snapshot, then the series of a registry. Not thread-safe.

    `collectors` are the collectors of features, and `off` names the collectors that are turned off. With
    `hide_identities`, the labels with a user, a command or a pod are empty.
    """

    def __init__(
        self,
        registry: Registry,
        collectors: Sequence[Collector] = (),
        *,
        version: str,
        source: str,
        off: Collection[str] = (),
        hide_identities: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build = (version, source, platform.python_version())
        self._hide_identities = hide_identities
        self._clock = clock
        every = (POLL, DEVICE, LEDGER, PROCESS, REPORTER, TORCH, *collectors)
        self._collectors = tuple(collector for collector in every if collector.name not in off)
        self.collectors = tuple(name for name in (*(collector.name for collector in every), OWN) if name not in off)
        """The names of the collectors that are on, in the order of the page."""
        self.off = frozenset(off)
        self._families = (*catalog.SCRAPED, *(metric for collector in collectors for metric in collector.families))
        self._lines = {collector.name: SubjectLines(collector.families) for collector in self._collectors}
        self._own = RegistryLines(registry)
        self._scrape_lines = SubjectLines((catalog.BUILD_INFO, catalog.COLLECTOR_SUCCESS, catalog.COLLECTOR_DURATION))
        self._failing: set[str] = set()

    def render(
        self, snapshot: Snapshot, *, openmetrics: bool, collectors: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """Yield the page, in OpenMetrics 1.0 or in Prometheus' text format 0.0.4, as lists of pieces.

        It has the series of the named collectors, by default of all that are on. It yields after short steps, at first
        empty lists, so that other work can go on in between.
        """
        work = _Work(self._clock)
        chosen = collectors or self.collectors
        view = view_of(snapshot, hide_identities=self._hide_identities)
        yield []
        subjects = {name: collect(view) for name, _, collect in self._collectors if name in chosen}
        samples: dict[str, Iterator[Any]] = {name: self._lines[name].sample(each) for name, each in subjects.items()}
        if OWN in chosen:
            samples[OWN] = self._own.render()
        sampled = yield from work.steps(samples)
        own = sampled.pop(OWN, [])
        if OWN in chosen and self._own.error is not None:
            work.errors[OWN] = self._own.error
        rendered = yield from work.steps({name: self._lines[name].render(each) for name, each in sampled.items()})
        families: dict[Metric, Sequence[bytes]] = {}
        for name, each in rendered.items():
            families.update(self._lines[name].page(each))
        # A collector that fails is left out and does not affect the others. It fails at each scrape, so one line is
        # enough.
        for name, error in work.errors.items():
            if name in self._lines:
                self._lines[name].clear()
            if name not in self._failing:
                _log.error("collector %r failed; its metrics are left out until it succeeds", name, exc_info=error)
        self._failing = self._failing.difference(chosen).union(work.errors)
        scrape = self._scrape_lines.sample([self._scrape(work)])
        families.update(self._scrape_lines.page(list(self._scrape_lines.render(scrape))))
        page: list[bytes] = []
        for metric, some in chain(((each, families.get(each, ())) for each in self._families), own):
            if any(some):
                page += (_header(metric, openmetrics=openmetrics), *some)
        yield [*page, b"# EOF\n"] if openmetrics else page

    def _scrape(self, work: _Work) -> Subject:
        samples: list[Sample] = [(catalog.BUILD_INFO, self._build, 1)]
        for name, seconds in work.seconds.items():
            samples.append((catalog.COLLECTOR_SUCCESS, (name,), int(name not in work.errors)))
            samples.append((catalog.COLLECTOR_DURATION, (name,), seconds))
        return Subject("scrape", listed, (samples,))


class _Work:
    """The work of collectors on one page: the time that each collector takes, and its errors."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, Exception] = {}

    def steps(self, collectors: Mapping[str, Iterator[T]]) -> Generator[list[bytes], None, dict[str, list[T]]]:
        """Take the steps of all collectors, and yield [] after some. Returns the steps of those that do not fail."""
        done = {}
        for name, steps in collectors.items():
            taken: list[T] = []
            spent, started = self.seconds.get(name, 0.0), self._clock()
            try:
                for step in steps:
                    taken.append(step)
                    if not len(taken) % _STEPS:
                        spent += self._clock() - started
                        yield []
                        started = self._clock()
                done[name] = taken
            except Exception as error:  # noqa: BLE001 - `Exposition.render` logs it
                self.errors[name] = error
            self.seconds[name] = spent + self._clock() - started
        return done


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


def _device_order(device: DeviceReading) -> tuple[list[int], str]:
    """Return a sort key: by index, with `0:2` (a MIG device) after `0` and before `1`; without an index first."""
    return [int(number) for number in device.gpu.split(":") if number], device.uuid


class Rendered(NamedTuple):
    """The lines of a subject."""

    source: tuple[Any, ...]
    samples: Samples
    shape: tuple[type, ...]
    """The type of each value."""
    template: bytes
    """The lines with a place for each value except None, family by family, with `_END` between families."""
    pick: Callable[[tuple[Value, ...]], Any]
    """Returns the values, or the only one, in the order of their places."""
    lines: list[bytes]
    """The lines of each family."""


class SubjectLines:
    """The rendered lines of a collector's subjects. Not thread-safe."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._indexes = {metric: index for index, metric in enumerate(families)}
        self._rendered: dict[Hashable, Rendered] = {}

    def sample(self, subjects: Iterable[Subject]) -> Iterator[tuple[Subject, Samples]]:
        """Return the subjects with their samples: the last page's samples if the source is equal."""
        known = self._rendered
        return (
            (each, last.samples)
            if (last := known.get(each.key)) is not None and last.source == each.source
            else (each, each.samples(*each.source))
            for each in subjects
        )

    def render(self, sampled: Iterable[tuple[Subject, Samples]]) -> Iterator[tuple[Hashable, Rendered]]:
        """Yield the keys of subjects with their lines. Renders the subjects that are new or that have changed."""
        for (key, _, source), samples in sampled:
            last = self._rendered.get(key)
            if last is None or last.samples is not samples:
                # In place of the last lines at once: the lines of a page are megabytes, of which one set is enough.
                last = self._rendered[key] = self._render(last, samples, source)
            yield key, last

    def page(self, subjects: list[tuple[Hashable, Rendered]]) -> dict[Metric, tuple[bytes, ...]]:
        """Return the lines of each family in the order of these subjects; forgets all other subjects."""
        self._rendered = dict(subjects)
        rows = [rendered.lines for _, rendered in subjects]
        return dict(zip(self._indexes, zip(*rows, strict=True), strict=True)) if rows else {}

    def clear(self) -> None:
        """Forget all subjects."""
        self._rendered.clear()

    def _render(self, last: Rendered | None, samples: Samples, source: tuple[Any, ...]) -> Rendered:
        if last is not None and last.samples == samples:
            return last._replace(source=source)
        shape = tuple(map(type, samples.values))
        # In most reports only numbers change: the names, labels and places of the lines stay.
        if last is not None and last.shape == shape and last.samples[:2] == samples[:2]:
            template, pick = last.template, last.pick
        else:
            template, pick = self._template(samples)
        # One formatting for all lines takes a third of the time of a formatting for each line.
        lines = (template % pick(samples.values)).split(_END)
        return Rendered(source, samples, shape, template, pick, lines)

    def _template(self, samples: Samples) -> tuple[bytes, Callable[[tuple[Value, ...]], Any]]:
        lines: list[list[str]] = [[] for _ in self._indexes]
        places: list[list[int]] = [[] for _ in self._indexes]
        text, last_labels = "", None
        for place, (metric, labels) in enumerate(samples.series(*samples.labels)):
            if labels is not last_labels:  # the series of an allocator share one tuple
                text = label_text(zip(metric.labels, labels, strict=True)).replace("%", "%%")
                last_labels = labels
            value = samples.values[place]
            if value is not None:
                family = self._indexes[metric]
                lines[family].append(f"{metric.name}{text}%{'d' if isinstance(value, int) else 'a'}\n")
                places[family].append(place)
        template = _END.join(["".join(family).encode("utf-8", "replace") for family in lines])
        picked = [*chain.from_iterable(places)]
        return template, itemgetter(*picked) if picked else lambda _: ()
