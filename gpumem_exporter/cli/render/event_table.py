"""Events as lines of text: local time, title and text. The exporter has written the words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

Event = Mapping[str, Any]

_TITLE_WIDTH = 13
_LONGEST_TITLE = 20
"""A newer exporter may have longer titles."""
_WORTH_SAYING_SECONDS = 60.0
"""Several events within this time, such as the starts of ranks, happened at once for people."""
_STYLES = {"critical": "bold red", "warning": "bold yellow"}


def event_line(event: Event, now_unix_seconds: float, width: int) -> Text:
    """Return an event as one line, which is cut to a width, with an ellipsis."""
    when, title, text = _cells(event, now_unix_seconds)
    title.pad_right(_TITLE_WIDTH - title.cell_len)
    line = plain(" ").join((when, title, text))
    line.truncate(width, overflow="ellipsis")
    return line


def _cells(event: Event, now_unix_seconds: float | None) -> tuple[Text, Text, Text]:
    """Return time, title and text of an event. An exporter of version 0.2 sends neither title nor text."""
    text, folded = str(event.get("text") or ""), event.get("folded")
    when = local_time(event["unix_seconds"], now_unix_seconds)
    first_unix_seconds = folded["first_unix_seconds"] if folded else event["unix_seconds"]
    lasted = event["unix_seconds"] - first_unix_seconds >= _WORTH_SAYING_SECONDS
    since = f", since {local_time(first_unix_seconds, now_unix_seconds)}" if lasted else ""
    title = str(event.get("title") or event.get("type"))[:_LONGEST_TITLE]
    return plain(when, "dim"), plain(title, _STYLES.get(str(event.get("severity")), "")), plain(text + since)


def local_time(unix_seconds: float, now_unix_seconds: float | None) -> str:
    """Return a time of today as `03:42:04`, and of another day with its date."""
    then = time.localtime(unix_seconds)
    today = now_unix_seconds is not None and time.localtime(now_unix_seconds)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", then)
