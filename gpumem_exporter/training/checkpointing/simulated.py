"""The peak of a training step on CUDA, found on fake tensors: the planner's simulation, for a model that is there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.checkpointing.blocks import checkpointed
from gpumem_exporter.training.checkpointing.step import Step
from gpumem_exporter.training.planning.cuda_rules import cuda_rules
from gpumem_exporter.training.planning.kernels import Kernels
from gpumem_exporter.training.planning.model import make_fake_mode
from gpumem_exporter.training.planning.replay import replay
from gpumem_exporter.training.planning.simulation import move, quiet
from gpumem_exporter.training.planning.trace import Trace
from gpumem_exporter.training.planning.tracing import Tracer

__all__ = ["simulate_peak"]


def simulate_peak(step: Step, blocks: Sequence[str]) -> int:
    """Bytes that a training step would allocate at most above its start, with these blocks (names) checkpointed.

    Runs a copy of the model on fake tensors: takes a second or so, no memory, and touches nothing of the model.
    Not thread-safe: CPU tensors of the whole process follow CUDA's rules meanwhile.

    Raises:
        ConfigurationError: the model cannot be copied, or fails on tensors without values; says how.
    """
    tracer = Tracer(Kernels("cudnn"))
    with quiet():
        try:
            mode = make_fake_mode()
            model = _fake(step.model, mode)
            batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, step.batch)
            fake = step.on(model, batch)
            chosen = [model.get_submodule(name) for name in blocks]
            with mode, cuda_rules("auto"), tracer, checkpointed(chosen):
                move(model, tracer)
                tracer.hold((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), "activations")
                start = _copy(tracer.trace)
                _run(fake, tracer)
            whole = tracer.trace.ordered()
        except ConfigurationError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ConfigurationError(
                f"the model fails on tensors without values: {type(error).__name__}: {text}"
            ) from error
    return replay(whole).allocated_bytes - replay(start).allocated_bytes


def _fake(model: nn.Module, mode: Any) -> nn.Module:
    """A copy of a model without its values; what is tied stays tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach())
    return copy.deepcopy(model, memo)


def _run(step: Step, tracer: Any) -> None:
    with torch.enable_grad():
        loss = step.forward()
        tracer.kind, tracer.in_backward = "temporaries", True
        loss.backward()
        tracer.in_backward = False


def _copy(trace: Trace) -> Trace:
    return Trace(list(trace.events), list(trace.sizes), list(trace.kinds))
