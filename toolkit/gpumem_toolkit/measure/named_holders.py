"""The bytes of device memory that named objects hold, such as the variables of a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.guest_safety import guest_safety
from gpumem_client.torch_access import initialized_torch
from gpumem_client.wire.units import ShownAsText, human_bytes, human_growth
from gpumem_toolkit.measure.tensor_bytes import HOST, Storages, tensors_in

_ROWS = 12


@dataclass(frozen=True)
class Holders(ShownAsText):
    """Bytes on all devices by the name that holds them. Prints as a table."""

    bytes: Mapping[str, int]
    growth: bool = False
    """Whether the bytes are the change between two times."""

    def __str__(self) -> str:
        shown = human_growth if self.growth else human_bytes
        rows = sorted(self.bytes.items(), key=lambda row: -abs(row[1]))
        return (
            "\n".join(f"{name:<24} {shown(size):>12}" for name, size in rows[:_ROWS]) or "no name holds device memory"
        )

    def since(self, before: Holders) -> Holders:
        """Return the change since an earlier time."""
        changes = {name: self.bytes.get(name, 0) - before.bytes.get(name, 0) for name in {**before.bytes, **self.bytes}}
        return Holders({name: change for name, change in changes.items() if change}, growth=True)


def holders_among(named: Iterable[tuple[str, Any]]) -> Holders:
    """Return which of the named objects hold device memory. A tensor counts with its first name.

    Reads tensors, models with their gradients, optimizers, and dictionaries, lists and tuples of tensors.
    """
    torch = initialized_torch()
    if torch is None:
        return Holders({})
    found, seen = dict[str, int](), Storages(torch)
    for name, value in named:
        with guest_safety():  # the classes of other libraries may raise
            tensors = _tensors_of(value, torch)
            size = sum(each for device, each in Storages(torch, tensors).bytes(seen).items() if device != HOST)
            seen.add(tensors)
            if size:
                found[name] = found.get(name, 0) + size
    return Holders(found)


def _tensors_of(value: Any, torch: Any) -> list[Any]:
    if isinstance(value, torch.optim.Optimizer):
        return tensors_in(list(value.state.values()), torch)
    if isinstance(value, torch.nn.Module):
        found = [*value.parameters(), *value.buffers()]
    else:
        found = tensors_in([value], torch)
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]
