"""Models for inference, with and without changed weights, on the CPU and on the emulated node.

The functions run in a process with torch; their results are JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError

MIB = 1 << 20


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the log lines of the client and the toolkit."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logs = {log: log.level for log in map(logging.getLogger, ("gpumem_client", "gpumem_toolkit"))}
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for log, level in logs.items():
            log.removeHandler(handler)
            log.setLevel(level)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigurationError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4))


def inference() -> dict[str, Any]:
    model, batch = net(), torch.randn(2, 3, 8, 8)
    model[1].eval()  # frozen by the script
    modes = [module.training for module in model.modules()]
    result: dict[str, Any] = {}

    @toolkit.inference_mode(model, autocast=torch.bfloat16)
    def predict(depth: int = 0) -> torch.Tensor:
        result["modes within"] = [module.training for module in model.modules()]
        return predict(depth - 1) if depth else model(batch)

    with heard() as lines:
        output = predict(depth=2)
        with toolkit.inference_mode(model) as use:
            again = model(batch)
    result["lines"] = lines
    result["dtypes"] = [str(output.dtype), str(again.dtype)]
    result["inference"] = [output.is_inference(), again.is_inference()]
    result["devices"] = list(use.devices)
    try:
        with toolkit.inference_mode(model):
            raise KeyError("in the block")
    except KeyError:
        result["modes after"] = [module.training for module in model.modules()] == modes
    result["gradients"] = model(batch).requires_grad
    result["autocast"] = refused(lambda: toolkit.inference_mode(model, autocast=torch.int8))

    def later() -> Iterator[int]:
        yield 1

    result["generator"] = refused(lambda: toolkit.inference_mode(model)(later))
    return result


def optimizing() -> dict[str, Any]:
    model, batch = net(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modes = [module.training for module in model.modules()]
    mean = model[1].running_mean.tolist()
    with heard() as lines:
        change = toolkit.optimize_model(model, dtype=torch.bfloat16, channels_last=True, example=batch)
    result = {
        "text": str(change),
        "logged": "\n".join(lines) == str(change),
        "weights": [change.weights_before_bytes, change.weights_after_bytes],
        "allocated": [change.allocated_before_bytes, change.allocated_after_bytes],
        "peaks": [change.forward_before.peak_bytes, change.forward_after.peak_bytes],
        "difference": change.output_difference_ratio,
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "layout": model[0].weight.is_contiguous(memory_format=torch.channels_last),
        "optimizer": optimizer.param_groups[0]["params"][0] is model[0].weight,
        "modes": [module.training for module in model.modules()] == modes,
        "statistics": model[1].running_mean.tolist() == mean,
    }
    refusals = {
        "nothing": {},
        "the same dtype": {"dtype": torch.bfloat16},
        "integers": {"dtype": torch.int8},
        "reset without example": {"dtype": torch.float16, "reset_peaks": True},
    }
    result["refused"] = {
        name: refused(lambda options=options: toolkit.optimize_model(model, **options))  # type: ignore[misc]
        for name, options in refusals.items()
    }
    result["refused"]["no convolution"] = refused(lambda: toolkit.optimize_model(nn.Linear(2, 2), channels_last=True))
    return result


class WithNothing(nn.Linear):
    """A model with an output that is always 0 and one that is empty."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [super().forward(x), x.new_zeros(3), x.new_zeros(0)]


def optimizing_zeros() -> float | None:
    return toolkit.optimize_model(
        WithNothing(8, 8), dtype=torch.bfloat16, example=torch.randn(4, 8)
    ).output_difference_ratio


def on_device() -> dict[str, Any]:
    model, batch = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda(), torch.zeros(1024, 1024)
    batch = batch.cuda()
    model(batch).sum().backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    with heard() as lines, toolkit.inference_mode(model) as use:
        model(batch)
    result: dict[str, Any] = {
        "inference": [use.before_bytes, use.after_bytes, use.peak_bytes, use.exact],
        "lines": lines,
    }
    result["allocated"] = torch.cuda.memory_allocated()
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # a higher peak than that of the forward passes
    highest = torch.cuda.max_memory_allocated()
    change = toolkit.optimize_model(model, dtype=torch.bfloat16, example=batch)
    result["kept"] = torch.cuda.max_memory_allocated() == highest
    result["weights"] = [change.weights_before_bytes, change.weights_after_bytes]
    result["fell"] = change.allocated_before_bytes - change.allocated_after_bytes
    result["measured fell"] = result["allocated"] - torch.cuda.memory_allocated()
    back = toolkit.optimize_model(model, dtype=torch.float32, example=batch.bfloat16(), reset_peaks=True)
    used = (change.forward_before, change.forward_after, back.forward_before)
    result["peaks"] = [each.peak_bytes for each in used if each.exact]
    return result
