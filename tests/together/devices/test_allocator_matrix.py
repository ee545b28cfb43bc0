"""Every claim of `tests/claims` on an emulated node, and claims about settings that need a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.claims.place import EXPANDABLE, SETTINGS, Bench, Place
from tests.claims.table import CLAIMS, check
from tests.claims.values import Claim, require, same
from tests.emulation.node import MIB
from tests.support.torch_release import since_torch, torch_release
from tests.support.waiting import wait_for

EMPTY_GRAPH = "import warnings; warnings.simplefilter('ignore')\n"


@pytest.fixture
def classic(place: Place) -> Bench:
    """A process with classic segments and no memory; one for the whole module."""
    return place.process()


@pytest.fixture
def begin(place: Place) -> Iterator[Any]:
    """Starts processes for one test: `begin(VARIABLE="…", before="code")`."""
    with ExitStack() as started:
        yield lambda before="", **environment: started.enter_context(place.reporting(before, **environment))


def cleared(bench: Bench) -> int:
    """Return the bytes that a clear has freed, and check that all sources report the same."""
    freed = bench.clear()
    require(same(freed, at_least=0))
    return int(freed["reserved fell"] or 0)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_is_true(claim: Claim, place: Place) -> None:
    check(claim, place)


@since_torch((2, 10), "torch before 2.10 has no large_segment_size_mb")
def test_a_page_size_that_changes_during_the_run(begin: Any) -> None:
    """A segment keeps its page size; if two sizes are possible, reclaimable is absent."""
    bench = begin(**{SETTINGS: EXPANDABLE})
    bench.exec("held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')")
    bench.exec("worker.set_allocator_settings('large_segment_size_mb:64')")
    bench.exec(
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream):\n"
        "    other = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
        "    torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    )
    assert cleared(bench) == 128 * MIB
    bench.exec("torch.empty(280 << 20, dtype=torch.uint8, device='cuda')")  # 320 MiB in one piece: 5 × 64, 16 × 20
    _, shown = bench.settle()
    assert shown["reserved_bytes"] == bench.stats()["reserved_bytes.all.current"]
    assert not {"reclaimable_bytes", "fragmented_bytes", "fragmentation_ratio"} & set(shown)


def test_expandable_segments_switched_on_and_off_during_the_run(begin: Any) -> None:
    """The existing segments count, not the settings for new ones."""
    bench = begin()
    bench.exec("kept = [torch.empty(3 << 20, dtype=torch.uint8, device='cuda')]")
    bench.exec("worker.set_allocator_settings('expandable_segments:True')")
    bench.exec(
        "heap = [torch.empty(9 << 20, dtype=torch.uint8, device='cuda') for _ in range(20)]\n"
        "worker.set_allocator_settings('expandable_segments:False')\n"
        "torch.cuda.reset_accumulated_memory_stats()\n"
        "kept += heap[::7]; del heap"
    )
    assert cleared(bench) > 0
    if torch_release() >= (2, 10):
        assert bench.info()["allocator_settings"] == "expandable_segments:False"


@since_torch((2, 10), "torch 2.9 empties no cache during a capture")
def test_a_capture_that_failed_delays_no_clear(classic: Bench) -> None:
    """Torch runs none of its own hooks if the end of a capture fails."""
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
    assert cleared(classic) == 100 * MIB


PLUGGABLE = """
#include <stddef.h>
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
void *take(ptrdiff_t size, int device, void *stream) { void *p = 0; return cudaMalloc(&p, size) ? 0 : p; }
void give(void *pointer, ptrdiff_t size, int device, void *stream) { cudaFree(pointer); }
"""


def test_a_pluggable_allocator(begin: Any, tmp_path: Path) -> None:
    """The allocator has no statistics. The driver counts its bytes, and actions report what is unsupported."""
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
    used = bench.book().processes[bench.process.pid]
    pid = str(bench.process.pid)
    wait_for(
        lambda: bench.exporter.metrics().values("gpumem_process_memory_used_bytes", gpu="0", pid=pid) == [used],
        "a poll of this state",
    )
    target = {"pid": bench.process.pid}
    (cleared,) = bench.exporter.act("empty_cache", target=target)["results"]
    assert (cleared["outcome"], cleared["freed_bytes"]) == ("done", None)
    (reset,) = bench.exporter.act("reset_peak", target=target)["results"]
    assert reset["outcome"] == "unsupported"
    assert "resetPeakStats" in reset["reason"]


@since_torch((2, 10), "torch reads PYTORCH_ALLOC_CONF and reports its settings since 2.10")
@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({SETTINGS: "max_split_size_mb:100", "PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}, "max_split_size_mb:100"),
        ({SETTINGS: "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:200"}, ""),
    ],
    ids=["both", "both, the older one empty"],
)
def test_the_settings_in_force(begin: Any, environment: dict[str, str], settings: str) -> None:
    """The info series shows the variable in force, and settings made during the run."""
    bench = begin(**environment)
    said = bench.exec("result = torch.cuda.memory._snapshot()['allocator_settings']['max_split_size']")
    assert said == (int(settings.rpartition(":")[2]) * MIB if settings else -1)
    assert bench.info()["allocator_settings"] == settings
    bench.exec("worker.set_allocator_settings('max_split_size_mb:300')")
    wait_for(lambda: bench.info()["allocator_settings"] == "max_split_size_mb:300", "the new settings")
    assert bench.series("reserved_bytes") == [bench.stats()["reserved_bytes.all.current"]]


def test_the_interpreter_keeps_running_while_the_program_empties_its_cache(classic: Bench, place: Place) -> None:
    """Statistics would wait for the allocator's lock with the GIL, so the reporter does not read them in a flush."""
    classic.exec("kept = [torch.empty(100 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]; kept.clear()")
    classic.settle()
    shown = classic.series("reserved_bytes")
    assert place.node is not None
    with place.node.slow("cudaFree", 800):
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
    flush, longest_pause = heartbeat
    assert flush > 4 * 0.8, "there was no flush to wait for"
    assert longest_pause < flush / 4, "the interpreter stood still for a whole cudaFree"
    _, shown_after = classic.settle()
    assert shown_after["reserved_bytes"] == classic.stats()["reserved_bytes.all.current"] == 0
