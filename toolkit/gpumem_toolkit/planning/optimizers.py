"""The optimizers of the planner: those of `torch.optim`, 8-bit Adam, and states described by their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job

__all__ = ["make_optimizer"]

_BLOCK = 256
"""The values that share a scale in bitsandbytes' 8-bit states. Smaller parameters than `_LEAST_8BIT` keep fp32."""
_LEAST_8BIT = 4096


def make_optimizer(job: Job, model: nn.Module) -> tuple[Any, bool]:
    """Return the optimizer or None, and whether its step counts are on the device.

    Raises:
        ConfigurationError: PyTorch rejects the options, or the optimizer rejects the model's parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "none" or not parameters:
        return None, False
    options = dict(job.optimizer_options)
    if callable(job.optimizer):
        made = job.optimizer(parameters, **options)
    else:
        options = {**({"lr": 1e-3} if job.optimizer == "sgd" else {}), **options}
        try:
            made = _MAKERS[job.optimizer](parameters, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"optimizer {job.optimizer}: {error}") from error
    for group in made.param_groups:
        # CUDA parameters get the foreach implementation by default; CPU parameters, which these are, do not.
        if group.get("foreach", False) is None and not group.get("fused") and type(made) is not torch.optim.Adafactor:
            group["foreach"] = True
    return made, any(group.get("fused") or group.get("capturable") for group in made.param_groups)


class _Described(torch.optim.Optimizer):
    """Allocates states in the first step. Later steps update them in place, by one kernel without temporary memory."""

    def __init__(self, parameters: Any, make_state: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__(parameters, {})
        self._make_state = make_state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as in Optimizer
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    made = self._make_state(parameter)
                    self.state[parameter] = {str(index): tensor for index, tensor in enumerate(made)}


def _adam_8bit(parameters: Any, **_: Any) -> _Described:
    """The states of bitsandbytes' 8-bit Adam: two of one byte per value, with one fp32 scale per block."""

    def states(parameter: Tensor) -> list[Tensor]:
        device, values = parameter.device, parameter.numel()
        if values < _LEAST_8BIT:
            return [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
        blocks = -(-values // _BLOCK)
        bytes_ = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
        return bytes_ + [torch.zeros(blocks, device=device) for _ in range(2)]

    return _Described(parameters, states)


def _described(parameters: Any, **options: Any) -> _Described:
    """States of `bytes` bytes for each value of a parameter."""
    size = options.pop("bytes", None)
    if options or not isinstance(size, int | float) or size < 0:
        raise ValueError("give the bytes of state per trainable parameter alone: --optimizer-option bytes=2.06")
    return _Described(parameters, lambda p: [torch.zeros(int(p.numel() * size), dtype=torch.uint8, device=p.device)])


def _lbfgs(parameters: Any, **options: Any) -> _Described:
    """The states of L-BFGS after `history_size` steps. It keeps vectors by their values, which a plan does not have."""
    history = torch.optim.LBFGS(parameters, **options).param_groups[0]["history_size"]
    vectors = 2 * history + 3  # directions, steps, the current direction, the previous gradient, the flat gradient
    return _Described(parameters, lambda p: [torch.zeros_like(p) for _ in range(vectors)])


_MAKERS: dict[str, Callable[..., Any]] = {
    **{
        made.__name__.lower(): made
        for made in vars(torch.optim).values()
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    },
    "lbfgs": _lbfgs,
    "adam8bit": _adam_8bit,
    "adamw8bit": _adam_8bit,
    "described": _described,
}
