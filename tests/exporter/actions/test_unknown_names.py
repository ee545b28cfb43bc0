"""The work and the size of the text for a target whose names are unknown."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

import pytest

from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.actions.selection import unknown_names


def test_a_thousand_unknown_names_lead_to_one_suggestion_and_a_bounded_number_of_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    for name in ("ratio", "quick_ratio"):
        method = getattr(SequenceMatcher, name)

        def counting(self: Any, method: Any = method) -> Any:
            compared.append(max(len(self.a), len(self.b)))
            return method(self)

        monkeypatch.setattr(SequenceMatcher, name, counting)
    known = {"workload": [f"{'train' * 20}-{number}" for number in range(500)], "user": ["ada"], "uuid": ["GPU-1"]}
    target = Target(workload=[f"{'tra1n' * 20}-{number}" for number in range(1000)], user=["adda"], uuid=["GPU-2"])
    text = unknown_names(target, known)
    assert text.count("did you mean") == 1
    assert len(compared) <= 110
    assert max(compared) <= 64
    assert len(text) < 8192
