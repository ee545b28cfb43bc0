"""`events`: what happened on the node. `actions`: the actions that were requested, one of them, its cancellation."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import date, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended
from gpumem_exporter.cli.completion import ACTION_IDS
from gpumem_exporter.cli.options import api_options, duration, job_option, list_option
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.columns import event_line, local_time
from gpumem_exporter.cli.render.terminal import open_console, plain, print_json, print_result, table
from gpumem_exporter.cli.usage import CommandGroup, note
from gpumem_exporter.core.caller import caller_text
from gpumem_exporter.core.event import EVENT_TYPES

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_EVENTS_EXAMPLES = """\b
Examples:
  gpumem-exporter events                              # the last 100
  gpumem-exporter events --follow
  gpumem-exporter events --since 3h --type oom,device_lost
  gpumem-exporter events --job llm-pretrain --json | jq -r '.events[].detail.reason'

\b
Exit codes: 0 shown, also after Ctrl-C; 1 the exporter does not answer; 2 wrong usage.
"""
_ACTIONS_EXAMPLES = """\b
Examples:
  gpumem-exporter actions list
  gpumem-exporter actions list --job llm-pretrain --state queued,running
  gpumem-exporter actions show 3f2a
  gpumem-exporter actions cancel 3f2a

\b
An ID may be shortened, as in the list. A user without the rights to all processes has its own actions.
"""
_PAGE = 1000
_POLL_SECONDS = 1.0
# The actions that release memory to the driver.
_FREEING = ("empty_cache", "terminate", "release_memory")
_COLUMNS = (
    *(("id", "left"), ("requested", "left"), ("action", "left"), ("target", "cut"), ("by", "cut"), ("outcome", "left")),
    *(("freed", "right"), ("stays free", "right")),
)


def _since(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Return the Unix time of `--since`: an age such as `3h`, or a local time."""
    if text is None:
        return None
    when = text.replace("Z", "+00:00")  # Python reads Z from 3.11 on
    with contextlib.suppress(ValueError):
        if when[-1:].isdigit():
            return datetime.fromisoformat(when if "-" in when else f"{date.today()} {when}").timestamp()
        if 0 <= (age_seconds := duration(text)) <= time.time():
            return time.time() - age_seconds
    raise ConfigurationError(
        f"invalid --since {text!r}: expected an age such as 30s, 15m, 3h or 2d, or a local time such as 03:42 or "
        "'2026-01-31 03:42'"
    )


@click.command(epilog=_EVENTS_EXAMPLES)
@click.option("--follow", "-f", is_flag=True, help="Wait for new events and show them, until Ctrl-C.")
@click.option(
    "--since", metavar="TIME", callback=_since, help="Only events since then: 30s, 15m, 3h, 2d, or a local time."
)
@list_option("--type", "types", {name: name for name in EVENT_TYPES}, f"Only these types: {', '.join(EVENT_TYPES)}.")
@job_option("Only events about this job")
@click.option("--pid", metavar="PID", help="Only events about this process.")
@api_options
def events(api: ExporterApi, *, follow: bool, types: list[str], job: str | None, as_json: bool, **given: Any) -> int:
    """Show what happened on the node, oldest first.

    Without --since, the last 100 events. Starts and ends of short jobs are one line. With --follow and --json, each
    event is one line of JSON.
    """
    query = {**given, "type": ",".join(types), "job": job and api.page_job(job), "fold": "true"}
    pages = _pages(api, {name: value for name, value in query.items() if value}, follow=follow)
    if as_json and not follow:
        print_json({"events": [event for page in pages for event in page]})
        return 0
    console = open_console()
    try:
        for page in pages:
            for event in page:
                if as_json:
                    print_json(event, indent=None)
                else:
                    console.print(event_line(event, time.time(), console.width), soft_wrap=True)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


def _pages(api: ExporterApi, query: dict[str, Any], *, follow: bool) -> Iterator[Sequence[Document]]:
    """Yield the events of each page; with `follow`, also later ones: an exporter that restarts is waited for."""
    query["limit"] = _PAGE if "since" in query else 100
    waits = False
    while True:
        try:
            page = api.get(f"/api/v1/events?{urlencode(query)}")
        except (ExporterUnreachableError, ExporterAnswerError) as error:
            # The ids of events increase over a restart, so nothing is shown twice.
            lasts = isinstance(error, ExporterAnswerError) and error.status not in (429, 503)
            if not follow or lasts or "after" not in query:
                raise
            if not waits:
                note(f"waiting for the exporter: {error}")
            waits = True
        else:
            waits = False
            # The exporter has them in the order in which it recorded them.
            yield sorted(page["events"], key=lambda event: (event["unix_seconds"], event["id"]))
            query.pop("since", None)
            query.update(limit=_PAGE, after=page["next_after"])
            if page["more"]:
                continue
            if not follow:
                return
        time.sleep(_POLL_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - jitter


@click.group(cls=CommandGroup, epilog=_ACTIONS_EXAMPLES, no_args_is_help=False)
def actions() -> None:
    """Show the actions that were requested, and cancel them."""


@actions.command("list")
@list_option("--action", "names", {name: action for action, name in COMMAND_NAMES.items()}, "Only these actions.")
@list_option("--state", "states", {state.value: state.value for state in ActionState}, "Only actions in these states.")
@job_option("Only actions on processes of this job")
@api_options
def list_actions(api: ExporterApi, *, names: list[str], states: list[str], job: str | None, as_json: bool) -> int:
    """Show the last 100 actions, the newest first, without dry runs.

    What was requested, by whom, the outcome, the memory that was freed, and how much of it stayed free if the request
    had --settle.
    """
    given = {"action": ",".join(names), "state": ",".join(states), "job": job and api.page_job(job)}
    query = {name: value for name, value in given.items() if value} | {"dry_run": "false"}
    document = api.get(f"/api/v1/actions?{urlencode(query)}")
    rows = list(map(_row, document["actions"]))
    print_result(document, [table("", _COLUMNS, rows) if rows else plain("No actions.")], as_json=as_json)
    return 0


@actions.command("show")
@click.argument("action_id", metavar="ID", shell_complete=ACTION_IDS)
@api_options
def show_action(api: ExporterApi, action_id: str, as_json: bool) -> int:
    """Show one action with the result of each process."""
    action = api.action(api.full_id("action", action_id))
    print_result(action, _lines(action), as_json=as_json)
    return 0


@actions.command("cancel")
@click.argument("action_id", metavar="ID", shell_complete=ACTION_IDS)
@api_options
def cancel_action(api: ExporterApi, action_id: str, as_json: bool) -> int:
    """Cancel an action in the processes that have not started it.

    The exit code is 1 if nothing was canceled, because the action had ended. A process that has received its command
    answers with its next report: see `actions show`.
    """
    full_id = api.full_id("action", action_id)
    had_ended = has_ended(api.action(full_id))
    action = api.cancel(full_id)
    shown = [*_lines(action), *([plain("The action had ended. Nothing was canceled.")] if had_ended else [])]
    print_result(action, shown, as_json=as_json)
    return FAILED if had_ended else 0


def _row(action: Document) -> Sequence[str | Text]:
    outcome, ended = action["state"], has_ended(action)
    return (
        action["id"][:8],
        _time(action),
        COMMAND_NAMES.get(action["action"], action["action"]),
        _target(action),
        caller_text(action["requested_by"]),
        plain(outcome, "green" if outcome == "done" else "red" if ended else ""),
        human_bytes(action["freed_bytes"] if action["action"] in _FREEING else None),
        human_bytes(action["still_free_bytes"]),
    )


def _lines(action: Document) -> Iterator[RenderableType]:
    """Yield what was requested, by whom and why, and the results."""
    name = COMMAND_NAMES.get(action["action"], action["action"])
    dry_run = ", a dry run" if action["dry_run"] else ""
    mode = f", in mode {action['mode']}" if action["mode"] not in ("auto", "now") else ""
    reason = f": {action['reason']}" if action["reason"] else ""
    yield plain(f"Action {action['id']}: {name} of {_target(action)}{mode}{dry_run}")
    yield plain(f"Requested at {_time(action)} by {action['requested_by']}{reason}")
    yield from action_tables(action)


def _time(action: Document) -> str:
    return local_time(datetime.fromisoformat(action["created"].replace("Z", "+00:00")).timestamp(), time.time())


def _target(action: Document) -> str:
    known = {each.name for each in fields(Target)}  # an exporter of a later version may have more
    return Target(**{name: value for name, value in action["target"].items() if name in known}).describe()
