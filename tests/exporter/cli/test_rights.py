from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.cli.rights import rights_line


@pytest.mark.parametrize(
    ("rights", "line"),
    [
        ({"rights": "own", "uid": 1001, "processes": 3}, "You can clear your own 3 processes (uid 1001)."),
        ({"rights": "own", "uid": 1001, "processes": 1}, "You can clear your own 1 process (uid 1001)."),
        ({"rights": "all", "uid": 0, "processes": 5}, "You can clear all processes that report (5)."),
        ({"rights": "none", "reason": "a\ntoken"}, "You cannot clear processes. a token"),
        ({}, ""),
    ],
)
def test_one_line_says_what_the_caller_may_do(rights: dict[str, Any], line: str) -> None:
    assert rights_line(rights, "clear") == line
