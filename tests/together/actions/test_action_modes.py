"""The modes of actions, groups, and what stays free after a clear, with real torch on the emulated node."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.http import Connection
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import eventually, wait_for

STEPPING = """
import os, threading, time
import gpumem_client as client
while not os.path.exists(stop):
    step_number = globals().get('step_number', 0) + 1
    torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    time.sleep(0.01)
    client.step()
result = [step_number, threading.get_native_id()]
"""
"""Steps of some milliseconds in the main thread until a file exists. Each reserves bytes again after a clear."""
SETTLE_SECONDS = 0.5


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK, "--log.level", "debug")


@pytest.fixture
def process(exporter: ExporterProcess, start_torch: StartTorch) -> TorchProcess:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="train", rank=0)
    process.call("free", numbers=[process.call("alloc", nbytes=MIB)])
    process.call("empty_cache")
    exporter.wait_for_processes(process.pid)
    return process


@contextmanager
def stepping(process: TorchProcess, folder: Path, nbytes: int = 0) -> Iterator[list[int]]:
    """Let the process make steps; afterwards the list has the number of the last one and its thread."""
    stop, ended = folder / "stop", list[int]()
    number = process.send("exec", code=STEPPING, stop=str(stop), nbytes=nbytes)
    try:
        yield ended
    finally:
        stop.touch()
        ended += process.receive(number)
        stop.unlink()


def test_in_every_mode_the_freed_bytes_are_what_the_driver_gained(
    exporter: ExporterProcess, process: TorchProcess, node: EmulatedNode, tmp_path: Path
) -> None:
    request: dict[str, Any] = {"target": {"pid": process.pid}, "wait_seconds": 50}
    for mode in ("now", "step", "idle"):
        for device in (0, 1):
            process.call("random_heap", device=device, seed=device, blocks=100)
        before, free = node.books().used_by(process.pid), [book.free_bytes for book in node.books().devices]
        if mode == "step":
            with stepping(process, tmp_path) as ended:
                action = exporter.act("empty_cache", mode=mode, **request)
            assert all(0 < row["step"] <= ended[0] for row in action["results"])
            # Linux: the main thread's id is the process'.
            assert {row["thread_id"] for row in action["results"]} == {ended[1]} == {process.pid}
        else:
            action = exporter.act("empty_cache", mode=mode, **request)
        assert action["state"] == "done", action
        gained = [book.free_bytes - was for book, was in zip(node.books().devices, free, strict=True)]
        rows = {row["uuid"]: row for row in action["results"]}
        assert [rows[node.uuid(device)]["freed_bytes"] for device in (0, 1)] == gained[:2]
        assert action["freed_bytes"] == before - node.books().used_by(process.pid) > 0
        for row in rows.values():
            assert row["device_free_after_bytes"] - row["device_free_before_bytes"] == row["freed_bytes"]


def settled(exporter: ExporterProcess, action: dict[str, Any]) -> dict[str, Any]:
    """Wait until an action has settled."""
    assert action["state"] == "done", action

    def document() -> dict[str, Any] | None:
        found: dict[str, Any] = exporter.get(f"/api/v1/actions/{action['id']}")
        return None if found["settling"] else found

    return wait_for(document, "the settling")


def test_what_a_job_reserves_again_is_not_still_free(
    exporter: ExporterProcess, process: TorchProcess, tmp_path: Path
) -> None:
    with stepping(process, tmp_path, 400 * MIB):
        wait_for(lambda: exporter.processes()[process.pid]["step"], "a step")
        action = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
        assert (action["freed_bytes"], action["settling"], action["still_free_bytes"]) == (400 * MIB, True, None)
        later = settled(exporter, action)
    assert (later["freed_bytes"], later["still_free_bytes"], later["settle_seconds"]) == (400 * MIB, 0, SETTLE_SECONDS)
    assert [row["still_free_bytes"] for row in later["results"]] == [0]

    # A second clear ends the settling time of the first one, which would otherwise count what the second one frees.
    process.call("empty_cache")
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    first = exporter.act("empty_cache", target={"pid": process.pid}, mode="now", settle_seconds=3600)
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    second = exporter.act("empty_cache", target={"pid": process.pid}, mode="now", settle_seconds=SETTLE_SECONDS)
    assert settled(exporter, first)["still_free_bytes"] == 0
    assert settled(exporter, second)["still_free_bytes"] == 400 * MIB


def test_actions_at_random_times_break_no_cuda_graph_capture(
    exporter: ExporterProcess, process: TorchProcess, tmp_path: Path
) -> None:
    """A command waits in every mode until the capture is over."""
    tries = int(os.environ.get("GPUMEM_CAPTURES", "300"))
    capturing = """
import os, random, time
import gpumem_client as client
torch.zeros(1, device="cuda:0")
result = 0
for number in range(tries):
    spare = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:0")
    del spare
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # raises if anything has broken the capture
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
        time.sleep(random.random() * 0.02)
        client.step()
    result += 1
    time.sleep(random.random() * 0.005)
    client.step()
    del graph, kept
while not os.path.exists(finished):  # an action may still wait for a step
    time.sleep(0.002)
    client.step()
"""
    finished = tmp_path / "finished"
    number = process.send("exec", code=capturing, tries=tries, finished=str(finished))
    outcomes: dict[tuple[str, str], int] = {}
    while process.pid not in exporter.processes() or (exporter.processes()[process.pid]["step"] or 0) < 2 * tries:
        for mode in ("now", "step"):
            action = exporter.act("empty_cache", target={"pid": process.pid}, mode=mode, wait_seconds=30)
            for row in action["results"]:
                outcomes[mode, row["outcome"]] = outcomes.get((mode, row["outcome"]), 0) + 1
                if row["outcome"] == "refused":  # the capture started just before the command
                    assert row["reason_code"] == "cuda_graph_capture"
        assert not process.answered(), process.receive(number)  # a broken capture ends the program
    finished.touch()
    assert process.receive(number, timeout_seconds=120) == tries
    assert set(outcomes) <= {("now", "done"), ("now", "refused"), ("step", "done")}, outcomes
    assert outcomes.get(("now", "done")), outcomes
    assert outcomes.get(("step", "done")), outcomes


def test_a_capture_on_one_device_waits_for_a_clear_that_goes_on_on_another(
    exporter: ExporterProcess, process: TorchProcess, node: EmulatedNode
) -> None:
    # For each device one call of `cudaFree`, and the clear takes the devices in turn.
    process.exec(
        "torch.empty(30 << 20, dtype=torch.uint8, device='cuda:0')\n"
        "kept = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda:1') for _ in range(3)]\ndel kept"
    )
    with node.slow("cudaFree", 300) as frees:
        exporter.act("empty_cache", target={"pid": process.pid}, wait_seconds=0.0, expect=202)
        wait_for(lambda: frees.hits > 1, "the clear to reach the second device")
        process.exec(
            """
with torch.cuda.device(0):
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()  # in the default mode, a `cudaFree` on any device breaks the capture
        import time
        time.sleep(0.5)
        graph.capture_end()
"""
        )


def test_a_snapshot_is_a_pickle_of_torch_with_a_correct_summary(
    exporter: ExporterProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots"
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_SNAPSHOT_DIR=str(folder))
    process.exec("import logging; logging.basicConfig(level=logging.DEBUG)")
    process.call("start_client", workload="train", rank=0)
    process.call("random_heap", device=0, seed=1, blocks=100)
    process.exec("torch.cuda.memory._record_memory_history(max_entries=1000, stacks='python')")
    process.exec("mine = torch.empty(500 << 20, dtype=torch.uint8, device='cuda:0')")
    exporter.wait_for_processes(process.pid)
    action = exporter.act("snapshot", target={"pid": process.pid})
    assert exporter.request("POST", "/api/v1/reports", {}).status == 422
    command = f"command {action['id']}"
    for log, *parts in (
        (process.stderr(), exporter.url, f"{command} received: snapshot", f"{command}: done"),
        (exporter.log(), f"pid={process.pid} uid={os.geteuid()} workload=train", "is delivered", "status=422"),
    ):
        assert [sum(part in line for line in log.splitlines()) for part in parts] == [1] * len(parts)
    (row, *_) = action["results"]
    summary = row["snapshot"]
    assert Path(summary["path"]).parent == folder
    assert Path(summary["path"]).stat().st_size == summary["size_bytes"]
    assert Path(summary["path"]).stat().st_mode & 0o777 == 0o600
    assert Path(summary["path"]).read_bytes()[:2] == b"\x80\x04", "memory_viz rejected pickle protocol 5"
    truth = process.exec(
        "import pickle; shot = pickle.load(open(path, 'rb')); segments = shot['segments']\n"
        "result = [len(segments), sum(len(s['blocks']) for s in segments), sum(s['total_size'] for s in segments)]",
        path=summary["path"],
    )
    assert truth == [
        summary["segments"],
        summary["blocks"],
        process.call("stats", device=0)["reserved_bytes.all.current"],
    ]
    assert summary["has_frames"]
    # the user's own recording goes on
    assert process.exec("result = torch._C._cuda_isHistoryEnabled()") is True


def test_a_memory_fraction_below_the_reserved_memory_is_refused_unless_forced(
    exporter: ExporterProcess, process: TorchProcess
) -> None:
    kept = process.call("alloc", nbytes=2 << 30)
    request: dict[str, Any] = {"target": {"pid": process.pid}, "fraction": 0.1}
    eventually(
        lambda: exporter.act("set_memory_fraction", **request, dry_run=True)["results"][0]["reason"],
        lambda reason: "2.0 GiB are reserved" in reason,
    )
    (row,) = exporter.act("set_memory_fraction", **request)["results"]
    assert (row["outcome"], row["reason_code"]) == ("refused", "reserved_exceeds_fraction")
    assert "2.0 GiB are reserved" in row["reason"]
    process.call("alloc", nbytes=1 << 30)  # nothing has changed
    (row,) = exporter.act("set_memory_fraction", **request, force=True)["results"]
    assert row["outcome"] == "done"
    code = "try:\n    torch.empty(1 << 30, dtype=torch.uint8, device='cuda:0'); result = 'took it'\n"
    assert process.exec(code + "except torch.OutOfMemoryError: result = 'no'") == "no"
    assert process.call("free", numbers=[kept]) == 1


RANK = """
import os, time
import torch.distributed as dist
import gpumem_client as client
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
client.start(workload="ranks")
kept = torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{rank % 2}")
stopped = torch.zeros(1)
while not stopped.item():
    spare = torch.empty(3 << 20, dtype=torch.uint8, device=f"cuda:{rank % 2}")
    del spare
    stopped.fill_(os.path.exists(stop))
    dist.all_reduce(stopped, op=dist.ReduceOp.MAX)  # real ranks have a collective too
    time.sleep(0.02)
    client.step()
client.stop()
dist.destroy_process_group()
result = True
"""


@contextmanager
def ranks(start_torch: StartTorch, exporter: ExporterProcess, folder: Path, count: int) -> Iterator[list[int]]:
    """Start ranks that make steps together; yield their pids by rank."""
    stop = folder / "stop"
    variables = {"GPUMEM_EXPORTER_URL": exporter.url, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = {"code": RANK, "count": count, "store": str(folder / "store"), "stop": str(stop)}
    processes = [start_torch(**variables) for _ in range(count)]
    numbers = [process.send("exec", rank=rank, **given) for rank, process in enumerate(processes)]

    def steps() -> bool:
        for process, number in zip(processes, numbers, strict=True):
            assert not process.answered(), process.receive(number)
        found = exporter.processes().values()
        return sum(bool(entry["step"] and entry["step_seconds"]) for entry in found) == count

    wait_for(steps, f"{count} ranks that make steps", 120.0)
    assert {pid: entry["rank"] for pid, entry in exporter.processes().items()} == {
        process.pid: str(rank) for rank, process in enumerate(processes)
    }
    yield [process.pid for process in processes]
    stop.touch()
    for process, number in zip(processes, numbers, strict=True):
        assert process.receive(number)


@pytest.mark.slow
def test_a_group_clears_after_the_same_step_on_every_rank_or_on_none(
    exporter: ExporterProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    with ranks(start_torch, exporter, tmp_path, 4) as pids:

        def act(_: int) -> Any:
            return act_on_group(exporter, {"rank": "0"})

        def step(rank: int) -> int:
            return int(exporter.processes()[pids[rank]]["step"])

        with ThreadPoolExecutor(20) as pool:
            waiting = []
            for number in range(20):
                waiting.append(pool.submit(act, number))
                before = step(0)
                wait_for(lambda before=before: step(0) > before, "a later step")  # type: ignore[misc]
            actions = [one.result() for one in waiting]
        assert [action["state"] for action in actions] == ["done"] * 20, actions
        for action in actions:
            assert {(row["outcome"], row["step"]) for row in action["results"]} == {("done", action["at_step"])}
            assert {row["pid"] for row in action["results"]} == set(pids)
            assert {row["thread_id"] for row in action["results"]} == set(pids)
        assert sum(action["freed_bytes"] for action in actions) > 0

        os.kill(pids[1], signal.SIGSTOP)
        try:
            action = exporter.act("empty_cache", target={"workload": "ranks"}, wait_seconds=30)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        results = {row["rank"]: row for row in action["results"]}
        assert (results["1"]["outcome"], results["1"]["reason_code"]) == ("expired", "group_rank_late")
        # A busy machine may delay the reports of the others, too.
        assert {row["outcome"] for row in action["results"]} <= {"refused", "expired"}
        before = step(1)
        wait_for(lambda: step(1) > before + 5, "the ranks to go on")
        # withdrawn commands never run later
        again = act_on_group(exporter, {"workload": "ranks"})
        assert {row["outcome"] for row in again["results"]} == {"done"}


def act_on_own_connection(exporter: ExporterProcess, **request: Any) -> tuple[int, Any]:
    """Request a clear on a separate connection, for use in threads; return the status and the document."""
    connection = Connection(exporter.url, timeout_seconds=90.0)
    try:
        body = json.dumps({"action": "empty_cache", **request}).encode()
        answer = connection.request("POST", "/api/v1/actions", body, {"Content-Type": "application/json"})
        return answer.status, json.loads(answer.body)
    finally:
        connection.close()


def act_on_group(exporter: ExporterProcess, target: dict[str, str]) -> Any:
    """Request a clear of a group until it is done: a busy machine may delay the steps or the report of a rank.

    A group that is not done has acted on no rank.
    """

    def done() -> Any:
        status, action = act_on_own_connection(
            exporter, target=target, mode="step", wait_seconds=60, deadline_seconds=60
        )
        assert status == 200, action
        if action["state"] == "done":
            return action
        assert not any(row["outcome"] == "done" for row in action.get("results", ())), action
        return None

    return wait_for(done, "a group that acts")
