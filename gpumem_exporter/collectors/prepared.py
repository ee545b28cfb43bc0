"""Renders the lines of a report when it arrives, so that a scrape only joins them.

All lines of a family are consecutive on the page. The lines of a process are therefore stored as one piece of bytes per
family, and a scrape joins the pieces of all processes, which takes little longer than copying them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from gpumem_exporter.collectors.allocators import REPORTED, report_samples
from gpumem_exporter.collectors.catalog import Metric
from gpumem_exporter.collectors.lines import Sample, label_text
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess

__all__ = ["PreparedReports"]


_Texts: TypeAlias = "Mapping[tuple[tuple[str, ...], tuple[str, ...]], str]"
"""The text of labels by their names and values; names are needed because a phase and a component may be equal."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The lines of one process, and the values that they depend on."""

    process: ReportingProcess
    pid: str
    gpu_by_uuid: Mapping[str, str]
    """The source of the `gpu` labels."""
    gpus: tuple[str, ...]
    pieces: tuple[bytes, ...]
    """The lines of each family, in the order of `REPORTED`."""
    texts: _Texts
    """The text of each set of labels, which the next report usually reuses."""


class PreparedReports:
    """Caches the lines of each process' last report. Not thread-safe.

    Args:
        max_processes: the most processes in the cache; those that reported last stay. The lines of other processes are
            rendered in each scrape.
    """

    def __init__(self, *, max_processes: int) -> None:
        self._max_processes = max_processes
        self._prepared: OrderedDict[ProcessKey, _Prepared] = OrderedDict()
        self._shown_gpus: Mapping[str, str] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def prepare(self, process: ReportingProcess, gpu_by_uuid: Mapping[str, str]) -> None:
        """Render a process' lines with the pid and the device indexes of the last page; `families` verifies both."""
        last = self._prepared.get(process.key)
        pid = last.pid if last is not None and last.process.host_pid == process.host_pid else process.label_pid
        # An unchanged mapping stays the same object, so that `families` can compare it by identity.
        shown = self._shown_gpus
        self._keep(_prepared(process, pid, shown if shown == gpu_by_uuid else {**gpu_by_uuid, **shown}, last))

    def families(self, view: View) -> dict[Metric, Iterable[bytes]]:
        """Return the pieces of each family in the view's order; renders lines that are missing or outdated.

        Removes processes that are not in the view from the cache.
        """
        if self._shown_gpus != view.gpu_by_uuid:
            self._shown_gpus = view.gpu_by_uuid
        rows = []
        for pid, process in view.reporting:
            prepared = self._prepared.get(process.key)
            if (
                prepared is None
                or prepared.process is not process
                or prepared.pid != pid
                or not (prepared.gpu_by_uuid is self._shown_gpus or prepared.gpus == _gpus(process, self._shown_gpus))
            ):
                prepared = _prepared(process, pid, self._shown_gpus, prepared)
                self._keep(prepared)
            rows.append(prepared.pieces)
        if len(self._prepared) > len(rows):
            shown = {process.key for _, process in view.reporting}
            for key in [key for key in self._prepared if key not in shown]:
                del self._prepared[key]
        return dict(zip(REPORTED, zip(*rows, strict=True), strict=True)) if rows else {}

    def _keep(self, prepared: _Prepared) -> None:
        self._prepared[prepared.process.key] = prepared
        self._prepared.move_to_end(prepared.process.key)
        if len(self._prepared) > self._max_processes:
            self._prepared.popitem(last=False)


def _gpus(process: ReportingProcess, gpu_by_uuid: Mapping[str, str]) -> tuple[str, ...]:
    return tuple([gpu_by_uuid.get(sample.uuid, "") for sample in process.report.devices])


def _prepared(process: ReportingProcess, pid: str, gpu_by_uuid: Mapping[str, str], last: _Prepared | None) -> _Prepared:
    gpus = _gpus(process, gpu_by_uuid)
    if last is not None and last.pid == pid and last.gpus == gpus and _has_same_values(last.process, process):
        return replace(last, process=process, gpu_by_uuid=gpu_by_uuid)
    samples = report_samples(process, pid, gpu_by_uuid)
    return _Prepared(process, pid, gpu_by_uuid, gpus, *_write(samples, last.texts if last is not None else {}))


def _has_same_values(one: ReportingProcess, other: ReportingProcess) -> bool:
    """Return whether two reports have the same lines, as those of an idle process do."""
    return (
        one.report.devices == other.report.devices
        and one.report.step == other.report.step
        and one.report.pinned_host_bytes == other.report.pinned_host_bytes
        and one.report.process.workload == other.report.process.workload
        and one.report.process.rank == other.report.process.rank
    )


_PLACES = {metric: place for place, metric in enumerate(REPORTED)}


def _write(samples: Iterable[Sample], known: _Texts) -> tuple[tuple[bytes, ...], _Texts]:
    pieces: list[list[str]] = [[] for _ in REPORTED]
    used: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    written: tuple[str, ...] | None = None
    for metric, labels, value in samples:
        if labels is not written:  # the samples of a device share one tuple and its text
            names = metric.labels
            text = used[names, labels] = known.get((names, labels)) or label_text(names, labels)
            written = labels
        pieces[_PLACES[metric]].append(f"{metric.name}{text}{value}\n")
    return tuple(["".join(lines).encode("utf-8", "replace") for lines in pieces]), used
