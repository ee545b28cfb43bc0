"""Takes profiles of jobs in a loop, and checks that none of them is harmed.

    python -m benchmarks.guest [--minutes 30] [--quick] [--json] [--real-gpu]

Jobs of many kinds train on a node, a few at a time, while an exporter takes profiles of all of them: without a
recording, with one, with a search for referrers, and of out-of-memory errors. Each runs without the client before. No
job may crash, run out of memory only beside profiles, or send a profile whose sums are wrong. No thread of a job may
wait for the GIL for more than 50 ms, or than one and a half times the longest full garbage collection of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.place import Place
from tests.emulation.torch_process import RemoteError, TorchProcess, TorchProcessError
from tests.support.servers.exporter_process import ExporterProcess

GAP_MS = 50.0
GAP_COLLECTIONS = 1.5
TOGETHER = max(1, len(os.sched_getaffinity(0)) // 2)
"""The number of jobs at one time. With less than two processors, a job waits for them, which counts as a gap."""
RANKS = {"ddp": 2, "fsdp": 2}
KINDS = (
    *("plain", "wrapped", "hooked_subclass", "sparse", "dtensor", "ddp", "fsdp", "checkpointed", "hooks"),
    *("compiled_autograd", "retained", "cleared_gradients", "loaded", "swapped", "out_of_memory"),
)
WAYS: Sequence[Mapping[str, float]] = (
    {},
    {"search_seconds": 5},
    {"duration_seconds": 1},
    {"duration_seconds": 0.5, "search_seconds": 5},
)
START_SECONDS = 300


class Profiles:
    """Takes profiles of all jobs, one after another, until `end`."""

    def __init__(self, exporter: ExporterProcess) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._exporter = exporter
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def end(self) -> None:
        """End the loop."""
        self._ended.set()
        self._thread.join()

    def _take(self) -> None:
        turn = 0
        while not self._ended.wait(0.05):
            if not self._exporter.processes():
                continue
            turn += 1
            body = {"action": "profile", "target": {"all": True}, "deadline_seconds": 20, "wait_seconds": 60}
            answer = self._exporter.request("POST", "/api/v1/actions", {**body, **WAYS[turn % len(WAYS)]})
            if answer.status != 200:
                continue  # all processes have ended meanwhile
            for result in json.loads(answer.body)["results"]:
                self.outcomes[result["outcome"]] += 1
                # A process may end while its profile is on the way, and has a limit of profiles in a minute.
                expected = ("does not report", "within a minute")
                if result["outcome"] == "failed" and not any(each in result["reason"] for each in expected):
                    self.failures.append(f"{result['reason_code']}: {result['reason']}")


def main() -> int:
    options = Options(__doc__)
    options.amount("--minutes", 30, 0.8, "minutes with profiles")
    options.amount("--starts", 200, 3, "starts and exits of short processes")
    given = options.read()
    progress = Progress("guest", 1)
    with Place(real_gpu=given.real_gpu, devices=TOGETHER, fresh=False) as place:
        exporter = place.exporter()
        rows = run(given, progress, place, exporter)
    return show("guest", rows, as_json=given.json)


def run(given: argparse.Namespace, progress: Progress, place: Place, exporter: ExporterProcess) -> list[Row]:
    """Run all jobs alone and beside profiles."""
    seconds = 60 * given.minutes * TOGETHER / len(KINDS)
    progress.part("jobs beside profiles")
    profiles = Profiles(exporter)
    starting = threading.Thread(target=starts, args=(place, exporter, given.starts, 60 * given.minutes))
    starting.start()
    try:
        seen = jobs(place, exporter, KINDS, seconds, TOGETHER)
    finally:
        starting.join()
        profiles.end()
    print(dict(profiles.outcomes), *profiles.failures[:5], sep="\n", file=sys.stderr)
    rows = [
        Row("profiles done", profiles.outcomes["done"], ""),
        Row("profiles that failed, one with a wrong sum among them", len(profiles.failures), "", limit=1),
        Row("jobs that crashed or did not end", sum("error" in each for each in seen.values()), "", limit=1),
    ]
    for kind, each in seen.items():
        if "error" in each:
            continue
        gap, alone, collection = (1e3 * each[name] for name in ("gap", "gap_alone", "collection"))
        more = each["ooms"] if each["ooms_alone"] == 0 else 0
        bound = max(GAP_MS, GAP_COLLECTIONS * collection, alone)
        rows += [
            Row(f"{kind}: steps", each["steps"], ""),
            Row(f"{kind}: out-of-memory errors that it has beside profiles only", more, "", limit=1),
            Row(f"{kind}: longest gap; alone {alone:.0f}, longest collection {collection:.0f}", gap, "ms", limit=bound),
        ]
    return rows


def jobs(
    place: Place, exporter: ExporterProcess, kinds: Sequence[str], seconds: float, together: int
) -> dict[str, Any]:
    """Run a job of each kind, some at a time, and return what each saw."""
    seen: dict[str, Any] = {}
    waiting = list(kinds)

    def work(device: int) -> None:
        while waiting:
            kind = waiting.pop(0)
            seen[kind] = job(place, exporter, kind, seconds, device)
            print(kind, seen[kind], file=sys.stderr)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(together)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return seen


def job(place: Place, exporter: ExporterProcess, kind: str, seconds: float, device: int) -> dict[str, Any]:
    """Run a job and return what it saw; an error if it did not end well."""
    environment = {
        "CUDA_VISIBLE_DEVICES": str(device),
        "GUEST_STORE": str(place.folder / f"{kind}-{time.monotonic_ns()}"),
        "GPUMEM_EXPORTER_URL": exporter.url,
        **({"GPUMEM_OOM_PROFILE": "1"} if kind == "out_of_memory" else {}),
    }
    code = "from benchmarks.guest_jobs import run\nresult = run(kind, seconds)"
    ranks = [TorchProcess(place.node, {**environment, "RANK": str(rank)}) for rank in range(RANKS.get(kind, 1))]
    try:
        sent = [rank.send("exec", code=code, kind=kind, seconds=seconds) for rank in ranks]
        found: list[dict[str, Any]] = [
            rank.receive(number, 1.2 * seconds + START_SECONDS) for rank, number in zip(ranks, sent, strict=True)
        ]
        ended = [rank.finish() for rank in ranks]
    except (TorchProcessError, RemoteError) as error:
        return {"error": str(error)[-1500:]}
    finally:
        for rank in ranks:
            rank.close()
    return {"error": f"exit status {ended}"} if any(ended) else found[0]


def starts(place: Place, exporter: ExporterProcess, count: int, seconds: float) -> None:
    """Start short processes again and again, which end during a profile."""
    end = time.monotonic() + seconds
    for _ in range(count):
        if time.monotonic() >= end:
            return
        found = job(place, exporter, "checkpointed", 0.3, 0)
        if "error" in found:
            raise RuntimeError(found["error"])


if __name__ == "__main__":
    raise SystemExit(main())
