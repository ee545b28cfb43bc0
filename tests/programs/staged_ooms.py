"""Training scripts that run out of memory, one for each cause; each can follow the advice of its diagnosis.

They run on a device of 8 GiB with real autograd and the real allocator. `run(name, advice)` runs one script, which
raises OutOfMemoryError or returns.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

import gpumem_toolkit as toolkit
from tests.emulation.torch_worker import set_allocator_settings

MIB = 1 << 20
WIDTH = 2048


def _model(layers: int = 6) -> torch.nn.Module:
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH, device="cuda"), torch.nn.GELU())]
    return torch.nn.Sequential(*parts)


def _train(model: torch.nn.Module, batches: list[int]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = toolkit.oom_guard(on_oom=keep)
    for size in batches:
        guard.batch_size = size
        with guard:
            batch = torch.empty(size, WIDTH, device="cuda")
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch
    return guard


def forward(advice: Any) -> None:
    """The activations of the third batch do not fit; those of the first two do."""
    size = 120_000
    micro = advice.batch_size if advice else size
    steps = -(-size // micro)
    _train(_model(), [8_000, 16_000, *[micro] * min(steps, 3)])


class _WidensBackwards(torch.autograd.Function):
    """Temporarily needs eight times its input in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(8, *gradient.shape, device=gradient.device)
        return gradient * wide[0]


class _Widens(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WidensBackwards.apply(x)


def backward(advice: Any) -> None:
    """The forward pass fits, the additional memory of the backward pass does not."""
    size = 90_000
    micro = advice.batch_size if advice else size
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), _Widens(), torch.nn.Linear(WIDTH, WIDTH)).to("cuda")
    _train(model, [8_000, 16_000, micro])


def optimizer(advice: Any) -> None:
    """Parameters and gradients fit, AdamW's state does not."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(10)])
    smaller = advice is not None and advice.kind == "optimizer_state"
    chosen = torch.optim.Adafactor(model.parameters()) if smaller else torch.optim.AdamW(model.parameters())
    model(torch.empty(8, 8192, device="cuda")).sum().backward()
    with toolkit.oom_guard(on_oom=keep):
        chosen.step()


def data_transfer(advice: Any) -> None:
    """The whole data set is copied to the device."""
    data = torch.empty(1_000, MIB, dtype=torch.uint8)
    ballast = torch.empty(6_500 * MIB, dtype=torch.uint8, device="cuda")
    model = torch.nn.Linear(1, 1).to("cuda")
    with toolkit.oom_guard(on_oom=keep):
        if advice is not None and advice.kind == "pieces":
            for start in range(0, len(data), 64):
                model(data[start : start + 64].to("cuda", non_blocking=True)[:, :1].float())
        else:
            moved = data.to("cuda", non_blocking=True)
            model(moved[:, :1].float())
    del ballast


def fragmentation(advice: Any) -> None:
    """Free memory is fragmented by live tensors."""
    if advice is not None and advice.kind == "expandable_segments":
        set_allocator_settings("expandable_segments:True")
    try:
        with toolkit.oom_guard(on_oom=keep):
            large = [torch.empty(700 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
            del large
            # A small tensor stays in each cached segment.
            kept = []
            for _ in range(9):
                moment = torch.empty(620 * MIB, dtype=torch.uint8, device="cuda")
                kept.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda"))
                kept.append(moment)
            del kept[1::2], moment
            torch.empty(2_000 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        set_allocator_settings("expandable_segments:False")


def other_process(advice: Any) -> None:
    """A job that fits an empty device. The caller starts another process there and ends it as advised."""
    model = _model()
    with toolkit.oom_guard(on_oom=keep):
        model(torch.empty(50_000, WIDTH, device="cuda")).sum().backward()


def leak(advice: Any) -> None:
    """Keeps every output with its graph."""
    model = _model(2)
    history = []

    @toolkit.oom_guard(on_oom=keep, batch_size=lambda batch: len(batch))
    def step(batch: torch.Tensor) -> None:
        output = model(batch)
        output.sum().backward()
        history.append(output.detach()[0, 0].item() if advice is not None and advice.kind == "leak" else output)

    for _ in range(120):
        step(torch.empty(16_000, WIDTH, device="cuda"))


def huge_request(advice: Any) -> None:
    """Computes the distances of all pairs at once."""
    points = torch.empty(60_000, 64, device="cuda")
    rows = 2_000 if advice is not None and advice.kind == "split_request" else len(points)
    with toolkit.oom_guard(on_oom=keep):
        for start in range(0, len(points), rows):
            torch.mm(points[start : start + rows], points.T).amin()


STAGES = (forward, backward, optimizer, data_transfer, fragmentation, other_process, leak, huge_request)

_last: list[Any] = []


def run(name: str, *, follow: bool = False) -> dict[str, Any]:
    """Run one script; with `follow`, it follows the first advice of the last diagnosis."""
    advice = _last[-1].advice[0] if follow else None
    outcome: dict[str, Any] = {"error": None}
    try:
        next(stage for stage in STAGES if stage.__name__ == name)(advice)
    except torch.OutOfMemoryError as error:
        outcome["error"] = type(error).__name__
        outcome["note"] = error.__notes__[0] if hasattr(error, "__notes__") else ""
    gc.collect()
    torch.cuda.empty_cache()
    outcome["left"] = torch.cuda.memory_allocated()
    return outcome


def keep(diagnosis: Any) -> None:
    """Remember the diagnosis for `follow`."""
    _last.append(diagnosis)


def last() -> dict[str, Any]:
    """Return the first advice of the last diagnosis and the location of the error."""
    diagnosis = _last[-1]
    first = diagnosis.advice[0]
    return {
        "kind": first.kind,
        "enough": first.enough,
        "text": str(first),
        "phase": diagnosis.values.phase,
        "place": diagnosis.values.place,
    }
