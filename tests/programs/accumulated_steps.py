"""Training with accumulated gradients, compared with whole batches, on the CPU and on the emulated node.

The functions run in a process with torch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gpumem_toolkit as toolkit
from gpumem_client.hooks.steps import process_steps
from gpumem_client.wire.errors import ConfigurationError

Batch = tuple[torch.Tensor, torch.Tensor]


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def micro_batches(sizes: list[int], dtype: torch.dtype = torch.float64, seed: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(4, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def joined(batches: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def optimizer_of(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train_whole(net: nn.Module, name: str, windows: list[list[Batch]], clip: float | None, epochs: int) -> list[float]:
    """Train one step per window with all of its samples at once; return the norms of the gradients."""
    optimizer = optimizer_of(name, net)
    norms = []
    for _ in range(epochs):
        for window in windows:
            x, y = joined(window)
            functional.cross_entropy(net(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip if clip is not None else float("inf"))))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train_accumulated(
    accumulator: Any, net: nn.Module, batches: list[Batch], epochs: int = 1, left_out: tuple[int, ...] = ()
) -> list[float]:
    norms = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(accumulator.batches(iter(batches))):
            if number in left_out:
                continue
            with accumulator.forward():
                loss = functional.cross_entropy(net(x), y)
            accumulator.backward(loss, samples=len(x))
            if accumulator.step():
                norms.append(accumulator.gradient_norm)
        if left_out and accumulator.step():
            norms.append(accumulator.gradient_norm)
    return [float(norm) for norm in norms if norm is not None]


def difference(a: nn.Module, b: nn.Module) -> float:
    """Return the largest difference, relative to the largest parameter."""
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    return max(float((p - q).abs().max()) for p, q in pairs) / max(float(q.abs().max()) for _, q in pairs)


def windows_of(batches: list[Batch], per_window: int) -> list[list[Batch]]:
    return [batches[at : at + per_window] for at in range(0, len(batches), per_window)]


def a_window_steps_like_one_batch_of_its_samples(
    name: str, sizes: list[int], clip: float | None, left_out: list[int]
) -> None:
    """Train with windows of 12 samples in three micro batches, for three epochs."""
    batches = micro_batches(sizes)
    kept = [batch for number, batch in enumerate(batches) if number not in left_out]
    whole, net = model(), model()
    expected = train_whole(whole, name, windows_of(kept, 3), clip, 3)
    accumulator = toolkit.GradientAccumulator(
        net, optimizer_of(name, net), effective_batch=12, micro_batch=4, clip_norm=clip
    )
    heard: list[Any] = []
    stop = process_steps().listen(heard.append)
    norms = train_accumulated(accumulator, net, batches, 3, tuple(left_out))
    stop()
    assert difference(net, whole) < 1e-12 < 1e-3 < difference(net, model())
    assert [accumulator.steps, len(heard)] == [len(expected)] * 2, "made, and seen by the reporter's hook"
    assert all(parameter.grad is None for parameter in net.parameters())
    if clip is not None:
        assert norms == pytest.approx(expected, rel=1e-12)
        assert max(norms) > clip, "some gradients must be clipped"


def under_autocast_a_step_equals_accumulation_by_hand(dtype_name: str) -> None:
    """Train the same windows manually in the same type; all shares are powers of two, so both are rounded alike."""
    dtype = getattr(torch, dtype_name)
    batches = micro_batches([4] * 6, torch.float32)
    by_hand, net = model(torch.float32), model(torch.float32)
    optimizer = optimizer_of("sgd", by_hand)
    for window in windows_of(batches, 4):
        samples = sum(len(x) for x, _ in window)
        for x, y in window:
            with torch.autocast("cpu", dtype):
                loss = functional.cross_entropy(by_hand(x), y)
            (loss * (len(x) / samples) * 1024).backward()
        for parameter in by_hand.parameters():
            parameter.grad /= 1024
        optimizer.step()
        optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype is torch.float16 else None
    accumulator = toolkit.GradientAccumulator(
        net, optimizer_of("sgd", net), effective_batch=16, micro_batch=4, autocast=dtype, scaler=scaler
    )
    train_accumulated(accumulator, net, batches)
    assert accumulator.steps == 2
    assert difference(net, by_hand) == 0 < 1e-3 < difference(net, model(torch.float32))


def a_step_that_the_scaler_skips_is_counted_as_skipped() -> None:
    """Train with a loss scale that overflows in float16 until it has been reduced twice."""
    net = model(torch.float32)
    options: dict[str, Any] = {"effective_batch": 8, "micro_batch": 4, "autocast": torch.float16}
    optimizer = optimizer_of("sgd", net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-14)
    accumulator = toolkit.GradientAccumulator(net, optimizer, **options, scaler=scaler, clip_norm=1.0)
    heard: list[Any] = []
    stop = process_steps().listen(heard.append)
    moved, stepped = [], []
    for x, y in accumulator.batches(micro_batches([4] * 8, torch.float32)):
        before = copy.deepcopy(net)
        with accumulator.forward():
            loss = functional.cross_entropy(net(x), y)
        accumulator.backward(loss, samples=len(x))
        stepped.append(accumulator.step())
        moved.append(difference(net, before) > 0)
    stop()
    assert stepped == moved == [False] * 5 + [True, False, True]
    assert (accumulator.steps, accumulator.skipped_steps, len(heard)) == (2, 2, 2)
    assert toolkit.GradientAccumulator(net, optimizer, **options).scaler.get_scale() == 65536.0


def errors_name_the_accepted_values() -> None:
    net = model()
    optimizer = optimizer_of("sgd", net)
    uneven = r"effective batch.*\b100\b.*micro batch.*\b32\b"
    for pattern, arguments in (
        (uneven, {"effective_batch": 100, "micro_batch": 32}),
        (r"autocast.*torch\.float64.*torch\.bfloat16.*torch\.float16.*None", {"autocast": torch.float64}),
        (r"clip norm.*\b0\.0\b.*\b0\b", {"clip_norm": 0.0}),
    ):
        with pytest.raises(ConfigurationError, match=pattern):
            toolkit.GradientAccumulator(net, optimizer, **{"effective_batch": 8, "micro_batch": 4, **arguments})
    accumulator = toolkit.GradientAccumulator(net, optimizer, effective_batch=8, micro_batch=4)

    def forward() -> torch.Tensor:
        with accumulator.forward():
            return net(torch.zeros(4, 6, dtype=torch.float64)).mean()

    with pytest.raises(ValueError, match=r"\b0 samples\b.*\b0\b"):
        accumulator.backward(forward(), samples=0)
    for _ in range(2):
        accumulator.backward(forward(), samples=4)
    with pytest.raises(RuntimeError, match=r"\b2\b.*step\(\).*forward\(\)"):
        forward()


def a_failed_or_abandoned_window_does_not_affect_the_next() -> None:
    """A backward pass and a forward pass fail, and a loop is left within a window."""
    batches = micro_batches([4] * 5)
    whole, net = model(), model()
    optimizer = optimizer_of("sgd", net)
    accumulator = toolkit.GradientAccumulator(net, optimizer, effective_batch=8, micro_batch=4)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise MemoryError("staged")

    caught = []
    for number, (x, y) in enumerate(accumulator.batches(batches)):
        try:
            with accumulator.forward():
                if number == 0:
                    raise KeyError("staged")
                loss = functional.cross_entropy(net[3](Fails.apply(net[:3](x)) if number == 2 else net[:3](x)), y)
            accumulator.backward(loss, samples=len(x))
        except (KeyError, MemoryError) as error:
            caught.append(type(error))
            continue
        accumulator.step()
    assert caught == [KeyError, MemoryError]
    # Batch 1 was dropped with the gradient of batch 2; batches 3 and 4 are a window.
    train_whole(whole, "sgd", [batches[3:5]], None, 1)
    assert difference(net, whole) < 1e-12
    for x, y in accumulator.batches(batches):
        with accumulator.forward():
            loss = functional.cross_entropy(net(x), y)
        accumulator.backward(loss, samples=len(x))
        break
    whole.load_state_dict(net.state_dict())
    reference = toolkit.GradientAccumulator(whole, optimizer_of("sgd", whole), effective_batch=8, micro_batch=4)
    optimizer.state.clear()
    train_accumulated(accumulator, net, batches[:3])
    train_accumulated(reference, whole, batches[:3])
    assert difference(net, whole) < 1e-12


def every_public_name_can_be_imported() -> None:
    assert all(getattr(toolkit, name).__name__ == name for name in toolkit.__all__)
