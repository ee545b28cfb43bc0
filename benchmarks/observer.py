"""Compares what the exporter shows with the truth, while jobs come and go and the exporter is restarted and paused.

    python -m benchmarks.observer [--quick] [--json] [--minutes N] [--seed N]

The truth comes from the emulated driver's books and from `memory_stats` in each process. A random step is taken after
another, and every 25 steps all surfaces must show every value to the byte: `/metrics`, `/api/v1/live`, the last row of
`/api/v1/history`, `info --json`, the events, and the recording rules in a real Prometheus. The exporter is killed,
stopped, and paused for longer than `--report.expiry`, and processes end and run out of memory meanwhile. At the end
nothing happens for two minutes, after which idle caches and the means of a minute have exact values, too.

Needs `prometheus` on PATH. It measures no time, so its processes are forks of one that has done their imports.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, show
from tests.emulation.node import EmulatedNode
from tests.support.builders.random_node import DEVICES, TOTAL_BYTES, Steps, World
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.servers.exporter_process import UNLIMITED, ExporterProcess
from tests.support.servers.running_prometheus import RunningPrometheus
from tests.support.truth.observer import Observer

QUIET_EVERY = 25
EXPIRY_SECONDS, PAUSE_SECONDS = 15.0, 22.0
# What takes long, or ends what others are about, is taken seldom.
RESTS = {
    "kill_torch": 20,
    "exit_torch": 20,
    "lose_device": 60,
    "restart_exporter": 50,
    "restart_driver": 50,
    "pause_exporter": 150,
    "run_out_of_memory": 10,
}
RULES = REPOSITORY / "deploy" / "prometheus" / "rules" / "recording.yml"


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--minutes", 10.0, 1.0, "minutes until the node comes to rest")
    options.parser.add_argument("--seed", type=int, help="repeats the choices of a run, but not its timing")
    given = options.read()
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    progress = Progress("observer", 2)
    # A Prometheus that ends prints its log.
    with contextlib.redirect_stdout(sys.stderr), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpumem-observer-")))
        node = stack.enter_context(EmulatedNode(folder / "node", len(DEVICES), TOTAL_BYTES))
        port = free_port()
        flags = [
            *("--report.interval", "0.2", "--collect.interval", "0.2", "--report.expiry", f"{EXPIRY_SECONDS:g}"),
            *("--storage.path", str(folder / "storage"), "--web.listen-address", f"127.0.0.1:{port}", *UNLIMITED),
        ]
        exporter = ExporterProcess(folder, *flags, environment=node.environment())
        stack.callback(exporter.close)
        prometheus = RunningPrometheus(folder / "prometheus", {"node": f"127.0.0.1:{port}"}, rules=[RULES])
        stack.callback(prometheus.close)
        world = World(node, exporter, torches=5, programs=6)
        stack.callback(world.close)
        rng = random.Random(seed)
        steps = Steps(world, rng, pause_seconds=PAUSE_SECONDS, rests=RESTS, log=lambda _: None)
        observer = Observer(world, prometheus.url)
        progress.part(f"random steps with seed {seed}")
        churn(observer, steps, rng, progress, given.minutes * 60)
        progress.part("two minutes at rest")
        rest(observer, rng)
    for text in observer.wrong():
        print(text, file=sys.stderr)
    return show(f"observer, seed {seed}", rows(observer, steps), as_json=given.json)


def churn(observer: Observer, steps: Steps, rng: random.Random, progress: Progress, seconds: float) -> None:
    """Take random steps for a time."""
    world, end, quiet = observer.world, time.monotonic() + seconds, QUIET_EVERY
    observer.check_quiet(rng)
    while time.monotonic() < end:
        steps.take()
        observer.check()
        if world.steps >= quiet:
            quiet = world.steps + QUIET_EVERY
            observer.check_quiet(rng)
        progress.at(f"{world.steps} steps, {len(observer.wrong())} mismatches")


def rest(observer: Observer, rng: random.Random) -> None:
    """Check all values once more, after nothing has happened for a while."""
    world = observer.world
    while world.lost:
        world.heal_device()
    observer.check_quiet(rng)
    observer.check_values(rested=True)


def rows(observer: Observer, steps: Steps) -> list[Row]:
    """Return the mismatches of each surface, and what happened."""
    world, taken = observer.world, steps.taken
    found = [
        Row(f"mismatches: {surface}", len(observer.mismatches[surface]), "", f"{count:,} values", limit=1)
        for surface, count in sorted(observer.compared.items())
    ]
    happened: Mapping[str, int] = {
        "steps": world.steps,
        "starts of reporting processes": world.starts.total(),
        "ends of reporting processes": world.ends.total(),
        "out-of-memory errors": world.errors.total(),
        "actions": len(world.actions),
        "restarts of the exporter": taken["restart_exporter"],
        f"pauses of the exporter of {PAUSE_SECONDS:g} s": taken["pause_exporter"],
        "losses of a device": taken["lose_device"],
    }
    return found + [Row(what, count, "") for what, count in happened.items()]


if __name__ == "__main__":
    sys.exit(main())
