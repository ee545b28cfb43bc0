"""A wall clock that is set, backwards or forwards, moves timestamps and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gpumem_client
from gpumem_exporter.actions.dispatcher import SILENT_GRACE_SECONDS
from gpumem_exporter.actions.request import Target
from tests.support.dispatching import Bench


@pytest.mark.parametrize("step_seconds", [-86_400.0, 86_400.0])
def test_a_set_clock_does_not_change_the_deadline_and_duration_of_an_action(step_seconds: float) -> None:
    bench, wall_seconds = Bench(), 1e9
    bench.dispatcher = bench.build(wall_clock=lambda: wall_seconds)
    action = bench.ask(target=Target(pid=1), deadline_seconds=30.0)
    bench.dispatcher.commands(bench.first)
    wall_seconds += step_seconds
    bench.now += 30.0
    bench.dispatcher.expire()
    assert not bench.current(action).finished
    bench.now += SILENT_GRACE_SECONDS
    bench.dispatcher.expire()
    expired = bench.current(action)
    assert (expired.state, expired.duration_seconds) == ("expired", 30.0 + SILENT_GRACE_SECONDS)


def test_the_client_does_not_use_the_wall_clock() -> None:
    root = Path(gpumem_client.__file__).parent
    modules = sorted(root.rglob("*.py"))
    assert len(modules) > 20
    looked_at = []
    for module in modules:
        if module.parent.name == "profile":
            continue  # torch's history, with which a profile compares its own times, has the wall clock's
        for part in ast.walk(ast.parse(module.read_text())):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                call = f"{part.value.id}.{part.attr}"
                if call in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"):
                    looked_at.append(f"{module.relative_to(root)}:{part.lineno}: {call}")
    assert looked_at == []
