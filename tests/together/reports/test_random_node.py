"""A random run of allocations, errors, exits, restarts, pauses and failures on a node: every surface shows the truth.

    GPUMEM_RANDOM_STEPS=10000 python -m pytest -s tests/together/reports/test_random_node.py

The default is 150 steps. The run prints its seed. `GPUMEM_RANDOM_SEED` repeats its choices, but not the times at which
reports and polls arrive. `python -m benchmarks.observer` is the same for ten minutes, with a real Prometheus.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode
from tests.support.builders.random_node import DEVICES, TOTAL_BYTES, Steps, World
from tests.support.servers.exporter_process import UNLIMITED
from tests.support.truth.observer import Observer

STEPS = int(os.environ.get("GPUMEM_RANDOM_STEPS", "150"))
QUIET_EVERY = 25
EXPIRY_SECONDS, PAUSE_SECONDS = 5.0, 8.0
# What takes long is taken seldom.
RESTS = {
    "kill_torch": 100,
    "exit_torch": 100,
    "lose_device": 60,
    "restart_exporter": 60,
    "restart_driver": 60,
    "pause_exporter": 120,
    "run_out_of_memory": 10,
}


@pytest.fixture
def world(make_node: MakeNode, start_exporter: StartExporter) -> Iterator[World]:
    node = make_node(devices=len(DEVICES), total_bytes=TOTAL_BYTES)
    folder = Path(node.path) / "events"
    flags = [
        *("--report.interval", "0.1", "--collect.interval", "0.1", "--report.expiry", f"{EXPIRY_SECONDS:g}"),
        *("--storage.path", str(folder), "--log.level", "warning", *UNLIMITED),
    ]
    world = World(node, start_exporter(node, *flags), torches=3, programs=6)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.timeout(300 + STEPS)
def test_every_value_is_correct_in_a_random_run(world: World) -> None:
    seed = int(os.environ.get("GPUMEM_RANDOM_SEED") or random.SystemRandom().getrandbits(32))
    print(f"GPUMEM_RANDOM_SEED={seed} GPUMEM_RANDOM_STEPS={STEPS}")
    rng = random.Random(seed)
    steps, observer = Steps(world, rng, pause_seconds=PAUSE_SECONDS, rests=RESTS), Observer(world)
    observer.check()  # a process that ends in the first step may stay on the page
    quiet = QUIET_EVERY
    while world.steps < STEPS:
        steps.take()
        observer.check()
        if world.steps >= quiet:
            quiet += QUIET_EVERY
            observer.check_quiet(rng, command=world.steps >= STEPS)
        assert not observer.wrong(), "\n".join(observer.wrong())
    print(dict(observer.compared))
