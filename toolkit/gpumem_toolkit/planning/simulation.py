"""Records the allocations of a job's first training steps by running its code on fake tensors.

A dispatch mode receives the results of each operator below autograd. A new storage is an allocation; the end of the
storage's life is a free. PyTorch's `MemTracker` works the same way but keeps only sums. The caching allocator depends
on the order of events.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.cuda_rules import cuda_rules
from gpumem_toolkit.planning.failures import explain
from gpumem_toolkit.planning.in_place import InPlace
from gpumem_toolkit.planning.job import Job
from gpumem_toolkit.planning.kernels import prepare, temporaries
from gpumem_toolkit.planning.model import (
    eager,
    gathered_bytes,
    in_moving_order,
    is_compiled,
    make_fake_mode,
    make_model,
    without_values,
)
from gpumem_toolkit.planning.stepping import Watch, train
from gpumem_toolkit.planning.trace import Mark, Trace

__all__ = ["STEPS", "Tracer", "gathered", "move", "quiet", "trace_job"]

COMPILED = "torch.compile: the plan is for eager execution, whose activations and temporaries differ"
STEPS = 3
"""The first step creates the optimizer state, the second the final state of the cache. The third repeats the second."""


class Tracer(TorchDispatchMode):
    """Records into `trace` while the mode is active. Not thread-safe; autograd runs CPU graphs in the calling thread.

    Args:
        convolution: `cudnn` or `native`.

    Attributes:
        kind: the kind of the next allocations (see trace.KINDS).
        ignore_scalars: skip tensors without dimensions, because an optimizer's step counts stay on the host.
        in_optimizer: answer reads of values with one. An optimizer computes with them, and its memory stays the same.
    """

    def __init__(self, convolution: str = "cudnn") -> None:
        super().__init__()
        self.trace = Trace()
        self.kind = "activations"
        self.ignore_scalars = False
        self.in_optimizer = False
        self._convolution = convolution
        self._in_place = InPlace()
        self._numbers: dict[int, int] = {}  # the number of the allocation, by storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # two more calls for each operator would be a tenth of the time

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of tensors. New ones are allocated now, as `.to(device)` does."""
        for tensor in tensors:
            self._record(tensor, kind)
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.trace.kinds[number] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # two thirds of all calls
            return args[0].fake_device
        changed = self._in_place.target(func, args)
        if changed is not None:
            return changed
        prepared = prepare(func, args, self._convolution)
        for copy, given in zip(prepared, args, strict=True):
            if copy is not given and isinstance(copy, Tensor):
                self._record(copy, "temporaries")
        try:
            result = func(*prepared, **(kwargs or {}))
        except DataDependentOutputException:
            if self.in_optimizer and func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else 1
            raise
        tensors = [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        for tensor in reversed(tensors) if func is torch.ops.aten.native_dropout.default else tensors:
            self._record(tensor, self.kind)
        for sizes in temporaries(func, args, result, self._convolution):
            for number in reversed([self.trace.allocate(size, "temporaries") for size in sizes]):
                self.trace.free(number)
        return result

    def _record(self, tensor: Tensor, kind: str) -> None:
        storage: Any = tensor.untyped_storage()
        key, size_bytes = storage._cdata, int(storage.nbytes())
        if key in self._numbers or not size_bytes or (self.ignore_scalars and tensor.dim() == 0):
            return
        self._numbers[key] = number = self.trace.allocate(size_bytes, kind)
        weakref.finalize(storage, self._free, key, number).atexit = False

    def _free(self, key: int, number: int) -> None:
        del self._numbers[key]
        self.trace.free(number)


def trace_job(job: Job, batch: int) -> Trace:
    """Record the first steps of a job at a batch size on fake tensors, in about a second.

    Runs all but the last step, which repeats the one before. Not thread-safe: CPU tensors of the whole process follow
    CUDA's rules during the call.

    Raises:
        ConfigurationError: the job's own code failed.
    """
    trace, starts, notes = _run(job, batch, STEPS - 1)
    repeated = trace.repeated(starts[-2], starts[-1])
    if repeated is None:
        repeated, _, _ = _run(job, batch, STEPS)
    return replace(repeated.ordered(), notes=notes)


def gathered(job: Job) -> int:
    """Return the bytes of whole parameters and buffers if the job's model is sharded.

    Raises:
        ConfigurationError: the model cannot be built.
    """
    with quiet("the job's model"), without_values():
        return gathered_bytes(make_model(job, make_fake_mode()))


def _run(job: Job, batch: int, steps: int) -> tuple[Trace, list[Mark], tuple[str, ...]]:
    """Run a job for a few steps.

    Returns the trace, the start of each step with the last one's end, and what the trace leaves out.
    """
    tracer = Tracer(job.convolution)
    with quiet(f"the job at batch size {batch}"), without_values():
        mode = make_fake_mode()
        model = make_model(job, mode)
        notes = (COMPILED,) if is_compiled(model) else ()
        with eager(), mode, cuda_rules(job.attention, job.convolution), tracer:
            move(model, tracer)
            watch = _Kinds(tracer)
            train(job, model, batch, steps, "cpu", watch)
    # Without the frees of the remaining tensors, which the tracer records from here on.
    return tracer.trace.until(watch.starts[-1]), watch.starts, notes


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
    logger.setLevel(logging.CRITICAL)  # what it logs is also in the exception
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{what} {explain(error)}") from error
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


class _Kinds(Watch):
    """Sets the kind of the allocations that the tracer records."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.starts: list[Mark] = []

    def step(self) -> None:
        self.starts.append(self._tracer.trace.mark())

    def forward(self) -> None:
        self._tracer.kind = "activations"

    def backward(self) -> None:
        self._tracer.kind = "temporaries"

    def optimizer(self, counts_on_device: bool) -> None:
        self._tracer.ignore_scalars = not counts_on_device
        self._tracer.in_optimizer = True

    def stepped(self, optimizer: Any, counts_on_device: bool) -> None:
        self._tracer.ignore_scalars = self._tracer.in_optimizer = False
        for state in optimizer.state.values():
            values = [value for value in state.values() if isinstance(value, Tensor)]
            self._tracer.mark((v for v in values if counts_on_device or v.dim()), "optimizer")
