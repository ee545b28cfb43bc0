"""Recurrent networks as CUDA runs them without cuDNN (`ATen/native/RNN.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from gpumem_client.wire.errors import ConfigurationError

LOWER_PRECISION = ("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
"""CUDA's autocast casts the inputs of these to half precision. The CPU does not have them."""

_aten: Any = torch.ops.aten
_Hidden = tuple[Tensor, ...]
_Step = Callable[[Tensor, _Hidden, Sequence[Any]], _Hidden]
_Product = Callable[[Tensor, Tensor], Tensor]


def rules(cudnn: bool) -> dict[str, Callable[..., Any]]:
    """Return a function for each operator that differs from the CPU's.

    The functions of whole networks raise ConfigurationError if cuDNN runs them: they keep what cuDNN reserves, and
    `cudnnGetRNNTempSpaceSizes` answers only on a device. cuDNN never runs the single cells.
    """
    networks: dict[str, Callable[..., Any]] = {
        "lstm.input": partial(_run, _lstm_step(_transposed)),
        "gru.input": partial(_run, _gru_step(_transposed)),
        "rnn_tanh.input": partial(_run, _simple_step(torch.tanh)),
        "rnn_relu.input": partial(_run, _simple_step(torch.relu)),
    }
    if cudnn:
        networks = {name: _refusal(name.partition(".")[0]) for name in networks}
    return {**networks, "lstm_cell": _lstm_cell, "gru_cell": _gru_cell}


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise ConfigurationError(
            f"torch.{name} runs in cuDNN, which reports the memory that it reserves only on a device: plan PyTorch's "
            "own kernels with --convolution native and train with torch.backends.cudnn.enabled = False, or plan from "
            "measured steps: --profile on a machine with a GPU"
        )

    return refuse


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as the networks do."""
    # Not `linear`: autocast does not cache the cast of a view, and so keeps one for each step.
    return torch.matmul(x, weight.t())


def _lstm_step(product: _Product) -> _Step:
    # The CPU multiplies the inputs of all steps at once, and computes gates with operators of their own. CUDA
    # multiplies at each step, and computes the gates in one kernel, for which autograd keeps its inputs.
    def step(x: Tensor, hidden: _Hidden, weights: Sequence[Any]) -> _Hidden:
        (hx, cx), (w_ih, w_hh, b_ih, b_hh, w_hr) = hidden, weights
        hy, cy, _ = _aten._thnn_fused_lstm_cell(product(x, w_ih), product(hx, w_hh), cx, b_ih, b_hh)
        return hy if w_hr is None else product(hy, w_hr), cy

    return step


def _gru_step(product: _Product) -> _Step:
    def step(x: Tensor, hidden: _Hidden, weights: Sequence[Any]) -> _Hidden:
        w_ih, w_hh, b_ih, b_hh = weights[:4]
        return _aten._thnn_fused_gru_cell(product(x, w_ih), product(hidden[0], w_hh), hidden[0], b_ih, b_hh)[:1]

    return step


def _simple_step(activation: Callable[[Tensor], Tensor]) -> _Step:
    def step(x: Tensor, hidden: _Hidden, weights: Sequence[Any]) -> _Hidden:
        w_ih, w_hh, b_ih, b_hh = weights[:4]
        return (activation(functional.linear(hidden[0], w_hh, b_hh).add_(functional.linear(x, w_ih, b_ih))),)

    return step


def _lstm_cell(x: Tensor, hidden: Sequence[Tensor], *weights: Tensor | None) -> _Hidden:
    return _lstm_step(functional.linear)(x, tuple(hidden), [*weights, None, None, None][:5])


def _gru_cell(x: Tensor, hidden: Tensor, *weights: Tensor | None) -> Tensor:
    return _gru_step(functional.linear)(x, (hidden,), [*weights, None, None])[0]


def _run(
    step: _Step, x: Tensor, hidden: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """Return the output and the final hidden states."""
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    hidden = (hidden,) if isinstance(hidden, Tensor) else hidden
    states = list(zip(*(state.unbind(0) for state in hidden), strict=True))
    weights = list(_weights(parameters, has_biases, layers * directions))
    final: list[_Hidden] = []
    for layer in range(layers):
        inputs, outputs = x.unbind(0), []
        for direction in range(directions):
            index = layer * directions + direction
            output, last = _run_direction(step, inputs, states[index], weights[index], reverse=direction == 1)
            outputs.append(output)
            final.append(last)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(each, 0) for each in zip(*final, strict=True)))


def _run_direction(
    step: _Step, inputs: Sequence[Tensor], hidden: _Hidden, weights: Sequence[Any], *, reverse: bool
) -> tuple[Tensor, _Hidden]:
    outputs = []
    for one in reversed(inputs) if reverse else inputs:
        hidden = step(one, hidden, weights)
        outputs.append(hidden[0])
    return torch.stack(outputs[::-1] if reverse else outputs, 0), hidden


def _weights(parameters: Sequence[Tensor], has_biases: bool, count: int) -> Any:
    """Return the weights and biases of each layer and direction, with None for what they do not have."""
    each = len(parameters) // count
    for start in range(0, len(parameters), each):
        w_ih, w_hh, *rest = parameters[start : start + each]
        biases = [rest.pop(0), rest.pop(0)] if has_biases else [None, None]
        yield w_ih, w_hh, *biases, rest[0] if rest else None
