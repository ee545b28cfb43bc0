"""Structured log lines on stderr: logfmt, or one JSON object per line.

The fields of a record's `extra={"fields": {…}}` become keys after `ts`, `level`, `logger` and `msg`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any


class LogFormatter(logging.Formatter):
    """Renders a record as logfmt or JSON on one line. Times are ISO 8601 in UTC with milliseconds."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, log_format: str = "logfmt") -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        items = dict(self._items(record))
        if not self._is_json:
            return " ".join(f"{key}={_quoted(value)}" for key, value in items.items())
        line = json.dumps(items, default=str, ensure_ascii=False)
        # Control and bidirectional characters would change how a terminal shows the line.
        return line if line.isprintable() else json.dumps(items, default=str)

    def _items(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        yield "ts", self.formatTime(record)
        yield "level", record.levelname.lower()
        yield "logger", record.name
        yield "msg", record.getMessage().rstrip()
        yield from getattr(record, "fields", {}).items()
        if record.exc_info:
            yield "exception", self.formatException(record.exc_info)


def configure_logging(level: str, log_format: str) -> None:
    """Send the records of every logger to stderr; replaces the handlers of the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn's messages repeat the exporter's own log lines and counters.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _quoted(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    plain = text and all(c.isprintable() and c not in ' "=\\' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
