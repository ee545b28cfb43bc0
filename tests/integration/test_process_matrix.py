"""Every way in which processes use devices, begin and end: each byte on the right device, under the right process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_exporter.procfs import start_time_ticks
from gpumem_exporter.wire.protocol import REPORTS_PATH, DeviceSample, ProcessIdentity, Report, to_wire
from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import RemoteError, TorchProcess, TorchProcessError
from tests.support.exporter_process import ExporterProcess, Metrics
from tests.support.namespaces import CONTAINER, needs_namespaces
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2")


def client(exporter: ExporterProcess, start_torch: StartTorch, on: EmulatedNode, **environment: str) -> TorchProcess:
    process = start_torch(on, GPUMEM_EXPORTER_URL=exporter.url, **environment)
    process.call("start_client", workload="matrix")
    return process


def allocated(metrics: Metrics, pid: int) -> dict[str, float]:
    """What a process is shown to have in tensors, by uuid."""
    found = metrics.samples.get("gpumem_torch_allocated_bytes", {}).items()
    return {dict(labels)["uuid"]: value for labels, value in found if dict(labels)["pid"] == str(pid)}


def used(metrics: Metrics, pid: int) -> dict[str, float]:
    """What the driver is shown to say of a process, by uuid."""
    found = metrics.samples.get("gpumem_process_memory_used_bytes", {}).items()
    return {dict(labels)["uuid"]: value for labels, value in found if dict(labels)["pid"] == str(pid)}


def booked(node: EmulatedNode, pid: int) -> dict[str, int]:
    """What the node itself knows of a process, by uuid."""
    return {device.uuid: device.processes[pid] for device in node.books().devices if pid in device.processes}


def say_the_same(exporter: ExporterProcess, node: EmulatedNode, *processes: TorchProcess) -> None:
    """Wait until the page shows of each process what it and the node say; every ledger adds up."""
    for process in processes:
        uuids = process.call("uuids")
        stats = {uuid: process.call("stats", device=i) for i, uuid in enumerate(uuids)}
        expected = {uuid: one["allocated_bytes.all.current"] for uuid, one in stats.items() if one}
        holding = {uuid: size for uuid, size in expected.items() if size}
        wait_for(
            lambda holding=holding, process=process: (
                {uuid: size for uuid, size in allocated(exporter.metrics(), process.pid).items() if size} == holding
            ),  # type: ignore[misc]
            f"{holding} in tensors of {process.pid}",
        )
        wait_for(
            lambda process=process: used(exporter.metrics(), process.pid) == booked(node, process.pid),  # type: ignore[misc]
            "a poll",
        )
    exporter.metrics().assert_ledgers_add_up()


def nothing_is_left_of(exporter: ExporterProcess, *pids: int) -> None:
    for pid in pids:
        wait_for(lambda pid=pid: not exporter.metrics().states_of(pid), f"no series of {pid}")  # type: ignore[misc]
    exporter.metrics().assert_ledgers_add_up()


# Devices and processes


def test_one_process_on_eight_devices(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    node = make_node(devices=8)
    exporter = start_exporter(node, *QUICK)
    process = client(exporter, start_torch, node)
    for device in range(8):
        process.call("alloc", nbytes=(device + 1) * 4 * MIB, device=device)
    say_the_same(exporter, node, process)
    assert allocated(exporter.metrics(), process.pid) == {node.uuid(i): (i + 1) * 4 * MIB for i in range(8)}
    wait_for(
        lambda: not any(row["other_processes"] for row in exporter.metrics().ledgers().values()), "one owner of all"
    )
    process.kill()
    nothing_is_left_of(exporter, process.pid)


def test_eight_processes_on_one_device(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    processes = [client(exporter, start_torch, node) for _ in range(8)]
    for number, process in enumerate(processes):
        process.call("alloc", nbytes=(number + 1) * 5 * MIB)
    say_the_same(exporter, node, *processes)
    ledger = exporter.metrics().ledgers()[node.uuid(0)]
    held = sum(process.call("stats")["allocated_bytes.all.current"] for process in processes)
    assert (ledger["torch_allocated"], ledger["other_processes"]) == (held, 0)
    for process in processes[:4]:
        process.kill()
    nothing_is_left_of(exporter, *(process.pid for process in processes[:4]))
    say_the_same(exporter, node, *processes[4:])


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        ("2", "PCI_BUS_ID"),
        ("3,1", "PCI_BUS_ID"),
        ("3,1", "FASTEST_FIRST"),
        ("uuid 2", "FASTEST_FIRST"),
        ("uuid 3,uuid 0", "PCI_BUS_ID"),
        ("1,7,0", "FASTEST_FIRST"),
    ],
)
def test_values_stand_on_the_device_that_is_meant_whatever_cuda_calls_it(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch, visible: str, order: str
) -> None:
    node = make_node(devices=4)
    for number in range(4):
        visible = visible.replace(f"uuid {number}", node.uuid(number))
    exporter = start_exporter(node, *QUICK)
    process = client(exporter, start_torch, node, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    named = [node.uuid(int(word)) if len(word) == 1 and int(word) < 4 else word for word in visible.split(",")]
    meant = named[: named.index("7")] if "7" in named else named  # CUDA stops at what there is not
    assert process.call("uuids") == meant
    for device in range(len(meant)):
        process.call("alloc", nbytes=(device + 1) * 7 * MIB, device=device)
    say_the_same(exporter, node, process)
    shown = allocated(exporter.metrics(), process.pid)
    assert {uuid: size for uuid, size in shown.items() if size} == {
        uuid: (device + 1) * 7 * MIB for device, uuid in enumerate(meant)
    }
    # the label is NVML's index, not CUDA's
    for uuid in meant:
        (labels,) = [
            dict(labels)
            for labels in exporter.metrics().samples["gpumem_torch_allocated_bytes"]
            if dict(labels)["uuid"] == uuid
        ]
        assert node.uuid(int(labels["gpu"])) == uuid


# Reporters


def test_of_two_copies_of_the_package_in_one_process_the_later_speaks_and_nothing_counts_twice(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "vendored").mkdir()
    (vendor / "vendored" / "__init__.py").touch()
    (vendor / "vendored" / "gpumem_exporter").symlink_to(REPOSITORY / "gpumem_exporter")
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="own")
    process.exec(
        # a copy under another name: its own modules, its own reporter
        "import importlib, sys\n"
        "sys.path.insert(0, folder)\n"
        "ours = [name for name in sys.modules if name.split('.')[0] == 'gpumem_exporter']\n"
        "kept = {name: sys.modules.pop(name) for name in ours}\n"
        "copy = importlib.import_module('gpumem_exporter.client')\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'gpumem_exporter']:\n"
        "    sys.modules['vendored.' + name] = sys.modules.pop(name)\n"
        "sys.modules.update(kept)\n"
        "copy.start(workload='vendored')\n"
        "result = copy is kept['gpumem_exporter.client']",
        folder=str(vendor),
    )
    process.call("alloc", nbytes=64 * MIB)
    threads = "import threading; result = [t.name for t in threading.enumerate()].count('gpumem-reporter')"
    assert process.exec(threads) == 2
    wait_for(
        lambda: exporter.metrics().values("gpumem_reports_total", outcome="superseded"), "the earlier to be refused"
    )
    seen = set()
    reports = exporter.metrics().value("gpumem_reports_total", outcome="accepted")
    while exporter.metrics().value("gpumem_reports_total", outcome="accepted") < reports + 15:
        metrics = exporter.metrics()
        metrics.assert_ledgers_add_up()
        (labels,) = [dict(labels) for labels in metrics.samples["gpumem_torch_allocated_bytes"]]
        seen.add(labels["workload"])
        assert metrics.values("gpumem_torch_allocated_bytes") == [64 * MIB]
    assert len(seen) == 1, "they do not take turns"
    process.call("free")
    (row,) = exporter.act("empty_cache", target={"pid": process.pid})["results"]
    assert row["freed_bytes"] == 64 * MIB


SPAWNED = """
import torch
from gpumem_exporter import client
client.start(workload="spawned")
kept = torch.empty(24 << 20, dtype=torch.uint8, device="cuda:1")
done.wait()
"""


def test_a_spawned_child_reports_for_itself(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    parent = client(exporter, start_torch, node)
    parent.call("alloc", nbytes=8 * MIB)
    child = parent.exec(
        "import multiprocessing\n"
        "context = multiprocessing.get_context('spawn')\n"
        "done = context.Event()\n"
        "spawned = context.Process(target=exec, args=(spawned_code, {'done': done}))\n"
        "spawned.start()\n"
        "result = spawned.pid",
        spawned_code=SPAWNED,
    )
    labels = {"pid": str(child), "workload": "spawned"}
    wait_for(lambda: allocated(exporter.metrics(), child) == {node.uuid(1): 24 * MIB}, "the child")
    assert exporter.metrics().values("gpumem_torch_allocated_bytes", **labels) == [24 * MIB]
    wait_for(lambda: used(exporter.metrics(), child) == booked(node, child), "a poll")
    say_the_same(exporter, node, parent)
    assert parent.exec("done.set()\nspawned.join(60)\nresult = spawned.exitcode") == 0
    nothing_is_left_of(exporter, child)
    say_the_same(exporter, node, parent)


def test_a_child_forked_before_cuda_is_up_reports_for_itself(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    parent = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    parent.call("start_client", workload="parent")
    child = parent.exec(
        "import os\n"
        "reading, writing = os.pipe()\n"
        "result = os.fork()\n"
        "if result == 0:\n"
        "    os.close(writing)\n"
        "    kept = torch.empty(24 << 20, dtype=torch.uint8, device='cuda:1')\n"
        "    os.read(reading, 1)\n"
        "    os._exit(0)\n"
        "os.close(reading)\n"
    )
    parent.call("alloc", nbytes=8 * MIB)
    wait_for(lambda: allocated(exporter.metrics(), child) == {node.uuid(1): 24 * MIB}, "the child")
    wait_for(lambda: used(exporter.metrics(), child) == booked(node, child), "a poll")
    say_the_same(exporter, node, parent)
    assert parent.exec("os.close(writing)\n_, status = os.waitpid(child, 0)\nresult = status", child=child) == 0
    nothing_is_left_of(exporter, child)
    say_the_same(exporter, node, parent)


# Ends, and what comes after


def test_a_process_that_dies_of_an_oom_takes_its_series_and_bytes_with_it(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK, "--report.expiry", "600")
    process = client(exporter, start_torch, node)
    process.call("alloc", nbytes=32 * MIB)
    say_the_same(exporter, node, process)
    with contextlib.suppress(RemoteError, TorchProcessError):
        process.exec(
            "import os, sys, threading\n"
            "try:\n"
            "    torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\n"
            "except torch.OutOfMemoryError:\n"
            "    os.abort()"  # nothing of Python's own end is run
        )
    nothing_is_left_of(exporter, process.pid)
    assert booked(node, process.pid) == {}


def test_after_an_exec_nothing_of_the_program_before_is_shown_nor_done(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK, "--report.expiry", "600")
    process = client(exporter, start_torch, node)
    process.call("alloc", nbytes=32 * MIB)
    say_the_same(exporter, node, process)
    pid, began = process.pid, start_time_ticks(f"/proc/{process.pid}")
    process.send(
        "exec",
        code=(
            "import os, sys\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    if os.path.exists(f'/proc/self/fd/{fd}') and os.stat(f'/proc/self/fd/{fd}').st_ino == inode:\n"
            "        os.dup2(int(fd), 1)\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'tests.emulation.torch_worker', 'again'])"
        ),
        inode=os.fstat(process._answers).st_ino,
    )
    wait_for(lambda: b"again" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the exec")
    nothing_is_left_of(exporter, pid)
    process._hello = {}
    assert process.pid == pid
    assert start_time_ticks(f"/proc/{pid}") == began, "it is the same process"
    process.call("start_client", workload="after")
    process.call("alloc", nbytes=5 * MIB, device=1)
    say_the_same(exporter, node, process)
    (labels,) = [dict(labels) for labels in exporter.metrics().samples["gpumem_torch_allocated_bytes"]]
    assert (labels["workload"], labels["uuid"]) == ("after", node.uuid(1))


@needs_namespaces
def test_a_pid_that_another_program_uses_again_inherits_nothing() -> None:
    """Everything runs in one PID namespace, where the next pid can be chosen."""
    ended = subprocess.run(
        [*CONTAINER, sys.executable, "-m", "tests.programs.pid_reuse"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=patient(110),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"


# Many


def raw_report(pid: int, uuid: str, **changes: object) -> Report:
    identity = ProcessIdentity(
        pid=pid, start_time_ticks=1000 + pid, pid_namespace=77, session=f"s{pid}", session_started_seconds=1.0
    )
    sample = DeviceSample(uuid, allocated_bytes=pid * 512, reserved_bytes=pid * 1024, reclaimable_bytes=pid * 256)
    return Report(identity, sequence=1, devices=(sample,), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("room", "kept"), [(300, 300), (200, 200), (512, 300)])
def test_three_hundred_processes_report_and_those_for_whom_there_is_no_room_are_counted(
    node: EmulatedNode, start_exporter: StartExporter, room: int, kept: int
) -> None:
    exporter = start_exporter(node, "--report.max-processes", str(room), "--report.expiry", "600")
    answers = [
        exporter.request("POST", REPORTS_PATH, to_wire(raw_report(pid, node.uuid(pid % 2)))).status
        for pid in range(1001, 1301)
    ]
    assert answers == [200] * kept + [503] * (300 - kept)
    metrics = exporter.metrics()
    shown = {dict(labels)["pid"]: value for labels, value in metrics.samples["gpumem_torch_allocated_bytes"].items()}
    assert shown == {str(pid): pid * 512 for pid in range(1001, 1001 + kept)}
    assert metrics.value("gpumem_processes_dropped_total") == 300 - kept
    assert metrics.values("gpumem_reports_total", outcome="dropped") == ([300 - kept] if kept < 300 else [])
    metrics.assert_ledgers_add_up()
    assert {entry["pid"] for entry in exporter.get("/api/v1/processes")["processes"]} == set(range(1001, 1001 + kept))
    # whoever goes makes room
    assert exporter.request("POST", REPORTS_PATH, to_wire(raw_report(1001, node.uuid(1), final=True))).status == 200
    if kept < 300:
        assert exporter.request("POST", REPORTS_PATH, to_wire(raw_report(1300, node.uuid(0)))).status == 200
        assert exporter.request("POST", REPORTS_PATH, to_wire(raw_report(1299, node.uuid(1)))).status == 503
