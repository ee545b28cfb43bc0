"""Real PyTorch processes, the real exporter, the real driver library, on the emulated node; every byte compared."""

from __future__ import annotations

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import EmulatedNode
from tests.exporter_process import wait_for

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
"""Series, and the key of `torch.cuda.memory_stats` that it must equal."""

QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2")


def test_every_torch_series_is_what_the_process_itself_says_byte_for_byte(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="bytes", rank=3)
    for device in (0, 1):
        process.call("random_heap", device=device, seed=device, blocks=200)
    process.exec(
        # an OOM that the program catches, after a retry that flushed the cache
        "try:\n    torch.empty(1 << 40, dtype=torch.uint8, device='cuda:0')\nexcept torch.OutOfMemoryError: pass"
    )
    stats = [process.call("stats", device=device) for device in (0, 1)]
    assert stats[0]["num_ooms"] == stats[0]["num_alloc_retries"] == 1
    exporter.wait_for_processes(process.pid)
    used = [node.books()[device].processes[process.pid] for device in (0, 1)]
    wait_for(lambda: exporter.metrics().values("gpumem_torch_ooms_total", gpu="0") == [1], "the OOM")
    wait_for(lambda: exporter.metrics().values("gpumem_process_memory_used_bytes") == used, "a poll of this state")
    metrics = exporter.metrics()
    for device in (0, 1):
        labels = {
            "gpu": str(device),
            "uuid": node.books()[device].uuid,
            "pid": str(process.pid),
            "workload": "bytes",
            "rank": "3",
        }
        for name, key in COMPARED.items():
            assert metrics.value(name, **labels) == stats[device][key], (name, device)
        reserved, allocated = stats[device]["reserved_bytes.all.current"], stats[device]["allocated_bytes.all.current"]
        assert metrics.value("gpumem_torch_non_torch_bytes", **labels) == used[device] - reserved
        assert metrics.value("gpumem_torch_slack_ratio", **labels) == (reserved - allocated) / reserved
    info = metrics.samples["gpumem_process_info"]
    (labels_of_process,) = [dict(labels) for labels in info if dict(labels)["pid"] == str(process.pid)]
    assert labels_of_process["reporting"] == "true"
    assert labels_of_process["command"].endswith("torch_worker")
    assert labels_of_process["torch_version"].startswith("2.")


def test_ledgers_add_up_in_every_scrape_while_processes_allocate_and_free(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    node = make_node(devices=4)
    node.set_process(pid=1, device=2, nbytes=123_456_789)
    exporter = start_exporter(node, *QUICK)
    processes = [start_torch(node, GPUMEM_EXPORTER_URL=exporter.url) for _ in range(8)]
    for number, process in enumerate(processes):
        process.call("start_client", workload=f"churn-{number % 3}")
        process.call("start_churn", devices=[number % 4, (number + 1) % 4], seed=number)
    exporter.wait_for_processes(*(process.pid for process in processes))
    seen = set()
    for _ in range(200):
        metrics = exporter.metrics()
        metrics.assert_ledgers_add_up()
        assert len(metrics.ledgers()) == 4
        seen.add(str(metrics.ledgers()))
    assert len(seen) > 10, "nothing moved: this was no test"


@pytest.mark.timeout(300)
def test_reclaimable_is_what_a_clear_gives_back_to_the_byte_on_50_random_heaps(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client")
    process.call("random_heap", device=0, seed=99)
    exporter.wait_for_processes(process.pid)
    gave_something_back = 0
    for seed in range(50):
        process.call("free")
        process.call("random_heap", device=0, seed=seed, blocks=40, keep=(seed % 10) / 10)
        stats = process.call("stats", device=0)
        labels = {"gpu": "0", "pid": str(process.pid)}
        wait_for(
            lambda labels=labels, stats=stats: exporter.metrics().values("gpumem_torch_allocated_bytes", **labels)  # type: ignore[misc]
            == [stats["allocated_bytes.all.current"]],
            "a sample of this heap",
        )
        reclaimable = exporter.metrics().value("gpumem_torch_reclaimable_bytes", **labels)
        dry = exporter.act("empty_cache", target={"pid": process.pid}, dry_run=True)
        books_before = node.books()[0]
        action = exporter.act("empty_cache", target={"pid": process.pid, "gpu": "0"})
        books_after = node.books()[0]
        (row,) = action["results"]
        assert (action["state"], row["outcome"]) == ("done", "done")
        reserved_after = process.call("stats", device=0)["reserved_bytes.all.current"]
        assert {
            reclaimable,
            dry["freed_bytes"],
            action["freed_bytes"],
            row["reserved_before_bytes"] - row["reserved_after_bytes"],
            stats["reserved_bytes.all.current"] - reserved_after,
            books_before.used_bytes - books_after.used_bytes,
            row["device_free_after_bytes"] - row["device_free_before_bytes"],
        } == {row["freed_bytes"]}
        gave_something_back += row["freed_bytes"] > 0
    assert gave_something_back > 40


def test_a_garbage_collection_frees_tensors_in_cycles_and_a_clear_gives_them_back(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client")
    process.exec(
        "import gc; gc.disable()\n"
        "for _ in range(4):\n"
        "    knot = [torch.empty(50 << 20, dtype=torch.uint8, device='cuda')]\n"
        "    knot.append(knot)\n"
        "del knot"
    )
    exporter.wait_for_processes(process.pid)
    target = {"pid": process.pid}
    (kept,) = exporter.act("empty_cache", target=target)["results"]
    assert kept["freed_bytes"] == 0
    (collected,) = exporter.act("collect_garbage", target=target)["results"]
    assert collected["allocated_before_bytes"] - collected["allocated_after_bytes"] == 4 * (50 << 20)
    assert collected["freed_bytes"] == 0
    (cleared,) = exporter.act("empty_cache", target=target)["results"]
    assert cleared["freed_bytes"] == 4 * (50 << 20)


def test_reset_peak_resets_the_peaks_of_the_device_meant_alone(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client")
    for device in (0, 1):
        process.call("alloc", nbytes=64 << 20, device=device)
    process.call("free")
    exporter.wait_for_processes(process.pid)
    exporter.act("reset_peak", target={"pid": process.pid, "gpu": "1"})
    peaks = [process.call("stats", device=device)["allocated_bytes.all.peak"] for device in (0, 1)]
    assert peaks == [64 << 20, 0]


def test_on_expandable_segments_reclaimable_is_right_to_the_page(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    process.call("start_client")
    for seed in range(10):
        process.call("free")
        process.call("random_heap", device=0, seed=seed, blocks=60, keep=0.3, largest_bytes=128 << 20)
        allocated = process.call("stats", device=0)["allocated_bytes.all.current"]
        wait_for(
            lambda allocated=allocated: exporter.metrics().values("gpumem_torch_allocated_bytes") == [allocated],  # type: ignore[misc]
            "a sample of this heap",
        )
        reclaimable = exporter.metrics().value("gpumem_torch_reclaimable_bytes")
        (row,) = exporter.act("empty_cache", target={"all": True})["results"]
        assert row["freed_bytes"] == reclaimable > 0
