"""The place where claims are measured: an emulated node or this machine, an exporter, and reporting processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.emulation.node import DeviceBook, EmulatedNode
from tests.emulation.torch_process import RemoteError, TorchProcess, TorchProcessError
from tests.gpu import driver
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import UNLIMITED, ExporterProcess, Metrics
from tests.support.torch_release import torch_release
from tests.support.waiting import wait_for, wait_until_equal

Books = Callable[[], Sequence[DeviceBook]]

SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
PATIENCE_SECONDS = 30.0
PREFIX = "gpumem_torch_"

COMPARED = {
    "gpumem_torch_allocated_bytes": "allocated_bytes.all.current",
    "gpumem_torch_reserved_bytes": "reserved_bytes.all.current",
    "gpumem_torch_active_bytes": "active_bytes.all.current",
    "gpumem_torch_inactive_split_bytes": "inactive_split_bytes.all.current",
    "gpumem_torch_requested_bytes": "requested_bytes.all.current",
    "gpumem_torch_allocated_peak_bytes": "allocated_bytes.all.peak",
    "gpumem_torch_reserved_peak_bytes": "reserved_bytes.all.peak",
    "gpumem_torch_alloc_retries_total": "num_alloc_retries",
    "gpumem_torch_ooms_total": "num_ooms",
    "gpumem_torch_segments_allocated_total": "segment.all.allocated",
    "gpumem_torch_segments_freed_total": "segment.all.freed",
    "gpumem_torch_cache_flushes_total": "num_sync_all_streams",
}
"""Each series and the key of `torch.cuda.memory_stats` that it must equal."""


class Bench:
    """One reporting process with the exporter's and the driver's values of it.

    The process has a context on device 0, the default of all methods. `books` reads the driver without the exporter.
    """

    def __init__(self, exporter: ExporterProcess, process: TorchProcess, books: Books) -> None:
        self.exporter = exporter
        self.process = process
        self.books = books
        self.uuids: list[str] = process.call("uuids")
        self.uuid = self.uuids[0]

    @property
    def pid(self) -> int:
        """The pid of the process in its own namespace."""
        return self.process.pid

    def exec(self, code: str, **variables: Any) -> Any:
        """Run Python code in the process."""
        return self.process.exec(code, **variables)

    def stats(self, device: int = 0) -> dict[str, Any]:
        """Return `torch.cuda.memory_stats`."""
        stats: dict[str, Any] = self.process.call("stats", device=device)
        return stats

    def reserved(self) -> int:
        """Return torch's reserved bytes of device 0."""
        return int(self.stats()["reserved_bytes.all.current"])

    def book(self, device: int = 0) -> DeviceBook:
        """Return the driver's values of a device."""
        return next(book for book in self.books() if book.uuid == self.uuids[device])

    def series(self, name: str, device: int = 0) -> list[float]:
        """Return the values of the process's series `gpumem_torch_<name>`."""
        return self.exporter.metrics().values(PREFIX + name, uuid=self.uuids[device], pid=str(self.pid))

    def once(self, name: str, wanted: float, device: int = 0) -> float | None:
        """Return the value of a series when it equals `wanted`, or its last value after a timeout; None if absent."""
        values: list[float] = []

        def read() -> list[float]:
            nonlocal values
            values = self.series(name, device)
            return values

        with contextlib.suppress(AssertionError):
            wait_until_equal(read, [wanted], name, PATIENCE_SECONDS)
        return values[0] if values else None

    def wait_until_listed(self, used_bytes: int, device: int = 0) -> None:
        """Wait for a scrape with these driver's bytes of the process."""
        name, labels = "gpumem_process_memory_used_bytes", {"uuid": self.uuids[device], "pid": str(self.pid)}
        wait_until_equal(lambda: self.exporter.metrics().values(name, **labels), [used_bytes], name)

    def settle(self) -> tuple[Metrics, dict[str, float]]:
        """Return a scrape of the current heap, and its series of device 0; the process must be idle.

        The second sample after now was taken after now.
        """
        for _ in range(2):
            before = self._reported()
            wait_for(lambda before=before: self._reported() > before, "a report")  # type: ignore[misc]
        metrics = self.exporter.metrics()
        metrics.assert_ledgers_add_up()
        found = {
            name.removeprefix(PREFIX): value
            for name in metrics.samples
            if name.startswith(PREFIX)
            for value in metrics.values(name, uuid=self.uuid, pid=str(self.pid))
        }
        return metrics, found

    def _reported(self) -> float:
        return self.exporter.metrics().value("gpumem_reporter_sample_timestamp_seconds", pid=str(self.pid))

    def unlike_torch(self, found: Mapping[str, float]) -> str:
        """Describe the series that differ from torch's values; empty if none does."""
        stats = self.stats()
        truth = {name.removeprefix(PREFIX): stats[key] for name, key in COMPARED.items() if key in stats}
        truth["private_pools_bytes"] = pools_of(self, stats)
        apart = [f"{name} {found.get(name)}, not {value}" for name, value in truth.items() if found.get(name) != value]
        return "; ".join(apart)

    def clear(self) -> dict[str, float | None]:
        """Empty the cache by an action and return the freed bytes from every source, torch's first."""
        if torch_release() < (2, 13):  # it does not list its private pools, so exact values need a walk over the heap
            self.settle()
            wait_for(lambda: self.series("private_pools_bytes"), "a walk over the heap")
        _, found = self.settle()
        assert not (unlike := self.unlike_torch(found)), unlike
        target = {"pid": self.pid, "uuid": self.uuid}
        dry = self.result(self.exporter.act("empty_cache", target=target, dry_run=True))
        reclaimable = found.get("reclaimable_bytes")
        reserved, before = self.reserved(), self.book()
        row = self.result(self.exporter.act("empty_cache", target=target))
        assert row["outcome"] == "done", row
        after = self.book()
        return {
            "reserved fell": reserved - self.reserved(),
            "reclaimable before": reclaimable,
            "dry run": dry["freed_bytes"],
            "action freed": row["freed_bytes"],
            "driver's used fell": before.used_bytes - after.used_bytes,
            "CUDA's free rose": row["device_free_after_bytes"] - row["device_free_before_bytes"],
            "reserved fell in the action": row["reserved_before_bytes"] - row["reserved_after_bytes"],
            "reclaimable fell": None if reclaimable is None else reclaimable - (self.once("reclaimable_bytes", 0) or 0),
        }

    def result(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of an action on device 0."""
        (row,) = [row for row in action["results"] if row["uuid"] == self.uuid]
        found: dict[str, Any] = row
        return found

    def info(self) -> dict[str, str]:
        """Return the labels of the info series of the process."""
        (labels,) = [
            dict(labels)
            for labels in self.exporter.metrics().samples["gpumem_process_info"]
            if dict(labels)["pid"] == str(self.pid)
        ]
        return labels


def pools_of(bench: Bench, stats: Mapping[str, Any]) -> int:
    """Return the bytes of private pools: from torch's statistics since 2.13, before that from its snapshot."""
    found = {key: value for key, value in stats.items() if key.startswith("reserved_bytes_by_private_pools")}
    if found:
        return sum(value for key, value in found.items() if key.endswith(".all.current"))
    segments = bench.process.call("snapshot")
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


class Place:
    """A machine on which claims are measured; a context manager that ends the exporter and all processes.

    Exporter and processes start on first use. One process for each allocator settings is shared by the claims, and is
    emptied before each.
    Without an emulated node, it is this machine. The folder receives the files of the programs.
    """

    def __init__(self, folder: Path, node: EmulatedNode | None = None) -> None:
        self.node = node
        self._folder = folder
        self._stack = ExitStack()
        self._exporter: ExporterProcess | None = None
        self._exporters = 0
        self._kept: dict[str, Bench] = {}

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def books(self) -> Sequence[DeviceBook]:
        """Read the driver's values of every device without the exporter."""
        return driver.books() if self.node is None else self.node.books().devices

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a program that runs here and imports from this repository."""
        variables = dict(os.environ) if self.node is None else self.node.environment()
        path = os.pathsep.join(filter(None, (str(REPOSITORY), variables.get("PYTHONPATH"))))
        return {**variables, "PYTHONPATH": path, **extra}

    @property
    def exporter(self) -> ExporterProcess:
        """The exporter of the place."""
        if self._exporter is None:
            folder = self._folder / f"exporter{self._exporters}"
            folder.mkdir(parents=True)
            self._exporters += 1
            flags = ("--report.interval", "0.1", "--collect.interval", "0.1", *UNLIMITED)
            self._exporter = ExporterProcess(folder, *flags, environment=self.environment())
            self._stack.callback(self._exporter.close)
        return self._exporter

    def process(self, settings: str = "") -> Bench:
        """Return the shared process with these allocator settings, emptied."""
        bench = self._kept.get(settings)
        if bench is None or not _emptied(bench):
            if bench is not None:
                bench.process.close()
            bench = self._kept[settings] = self._start({SETTINGS: settings or None}, "")
        return bench

    @contextlib.contextmanager
    def reporting(self, before: str = "", **environment: str | None) -> Iterator[Bench]:
        """Run a process for one claim; `before` runs in it before CUDA is initialized."""
        bench = self._start(environment, before)
        try:
            yield bench
        finally:
            bench.process.close()

    def torch(self, **environment: str | None) -> TorchProcess:
        """Start a process that does not report yet; `rest` ends it at the latest."""
        cleared: dict[str, str | None] = {SETTINGS: None, "PYTORCH_ALLOC_CONF": None}
        variables = {**cleared, "GPUMEM_EXPORTER_URL": self.exporter.url, **environment}
        process = TorchProcess(self.node, variables)
        self._stack.callback(process.close)
        return process

    def rest(self) -> None:
        """End the exporter and all processes; the next use starts them again."""
        self._kept.clear()
        self._exporter = None
        self._stack.close()

    def _start(self, environment: Mapping[str, str | None], before: str) -> Bench:
        process = self.torch(**environment)
        try:
            process.call("start_client")
            # The reclaimable bytes are an estimate until the next walk, which a slow machine makes seconds later.
            process.exec("import gpumem_client.allocator.reclaimable as limit; limit._WALK_SHARE = 0")
            process.exec(before)
            process.exec("torch.empty(1, device='cuda'); torch.cuda.empty_cache()")
            self.exporter.wait_for_processes(process.pid)
        except BaseException:
            process.close()
            raise
        return Bench(self.exporter, process, self.books)


def _emptied(bench: Bench) -> bool:
    """Free all memory of a process; return False if some remains."""
    try:
        bench.process.call("free")
        bench.exec(
            "for name in set(worker.namespace) - {'torch', 'worker', '__builtins__'}: del worker.namespace[name]\n"
            "import gc; gc.collect(); torch.cuda.empty_cache()\n"
            "getattr(torch._C, '_host_emptyCache', int)()\n"
            "torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_accumulated_memory_stats()"
        )
        return bench.reserved() == 0
    except (RemoteError, TorchProcessError):
        return False
