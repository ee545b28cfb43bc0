"""`events`: what happened on the node."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any
from urllib.parse import urlencode

import click

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.options import api_options, job_option, list_option
from gpumem_exporter.cli.render.columns import event_line
from gpumem_exporter.cli.render.terminal import open_console, print_json
from gpumem_exporter.cli.usage import note
from gpumem_exporter.core.event import EVENT_TYPES

_EXAMPLES = f"""\b
Examples:
  gpumem-exporter events                              # the last 100
  gpumem-exporter events --follow
  gpumem-exporter events --since 3h --type oom,device_lost
  gpumem-exporter events --job llm-pretrain --json | jq -r '.events[].detail.reason'

\b
Types: {", ".join(EVENT_TYPES[:5])},
{", ".join(EVENT_TYPES[5:])}.

\b
Exit codes: 0 shown, also after Ctrl-C; 1 the exporter does not answer; 2 wrong usage.
"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PAGE = 1000
_POLL_SECONDS = 1.0
# `--follow` waits this long for an exporter that does not answer.
_LONGEST_OUTAGE_SECONDS = 600.0


def _since(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Return the Unix time of `--since`: an age such as `3h`, or a local time."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text):
        return time.time() - float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(text if "-" in text else f"{date.today()} {text}").timestamp()
    except ValueError:
        raise ConfigurationError(
            f"invalid --since {text!r}: expected an age such as 30s, 15m, 3h or 2d, or a local time such as 03:42 or "
            "'2026-01-31 03:42'"
        ) from None


@click.command(epilog=_EXAMPLES)
@click.option("--follow", "-f", is_flag=True, help="Wait for new events and show them, until Ctrl-C.")
@click.option(
    "--since", metavar="TIME", callback=_since, help="Only events since then: 30s, 15m, 3h, 2d, or a local time."
)
@list_option("--type", "types", dict(zip(EVENT_TYPES, EVENT_TYPES, strict=True)), "Only events of these types.")
@job_option("Only events about this job")
@click.option("--pid", metavar="PID", help="Only events about this process.")
@api_options
def events(
    api: ExporterApi,
    *,
    follow: bool,
    since: float | None,
    types: list[str],
    job: str | None,
    pid: str | None,
    as_json: bool,
) -> int:
    """Show what happened on the node, oldest first.

    Without --since, the last 100 events. Starts and ends of short jobs are one line. With --follow and --json, each
    event is one line of JSON.
    """
    filters = {"type": ",".join(types), "job": job and api.page_job(job), "pid": pid}
    query = {name: value for name, value in filters.items() if value} | {"fold": "true"}
    pages = _pages(api, query, since, follow=follow)
    if as_json and not follow:
        print_json({"events": [event for page in pages for event in page]})
        return 0
    console = open_console()
    try:
        for page in pages:
            now = time.time()
            for event in page:
                if as_json:
                    print_json(event, indent=None)
                else:
                    console.print(event_line(event, now, console.width), soft_wrap=True)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


def _pages(
    api: ExporterApi, query: Mapping[str, Any], since: float | None, *, follow: bool
) -> Iterator[Sequence[Document]]:
    """Yield the events of each page; with `follow`, also the events of later pages."""
    position: dict[str, Any] = {"limit": 100} if since is None else {"limit": _PAGE, "since": since}
    while True:
        page = _read(api, {**query, **position}, patient=follow and "after" in position)
        # The exporter has them in the order in which it recorded them.
        yield sorted(page["events"], key=lambda event: (event["unix_seconds"], event["id"]))
        position = {"limit": _PAGE, "after": page["next_after"]}
        if not page["more"]:
            if not follow:
                return
            time.sleep(_POLL_SECONDS)


def _read(api: ExporterApi, query: Mapping[str, Any], *, patient: bool) -> dict[str, Any]:
    """Read a page of events. If `patient`, an exporter that restarts is waited for, with one line on stderr.

    The ids of events increase over a restart, so nothing is shown twice.
    """
    end_seconds = 0.0
    while True:
        try:
            return api.get(f"/api/v1/events?{urlencode(query)}")
        except (ExporterUnreachableError, ExporterAnswerError) as error:
            lasts = isinstance(error, ExporterAnswerError) and error.status not in (429, 503)
            if not patient or lasts or 0 < end_seconds < time.monotonic():
                raise
            if not end_seconds:
                end_seconds = time.monotonic() + _LONGEST_OUTAGE_SECONDS
                note(f"waiting for the exporter: {error}")
        time.sleep(_POLL_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
