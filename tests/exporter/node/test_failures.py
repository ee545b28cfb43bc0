"""What is logged of failures that repeat."""

from __future__ import annotations

import logging

import pytest

from gpumem_exporter.node.failures import FailureLog


def test_a_failure_that_stays_is_logged_though_another_one_was_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 30.0, 59.0, 60.0))
    failures = FailureLog(logging.getLogger("test"), lambda: next(times))
    failures.failed("kubelet", "unavailable")
    failures.recovered("kubelet")
    for _ in range(9):
        failures.failed("kubelet", "permission denied")
    assert [record.getMessage() for record in caplog.records] == ["kubelet: unavailable", "kubelet: permission denied"]
