"""Log lines that machines read: logfmt, or one JSON object a line, on stderr.

A record may carry `extra={"fields": {…}}`: each becomes a key of its own, after `ts`, `level`, `logger` and `msg`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

__all__ = ["JsonFormatter", "LogfmtFormatter", "configure_logging", "iso_time"]


def iso_time(unix_seconds: float) -> str:
    """An instant as ISO 8601 in UTC, to the millisecond: `2026-01-31T12:00:00.000Z`."""
    moment = datetime.fromtimestamp(unix_seconds, tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Fields(logging.Formatter):
    """What both forms show of a record, in order."""

    def _items(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        yield "ts", iso_time(record.created)
        yield "level", record.levelname.lower()
        yield "logger", record.name
        yield "msg", record.getMessage().rstrip()
        yield from getattr(record, "fields", {}).items()
        if record.exc_info:
            yield "exception", self.formatException(record.exc_info)


class LogfmtFormatter(_Fields):
    """`ts=… level=info logger=… msg=…`: values in quotes where they need them, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in self._items(record))


class JsonFormatter(_Fields):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        return json.dumps(dict(self._items(record)), default=str, ensure_ascii=False)


def configure_logging(level: str, form: str) -> None:
    """Send every logger of this process to stderr in one form; replaces what the root logger had.

    Args:
        level: debug, info, warning or error.
        form: logfmt or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The server's own chatter (process started, bad request line) says nothing that our lines and counters do not.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _quoted(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    plain = text and all(c.isprintable() and c not in ' "=\\' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
