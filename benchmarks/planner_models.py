"""Compares planned with real peaks of models from transformers, timm, diffusers and peft.

    python -m benchmarks.planner_models [--json] [--only MODEL ...]

Needs the dependency group `models`. The models are small and random, and nothing is downloaded. Each model is planned
on fake tensors and trained for a few steps on the emulated node, in the loop that its library documents. The claim
counts bytes, which do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.planner_model_jobs import JOBS, job, train
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.search import Sizing
from tests.emulation.node import GIB, EmulatedNode
from tests.support.paths import REPOSITORY

WORST_PERCENT = 3.0
STEPS = 3
PATIENCE_SECONDS = 60.0
"""Kernels of the emulated node compute nothing. A model that loops until a value changes never ends there."""


def main() -> int:
    options = Options(__doc__)
    options.parser.add_argument("--only", nargs="+", choices=JOBS, metavar="MODEL", help="models (default: all)")
    options.parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = options.read()
    names = given.only or list(JOBS)
    if given.train:
        return _train_all(names)
    progress = Progress("planner_models", len(names) + 1)
    progress.part("training on the emulated node")
    measured = _measure(names)
    rows: list[Row] = []
    errors: list[float] = []
    for name in names:
        progress.part(f"planning {name}")
        row, error = _compare(name, measured[name])
        rows.append(row)
        errors += [] if error is None else [abs(error)]
    rows.append(Row("models that could not be compared", len(names) - len(errors), "", limit=0.5))
    rows.append(Row("reserved peak, error, worst", max(errors, default=100.0), "%", limit=WORST_PERCENT))
    return show("planner_models", rows, as_json=given.json)


def _compare(name: str, real: Mapping[str, Any]) -> tuple[Row, float | None]:
    """Plan a model, and return the row with the error of the reserved peak in percent; None if either side failed."""
    what, started = f"{name}, batch {JOBS[name].batch}: reserved peak planned", time.process_time()
    try:
        planned = Sizing(job(name)).peaks(JOBS[name].batch)
    except ConfigurationError as error:
        return Row(what, 0, "MiB", beside=str(error)), None
    seconds, mib = time.process_time() - started, planned.reserved_bytes / 2**20
    if "error" in real:
        return Row(what, mib, "MiB", beside=real["error"]), None
    reserved = 100 * (planned.reserved_bytes / real["reserved"] - 1)
    allocated = 100 * (planned.allocated_bytes / real["allocated"] - 1)
    beside = f"measured {real['reserved'] / 2**20:.0f} MiB: {reserved:+.2f} % (allocated {allocated:+.2f} %)"
    return Row(what, mib, "MiB", beside=f"{beside}, {seconds:.1f} s of CPU for the plan"), reserved


def _measure(names: list[str]) -> dict[str, Any]:
    """Train the models on an emulated node, and return the peaks of each, or its error."""
    command = [sys.executable, "-m", "benchmarks.planner_models", "--train", "--only", *names]
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as folder,
        EmulatedNode(Path(folder) / "node", 1, 80 * GIB) as node,
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPOSITORY, env=node.environment(), check=True)
    return {name: peaks for line in done.stdout.splitlines() for name, peaks in json.loads(line).items()}


def _train_all(names: list[str]) -> int:
    """Train each model in a forked process, which has the imported libraries and a fresh CUDA context."""
    fork = multiprocessing.get_context("fork")
    results = os.dup(1)
    os.dup2(2, 1)
    for name in names:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_train_one, args=(name, sender))
        process.start()
        print(f"training {name}", file=sys.stderr, flush=True)
        sender.close()
        try:
            peaks = receiver.recv() if receiver.poll(PATIENCE_SECONDS) else {"error": "the training did not end"}
        except EOFError:
            peaks = {"error": "the training ended without a result"}
        process.kill()
        process.join()
        os.write(results, json.dumps({name: peaks}).encode() + b"\n")
    return 0


def _train_one(name: str, sender: Any) -> None:
    torch.backends.cudnn.enabled = False  # the emulated node does not have it
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        train(JOBS[name], STEPS, "cuda")
    except Exception as error:  # noqa: BLE001 - one model fails alone
        traceback.print_exc()
        sender.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        return
    stats = torch.cuda.memory_stats(0)
    sender.send({kind: stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")})


if __name__ == "__main__":
    sys.exit(main())
