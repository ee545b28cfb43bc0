"""Compares the idle cache of nine kinds of jobs with what was still free 10 s after a clear.

    python -m benchmarks.idle_cache [--quick] [--json] [--real-gpu]

The jobs run at the same time, each in a process of its own, and on devices of their own if there are enough. After 75 s
one action clears all of them, 5 s before the next burst or evaluation. The claim: idle cache and still free differ by
at most one segment. That is 20 MiB, the allocator's unit for tensors of 1 to 10 MiB. After a phase with larger batches
it is 400 MiB: a smaller tensor then uses part of a segment of the first phase, which a clear replaces by a smaller one.
The last two rows claim nothing: the burst comes after more than a minute, and the short peak is between two readings,
which the idle cache cannot know.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.place import Place
from tests.emulation.node import MIB
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

WORKLOADS = {
    "training": "training, activations that come and go",
    "notebook": "notebook that freed a model",
    "bursts": "server with a burst every 20 s",
    "steady": "inference server with a steady small load",
    "evaluation": "training, batches of four lengths, evaluation every 20 s",
    "shrunk": "fine-tuning after a phase with larger batches",
    "long_evaluation": "training, evaluation of 70 s with less memory",
    "late_burst": "server with a burst after 80 s",
    "short_peak": "training, 400 MiB more for under a thousandth of a step",
}
SEGMENT_MIB = dict.fromkeys(WORKLOADS, 20) | {"shrunk": 400}
NOT_CLAIMED = ("late_burst", "short_peak")
START_SECONDS = 3.0
CLEAR_SECONDS = 75.0
SETTLE_SECONDS = 10.0
JOB_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one job, in bytes: before the clear, at the clear, and 10 s later."""

    idle: int
    reclaimable: int
    freed: int
    still_free: int


def main() -> int:
    options = Options(__doc__)
    given = options.read()
    progress = Progress("idle_cache", 3)
    progress.part(f"start of {len(WORKLOADS)} processes")
    with Place(real_gpu=given.real_gpu, devices=len(WORKLOADS)) as place:
        exporter = place.exporter()
        processes = {name: place.torch(GPUMEM_EXPORTER_URL=exporter.url) for name in WORKLOADS}
        devices = min(process.exec("result = torch.cuda.device_count()") for process in processes.values())
        for name, process in processes.items():
            process.exec(f"from benchmarks import cache_jobs\ncache_jobs.client.start(workload={name!r})")
        start_seconds = time.monotonic() + START_SECONDS
        runs = {
            name: process.send(
                "exec", code=f"cache_jobs.run({name!r}, {index % devices}, {start_seconds}, {JOB_SECONDS})"
            )
            for index, (name, process) in enumerate(processes.items())
        }
        progress.part("jobs")
        progress.sleep(start_seconds + CLEAR_SECONDS - time.monotonic())
        progress.part("clear")
        caches = measure(exporter)
        for name, number in runs.items():
            processes[name].receive(number)
    return show("idle_cache", [row_of(name, caches[name]) for name in WORKLOADS], as_json=given.json)


def measure(exporter: ExporterProcess) -> dict[str, Cache]:
    """Clear all processes, and return the cache of each by workload once the settling time has passed."""
    before = {process["workload"]: process["devices"][0] for process in exporter.processes().values()}
    action = exporter.act("empty_cache", target={"all": True}, settle_seconds=SETTLE_SECONDS)

    def settled() -> Any:
        found = exporter.get(f"/api/v1/actions/{action['id']}")
        return None if found["settling"] else found

    results = {result["workload"]: result for result in wait_for(settled, "the settling time", 60.0)["results"]}
    return {
        name: Cache(
            before[name]["idle_cache_bytes"],
            before[name]["reclaimable_bytes"],
            results[name]["freed_bytes"],
            results[name]["still_free_bytes"],
        )
        for name in WORKLOADS
    }


def row_of(name: str, cache: Cache) -> Row:
    """Return the difference of idle cache and still free."""
    idle, reclaimable, freed, still_free = (
        f"{value / MIB:,.0f}" for value in (cache.idle, cache.reclaimable, cache.freed, cache.still_free)
    )
    return Row(
        WORKLOADS[name],
        abs(cache.idle - cache.still_free) / MIB,
        "MiB",
        f"idle {idle}, still free {still_free}; reclaimable {reclaimable}, freed {freed}",
        limit=None if name in NOT_CLAIMED else SEGMENT_MIB[name] + 1,
    )


if __name__ == "__main__":
    raise SystemExit(main())
