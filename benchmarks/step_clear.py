"""What a clear at the end of a step costs a training loop: steps with one clear in each hundred, and without, in turns.

    python -m benchmarks.step_clear [--json] [--real-gpu] [--turns N]

The clear waits in the process before the hundred begin, runs at the end of the first, in the training thread, and the
next step takes its memory from the driver again: those two are what it costs. All other steps must be what they were.
On the emulated node giving memory back and taking it are quicker than on a device, which waits for its kernels.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.claims import Row, parser, show
from benchmarks.place import Place
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

STEPS = 100
OTHERS_RATIO = 1.05

SET_UP = """
import time
from gpumem_exporter import client
client.start(workload="steps")

def hundred(steps):
    took = []
    for _ in range(steps):
        begun = time.perf_counter()
        activations = [torch.empty(size << 20, dtype=torch.uint8, device="cuda:0") for size in (3, 7, 25, 60, 11)]
        sum(range(60_000))  # the interpreter has its share of a step
        del activations
        client.step()
        took.append(time.perf_counter() - begun)
    return took

result = len(hundred(steps))
"""


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--turns", type=int, default=20, help="hundreds with and without, each (default: %(default)s)")
    options = made.parse_args()
    return show("step_clear", measure(options), as_json=options.json)


def measure(options: argparse.Namespace) -> list[Row]:
    """All figures."""
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        exporter = place.exporter()
        process = place.torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.exec(SET_UP, steps=STEPS)
        exporter.wait_for_processes(process.pid)
        without: list[list[float]] = []
        with_one: list[list[float]] = []
        for _ in range(options.turns):
            without.append(process.exec("result = hundred(steps)", steps=STEPS))
            action = _ask(exporter, process.pid)
            with_one.append(process.exec("result = hundred(steps)", steps=STEPS))
            _require_done(exporter, action)
    usual = _median_ms(without, 2, STEPS)
    others = _median_ms(with_one, 2, STEPS)
    first, second = (_median_ms(with_one, i, i + 1) - _median_ms(without, i, i + 1) for i in (0, 1))
    beside = f"a step without ({usual:.3f} ms)"
    return [
        Row("a step that clears at its end, more than one that does not", first, "ms", None, beside, first / usual),
        Row("the next, which asks the driver again", second, "ms", None, beside, second / usual),
        Row("every other step, median", others, "ms", None, beside, others / usual, OTHERS_RATIO),
        Row(
            "all hundred",
            1e3 * statistics.median(map(sum, with_one)),
            "ms",
            None,
            "a hundred without",
            statistics.median(map(sum, with_one)) / statistics.median(map(sum, without)),
        ),
    ]


def _ask(exporter: ExporterProcess, pid: int) -> Any:
    """Ask for a clear, and return once it waits in the process."""
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


def _median_ms(hundreds: list[list[float]], begin: int, end: int) -> float:
    return 1e3 * statistics.median([taken for each in hundreds for taken in each[begin:end]])


if __name__ == "__main__":
    raise SystemExit(main())
