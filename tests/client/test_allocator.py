"""The allocator with the C modules of several releases of torch and of several backends."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client import torch_access
from gpumem_client.allocator import components
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.components import Unmapped, without_unmapped
from tests.support.builders.builders import sample as torch_sample

MIB = 1 << 20


def _stat(current: int, freed: int = 0) -> dict[str, Any]:
    return {"all": {"current": current, "peak": current, "allocated": current + freed, "freed": freed}}


class C:
    """`torch._C` of a release. One device has 100 MiB reserved, 40 of them allocated and 10 in split blocks."""

    def __init__(self) -> None:
        self.pools: dict[tuple[int, int], int] | None = {}
        self.reserved = 100 * MIB
        self._cuda_memorySnapshot: Any = None

    def _cuda_hasPrimaryContext(self, index: int) -> bool:  # noqa: N802 - torch's name
        return index == 0

    def _statistics(self) -> dict[str, Any]:
        return {
            "reserved_bytes": _stat(self.reserved),
            "allocated_bytes": _stat(40 * MIB),
            "active_bytes": _stat(40 * MIB),
            "inactive_split_bytes": _stat(10 * MIB),
            "requested_bytes": _stat(39 * MIB),
            "segment": _stat(4),
            "num_device_alloc": 4,
            "num_ooms": 0,
        }

    def _cuda_memoryStats(self, index: int) -> dict[str, Any]:  # noqa: N802 - torch's name
        pools = (
            {}
            if self.pools is None
            else {"reserved_bytes_by_private_pools": {p: _stat(b) for p, b in self.pools.items()}}
        )
        return {**self._statistics(), **pools}

    def _cuda_hostMemoryStats(self) -> dict[str, Any]:  # noqa: N802 - torch's name
        return {"allocated_bytes": {"current": 7}}


class Torch:
    """A torch whose snapshot has one classic segment per pool, wholly free except that of the default pool."""

    __version__ = "2.x"

    def __init__(self, c: C, backend: str = "native") -> None:
        self._C = c
        self.snapshots = 0
        self.private: dict[tuple[int, int], int] = {}
        self.cuda = SimpleNamespace(
            device_count=lambda: 2,
            get_allocator_backend=lambda: backend,
            get_device_properties=lambda index: SimpleNamespace(uuid=f"uuid-{index}", name="NVIDIA H100"),
            memory_snapshot=lambda mempool_id=None, include_traces=True: None,
        )
        c._cuda_memorySnapshot = self._snapshot

    def _snapshot(self, arguments: tuple[int, int, bool]) -> dict[str, Any]:
        assert arguments == (0, 0, False)
        self.snapshots += 1
        free = self._C.reserved - 50 * MIB - sum(self.private.values())
        segments = [((0, 0), 50 * MIB, 40 * MIB), ((0, 0), free, 0)] + [(p, b, 0) for p, b in self.private.items()]
        return {
            "segments": [
                {
                    "device": 0,
                    "address": 0,
                    "total_size": size,
                    "allocated_size": allocated,
                    "segment_pool_id": pool,
                    "blocks": [],
                }
                for pool, size, allocated in segments
            ]
        }


def test_an_old_torch_reports_what_it_has() -> None:
    torch = Torch(C())
    torch._C.pools = None
    allocator = Allocator(torch)
    for _ in range(10):
        (sample,) = allocator.samples()
        assert (sample.uuid, sample.reserved_bytes, sample.reclaimable_bytes) == ("GPU-uuid-0", 100 * MIB, 50 * MIB)
        assert (sample.private_pools_bytes, sample.alloc_retries, sample.cache_flushes) == (0, None, None)
    assert torch.snapshots == 1
    assert allocator.pinned_host_bytes() == 7


def test_a_torch_without_uuids_reports_devices_by_the_uuid_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid_of_driver(uuid: Any, _device: object) -> int:
        uuid[:] = range(16)
        return 0

    driver = SimpleNamespace(cuDeviceGet=lambda _device, _index: 0, cuDeviceGetUuid_v2=uuid_of_driver)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    torch = Torch(C())
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="NVIDIA H100")
    (sample,) = Allocator(torch).samples()
    assert sample.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_private_pools_that_an_older_torch_does_not_list_are_not_reclaimable() -> None:
    torch = Torch(C())
    torch._C.pools = None
    torch.private = {(1, 0): 30 * MIB}
    (sample,) = Allocator(torch).samples()
    assert (sample.reclaimable_bytes, sample.private_pools_bytes) == (20 * MIB, 30 * MIB)


@pytest.mark.parametrize(
    ("listed", "held"),
    [({(1, 0): 30 * MIB}, (80 * MIB, 40 * MIB, 30 * MIB, 0)), (None, (None, None, None, None))],
    ids=["torch lists its pools", "older torch"],
)
def test_between_walks_memory_that_may_be_unmapped_is_not_shown_as_held(
    monkeypatch: pytest.MonkeyPatch, listed: dict[tuple[int, int], int] | None, held: tuple[int | None, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace())
    monkeypatch.setattr(components, "_mapped", lambda addresses: [False for _ in addresses])
    torch = Torch(C())
    torch._C.pools = listed
    torch.private = {(1, 0): 30 * MIB}
    allocator = Allocator(torch)
    (sample,) = allocator.samples()
    assert (sample.reserved_bytes, sample.unmapped_bytes) == (70 * MIB, 30 * MIB)
    torch._C.reserved += 10 * MIB  # a segment of the default pool
    sample = allocator.sample_now(0)
    values = (sample.reserved_bytes, sample.allocated_bytes, sample.reclaimable_bytes, sample.private_pools_bytes)
    assert values == held
    assert sample.unmapped_bytes == (30 * MIB if listed else None)
    assert allocator.unmapped(0, allocator.state(0)) == (Unmapped(30 * MIB, 0) if listed else None)


def test_an_allocator_without_pools_has_no_unmapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace())
    monkeypatch.setattr(components, "_mapped", lambda addresses: [False for _ in addresses])
    (sample,) = Allocator(Torch(C(), "cudaMallocAsync")).samples()
    assert (sample.reserved_bytes, sample.allocated_bytes, sample.unmapped_bytes) == (100 * MIB, 40 * MIB, 0)


def test_before_torch_reports_settings_only_the_older_variable_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:2")
    assert Allocator(Torch(C())).settings == "max_split_size_mb:2"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert Allocator(Torch(C())).settings == ""


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


def test_a_sample_has_only_what_the_driver_holds() -> None:
    counted = replace(torch_sample(allocated=100, reclaimable=30, fragmented=20), component_bytes={"parameters": 100})
    held = without_unmapped(counted, Unmapped(90, 80))
    assert (held.reserved_bytes, held.allocated_bytes, held.reclaimable_bytes) == (60, 20, 30)
    assert held.unmapped_bytes == 90
    assert held.component_bytes == {}, "which of the tensors are unmapped is unknown"
    assert without_unmapped(counted, Unmapped(0, 0)).component_bytes == {"parameters": 100}
