"""The matrix' allocators and heaps: real PyTorch on an emulated node, every figure compared with its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.exporter_process import ExporterProcess, Metrics, wait_for

COMPARED = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "active_bytes": "active_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "alloc_retries_total": "num_alloc_retries",
    "ooms_total": "num_ooms",
    "segments_allocated_total": "segment.all.allocated",
    "segments_freed_total": "segment.all.freed",
    "cache_flushes_total": "num_sync_all_streams",
}
"""Series of torch's, and the key of `torch.cuda.memory_stats` that it must equal."""

SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
EMPTY_GRAPH = "import warnings; warnings.simplefilter('ignore')\n"


class Bench:
    """One reporting process, and what the exporter says of it."""

    def __init__(self, node: EmulatedNode, exporter: ExporterProcess, process: TorchProcess) -> None:
        self.node = node
        self.exporter = exporter
        self.process = process

    def exec(self, code: str, **variables: Any) -> Any:
        return self.process.exec(code, **variables)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.process.call("stats", device=0)
        return stats

    def series(self, name: str) -> list[float]:
        return self.exporter.metrics().values(f"gpumem_torch_{name}", gpu="0", pid=str(self.process.pid))

    def settle(self) -> tuple[Metrics, dict[str, float]]:
        """A scrape that shows the heap as it is now: the process does nothing meanwhile. Its series of device 0.

        The next report but one was sampled after now.
        """
        for _ in range(2):
            before = self._reported()
            wait_for(lambda before=before: self._reported() > before, "a report")  # type: ignore[misc]
        metrics = self.exporter.metrics()
        metrics.assert_ledgers_add_up()
        pid = str(self.process.pid)
        prefix = "gpumem_torch_"
        shown = {
            name.removeprefix(prefix): value
            for name in metrics.samples
            if name.startswith(prefix)
            for value in metrics.values(name, gpu="0", pid=pid)
        }
        return metrics, shown

    def _reported(self) -> float:
        return self.exporter.metrics().value("gpumem_reporter_last_report_timestamp_seconds", pid=str(self.process.pid))

    def assert_as_torch_says(self, shown: dict[str, float]) -> None:
        stats = self.stats()
        for name, key in COMPARED.items():
            assert shown[name] == stats[key], name
        pools = [
            value
            for key, value in stats.items()
            if key.startswith("reserved_bytes_by_private_pools") and key.endswith(".all.current")
        ]
        assert shown["private_pools_bytes"] == sum(pools)

    def assert_a_clear_returns_what_was_said(self) -> int:
        """Reclaimable, a dry run, the action's answer, torch's figure and the driver's books are one number."""
        _, shown = self.settle()
        self.assert_as_torch_says(shown)
        target = {"pid": self.process.pid}
        dry = self.exporter.act("empty_cache", target=target, dry_run=True)
        reserved, books = self.stats()["reserved_bytes.all.current"], self.node.books()[0]
        action = self.exporter.act("empty_cache", target=target)
        assert [row["outcome"] for row in action["results"]] == ["done"], action
        freed = reserved - self.stats()["reserved_bytes.all.current"]
        assert {
            shown["reclaimable_bytes"],
            dry["freed_bytes"],
            action["freed_bytes"],
            books.used_bytes - self.node.books()[0].used_bytes,
        } == {freed}
        _, shown = self.settle()
        assert shown["reclaimable_bytes"] == 0
        return int(freed)

    def info(self) -> dict[str, str]:
        (labels,) = [
            dict(labels)
            for labels in self.exporter.metrics().samples["gpumem_process_info"]
            if dict(labels)["pid"] == str(self.process.pid)
        ]
        return labels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[tuple[EmulatedNode, ExporterProcess]]:
    """One node and one exporter for the whole module."""
    folder = tmp_path_factory.mktemp("exporter")
    with EmulatedNode(tmp_path_factory.mktemp("node")) as node:
        flags = ("--report.interval", "0.1", "--collect.interval", "0.1")
        exporter = ExporterProcess(folder, *flags, environment=node.environment())
        try:
            yield node, exporter
        finally:
            exporter.close()


Place = tuple[EmulatedNode, ExporterProcess]


def start(place: Place, environment: dict[str, str | None], before: str = "") -> Bench:
    """A process that reports; `before` runs in it before CUDA is initialised."""
    node, exporter = place
    cleared: dict[str, str | None] = {SETTINGS: None, "PYTORCH_ALLOC_CONF": None}
    process = TorchProcess(node, {**cleared, "GPUMEM_EXPORTER_URL": exporter.url, **environment})
    try:
        process.call("start_client")
        process.exec(before)
        process.exec("torch.empty(1, device='cuda'); torch.cuda.empty_cache()")
        exporter.wait_for_processes(process.pid)
    except BaseException:
        process.close()
        raise
    return Bench(node, exporter, process)


@pytest.fixture(scope="module")
def classic_process(place: Place) -> Iterator[Bench]:
    bench = start(place, {})
    yield bench
    bench.process.close()


@pytest.fixture(scope="module")
def expandable_process(place: Place) -> Iterator[Bench]:
    bench = start(place, {SETTINGS: "expandable_segments:True"})
    yield bench
    bench.process.close()


def emptied(bench: Bench) -> Bench:
    bench.process.call("free")
    bench.exec(
        "for name in set(worker.namespace) - {'torch', 'worker', '__builtins__'}: del worker.namespace[name]\n"
        "import gc; gc.collect(); torch.cuda.empty_cache()"
    )
    assert bench.stats()["reserved_bytes.all.current"] == 0
    return bench


@pytest.fixture
def classic(classic_process: Bench) -> Bench:
    """A process with classic segments that holds nothing; one for the whole module."""
    return emptied(classic_process)


@pytest.fixture
def expandable(expandable_process: Bench) -> Bench:
    """The same with expandable segments."""
    return emptied(expandable_process)


@pytest.fixture
def begin(place: Place) -> Iterator[Any]:
    """Starts processes for one test: `begin(VARIABLE="…", before="code")`."""
    started: list[Bench] = []

    def made(before: str = "", **environment: str | None) -> Bench:
        started.append(start(place, environment, before))
        return started[-1]

    yield made
    for bench in started:
        bench.process.close()


def random_heaps(bench: Bench, count: int = 8) -> int:
    """Random heaps, small and large blocks, on three streams; answers how many had something to give back."""
    found = 0
    for seed in range(count):
        bench.process.call("free")
        bench.exec(
            "streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]\n"
            "for number, stream in enumerate(streams):\n"
            "    with torch.cuda.stream(stream):\n"
            "        worker.random_heap(seed=10 * seed + number, blocks=40, keep=keep, largest_bytes=128 << 20)",
            seed=seed,
            keep=(seed % 4) / 8,
        )
        found += bench.assert_a_clear_returns_what_was_said() > 0
    return found


def test_classic_segments(classic: Bench) -> None:
    """Each statistic is torch's, and reclaimable what a clear gives back, on random heaps of several streams."""
    assert random_heaps(classic) > 4


def test_expandable_segments(expandable: Bench) -> None:
    """The same to the page, with a page of 2 MiB in the small pool and of 20 in the large one."""
    assert random_heaps(expandable) > 4
    assert expandable.series("inactive_split_bytes") == [0]
    assert any(segment["is_expandable"] for segment in expandable.process.call("snapshot"))


def test_expandable_segments_with_another_page_size(begin: Any) -> None:
    """`large_segment_size_mb` makes the pages, and reclaimable follows."""
    bench = begin(**{SETTINGS: "expandable_segments:True,large_segment_size_mb:64"})
    assert random_heaps(bench, 4) > 2


def test_a_page_size_that_changed_under_way(begin: Any) -> None:
    """A segment keeps the page size it was made with; where the two cannot be told apart, reclaimable is absent."""
    bench = begin(**{SETTINGS: "expandable_segments:True"})
    bench.exec("held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')")
    bench.exec("torch._C._accelerator_setAllocatorSettings('large_segment_size_mb:64')")
    bench.exec(
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream):\n"
        "    other = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
        "    torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert bench.assert_a_clear_returns_what_was_said() == 128 * MIB
    bench.exec("torch.empty(280 << 20, dtype=torch.uint8, device='cuda')")  # 320 MiB in one piece: 5 × 64, 16 × 20
    _, shown = bench.settle()
    assert shown["reserved_bytes"] == bench.stats()["reserved_bytes.all.current"]
    assert not {"reclaimable_bytes", "fragmented_bytes", "fragmentation_ratio"} & set(shown)


def test_expandable_segments_switched_on_and_off_under_way(begin: Any) -> None:
    """What counts is which segments there are, not which the settings would make now."""
    bench = begin()
    bench.exec("kept = [torch.empty(3 << 20, dtype=torch.uint8, device='cuda')]")
    bench.exec("torch._C._accelerator_setAllocatorSettings('expandable_segments:True')")
    bench.exec(
        "heap = [torch.empty(9 << 20, dtype=torch.uint8, device='cuda') for _ in range(20)]\n"
        "torch._C._accelerator_setAllocatorSettings('expandable_segments:False')\n"
        "torch.cuda.reset_accumulated_memory_stats()\n"
        "kept += heap[::7]; del heap"
    )
    assert bench.assert_a_clear_returns_what_was_said() > 0
    assert bench.info()["allocator_settings"] == "expandable_segments:False"


def test_max_split_size(begin: Any) -> None:
    """Blocks above it are never split."""
    bench = begin(**{SETTINGS: "max_split_size_mb:32"})
    assert random_heaps(bench, 4) > 2
    assert bench.stats()["max_split_size"] == 32 * MIB


def test_garbage_collection_threshold_and_a_memory_fraction(begin: Any) -> None:
    """The allocator gives segments back by itself; the fraction is the limit that an out-of-memory error shows."""
    bench = begin(**{SETTINGS: "garbage_collection_threshold:0.5"})
    bench.exec("torch.cuda.set_per_process_memory_fraction(0.25)")
    bench.exec("for n in range(1, 40): torch.empty(n * (32 << 20), dtype=torch.uint8, device='cuda')")
    assert bench.stats()["segment.all.freed"] > 0
    bench.assert_a_clear_returns_what_was_said()
    bench.exec("try: torch.empty(4 << 30, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass")
    _, shown = bench.settle()
    assert shown["ooms_total"] == bench.stats()["num_ooms"] == 1
    bench.assert_as_torch_says(shown)


@pytest.mark.parametrize("kind", ["classic", "expandable"])
def test_a_living_mem_pool_keeps_its_cache(kind: str, request: pytest.FixtureRequest) -> None:
    """It counts in reserved and in private pools, and is not reclaimable until the pool has gone."""
    bench: Bench = request.getfixturevalue(kind)
    bench.exec(
        "pool = torch.cuda.MemPool()\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    inside = torch.empty(50 << 20, dtype=torch.uint8, device='cuda')\n"
        "    torch.empty(70 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert bench.assert_a_clear_returns_what_was_said() == 100 * MIB
    _, shown = bench.settle()
    assert shown["private_pools_bytes"] == shown["reserved_bytes"] == 120 * MIB
    bench.exec("del inside, pool")
    _, shown = bench.settle()
    assert (shown["private_pools_bytes"], shown["reserved_bytes"], shown["reclaimable_bytes"]) == (0, 0, 0)


CAPTURE = EMPTY_GRAPH + (
    "def capture(nbytes, **arguments):\n"
    "    graph = torch.cuda.CUDAGraph()\n"
    "    with torch.cuda.graph(graph, **arguments):\n"
    "        torch.empty(nbytes, dtype=torch.uint8, device='cuda').zero_()\n"
    "    return graph\n"
)


@pytest.mark.parametrize("kind", ["classic", "expandable"])
def test_a_dead_graphs_memory_is_reclaimable_and_a_living_ones_is_not(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Both look alike in torch's snapshot; no statistic changes when the graph dies, and yet reclaimable does."""
    bench: Bench = request.getfixturevalue(kind)
    bench.exec(
        CAPTURE + "first = capture(40 << 20); second = capture(60 << 20)\n"
        "third = capture(30 << 20, pool=first.pool())\n"
        "torch.empty(20 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert bench.assert_a_clear_returns_what_was_said() == 20 * MIB
    bench.exec("del first")  # the third still holds its pool
    assert bench.assert_a_clear_returns_what_was_said() == 0
    bench.exec("second.reset()")
    assert bench.assert_a_clear_returns_what_was_said() == 60 * MIB
    bench.exec("del third")
    assert bench.assert_a_clear_returns_what_was_said() == 40 * MIB
    _, shown = bench.settle()
    assert shown["reserved_bytes"] == 0


def test_a_capture_that_failed_does_not_refuse_clears_for_ever(classic: Bench) -> None:
    """Torch runs no hook where the end of a capture fails."""
    during = classic.process.send(
        "exec",
        code=EMPTY_GRAPH + "import threading\n"
        "graph, errors = torch.cuda.CUDAGraph(), []\n"
        "cached = torch.empty(100 << 20, dtype=torch.uint8, device='cuda')\n"
        "def clear():\n"
        "    try: torch.cuda.empty_cache()\n"
        "    except Exception as error: errors.append(str(error))\n"
        "try:\n"
        "    with torch.cuda.graph(graph):\n"
        "        del cached\n"
        "        thread = threading.Thread(target=clear); thread.start(); thread.join()\n"
        "    result = 'captured'\n"
        "except Exception as error: result = str(error)",
    )
    assert "capture" in classic.process.receive(during, 60)
    assert classic.exec("result = len(errors)") == 1, "nothing broke the capture: this was no test"
    assert classic.assert_a_clear_returns_what_was_said() == 100 * MIB


def test_a_thousand_dead_pools(begin: Any) -> None:
    """The statistics that list them, milliseconds long by then, are not asked for; the figures stay right."""
    bench = begin()
    bench.exec(
        "asked = [0]\n"
        "listing = torch._C._cuda_memoryStats\n"
        "def counted(device):\n"
        "    asked[0] += 1\n"
        "    return listing(device)\n"
        "torch._C._cuda_memoryStats = counted\n"
        "for _ in range(1000):\n"
        "    pool = torch.cuda.MemPool()\n"
        "    with torch.cuda.use_mem_pool(pool): torch.empty(2 << 20, dtype=torch.uint8, device='cuda')\n"
        "del pool\n"
        "kept = torch.empty(5 << 20, dtype=torch.uint8, device='cuda')"
    )
    bench.settle()
    bench.exec("asked[0] = 0")
    _, shown = bench.settle()
    assert shown["private_pools_bytes"] == 0
    bench.exec(
        "alive = torch.cuda.MemPool()\n"
        "with torch.cuda.use_mem_pool(alive): torch.empty(30 << 20, dtype=torch.uint8, device='cuda')"
    )
    _, shown = bench.settle()
    assert shown["private_pools_bytes"] == 30 * MIB
    bench.exec("torch.empty(70 << 20, dtype=torch.uint8, device='cuda')")
    _, shown = bench.settle()
    assert (shown["private_pools_bytes"], shown["reclaimable_bytes"]) == (30 * MIB, 70 * MIB)
    bench.exec("del alive")
    _, shown = bench.settle()
    assert (shown["private_pools_bytes"], shown["reclaimable_bytes"]) == (0, 70 * MIB)
    assert bench.exec("result = asked[0]") == 0
    bench.exec("torch._C._cuda_memoryStats = listing")
    assert bench.assert_a_clear_returns_what_was_said() == 70 * MIB


@pytest.mark.parametrize("kind", ["classic", "expandable"])
def test_memory_that_is_pending_on_another_stream(kind: str, request: pytest.FixtureRequest) -> None:
    """It is in no tensor any more, still active, and a clear waits for it and returns it: so it is reclaimable."""
    bench: Bench = request.getfixturevalue(kind)
    bench.exec(
        "stream = torch.cuda.Stream()\n"
        "large, small = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'), torch.empty(9, device='cuda')\n"
        "kept = torch.empty(9, device='cuda')\n"
        "for tensor in (large, small): tensor.record_stream(stream)\n"
        "del tensor, large, small"
    )
    _, shown = bench.settle()
    assert shown["active_bytes"] - shown["allocated_bytes"] > 64 * MIB
    assert bench.assert_a_clear_returns_what_was_said() > 0
    _, shown = bench.settle()
    assert shown["active_bytes"] == shown["allocated_bytes"] > 0
    bench.exec("del kept")


def test_pinned_host_memory(classic: Bench) -> None:
    """It is what torch's host allocator holds, cached or not, and on no device."""
    books = classic.node.books()[0].used_bytes
    classic.exec(
        "pinned = [torch.empty(n << 20, dtype=torch.uint8, pin_memory=True) for n in (1, 3, 10)]; del pinned[1]"
    )
    metrics, _ = classic.settle()
    said = classic.exec("result = torch.cuda.host_memory_stats()['allocated_bytes.current']")
    assert metrics.value("gpumem_torch_pinned_host_bytes", pid=str(classic.process.pid)) == said > 11 * MIB
    assert classic.node.books()[0].used_bytes == books
    classic.exec("del pinned; torch._C._host_emptyCache()")
    metrics, _ = classic.settle()
    said = classic.exec("result = torch.cuda.host_memory_stats()['allocated_bytes.current']")
    assert metrics.value("gpumem_torch_pinned_host_bytes", pid=str(classic.process.pid)) == said


def test_the_asynchronous_backend(begin: Any) -> None:
    """What it tells is shown, what its statistics leave at a constant 0 is absent; actions do what they can."""
    bench = begin(**{SETTINGS: "backend:cudaMallocAsync"})
    bench.exec(
        "try: torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\n"
        "held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.empty(50 << 20, dtype=torch.uint8, device='cuda')"
    )
    _, shown = bench.settle()
    stats = bench.stats()
    for name in ("allocated", "reserved", "active"):
        assert shown.pop(f"{name}_bytes") == stats[f"{name}_bytes.all.current"] > 0
    for name in ("allocated", "reserved"):
        assert shown.pop(f"{name}_peak_bytes") == stats[f"{name}_bytes.all.peak"] > 0
    assert set(shown) <= {"slack_ratio", "non_torch_bytes", "peak_resets_total"}
    books = bench.node.books()[0].used_bytes
    action = bench.exporter.act("empty_cache", target={"pid": bench.process.pid})
    (row,) = action["results"]
    freed = stats["reserved_bytes.all.current"] - bench.stats()["reserved_bytes.all.current"]
    assert row["outcome"] == "done"
    assert row["reserved_before_bytes"] - row["reserved_after_bytes"] == freed
    assert row["device_free_after_bytes"] - row["device_free_before_bytes"] == freed
    assert books - bench.node.books()[0].used_bytes == freed > 0
    assert row["freed_bytes"] == freed
    (reset,) = bench.exporter.act("reset_peak", target={"pid": bench.process.pid})["results"]
    assert reset["outcome"] == "done"
    _, shown = bench.settle()
    assert shown["allocated_peak_bytes"] == bench.stats()["allocated_bytes.all.peak"] == 30 * MIB


PLUGGABLE = """
#include <stddef.h>
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
void *take(ptrdiff_t size, int device, void *stream) { void *p = 0; return cudaMalloc(&p, size) ? 0 : p; }
void give(void *pointer, ptrdiff_t size, int device, void *stream) { cudaFree(pointer); }
"""


def test_a_pluggable_allocator(begin: Any, tmp_path: Path) -> None:
    """It keeps no books: no series of its bytes, which the driver's figure still shows; actions say what they lack."""
    bench = begin(
        before=(
            "import subprocess\n"
            f"open({str(tmp_path / 'pluggable.c')!r}, 'w').write('''{PLUGGABLE}''')\n"
            f"subprocess.run(['gcc', '-shared', '-fPIC', '-o', {str(tmp_path / 'pluggable.so')!r},"
            f" {str(tmp_path / 'pluggable.c')!r}], check=True)\n"
            f"made = torch.cuda.memory.CUDAPluggableAllocator({str(tmp_path / 'pluggable.so')!r}, 'take', 'give')\n"
            "torch.cuda.memory.change_current_allocator(made)"
        )
    )
    bench.exec("held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')")
    _, shown = bench.settle()
    assert shown == {}
    used = bench.node.books()[0].processes[bench.process.pid]
    pid = str(bench.process.pid)
    wait_for(
        lambda: bench.exporter.metrics().values("gpumem_process_memory_used_bytes", gpu="0", pid=pid) == [used],
        "a poll of this state",
    )
    target = {"pid": bench.process.pid}
    (cleared,) = bench.exporter.act("empty_cache", target=target)["results"]
    assert (cleared["outcome"], cleared["freed_bytes"]) == ("done", None)
    assert cleared["device_free_before_bytes"] == cleared["device_free_after_bytes"]
    (collected,) = bench.exporter.act("collect_garbage", target=target)["results"]
    assert collected["outcome"] == "done"
    (reset,) = bench.exporter.act("reset_peak", target=target)["results"]
    assert reset["outcome"] == "unsupported"
    assert "does not yet support resetPeakStats" in reset["reason"]
    assert bench.exec("del held; result = len(torch.empty(5, device='cuda'))") == 5
    metrics, _ = bench.settle()
    assert metrics.value("gpumem_reporter_up", pid=pid) == 1


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({SETTINGS: "max_split_size_mb:100"}, "max_split_size_mb:100"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}, "max_split_size_mb:200"),
        ({SETTINGS: "max_split_size_mb:100", "PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}, "max_split_size_mb:100"),
        ({SETTINGS: "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}, ""),
        ({}, ""),
    ],
    ids=["older name", "newer name", "both", "both, the older one empty", "neither"],
)
def test_the_settings_in_force(begin: Any, environment: dict[str, str], settings: str) -> None:
    """Whichever variable won is on the info series, and so is what is set under way."""
    bench = begin(**environment)
    said = bench.exec("result = torch._C._cuda_memorySnapshot((0, 0, False))['allocator_settings']['max_split_size']")
    assert said == (int(settings.rpartition(":")[2]) * MIB if settings else -1)
    assert bench.info()["allocator_settings"] == settings
    bench.exec("torch._C._accelerator_setAllocatorSettings('max_split_size_mb:300')")
    wait_for(lambda: bench.info()["allocator_settings"] == "max_split_size_mb:300", "the new settings")
    assert bench.series("reserved_bytes") == [bench.stats()["reserved_bytes.all.current"]]


def test_the_interpreter_goes_on_while_the_program_empties_its_cache(classic: Bench) -> None:
    """Statistics would wait for the allocator's lock with the GIL: the reporter does not ask during the flush."""
    classic.exec("kept = [torch.empty(100 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]; kept.clear()")
    classic.settle()
    shown = classic.series("reserved_bytes")
    with classic.node.slow("cudaFree", 500):
        heartbeat = classic.exec(
            "import threading, time\n"
            "flush = threading.Thread(target=torch.cuda.empty_cache)\n"
            "beats = [time.monotonic()]\n"
            "flush.start()\n"
            "while flush.is_alive():\n"
            "    time.sleep(0.005)\n"
            "    beats.append(time.monotonic())\n"
            "result = [beats[-1] - beats[0], max(after - before for before, after in zip(beats, beats[1:]))]"
        )
    assert shown == [400 * MIB]
    assert heartbeat[0] > 2.0, "there was no flush to wait for"
    assert heartbeat[1] < 0.5, "the interpreter stood still for a whole cudaFree"
    _, shown_after = classic.settle()
    assert shown_after["reserved_bytes"] == classic.stats()["reserved_bytes.all.current"] == 0


def test_memory_allocated_past_a_disabled_cache_is_not_torchs(classic: Bench) -> None:
    """Torch does not count it; the driver does, as the process' non-torch bytes."""
    _, before = classic.settle()
    classic.exec(
        "torch.cuda.caching_allocator_enable(False)\n"
        "past = torch.empty(40 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.caching_allocator_enable(True)"
    )
    wanted = before["non_torch_bytes"] + 40 * MIB
    wait_for(lambda: classic.series("non_torch_bytes") == [wanted], "a poll of this state")
    _, shown = classic.settle()
    assert shown["reserved_bytes"] == before["reserved_bytes"] == classic.stats()["reserved_bytes.all.current"]
    classic.exec("del past")
    wait_for(lambda: classic.series("non_torch_bytes") == [before["non_torch_bytes"]], "a poll after it went")
