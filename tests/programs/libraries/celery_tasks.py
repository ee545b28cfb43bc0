"""Tasks for `celery worker` with its pool of forked processes, and a folder as the broker."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from celery import Celery
from celery.signals import worker_ready
from statement import state, state_and_wait

queue = Path(os.environ["STATEMENTS"]) / "queue"
queue.mkdir(exist_ok=True)
app = Celery("celery_tasks", broker="filesystem://")
app.conf.broker_transport_options = {
    "data_folder_in": str(queue),
    "data_folder_out": str(queue),
    "control_folder": str(queue),
    "polling_interval": 0.1,
}


@cache
def model() -> torch.nn.Module:
    return torch.nn.Linear(256, 256).cuda()


@app.task
def predict(number: int) -> None:
    with torch.inference_mode():
        model()(torch.ones(4, 256, device="cuda"))
    state_and_wait("worker", number=number)


@worker_ready.connect
def send(**_: Any) -> None:
    """Send two tasks, one for each process of the pool, as soon as the worker is ready."""
    state("parent")
    for number in range(2):
        predict.delay(number)
