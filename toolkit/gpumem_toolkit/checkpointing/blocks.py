"""Finds the repeated blocks of a model, and checkpoints them temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumem_client.wire.errors import ConfigurationError

__all__ = ["checkpointed", "find_blocks", "recomputed"]


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return name and blocks of the longest `nn.ModuleList` or `nn.Sequential` of one class with parameters.

    Raises:
        ConfigurationError: no list has at least two blocks.
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


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, recompute the forward pass of these modules in backward. Their hooks run once."""
    replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for block in dict.fromkeys(blocks):
            replaced.append((block, vars(block).get("forward")))
            block.forward = recomputed(block.forward)
        yield
    finally:
        for block, own in reversed(replaced):
            if own is None:
                vars(block).pop("forward", None)
            else:
                block.forward = own


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a checkpoint, which saves only the inputs for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
