"""Takes profiles of jobs in a loop, and checks that none of them is harmed.

    python -m benchmarks.guest [--minutes 30] [--quick] [--json] [--real-gpu]

Jobs of many kinds train on a node, a few at a time, while an exporter takes profiles of all of them: without
a recording, with one, with a search for referrers, and of out-of-memory errors. Every kind runs once without profiles
before. No job may crash, run out of memory that it has alone, or send a profile whose sums are wrong, and no thread of
a job may wait for the GIL for longer than a full garbage collection of its process justifies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.guest_jobs import KINDS
from benchmarks.place import Place
from tests.support.exporter_process import ExporterProcess
from tests.support.paths import REPOSITORY

GAP_MS = 50.0
GAP_COLLECTIONS = 1.5
TOGETHER = 2
"""The number of jobs at one time: each with a processor of a small machine."""
RANKS = {"ddp": 2, "fsdp": 2}
WAYS: Sequence[Mapping[str, float]] = (
    {},
    {"search_seconds": 5},
    {"duration_seconds": 1},
    {"duration_seconds": 0.5, "search_seconds": 5},
)
START_SECONDS = 300
EXPECTED = {"done", "refused", "expired"}
"""The outcomes of a profile of a healthy job: one that ends, or whose allocator captures a graph, refuses."""


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
                if result["outcome"] == "failed" and result["reason_code"] != "process_exited":
                    self.failures.append(f"{result['reason_code']}: {result['reason']}")


def main() -> int:
    options = Options(__doc__)
    options.amount("--minutes", 30, 0.8, "minutes with profiles")
    options.amount("--starts", 200, 3, "starts and exits of short processes")
    given = options.read()
    progress = Progress("guest", 2)
    with Place(real_gpu=given.real_gpu, devices=TOGETHER) as place:
        exporter = place.exporter("--action.caller-limit", "0")
        rows = run(given, progress, place, exporter)
    return show("guest", rows, as_json=given.json)


def run(given: argparse.Namespace, progress: Progress, place: Place, exporter: ExporterProcess) -> list[Row]:
    """Run all jobs alone and beside profiles."""
    kinds = list(KINDS)
    seconds = 60 * given.minutes * TOGETHER / len(kinds)
    progress.part("jobs alone")
    alone = jobs(place, exporter, kinds, min(seconds, 5), reports=False)
    progress.part("jobs beside profiles")
    profiles = Profiles(exporter)
    starting = threading.Thread(target=starts, args=(place, exporter, given.starts, 60 * given.minutes))
    starting.start()
    try:
        beside = jobs(place, exporter, kinds, seconds)
    finally:
        starting.join()
        profiles.end()
    print(dict(profiles.outcomes), *profiles.failures[:5], sep="\n", file=sys.stderr)
    rows = [
        Row("profiles done", profiles.outcomes["done"], ""),
        Row("profiles that failed, one with a wrong sum among them", len(profiles.failures), "", limit=1),
    ]
    for kind in kinds:
        if "error" in alone[kind]:
            print(f"{kind} does not run here: {alone[kind]['error']}", file=sys.stderr)
            continue
        seen = beside[kind]
        rows.append(Row(f"{kind}: crashes", "error" in seen, "", limit=1))
        if "error" in seen:
            print(f"{kind}: {seen['error']}", file=sys.stderr)
            continue
        gap, alone_gap, collection = (
            1e3 * value for value in (seen["gap_seconds"], alone[kind]["gap_seconds"], seen["gc_seconds"])
        )
        bound = max(GAP_MS, GAP_COLLECTIONS * collection, alone_gap)
        rows += [
            Row(f"{kind}: steps", seen["steps"], ""),
            Row(f"{kind}: out-of-memory errors", seen["ooms"], "", limit=alone[kind]["ooms"] + 1),
            Row(f"{kind}: longest gap; alone {alone_gap:.0f}, collection {collection:.0f}", gap, "ms", limit=bound),
        ]
    return rows


def jobs(
    place: Place, exporter: ExporterProcess, kinds: Sequence[str], seconds: float, *, reports: bool = True
) -> dict[str, Any]:
    """Run a job of each kind, a few at a time, and return what each saw."""
    seen: dict[str, Any] = {}
    waiting = list(kinds)

    def work(device: int) -> None:
        while waiting:
            kind = waiting.pop(0)
            seen[kind] = job(place, exporter, kind, seconds, device, reports=reports)
            print(kind, seen[kind], file=sys.stderr)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(TOGETHER)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return seen


def job(
    place: Place, exporter: ExporterProcess, kind: str, seconds: float, device: int, *, reports: bool
) -> dict[str, Any]:
    """Run a job and return what it saw; an error if it did not end well."""
    environment = {
        **place.environment(),
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'client'}",
        "CUDA_VISIBLE_DEVICES": str(device),
        "GUEST_STORE": str(place.folder / f"{kind}-{time.monotonic_ns()}"),
        "GPUMEM_EXPORTER_URL": exporter.url,
        **({} if reports else {"GPUMEM_DISABLED": "1"}),
        **({"GPUMEM_OOM_PROFILE": "1"} if kind == "out_of_memory" else {}),
    }
    command = [sys.executable, "-m", "benchmarks.guest_jobs", kind, str(seconds)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for rank in range(RANKS.get(kind, 1))
    ]
    found: dict[str, Any] = {}
    for rank in ranks:
        try:
            out, errors = rank.communicate(timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            out, errors = "", f"it has not ended; {rank.communicate()[1]}"
        if rank.returncode or not out:
            found["error"] = f"exit status {rank.returncode}: {errors[-500:]}"
        elif "error" not in found:
            found = json.loads(out.splitlines()[-1])
    return found


def starts(place: Place, exporter: ExporterProcess, count: int, seconds: float) -> None:
    """Start short processes again and again, which end during a profile."""
    end = time.monotonic() + seconds
    for _ in range(count):
        if time.monotonic() >= end:
            return
        found = job(place, exporter, "plain", 0.3, 0, reports=True)
        if "error" in found:
            raise RuntimeError(found["error"])


if __name__ == "__main__":
    raise SystemExit(main())
