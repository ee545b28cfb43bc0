"""What a job's first training steps allocate, found without a device: its own Python, run on fake tensors."""

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
"""The optimizer's state is made in the first step, the cache has its shape after the second."""


def trace_job(job: Job, batch: int, steps: int = STEPS) -> Trace:
    """Run a few training steps at a batch size on fake tensors. Takes a second or so; needs no memory and no GPU.

    Not thread-safe: CPU tensors of the whole process follow CUDA's rules meanwhile.

    Raises:
        ConfigurationError: the job's own code failed; says how.
    """
    tracer = Tracer(Kernels(job.convolution))
    with quiet():
        try:
            mode = make_fake_mode()
            model = make_model(job, mode)
            with mode, cuda_rules(job.attention), tracer:
                move(model, tracer)
                train(job, model, batch, steps, "cpu", _Kinds(tracer))
        except ConfigurationError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ConfigurationError(
                f"the job failed on tensors without values, at batch size {batch}: {type(error).__name__}: {text}"
            ) from error
        # What is still alive dies after this, in an order that means nothing.
        return tracer.trace.ordered()


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings and logs, and without garbage collections, whose moments differ from run to run."""
    collecting = gc.isenabled()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    gc.disable()
    logger.setLevel(logging.CRITICAL)  # what fails is told by the error itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()


def move(model: nn.Module, tracer: Tracer) -> None:
    """What `model.to(device)` allocates, and telling gradients when they come."""
    for module in in_moving_order(model):
        tracer.hold(module.parameters(recurse=False), "parameters")
        tracer.hold(module.buffers(recurse=False), "buffers")

    def hold_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracer.hold([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hold_gradient)


class _Kinds:
    """Tells the tracer what allocations are for."""

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
            self._tracer.hold((v for v in values if counts_on_device or v.dim()), "optimizer")
