"""CPU of evaluating a policy once, compared with a scrape of the same node; the exporter does it once per second.

    python -m benchmarks.policy [--quick] [--json]

512 processes, each on one of eight devices, and 20 rules of three conditions. Each round has new reports and a new
reading of the driver. In the first row no rule's conditions are true, as is usual. In the second all of them are true
for every process but not yet for long enough, which needs the most memory.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.claims import Options, Progress, compared, show
from benchmarks.exposition import timed
from benchmarks.snapshots import node, reporting
from gpumem_exporter.actions.policy.engine import Engine
from gpumem_exporter.actions.policy.rules import Rule
from gpumem_exporter.actions.request import ACTIONS
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import ProcessKey, Snapshot

PROCESSES = 512
DEVICES = 8
RULES = 20
SCRAPE_RATIO = 1.5


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--rounds", 50, 10, "evaluations of each kind")
    given = options.read()
    progress = Progress("policy", 1)
    progress.part(f"{RULES} rules on {PROCESSES} processes")
    usual = Engine(rules(slack_over=1e15), stale_seconds=5.0)
    worst = Engine(rules(slack_over=1.0), stale_seconds=5.0)
    exposition = Exposition(Instruments(), version="0", source="nvml")
    spent: dict[str, list[float]] = {"usual": [], "worst": [], "scrape": []}
    for turn in progress.turns(given.rounds):
        snapshot = snapshot_at(turn + 1)
        spent["usual"].append(timed(usual.evaluate, snapshot, frozenset)[0])
        spent["worst"].append(timed(worst.evaluate, snapshot, frozenset)[0])
        spent["scrape"].append(timed(list, exposition.render(snapshot, openmetrics=False))[0])
    ms = {name: 1e3 * statistics.median(values) for name, values in spent.items()}
    what = f"{PROCESSES} processes × {RULES} rules"
    rows = [
        compared(f"{what}, no condition true", ms["usual"], "ms", "a scrape of them", ms["scrape"], SCRAPE_RATIO),
        compared(f"{what}, every condition true", ms["worst"], "ms", "a scrape of them", ms["scrape"]),
    ]
    return show("policy", rows, as_json=given.json)


def rules(slack_over: float) -> tuple[Rule, ...]:
    """Return rules that differ only in their names; none of them ever acts."""
    rule = {
        "workloads": ["llm-*"],
        "when": {
            "slack_bytes": {"over": f"{slack_over}"},
            "device_free_ratio": {"under": "90%"},
            "idle_seconds": {"under": "1e9"},
        },
        "for": "1d",
        "do": {"action": "empty_cache", "mode": "idle"},
    }
    return tuple(Rule.model_validate({**rule, "name": f"rule-{n}"}, context=ACTIONS) for n in range(RULES))


def snapshot_at(tick: int) -> Snapshot:
    """Return the node at a tick: every process has reported again, and the driver was polled again."""
    processes = []
    for pid in range(PROCESSES):
        process = reporting(pid, DEVICES, tick)
        report = replace(process.report, devices=process.report.devices[pid % DEVICES :][:1])
        processes.append(replace(process, key=ProcessKey(process.key.pid_namespace, pid), report=report))
    return Snapshot(float(tick), node(PROCESSES // DEVICES, DEVICES, tick), tuple(processes))


if __name__ == "__main__":
    raise SystemExit(main())
