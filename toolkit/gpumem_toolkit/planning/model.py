"""Builds the job's model from fake tensors, and applies the job's options to it."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.failures import NEEDS_VALUES, explain
from gpumem_toolkit.planning.job import Job

_FEW_VALUES = 4096

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "pure-bf16": torch.bfloat16, "pure-fp16": torch.float16}


def make_fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A deep copy of a fake tensor (nn.TransformerEncoder copies its layer) must keep the same mode.
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]
    return mode


@contextmanager
def without_values() -> Iterator[None]:
    """Let PyTorch's code for modules run on tensors without values within the context."""
    # `Module.to`, `half` and `bfloat16` swap fake parameters with `swap_tensors`, which refuses tensors with weak
    # references. The fake mode has one to each parameter. So the data is assigned, and tied parameters stay tied.
    swap = torch.utils.swap_tensors
    # `nn.init.trunc_normal_` samples until all values are in its range. It reads values, and in memory that is not
    # initialized it never ends. It is skipped, as PyTorch does for meta tensors.
    sample = nn.init._no_grad_trunc_normal_

    def assign(parameter: Tensor, converted: Tensor) -> None:
        if isinstance(parameter, FakeTensor):
            parameter.data = converted.detach().to(parameter.device)
        else:
            swap(parameter, converted)

    torch.utils.swap_tensors = assign
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    # The assertions of transformers read values, such as the number of image tokens. They are off from here on.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
        nn.init._no_grad_trunc_normal_ = sample


def make_model(job: Job, mode: FakeTensorMode) -> nn.Module:
    """Build the module in training mode. `mode` must not be active. Raises ConfigurationError if the factory fails."""
    try:
        inspect.signature(job.make_model).bind()
    except ValueError:
        pass  # a callable of C without a signature
    except TypeError as error:
        raise ConfigurationError(
            f"the model factory is called without arguments: {error}; write a function that takes none and returns the "
            "model"
        ) from error
    try:
        model = _built(job, mode)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the model factory {explain(error, factory=True)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"the model factory returned {type(model).__name__}, not a torch.nn.Module")
    with mode:
        if job.precision.startswith("pure-"):
            _cast(model, DTYPES[job.precision])
        if job.frozen:
            _freeze(model)
        if job.checkpointing:
            checkpoint_blocks(model)
    return model.train()


def _built(job: Job, mode: FakeTensorMode) -> Any:
    try:
        with mode:
            return job.make_model()
    except NEEDS_VALUES:
        # The factory reads values, for example with `.tolist()` or `torch.unique`: build the model in memory, then
        # replace its tensors.
        with _Uninitialized():
            model = job.make_model()
        if isinstance(model, nn.Module):
            _replace(model, mode.from_tensor)
        return model


def is_compiled(model: nn.Module) -> bool:
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


@contextmanager
def eager() -> Iterator[None]:
    """Keep Dynamo from compiling the model, and the planner's functions that the model's operators call."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


class _Uninitialized(TorchDispatchMode):
    """Skips operators that fill large tensors: initial weights take most of the time, and hardly any code reads them.

    Reading a value that depends on a skipped operator raises DataDependentOutputException.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = func._schema.name.endswith("_") and isinstance(args[0], Tensor) and args[0].numel() > _FEW_VALUES
        unknown = skipped or any(storage in self._unknown for storage in _storages((args, kwargs)))
        # A loop that waits for such a value may never end.
        if unknown and func is torch.ops.aten._local_scalar_dense.default:
            raise DataDependentOutputException(func)
        result = args[0] if skipped else func(*args, **(kwargs or {}))
        if unknown:
            self._unknown.update(_storages(result))
        return result


def _storages(values: Any) -> Iterator[Any]:
    tensors = (value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided)
    return (tensor.untyped_storage() for tensor in tensors)


def in_moving_order(module: nn.Module) -> list[nn.Module]:
    """Return the modules in the order in which `Module.to` moves their tensors: children first."""
    return [m for child in module.children() for m in in_moving_order(child)] + [module]


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model."""
    # `Module.to(dtype)` refuses to swap fake parameters with other references.
    _replace(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _replace(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # keeps ids from being reused
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    kept.append(parameter)
                    made[id(parameter)] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                module._buffers[name] = made.setdefault(id(buffer), change(buffer))


def _freeze(model: nn.Module) -> None:
    """Freeze all parameters except the parameters of the last module that has parameters of its own."""
    last = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))][-1]
    kept = {id(p) for p in last.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return name and blocks of the longest `nn.ModuleList` or `nn.Sequential` of one class with parameters.

    Raises ConfigurationError if no list has at least two blocks.
    """
    name, blocks = "", list[nn.Module]()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(dict.fromkeys(module))
        alike = len({type(child) for child in children}) == 1 and any(True for _ in children[0].parameters())
        if alike and len(children) > max(1, len(blocks)):
            name, blocks = path, children
    if not blocks:
        raise ConfigurationError(
            f"{type(model).__name__} has no nn.ModuleList and no nn.Sequential of two or more blocks of one class"
            " (compare_checkpointing accepts blocks=[...])"
        )
    return name, blocks


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a checkpoint, which saves only the inputs for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def checkpoint_blocks(model: nn.Module) -> None:
    """Checkpoint the model's repeated blocks."""
    for block in find_blocks(model)[1]:
        block.forward = recomputed(block.forward)
