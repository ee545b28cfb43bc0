"""A model behind gunicorn, as a WSGI application.

The model is created with the application. Each worker moves it to the device when the worker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from statement import state

model = torch.nn.Linear(256, 256)


@torch.inference_mode()
def predict() -> list[int]:
    return list(model(torch.ones(4, 256, device="cuda")).shape)


def load() -> None:
    model.to("cuda")
    predict()
    state("worker")


def post_worker_init(worker: Any) -> None:
    """Load the model in a worker of gunicorn, for which this module is the configuration, too."""
    load()


def wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "application/json")])
    return [str(predict()).encode()]
