"""The events in `top`: below the processes, instead of the processes, or printed. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.event_lines import chosen_events, event_lines
from gpumem_exporter.cli.top.rows import Choice
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["events_alone", "events_below", "events_printed"]

_HEADING = "last events"
_LONG_PAGE = 20
"""The number of lines from which the events always get a quarter."""
_PRINTED = 10


def events_below(
    reading: Reading, choice: Choice, width: int, page: int, processes: int, *, unicode_output: bool
) -> list[Text]:
    """Return a heading and the last events for the space below the processes; empty if there is no space.

    Args:
        reading: has the events.
        choice: selects events.
        width: the columns of the screen.
        page: the lines for processes and events.
        processes: the number of processes. On a short screen, events use only the lines that processes leave free.
        unicode_output: whether the terminal shows more than ASCII.
    """
    room = max(page - processes - 1, page // 4 if page >= _LONG_PAGE else 0)
    return _last_events(reading, choice, width, room - 1, unicode_output)


def events_alone(
    reading: Reading, view: View, width: int, page: int, *, unicode_output: bool
) -> tuple[list[Text], View, str]:
    """Return a heading and `page` lines of complete events, from the view's position.

    Returns:
        The lines, the view with a valid position, and the range of shown events, such as `1-5 of 20`.
    """
    events = chosen_events(reading.events or (), view.choice)
    drawn = event_lines(events, width, reading.taken_unix_seconds, unicode_output=unicode_output, cut=False)
    page = max(1, page)
    heights = [min(page, len(lines)) for lines in drawn]
    view = view.settle_events(heights, page)
    if not events:
        reason = [plain(part, "dim") for part in textwrap.wrap(_reason_for_none(reading), width)]
        return [plain(_HEADING, "bold"), *reason[:page]], view, ""
    shown: list[Text] = []
    last = view.first_event
    while last < len(drawn) and len(shown) + heights[last] <= page:
        shown += drawn[last][: heights[last]]
        last += 1
    return [plain(_HEADING, "bold"), *shown], view, f"{view.first_event + 1}-{last} of {len(events)}"


def events_printed(reading: Reading, choice: Choice, width: int, *, unicode_output: bool) -> list[Text]:
    """Return a heading and the last events for `top --once`; empty if no event is known."""
    return _last_events(reading, choice, width, _PRINTED, unicode_output)


def _last_events(reading: Reading, choice: Choice, width: int, max_events: int, unicode_output: bool) -> list[Text]:
    events = chosen_events(reading.events or (), choice)[: max(0, max_events)]
    drawn = event_lines(events, width, reading.taken_unix_seconds, unicode_output=unicode_output)
    return [plain(_HEADING, "bold"), *(first for first, *_ in drawn)] if events else []


def _reason_for_none(reading: Reading) -> str:
    if not reading.url:
        return "Events need an exporter, and no exporter answers."
    if reading.events:
        return "No event matches."
    if reading.events is not None:
        return "The exporter has recorded no event yet."
    reason = reading.no_events or "waiting for the events"
    return f"{reason[0].upper()}{reason[1:]}{'' if reason.endswith('.') else '.'}"
