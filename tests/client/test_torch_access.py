"""Private functions of torch that differ between releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client import torch_access

KEPT: list[Any] = []


@pytest.mark.parametrize("name", ["allocated_bytes", "reserved_bytes"])
def test_pinned_host_bytes_are_those_that_the_allocator_keeps(name: str) -> None:
    """Older releases count the bytes in tensors as `allocated_bytes`."""
    statistics = {"allocated_bytes": {"current": 3}} | {name: {"current": 8}}
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_hostMemoryStats=lambda: statistics))
    assert torch_access.pinned_host_bytes(torch) == 8


@pytest.mark.parametrize(
    "stash", [lambda key, mark: KEPT.append(mark), lambda key, mark: None], ids=["takes a reference", "takes none"]
)
def test_torch_s_state_has_a_reference_to_the_mark_of_a_thread(
    monkeypatch: pytest.MonkeyPatch, stash: Callable[[str, int], None]
) -> None:
    """Every release of torch releases a reference when the thread ends."""
    c = SimpleNamespace(_is_key_in_tls=lambda key: False, _stash_obj_in_tls=stash)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=c))
    mark = int("123456789012")
    monkeypatch.setattr("threading.get_ident", lambda: mark)
    before = sys.getrefcount(mark)
    torch_access.mark_thread()
    assert sys.getrefcount(mark) == before + 1
