"""The repeated blocks of a model, and their forward passes under checkpoints for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumem_exporter.errors import ConfigurationError

__all__ = ["checkpointed", "find_blocks", "recomputed"]


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The longest `nn.ModuleList` or `nn.Sequential` of blocks of one class with parameters: its name, and they.

    Raises:
        ConfigurationError: there is none of at least two.
    """
    name, blocks = "", list[nn.Module]()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(dict.fromkeys(module))
        alike = len({type(child) for child in children}) == 1 and _has_parameters(children[0])
        if alike and len(children) > max(1, len(blocks)):
            name, blocks = path, children
    if not blocks:
        raise ConfigurationError(
            f"{type(model).__name__} has no nn.ModuleList and no nn.Sequential of two or more blocks of one class:"
            " name what is repeated with blocks=[...]"
        )
    return name, blocks


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute the forward of these modules in backward, for as long as it is entered.

    Their hooks run once, around it. Afterwards they are as they were, whatever has happened.
    """
    taken: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for block in dict.fromkeys(blocks):
            taken.append((block, vars(block).get("forward")))
            block.forward = recomputed(block.forward)
        yield
    finally:
        for block, own in reversed(taken):
            if own is None:
                vars(block).pop("forward", None)
            else:
                block.forward = own


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose inputs alone are kept for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
