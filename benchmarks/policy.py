"""What a policy costs the exporter's event loop each second: every rule on every process, beside a scrape of the same.

    python -m benchmarks.policy [--rounds N] [--json]

512 processes, each on one of eight devices, and 20 rules of three conditions; each round has fresh reports and a fresh
reading of the driver. In the first row no rule's conditions hold, as is usual; in the second all of them do, for every
process, and are waited for, which is the most that there is to remember.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from prometheus_client import CollectorRegistry

from benchmarks.claims import Row, show
from benchmarks.exposition import node, reporting, timed
from gpumem_exporter.actions.model import ActionRequest, Target
from gpumem_exporter.actions.policy import Condition, Rule
from gpumem_exporter.actions.policy_engine import Engine
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.core.samples import ProcessKey, Snapshot

PROCESSES = 512
DEVICES = 8
RULES = 20
LIMIT_MILLISECONDS = 5.0
LIMIT_OF_A_SCRAPE = 0.5


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--rounds", type=int, default=50, help="evaluations per figure (default: %(default)s)")
    options = made.parse_args()
    usual = Engine(rules(slack_over=1e15), stale_seconds=5.0)
    worst = Engine(rules(slack_over=1.0), stale_seconds=5.0)
    exposition = Exposition(CollectorRegistry(), version="0", source="nvml")
    spent: dict[str, list[float]] = {"usual": [], "worst": [], "scrape": []}
    for tick in range(1, options.rounds + 1):
        snapshot = fresh(tick)
        for process in snapshot.processes:
            exposition.prepare(process, snapshot.node)
        spent["usual"].append(timed(usual.evaluate, snapshot, frozenset)[0])
        spent["worst"].append(timed(worst.evaluate, snapshot, frozenset)[0])
        spent["scrape"].append(timed(exposition.render, snapshot, openmetrics=False)[0])
    scrape = statistics.median(spent["scrape"])
    beside = f"a scrape of them ({1e3 * scrape:.1f} ms)"
    rows = []
    for what, name in ((f"{PROCESSES} processes x {RULES} rules, none holds", "usual"), ("all hold", "worst")):
        median = statistics.median(spent[name])
        limits = (LIMIT_MILLISECONDS, LIMIT_OF_A_SCRAPE) if name == "usual" else (None, None)
        rows.append(Row(f"{what}, median", 1e3 * median, "ms", limits[0], beside, median / scrape, limits[1]))
    return show("policy", rows, as_json=options.json)


def rules(slack_over: float) -> tuple[Rule, ...]:
    """Rules that differ in their names alone; none of them ever comes to act."""
    when = (
        Condition("slack_bytes", over=slack_over),
        Condition("device_free_ratio", under=0.9),
        Condition("idle_seconds", under=1e9),
    )
    asks = ActionRequest("empty_cache", Target(), mode="idle")
    return tuple(Rule(f"rule-{number}", when, asks, ("llm-*",), for_seconds=1e9) for number in range(RULES))


def fresh(tick: int) -> Snapshot:
    """A second later: every process has reported, and the driver was polled."""
    processes = []
    for pid in range(PROCESSES):
        process = reporting(pid, DEVICES, tick)
        report = replace(process.report, devices=process.report.devices[pid % DEVICES :][:1])
        processes.append(replace(process, key=ProcessKey(process.key.pid_namespace, pid), report=report))
    return Snapshot(float(tick), node(PROCESSES // DEVICES, DEVICES, tick), tuple(processes))


if __name__ == "__main__":
    raise SystemExit(main())
