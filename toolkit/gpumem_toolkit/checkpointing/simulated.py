"""Predicts the peak of a training step on CUDA, by running a copy of a model on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_toolkit.checkpointing.blocks import checkpointed
from gpumem_toolkit.checkpointing.step import Step
from gpumem_toolkit.planning.cuda_rules import cuda_rules
from gpumem_toolkit.planning.model import make_fake_mode
from gpumem_toolkit.planning.simulation import Tracer, move, quiet
from gpumem_toolkit.planning.trace import replay

__all__ = ["simulate_peak"]


def simulate_peak(step: Step, blocks: Sequence[str]) -> int:
    """Return the peak bytes of a training step above its start, with the named blocks checkpointed.

    Takes about a second and does not change the model. Not thread-safe: it runs in this process, because the model and
    the loss exist only here, and CPU tensors of the whole process follow CUDA's rules during the call.

    Raises:
        ConfigurationError: the model cannot be copied, or fails on tensors without values.
    """
    tracer = Tracer()
    with quiet("the model"):
        mode = make_fake_mode()
        model = _fake(step.model, mode)
        batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, step.batch)
        chosen = [model.get_submodule(name) for name in blocks]
        with mode, cuda_rules("auto", "native"), tracer, checkpointed(chosen):
            move(model, tracer)
            tracer.mark((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), "activations")
            start = copy.deepcopy(tracer.trace)
            with torch.enable_grad():
                loss = step.on(model, batch).forward()
                tracer.kind = "temporaries"
                loss.backward()
        whole = tracer.trace.ordered()
    return replay(whole).allocated_bytes - replay(start).allocated_bytes


def _fake(model: nn.Module, mode: Any) -> nn.Module:
    """Copy a model without its values; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach())
    return copy.deepcopy(model, memo)
