"""What exporters say of an emulated node beside its books: bytes of error by device and by process.

    python -m benchmarks.exporters [--json]

The node has two GPUs, a third one with a MIG device, and processes on all of them; then a process exits, and a GPU
falls off the bus. `nvitop-exporter` runs if it is on PATH (`pip install nvitop-exporter`, in a virtual environment):
pip has no other exporter that reads NVML. A value that should be there and is missing counts with its bytes, and so
does a value that should not be there: of what has ended, of a lost device, and what a sum would count twice.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.reporters import Stand
from tests.emulation.node import GIB, EmulatedNode, MigSlice
from tests.support.ports import free_port
from tests.support.servers.exporter_process import ExporterProcess, Metrics
from tests.support.waiting import wait_for

MIB = 1 << 20
SECONDS = 10.0
"""The time for an exporter to notice a change; both read the driver once a second."""
STATES = ("all answers", "a process has exited", "a GPU is lost")

Bytes = Mapping[tuple[str, ...], float]
"""The used bytes by UUID, or by UUID and pid."""
Shown = tuple[Bytes, Bytes]
"""Of devices, and of processes."""


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    given = options.read()
    progress = Progress("exporters", len(STATES))
    with tempfile.TemporaryDirectory(prefix="gpumem-exporters-") as folder, ExitStack() as stack:
        rows = measured(Path(folder), progress, stack)
    return show("exporters", rows, as_json=given.json)


def measured(folder: Path, progress: Progress, stack: ExitStack) -> list[Row]:
    """Change the node step by step, and compare what each exporter shows with its books."""
    mig = {2: [MigSlice("3g.40gb", 39 * GIB)]}
    node = stack.enter_context(EmulatedNode(folder / "node", devices=3, total_bytes=80 * GIB, mig=mig))
    stand = stack.enter_context(Stand(4))
    stays, exits, on_lost, on_mig = stand.pids
    for pid, device, size in ((stays, 0, 20 * GIB), (exits, 0, 10 * GIB), (on_lost, 1, 30 * GIB), (on_mig, 3, 5 * GIB)):
        node.set_process(pid, device, size)
    exporters = {"gpumem-exporter": _ours(folder, node, stack)}
    if shutil.which("nvitop-exporter"):
        exporters["nvitop-exporter"] = _nvitop(node, stack)
    else:
        print("nvitop-exporter is not on PATH", file=sys.stderr)
    changes: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: node.remove_process(exits),
        lambda: node.lose_device(1),
    )
    rows = []
    for state, change in zip(STATES, changes, strict=True):
        progress.part(state)
        change()
        progress.sleep(SECONDS)
        truth = _truth(node, lost="" if state != STATES[-1] else node.uuid(1))
        for name, read in exporters.items():
            for what, shown, true in zip(("devices", "processes"), read(), truth, strict=True):
                rows.append(_row(f"{state}: {what} of {name}", shown, true))
    return rows


def _row(what: str, shown: Bytes, true: Bytes) -> Row:
    wrong = {key: abs(shown.get(key, 0.0) - true.get(key, 0.0)) for key in shown.keys() | true.keys()}
    missing, extra = true.keys() - shown.keys(), shown.keys() - true.keys()
    beside = f"of {sum(true.values()):,.0f}; {len(missing)} missing, {len(extra)} too many"
    return Row(what, sum(wrong.values()), "bytes of error", beside=beside, limit=1 if "gpumem" in what else None)


def _truth(node: EmulatedNode, lost: str) -> Shown:
    """Return the used bytes of the books. A GPU with MIG has no process of its own: its MIG devices have them."""
    books = node.books()
    parents = {book.parent_uuid for book in books.devices if book.parent_uuid}
    known = [book for book in books.devices if book.uuid not in parents and book.uuid != lost]
    processes = {(book.uuid, str(pid)): float(used) for book in known for pid, used in book.processes.items()}
    return {(book.uuid,): float(book.used_bytes) for book in known}, processes


def _ours(folder: Path, node: EmulatedNode, stack: ExitStack) -> Callable[[], Shown]:
    exporter = ExporterProcess(folder, environment=node.environment(), fresh=True)
    stack.callback(exporter.close)
    return lambda: _shown(
        exporter.metrics(), "gpumem_device_memory_used_bytes", "gpumem_process_memory_used_bytes", factor=1
    )


def _nvitop(node: EmulatedNode, stack: ExitStack) -> Callable[[], Shown]:
    port = free_port()
    command = ["nvitop-exporter", "--bind-address", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=node.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)

    def page() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    wait_for(lambda: "process_gpu_memory_MiB{" in page(), "nvitop-exporter", 60.0)
    return lambda: _shown(Metrics(page()), "gpu_memory_used_MiB", "process_gpu_memory_MiB", factor=MIB)


def _shown(metrics: Metrics, device: str, process: str, *, factor: int) -> Shown:
    """Return the values of two metrics. A value that is not a number shows nothing."""

    def values(name: str, *labels: str) -> Bytes:
        found = metrics.samples.get(name, {}).items()
        return {tuple(dict(has)[label] for label in labels): factor * value for has, value in found if value == value}

    return values(device, "uuid"), values(process, "uuid", "pid")


if __name__ == "__main__":
    sys.exit(main())
