"""The memory of the history after simulated hours of three hostile nodes, and what a second of it costs.

    python -m benchmarks.history [--quick] [--json]

Each node has eight devices. The memory is the sum of all Python objects that the history refers to. The growth of the
resident memory beside it also has what the simulation itself leaves behind. The last row is about the first node.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, compared, show
from benchmarks.exposition import timed
from benchmarks.snapshots import identity, node, report, uuid
from gpumem_exporter.core.place import HERE
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.history.history import MAX_BYTES, History
from gpumem_exporter.view.live import NodeView

DEVICES = 8
STEP_SECONDS = 60
"""One second of each minute is simulated. The seconds between take the same memory."""
START = 1.7e9
MIB = 1 << 20


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--hours", 25.0, 1.0, "simulated hours")
    given = options.read()
    ticks = int(given.hours * 3600 / STEP_SECONDS)
    nodes: dict[str, Callable[[int], Snapshot]] = {
        "256 processes, each a job": lambda tick: snapshot(tick, range(256), lambda pid: f"job {pid}"),
        "192 new jobs each minute": lambda tick: snapshot(
            tick, range(192 * tick, 192 * tick + 192), lambda pid: f"short job {pid}"
        ),
        "512 processes of one user, always with new names of 128 characters": lambda tick: snapshot(
            tick, range(512), lambda pid: f"\N{PILE OF POO}{512 * tick + pid:0>127}", uid=1001
        ),
    }
    progress = Progress("history", len(nodes))
    rows = []
    for what, at in nodes.items():
        progress.part(what)
        history, growth_bytes, costs = simulated(at, ticks, progress)
        measured = reachable_bytes(history) / MIB
        beside = f"counted {history.size_bytes / MIB:.1f} MiB; resident memory grew by {growth_bytes / MIB:.1f} MiB"
        rows.append(Row(f"{what}: memory after {given.hours:g} h", measured, "MiB", beside, limit=MAX_BYTES / MIB))
        if len(rows) == 1:
            view = NodeView(clock=lambda: 0.0, wall_clock=lambda: START, minima_of=lambda _: ())
            document = [timed(view.document, at(tick), {"failed_checks": []}, START)[0] for tick in range(20)]
            cost, base = (1e3 * statistics.median(values) for values in (costs, document))
            second = compared(f"{what}: CPU of a second", cost, "ms", "a poll of /api/v1/live", base, 2.0)
    return show("history", [*rows, second], as_json=given.json)


def simulated(at: Callable[[int], Snapshot], ticks: int, progress: Progress) -> tuple[History, int, list[float]]:
    """Return a history of this node, how much the resident memory grew, and the CPU seconds of each snapshot."""
    now = 0.0
    history = History(retention_seconds=86400, clock=lambda: now, wall_clock=lambda: START + now)
    before, costs = resident_bytes(), []
    for tick in progress.turns(ticks):
        now = tick * STEP_SECONDS + 0.5
        costs.append(timed(history.add, replace(at(tick), taken_seconds=now))[0])
    gc.collect()
    return history, resident_bytes() - before, costs


def snapshot(tick: int, pids: range, workload: Callable[[int], str], uid: int = 1000) -> Snapshot:
    """Return the node with these processes, each on one device."""
    processes = []
    for pid in pids:
        sent = report(replace(identity(pid), workload=workload(pid)), [uuid(pid % DEVICES)], tick)
        key = ProcessKey(sent.process.pid_namespace, pid, uid, HERE)
        processes.append(ReportingProcess(key, None, sent, float(tick), START + tick))
    return Snapshot(float(tick), node(0, DEVICES, tick), tuple(processes))


def reachable_bytes(root: object) -> int:
    """Return the size of all objects that an object refers to, without code."""
    return sum(map(sys.getsizeof, _reachable(root)))


def _reachable(root: object) -> Iterator[object]:
    waiting, seen = [root], {id(root)}
    while waiting:
        found = waiting.pop()
        yield found
        for each in gc.get_referents(found):
            code = isinstance(each, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType))
            if id(each) not in seen and not code:
                seen.add(id(each))
                waiting.append(each)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    raise SystemExit(main())
