"""Jobs with a cache, for `benchmarks.idle_cache`: each runs in a process of its own, on one device, until it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

import gpumem_client as client

BURST_SECONDS = 20.0
LATE_BURST_SECONDS = 80.0
_STARTED_SECONDS = 10.0
"""The time by which each job has ended the part of its work that needs the most memory."""


class Job:
    """The clock and the tensors of one job.

    Args:
        device: the device's index.
        start_seconds: when the job starts, by the monotonic clock, which is the same in all processes.
        seconds: how long it runs.
    """

    def __init__(self, device: int, start_seconds: float, seconds: float) -> None:
        self._device = f"cuda:{device}"
        self._start_seconds = start_seconds
        self._seconds = seconds
        self.rng = random.Random(device)

    @property
    def now(self) -> float:
        """The seconds since the job started."""
        return time.monotonic() - self._start_seconds

    @property
    def running(self) -> bool:
        """Whether the job goes on."""
        return self.now < self._seconds

    def tensors(self, sizes_mib: Sequence[int]) -> list[torch.Tensor]:
        """Allocate tensors."""
        return [torch.empty(size << 20, dtype=torch.uint8, device=self._device) for size in sizes_mib]

    def hold(self, sizes_mib: Sequence[int], seconds: float) -> None:
        """Allocate tensors one after the other in half of this time, and free them at its end."""
        held = []
        for size in sizes_mib:
            held += self.tensors([size])
            time.sleep(seconds / 2 / len(sizes_mib))
        time.sleep(seconds / 2)

    def step(self, sizes_mib: Sequence[int], seconds: float = 0.1) -> None:
        """Train for one step with these activations."""
        self.hold(sizes_mib, 0.8 * seconds)
        client.step()
        time.sleep(0.2 * seconds)

    def burst(self, every_seconds: float) -> bool:
        """Whether a burst of two seconds is going on."""
        return self.now >= every_seconds and self.now % every_seconds < 2.0


def _training(job: Job) -> None:
    """A training loop whose activations come and go."""
    while job.running:
        job.step([96, 96, 40, 7, 3] * 4)


def _notebook(job: Job) -> None:
    """A notebook that freed a model."""
    job.hold([512] * 12 + [12, 5, 3] * 4, 1.0)
    while job.running:
        time.sleep(0.5)


def _bursts(job: Job) -> None:
    """A server with a burst every 20 s."""
    _serve(job, BURST_SECONDS)


def _late_burst(job: Job) -> None:
    """A server with a burst after more than a minute."""
    _serve(job, LATE_BURST_SECONDS)


def _serve(job: Job, every_seconds: float) -> None:
    job.hold([64] * 64, 1.0)  # the largest batch, once at the start
    while job.running:
        job.hold([64] * (20 if job.burst(every_seconds) else 2), 0.2)


def _steady(job: Job) -> None:
    """An inference server with a steady small load."""
    job.hold([64] * 32, 1.0)
    while job.running:
        job.hold([8, 24, 3], 0.1)


def _evaluation(job: Job) -> None:
    """Training with batches of four lengths, and an evaluation every 20 s."""
    job.hold([64] * 64, 1.0)
    while job.running:
        if job.burst(BURST_SECONDS):
            job.step([64] * 30, 0.5)
        else:
            job.step([64] * job.rng.choice((6, 8, 10, 12)))


def _shrunk(job: Job) -> None:
    """Fine-tuning after a first phase with larger batches."""
    while job.now < _STARTED_SECONDS:
        job.step([400] * 12)
    while job.running:
        job.step([96] * 12)


def _long_evaluation(job: Job) -> None:
    """Training that stops for an evaluation of 70 s, which needs less memory."""
    while job.running:
        if _STARTED_SECONDS <= job.now < LATE_BURST_SECONDS:
            job.hold([64] * 2, 0.2)
        else:
            job.step([64] * 30)


def _short_peak(job: Job) -> None:
    """Training of which less than a thousandth of each step needs one more tensor."""
    while job.running:
        held = job.tensors([96] * 12)
        job.tensors([400])
        time.sleep(0.4)
        del held
        client.step()
        time.sleep(0.1)


JOBS: dict[str, Callable[[Job], None]] = {
    job.__name__.removeprefix("_"): job
    for job in (
        _training,
        _notebook,
        _bursts,
        _steady,
        _evaluation,
        _shrunk,
        _long_evaluation,
        _late_burst,
        _short_peak,
    )
}


def run(name: str, device: int, start_seconds: float, seconds: float) -> None:
    """Run a job with weights of 2 GiB."""
    job = Job(device, start_seconds, seconds)
    weights = job.tensors([256] * 8)
    time.sleep(max(0.0, -job.now))
    JOBS[name](job)
    del weights
