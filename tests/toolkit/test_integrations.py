"""The boundary between a trainer and the integrations."""

from __future__ import annotations

import logging

import pytest

from gpumem_toolkit.integrations.training_watch import safely


def test_an_integration_that_fails_is_one_line_and_the_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    steps = []

    @safely
    def step() -> None:
        steps.append(1)
        raise RuntimeError("a defect of the integration")

    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            step()
    assert len(steps) == 3
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "a defect of the integration" in lines[0]
