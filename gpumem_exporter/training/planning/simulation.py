"""Records the allocations of a job's first training steps by running its code on fake tensors."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.planning.cuda_rules import cuda_rules
from gpumem_exporter.training.planning.job import Job
from gpumem_exporter.training.planning.kernels import Kernels
from gpumem_exporter.training.planning.model import in_moving_order, make_fake_mode, make_model
from gpumem_exporter.training.planning.stepping import train
from gpumem_exporter.training.planning.trace import Trace
from gpumem_exporter.training.planning.tracing import Tracer

__all__ = ["STEPS", "move", "quiet", "trace_job"]

STEPS = 3
"""The first step creates the optimizer state, the second the final state of the cache."""


def trace_job(job: Job, batch: int, steps: int = STEPS) -> Trace:
    """Run a few training steps at a batch size on fake tensors, in about a second.

    Not thread-safe: CPU tensors of the whole process follow CUDA's rules during the call.

    Raises:
        ConfigurationError: the job's own code failed.
    """
    tracer = Tracer(Kernels(job.convolution))
    with quiet(f"the job at batch size {batch}"):
        mode = make_fake_mode()
        model = make_model(job, mode)
        with mode, cuda_rules(job.attention), tracer:
            move(model, tracer)
            train(job, model, batch, steps, "cpu", _Kinds(tracer))
        # Must be read here: afterwards the remaining tensors are freed in an arbitrary order.
        return tracer.trace.ordered()


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Suppress PyTorch's warnings and logs, and garbage collection, whose timing varies.

    Raises:
        ConfigurationError: the code in the block failed; `what` names it.
    """
    collecting = gc.isenabled()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    gc.disable()
    logger.setLevel(logging.CRITICAL)  # the exception has the same information
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ConfigurationError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"{what} fails on tensors without values: {type(error).__name__}: {text}") from error
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()


def move(model: nn.Module, tracer: Tracer) -> None:
    """Record the allocations of `model.to(device)`, and mark gradients when they are created."""
    for module in in_moving_order(model):
        tracer.mark(module.parameters(recurse=False), "parameters")
        tracer.mark(module.buffers(recurse=False), "buffers")

    def mark_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracer.mark([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark_gradient)


class _Kinds:
    """Sets the kind of the allocations that the tracer records."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def forward(self) -> None:
        self._tracer.kind = "activations"

    def backward(self) -> None:
        self._tracer.kind, self._tracer.in_backward = "temporaries", True

    def optimizer(self, counts_on_device: bool) -> None:
        self._tracer.in_backward = False
        self._tracer.ignore_scalars = not counts_on_device

    def stepped(self, optimizer: Any, counts_on_device: bool) -> None:
        self._tracer.ignore_scalars = False
        for state in optimizer.state.values():
            values = [value for value in state.values() if isinstance(value, Tensor)]
            self._tracer.mark((v for v in values if counts_on_device or v.dim()), "optimizer")
