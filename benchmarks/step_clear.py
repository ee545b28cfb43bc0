"""Measures the cost of a clear at the end of a step: a hundred steps with one clear, and a hundred without.

    python -m benchmarks.step_clear [--quick] [--json] [--real-gpu]

The clear waits in the process before the hundred steps start. It runs at the end of the first one, in the training
thread, and the next step allocates from the driver again, so these two steps are slower. All other steps must cost the
same as without a clear. On the emulated node the driver frees and allocates faster than on a device, which waits for
its kernels.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.place import Place
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

STEPS = 100
OTHERS_RATIO = 1.3

SET_UP = """
import time
import gpumem_client as client
client.start(workload="steps")

def hundred(steps):
    took = []
    for _ in range(steps):
        started = time.perf_counter()
        activations = [torch.empty(size << 20, dtype=torch.uint8, device="cuda:0") for size in (3, 7, 25, 60, 11)]
        sum(range(60_000))  # as the Python of a training step
        del activations
        client.step()
        took.append(time.perf_counter() - started)
    return took

result = len(hundred(steps))
"""


def main() -> int:
    options = Options(__doc__)
    options.amount("--turns", 20, 5, "hundreds of steps with a clear and without")
    given = options.read()
    progress = Progress("step_clear", 1)
    progress.part("hundreds of steps with a clear and without")
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        exporter = place.exporter()
        process = place.torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.exec(SET_UP, steps=STEPS)
        exporter.wait_for_processes(process.pid)
        without: list[list[float]] = []
        with_one: list[list[float]] = []
        for _ in progress.turns(given.turns):
            without.append(process.exec("result = hundred(steps)", steps=STEPS))
            action = _request(exporter, process.pid)
            with_one.append(process.exec("result = hundred(steps)", steps=STEPS))
            _require_done(exporter, action)
    return show("step_clear", rows_of(without, with_one), as_json=given.json)


def rows_of(without: list[list[float]], with_one: list[list[float]]) -> list[Row]:
    """Compare the times of the hundreds of steps."""
    usual = _typical_ms(without, 2, STEPS)
    others = _typical_ms(with_one, 2, STEPS)
    first, second = (_typical_ms(with_one, i, i + 1) - _typical_ms(without, i, i + 1) for i in (0, 1))
    hundred, base = (1e3 * statistics.median(map(sum, each)) for each in (with_one, without))
    return [
        compared("every other step", others, "ms", "a step without a clear", usual, OTHERS_RATIO),
        compared("the step that clears at its end: additional time", first, "ms", "a step without a clear", usual),
        compared("the next step: additional time", second, "ms", "a step without a clear", usual),
        compared("all hundred", hundred, "ms", "a hundred without a clear", base),
    ]


def _request(exporter: ExporterProcess, pid: int) -> Any:
    """Request a clear, and return once it waits in the process."""
    target = {"pid": pid}
    action = exporter.act("empty_cache", target=target, mode="step", wait_seconds=0, expect=202)
    wait_for(lambda: exporter.get(f"/api/v1/actions/{action['id']}")["state"] == "running", "its delivery")
    return action


def _require_done(exporter: ExporterProcess, action: Any) -> None:
    done = wait_for(lambda: _finished(exporter, action["id"]), "its end")
    if done["state"] != "done" or not done["freed_bytes"]:
        raise RuntimeError(f"the clear did not free anything: {done}")


def _finished(exporter: ExporterProcess, action_id: str) -> Any:
    action = exporter.get(f"/api/v1/actions/{action_id}")
    return action if action["state"] not in ("queued", "running") else None


def _typical_ms(hundreds: list[list[float]], start: int, end: int) -> float:
    return 1e3 * typical([taken for each in hundreds for taken in each[start:end]])


if __name__ == "__main__":
    raise SystemExit(main())
