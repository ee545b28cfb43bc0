"""Models for inference, with and without changed weights, on the CPU and on the emulated node.

The functions run in a process with torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4))


def inference_restores_each_mode_and_logs_that_there_is_no_cuda() -> None:
    model, batch = net(), torch.randn(2, 3, 8, 8)
    model[1].eval()  # frozen by the script
    modes = [module.training for module in model.modules()]

    @toolkit.inference_mode(model, autocast=torch.bfloat16)
    def predict(depth: int = 0) -> torch.Tensor:
        assert not any(module.training for module in model.modules())
        return predict(depth - 1) if depth else model(batch)

    with heard() as lines:
        output = predict(depth=2)
        with toolkit.inference_mode(model) as use:
            again = model(batch)
    assert len(lines) == 4
    assert all(re.search(r"\bSequential\b.*\bno CUDA\b", line) for line in lines)
    assert (output.dtype, again.dtype) == (torch.bfloat16, torch.float32)
    assert output.is_inference()
    assert again.is_inference()
    assert list(use.devices) == []
    with pytest.raises(KeyError, match="in the block"), toolkit.inference_mode(model):
        raise KeyError("in the block")
    assert [module.training for module in model.modules()] == modes
    assert model(batch).requires_grad
    with pytest.raises(ConfigurationError, match=r"torch\.int8\b.*torch\.bfloat16\b.*torch\.float16\b"):
        toolkit.inference_mode(model, autocast=torch.int8)


def changed_weights_are_measured_and_arguments_without_effect_are_rejected() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with heard() as lines:
        change = toolkit.optimize_model(model, dtype=torch.bfloat16, channels_last=True)
    assert lines == [str(change)]
    before, after = change.weights_before_bytes, change.weights_after_bytes
    assert before - after == (before - 8) // 2, "except the norm's count of batches, an integer of 8 bytes"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    for options in ({}, {"dtype": torch.int8}):
        with pytest.raises(ConfigurationError, match=r"dtype=torch\.bfloat16.*channels_last="):
            toolkit.optimize_model(model, **options)


def on_a_device_bytes_and_peaks_equal_the_allocators() -> None:
    model, batch = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda(), torch.zeros(1024, 1024)
    batch = batch.cuda()
    model(batch).sum().backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    with heard() as lines, toolkit.inference_mode(model) as use:
        model(batch)
    (line,) = lines
    assert re.search(r"\bSequential\b.*\bcuda:0\b", line)
    assert (use.before_bytes, use.exact) == (use.after_bytes, True)
    assert use.peak_bytes - use.before_bytes >= 2 * 4 * MIB, "the outputs of two layers at once"

    allocated = torch.cuda.memory_allocated()
    change = toolkit.optimize_model(model, dtype=torch.bfloat16)
    assert (change.weights_before_bytes, change.weights_after_bytes) == (16 * MIB, 8 * MIB)
    assert allocated - torch.cuda.memory_allocated() == 8 * MIB
