from __future__ import annotations

import json
import logging
import shlex
import sys
from typing import Any

import pytest

from gpumem_exporter.logs import LogFormatter


def record(message: str, fields: dict[str, Any] | None = None, *, failing: bool = False) -> logging.LogRecord:
    exc_info = None
    if failing:
        try:
            raise LookupError('no\nsuch "thing"')
        except LookupError:
            exc_info = sys.exc_info()
    made = logging.LogRecord("gpumem_exporter.x", logging.WARNING, "f", 1, message, (), exc_info)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    if fields is not None:
        made.fields = fields
    return made


def test_logfmt_is_one_line_of_keys_and_values() -> None:
    line = LogFormatter().format(record("action finished", {"n": 3, "path": "/a b", "none": None, "s": 0.25}))
    assert line == (
        "ts=2023-11-14T22:13:20.250Z level=warning logger=gpumem_exporter.x "
        'msg="action finished" n=3 path="/a b" none="" s=0.25'
    )


def test_a_value_cannot_break_out_of_its_quotes() -> None:
    line = LogFormatter().format(
        record("x", {"reason": 'a" level=error\nts=now \x1b[31m \x9b32m', "exception_text": "=\\"})
    )
    assert "\n" not in line
    assert "\x1b" not in line
    assert "\x9b" not in line
    values = dict(part.split("=", 1) for part in shlex.split(line))
    assert values["level"] == "warning"


def test_json_lines_carry_the_same_fields() -> None:
    failed = record("x", {"n": 3, "odd": {1}}, failing=True)
    plain = LogFormatter().format(failed)
    assert "LookupError" in plain
    line = LogFormatter("json").format(failed)
    assert "\n" not in plain + line
    document = json.loads(line)
    assert list(document)[:6] == ["ts", "level", "logger", "msg", "n", "odd"]
    assert document["n"] == 3
    assert "LookupError" in document["exception"]


@pytest.mark.parametrize("log_format", ["json", "logfmt"])
def test_no_character_changes_how_a_terminal_shows_a_line(log_format: str) -> None:
    hidden = "\x1b[2K \x9b31m \x7f \u202e \u2066 \u200b \ue000 \U000e0041 \u2028 \udce9"
    line = LogFormatter(log_format).format(record(f"é {hidden}", {"command": f"größe 火 {hidden}"}))
    assert line.isprintable()
    if log_format == "json":
        document = json.loads(line)
        assert (document["msg"], document["command"]) == (f"é {hidden}", f"größe 火 {hidden}")
        assert "größe 火" in LogFormatter("json").format(record("größe 火"))
