"""Lets the checks that integration tests share say what they compared when they fail."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.integration.end_to_end_checks")
