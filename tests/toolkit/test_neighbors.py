from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpumem_toolkit.oom.settings_advice import expandable_segments_conflict


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
