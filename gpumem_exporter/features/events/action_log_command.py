"""`actions`: the actions that were requested, one of them with its results, and its cancellation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.actions.lifecycle import ActionState
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended
from gpumem_exporter.cli.completion import ACTION_IDS
from gpumem_exporter.cli.options import api_options, job_option, list_option
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.columns import local_time
from gpumem_exporter.cli.render.terminal import plain, print_result, table
from gpumem_exporter.cli.usage import CommandGroup
from gpumem_exporter.features.events.event_entries import caller_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\b
Examples:
  gpumem-exporter actions list
  gpumem-exporter actions list --job llm-pretrain --state queued,running
  gpumem-exporter actions show 3f2a
  gpumem-exporter actions cancel 3f2a

\b
An ID may be shortened, as in the list. A user without the rights to all processes has its own actions.
"""
# The action of each command.
_COMMANDS = {name: action for action, name in COMMAND_NAMES.items()}
_STATES = {state.value: state.value for state in ActionState}
_SHOWN_ID = 8
# The actions that release memory to the driver.
_FREEING = ("empty_cache", "terminate", "release_memory")
# How long `cancel` waits for processes that have received their command.
_CANCEL_SECONDS = 5.0
_POLL_SECONDS = 0.25
_COLUMNS = (
    *(("id", "left"), ("requested", "left"), ("action", "left"), ("of", "cut"), ("by", "cut"), ("outcome", "left")),
    *(("freed", "right"), ("stays free", "right")),
)


@click.group(cls=CommandGroup, epilog=_EXAMPLES, no_args_is_help=False)
def actions() -> None:
    """Show the actions that were requested, and cancel them."""


@actions.command("list")
@list_option("--action", "names", _COMMANDS, "Only these actions.")
@list_option("--state", "states", _STATES, "Only actions in these states.")
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
    print_result(document, _list(document["actions"]), as_json=as_json)
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

    The exit code is 1 if nothing was canceled, because the action had ended.
    """
    full_id = api.full_id("action", action_id)
    had_ended = has_ended(api.action(full_id))
    action = api.cancel(full_id)
    end = time.monotonic() + _CANCEL_SECONDS
    while not has_ended(action) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        action = api.action(full_id)
    note = "The action had ended. Nothing was canceled." if had_ended else ""
    print_result(action, _lines(action, note), as_json=as_json)
    return FAILED if had_ended else 0


def _list(actions: Sequence[Document]) -> Iterator[RenderableType]:
    yield table("", _COLUMNS, map(_row, actions)) if actions else plain("No actions.")


def _row(action: Document) -> Sequence[Any]:
    outcome, ended = action["state"], has_ended(action)
    style = "green" if outcome == "done" else "red" if ended else ""
    freed = action["freed_bytes"] if action["action"] in _FREEING else None
    return (
        action["id"][:_SHOWN_ID],
        _time(action),
        COMMAND_NAMES.get(action["action"], action["action"]),
        _target(action["target"]),
        caller_text(action["requested_by"]),
        plain(outcome, style),
        human_bytes(freed),
        human_bytes(action["still_free_bytes"]),
    )


def _lines(action: Document, note: str = "") -> Iterator[RenderableType]:
    """Yield what was requested, by whom and why, the results, and a note."""
    name = COMMAND_NAMES.get(action["action"], action["action"])
    dry_run = ", a dry run" if action["dry_run"] else ""
    mode = f", in mode {action['mode']}" if action["mode"] not in ("auto", "now") else ""
    reason = f": {action['reason']}" if action["reason"] else ""
    yield plain(f"Action {action['id']}: {name} of {_target(action['target'])}{mode}{dry_run}")
    yield plain(f"Requested at {_time(action)} by {action['requested_by']}{reason}")
    yield from action_tables(action)
    if note:
        yield plain(note)


def _time(action: Document) -> str:
    return local_time(datetime.fromisoformat(action["created"].replace("Z", "+00:00")).timestamp(), time.time())


def _target(target: Document) -> str:
    """Return a target for people: `llm-pretrain rank 0`, `GPU 0,1`, `all`."""
    words = {"workload": "", "gpu": "GPU ", "uuid": "", "rank": "rank ", "user": "user ", "pid": "pid "}
    given = {name: value if isinstance(value, list) else [value] for name, value in target.items() if name in words}
    return " ".join(f"{words[name]}{','.join(map(str, given[name]))}" for name in words if name in given) or "all"
