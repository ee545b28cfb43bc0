from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpumem_client as client
import gpumem_toolkit as toolkit
from gpumem_client.allocator.allocator_environment import KEYS, merged, parse_settings
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.protocol import DeviceSample
from gpumem_toolkit.cleanup import auto_clean
from gpumem_toolkit.cleanup.auto_clean import AutoClean
from gpumem_toolkit.oom.settings_advice import Recommendation, expandable_segments_conflict, recommend

MIB, GIB = 1 << 20, 1 << 30


class _Heap:
    """A fragmented heap; a clear frees its reclaimable bytes."""

    def __init__(self, reclaimable: int, fragmented: int, regained: float = 0.0) -> None:
        self.reclaimable = reclaimable
        self.fragmented = fragmented
        self.regained = regained
        self.clears = 0

    def samples(self) -> tuple[DeviceSample, ...]:
        reserved = 4 * GIB + self.fragmented + self.reclaimable
        return (DeviceSample("", allocated_bytes=4 * GIB, reserved_bytes=reserved, reclaimable_bytes=self.reclaimable),)

    def clear(self) -> int:
        self.clears += 1
        freed, self.reclaimable = self.reclaimable, 0
        return freed


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> _Heap:
    heap = _Heap(GIB, 3 * GIB)
    monkeypatch.setattr(auto_clean, "_samples", heap.samples)
    monkeypatch.setattr(auto_clean, "clear_cache", heap.clear)
    return heap


def _cleaner() -> AutoClean:
    return AutoClean(0.3, 100 * MIB, 10)


def test_a_fragmented_heap_is_cleared_once_per_cooldown(heap: _Heap) -> None:
    cleaner = _cleaner()
    assert cleaner.look() == GIB
    heap.reclaimable = 200 * MIB
    assert [cleaner.look() for _ in range(9)] == [0] * 9
    assert cleaner.look() == 200 * MIB
    assert (cleaner.clears, cleaner.freed_bytes) == (2, GIB + 200 * MIB)


@pytest.mark.parametrize(
    ("reclaimable", "fragmented"), [(GIB, 100 * MIB), (50 * MIB, 4 * GIB), (0, 0)], ids=["whole", "little", "none"]
)
def test_no_clear_that_would_free_little(heap: _Heap, reclaimable: int, fragmented: int) -> None:
    heap.reclaimable, heap.fragmented = reclaimable, fragmented
    cleaner = _cleaner()
    assert sum(cleaner.look() for _ in range(50)) == 0
    assert heap.clears == 0


def test_clears_become_rare_if_the_freed_memory_is_reserved_again(heap: _Heap) -> None:
    cleaner = _cleaner()
    cleared_at = []
    for step in range(500):
        if cleaner.look():
            cleared_at.append(step)
        heap.reclaimable = GIB  # all freed bytes are reserved again
    assert cleared_at == [0, 20, 60, 140, 300]


@pytest.mark.parametrize("bounds", [(1.5, 1, 1), (0.3, 0, 1), (0.3, 1, 0)])
def test_invalid_bounds_are_rejected(bounds: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match=r"fragmentation.*min_bytes.*cooldown_steps"):
        AutoClean(*bounds)


def test_every_function_does_nothing_without_cuda(tmp_path: Path) -> None:
    assert client.clear_cache(collect_garbage=True) == 0
    assert toolkit.deep_clean().rungs == ()
    client.reset_peak()
    client.set_memory_fraction(0.5)
    with pytest.raises(ValueError, match=r"invalid fraction 1\.5"):
        client.set_memory_fraction(1.5)
    assert toolkit.release_model() == 0
    assert toolkit.to_cpu({"a": [1, (2,)]}) == {"a": [1, (2,)]}
    assert client.snapshot(tmp_path / "none") is None
    assert list(tmp_path.iterdir()) == []
    assert toolkit.lingering_tensors().groups == ()
    assert toolkit.recommend_allocator_settings().settings == ()
    cleaner, detector = toolkit.auto_clean(), toolkit.leak_detector()
    client.step()
    cleaner.stop()
    detector.stop()
    assert cleaner.clears == 0
    assert detector.leaks == ()


GOOD = (
    "expandable_segments:True",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
    "backend:cudaMallocAsync",
    "pinned_num_register_threads:8",
    "expandable_segments_reserve:40G",
)
BAD = {
    "expandable_segment:True": ["'expandable_segment'", *KEYS],
    "expandable_segments": ["expandable_segments", "True", "False"],
    "expandable_segments:true": ["expandable_segments", "'true'", "True", "False"],
    "": ["expandable_segments:True"],
}
"""Invalid lines, and words that the error contains: the name, the value, and the accepted values."""


@pytest.mark.parametrize("line", GOOD)
def test_valid_settings_are_parsed_and_written_again(line: str) -> None:
    assert merged("", parse_settings(line)) == line


@pytest.mark.parametrize("line", BAD)
def test_invalid_settings_are_rejected_with_what_is_accepted(line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(line)
    assert [named for named in BAD[line] if named not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


FRAGMENTED = {"reclaimable_bytes": GIB}
RETRIES = {"alloc_retries": 7, "ooms": 2}


def recommended(values: dict[str, int], current: str = "", variable: str = "", conflict: str = "") -> Recommendation:
    sizes: dict[str, Any] = {"allocated_bytes": 4 * GIB, "reserved_bytes": 7 * GIB, "reclaimable_bytes": 3 * GIB}
    return recommend(
        {0: DeviceSample("", **{**sizes, **values})}, current, variable, expandable_segments_conflict=conflict
    )


@pytest.mark.parametrize(
    ("values", "current", "line", "named"),
    [
        ({}, "", "", ()),
        (FRAGMENTED, "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True", ("2.0 GiB", "7.0 GiB")),
        (FRAGMENTED, "expandable_segments:True", "", ("2.0 GiB",)),
        (RETRIES, "", "expandable_segments:True", ("7 times", "2 times")),
        ({**FRAGMENTED, **RETRIES}, "backend:cudaMallocAsync", "", ("cudaMallocAsync",)),
    ],
    ids=["reclaimable", "fragmented", "expandable", "retries", "asynchronous"],
)
def test_recommended_settings(values: dict[str, int], current: str, line: str, named: tuple[str, ...]) -> None:
    found = recommended(values, current, "PYTORCH_ALLOC_CONF")
    assert found.line == line
    assert [word for word in named if word not in found.reasons[0]] == []
    assert (f"PYTORCH_CUDA_ALLOC_CONF={line}" in str(found)) is bool(line)
    assert "PYTORCH_ALLOC_CONF" in str(found)


@pytest.mark.parametrize("values", [FRAGMENTED, RETRIES])
def test_expandable_segments_are_not_recommended_beside_an_allocator_that_they_break(values: dict[str, int]) -> None:
    found = recommended(values, conflict="vLLM is loaded")
    assert found.settings == ()
    assert all("because vLLM is loaded" in reason for reason in found.reasons)
    assert "expandable_segments:True" not in str(found)


def test_copies_of_a_cleaner_and_a_detector_are_stopped() -> None:
    cleaner, detector = toolkit.auto_clean(), toolkit.leak_detector()
    try:
        trainer = {"cleaner": cleaner, "detector": detector}
        for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            copied["cleaner"].stop()
            assert copied["detector"].leaks == ()
            client.step()
            assert copied["detector"].steps == 0
    finally:
        cleaner.stop()
        detector.stop()


@pytest.mark.parametrize(
    ("module", "version", "conflict"),
    [
        ("vllm", "0.32.1", "vLLM is loaded"),
        ("vllm", "0.33.0", ""),
        ("vllm", "0.33.0rc1", ""),
        ("vllm", "1.0", ""),
        ("vllm", "dev", "vLLM is loaded"),
        ("torch_memory_saver", "0.33.0", "torch_memory_saver is loaded"),
        ("sglang", "0.5.23", "SGLang is loaded"),
    ],
)
def test_only_new_versions_of_vllm_work_together_with_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, module: str, version: str, conflict: str
) -> None:
    for name in ("vllm", "sglang", "torch_memory_saver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(__version__=version))
    assert expandable_segments_conflict() == conflict
