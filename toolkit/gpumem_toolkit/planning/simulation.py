"""Records the allocations of a job's first training steps by running its code on fake tensors.

A dispatch mode receives the results of each operator below autograd. A new storage is an allocation; the end of the
storage's life is a free.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.cuda_operator_rules import cuda_rules
from gpumem_toolkit.planning.fake_model import eager, explain, find_blocks, make_fake_mode, make_model, without_values
from gpumem_toolkit.planning.job import Job
from gpumem_toolkit.planning.kernel_memory_rules import prepare, temporaries
from gpumem_toolkit.planning.stepping import make_optimizer, train
from gpumem_toolkit.planning.trace import Mark, Trace

STEPS = 3
"""The first step creates the optimizer state, the second the final state of the cache. The third repeats the second."""
_COMPILED = "torch.compile: the plan is for eager execution, whose activations and temporaries differ"
_Counts: TypeAlias = "tuple[int, int, int]"
_aten: Any = torch.ops.aten
_OPERATORS = frozenset({_aten.add.Tensor, _aten.index_put.default, _aten.scatter_add.default})


# Not PyTorch's `MemTracker`, which works the same way but keeps only sums: what the caching allocator reserves depends
# on the order of events.
class Tracer(TorchDispatchMode):
    """Records into `trace` while it is active. Not thread-safe; autograd runs CPU graphs in the calling thread."""

    def __init__(self, convolution: str = "cudnn") -> None:
        super().__init__()
        self.trace = Trace()
        self.kind = "activations"
        """The kind of the next allocations, one of trace.KINDS."""
        self.ignore_scalars = False  # of an optimizer's step counts, which stay on the host
        self.in_optimizer = False
        """Whether reads of values get one: an optimizer computes with them, and its memory stays the same."""
        self._convolution = convolution
        self._in_place = _InPlace()
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
        # CUDA's dropout allocates its mask before its output (`Dropout.cu`).
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
    CUDA's rules during the call. Raises ConfigurationError if the job's own code fails.
    """
    trace, starts = _run(job, batch, STEPS - 1)
    # Tracing takes most of the time of a plan, and a steady step repeats the one before it.
    return (trace.repeated(starts[-2], starts[-1]) or _run(job, batch, STEPS)[0]).ordered()


def gathered(job: Job) -> int:
    """Return the bytes that `fully_shard` of each repeated block, then of the model, needs for whole parameters."""
    with quiet("the job's model"), without_values():
        model = make_model(job, make_fake_mode())
    try:
        blocks = find_blocks(model)[1]
    except ConfigurationError:
        blocks = []
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    largest = max((_bytes(block.parameters()) for block in blocks), default=0)
    outside = _bytes(parameter for parameter in model.parameters() if id(parameter) not in inside)
    # The parameters outside of the blocks stay whole. Of the blocks, one is in use while the next one is gathered. The
    # buffers of all-gather and reduce-scatter are on streams of their own, so that they share no memory with the rest.
    return outside + 2 * largest + 2 * max(outside, largest)


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _run(job: Job, batch: int, steps: int) -> tuple[Trace, list[Mark]]:
    """Run a job for a few steps. Returns the trace, and the start of each step with the last one's end."""
    tracer = Tracer(job.convolution)
    starts: list[Mark] = []
    with quiet(f"the job at batch size {batch}"), without_values():
        mode = make_fake_mode()
        model = make_model(job, mode)
        tracer.trace.notes = (_COMPILED,) if _is_compiled(model) else ()
        with eager(), mode, cuda_rules(job.attention, job.convolution), tracer:
            move(model, tracer)
            optimizer, counts_on_device = make_optimizer(job, model)
            for event in train(job, model, optimizer, batch, steps, "cpu"):
                tracer.kind = {"forward": "activations", "backward": "temporaries"}.get(event, tracer.kind)
                if event == "step":
                    starts.append(tracer.trace.mark())
                elif event == "optimizer":
                    tracer.ignore_scalars, tracer.in_optimizer = not counts_on_device, True
                elif event == "stepped":
                    tracer.ignore_scalars = tracer.in_optimizer = False
                    values = (value for state in optimizer.state.values() for value in state.values())
                    tensors = (value for value in values if isinstance(value, Tensor))
                    tracer.mark((each for each in tensors if counts_on_device or each.dim()), "optimizer")
    # Without the frees of the remaining tensors, which the tracer records from here on.
    return tracer.trace.until(starts[-1]), starts


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Suppress PyTorch's warnings and logs, and garbage collection, whose timing varies.

    If the code in the block fails, raises a ConfigurationError that names `what`.
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

    def mark(module: nn.Module) -> None:
        tracer.mark(module.parameters(recurse=False), "parameters")
        tracer.mark(module.buffers(recurse=False), "buffers")

    model.apply(mark)  # children first, as `Module.to`

    def mark_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracer.mark([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark_gradient)


def _is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` was applied to the model, to a part of it, or to a `forward`."""
    return any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or (
            hasattr(module.forward, "_torchdynamo_orig_callable")
            and not hasattr(module.forward, "_torchdynamo_disable")
        )
        for module in model.modules()
    )


class _InPlace(TorchDispatchMode):
    """Recognizes operators that PyTorch runs in place on a device, but not under a dispatch mode.

    Create it outside of dispatch modes, because it runs a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unshared: dict[Any, _Counts] = {}  # of tensors that only autograd has; depend on the release of PyTorch
        # Autograd adds gradients of the same tensor in place if nothing else refers to the first one
        # (`input_buffer.cpp`). The backward passes of indexing and `gather` fill new tensors in place. Under a dispatch
        # mode they call the operators that return a new tensor (`TensorSubclassLikeUtils.h`).
        with torch.enable_grad(), FakeTensorMode(), self:
            shared = torch.empty(2, requires_grad=True).exp()
            index = torch.zeros(2, dtype=torch.int64)
            torch.stack((shared.exp(), shared.tanh(), shared[index], shared.gather(0, index))).sum().backward()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS:
            self._unshared[func] = _count(args)
        return func(*args, **(kwargs or {}))

    def target(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Return the first argument if a device would change it in place, otherwise None."""
        if func not in _OPERATORS or torch.is_grad_enabled() or not isinstance(args[0], Tensor):
            return None
        return args[0] if _count(args) == self._unshared[func] and _is_dense(args[0]) else None


def _count(args: tuple[Any, ...]) -> _Counts:
    """Count the references to the first argument: its Python object, tensor and storage."""
    first = args[0]
    return sys.getrefcount(first), first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill the memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
