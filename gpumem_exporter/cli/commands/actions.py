"""The commands that request an action, from the declarations of the actions; `fleet` has the same ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from gpumem_exporter.actions.kinds import KINDS, ActionKind, is_done
from gpumem_exporter.cli.action_dialog import act, confirmed, needs_yes
from gpumem_exporter.cli.api_client import ExporterApi, read_rights, rights_line
from gpumem_exporter.cli.options import (
    Seconds,
    action_options,
    action_request,
    api_options,
    option_group,
    pop_target,
    target_options,
    yes_to_terminate,
)
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.terminal import print_result
from gpumem_exporter.cli.usage import is_quiet, note

_yes_options = {
    "clear": click.option("--yes", is_flag=True, help="Do not ask before `clear --all` on a terminal."),
    "terminate": yes_to_terminate,
}
_wait_option = click.option(
    *("--wait", "wait_seconds"),
    type=Seconds(0),
    metavar="SECONDS",
    help="How long to wait for the result; 0 does not wait. Default: to the end.",
)


def __getattr__(name: str) -> click.Command:
    """Return the command of a name of `COMMANDS`, with underscores."""
    for action, kind in KINDS.items():
        if kind.command == name.replace("_", "-"):
            return _click_command(action, kind)
    raise AttributeError(name)


def _click_command(action: str, kind: ActionKind) -> click.Command:
    own = (_yes_options[kind.command],) if kind.command in _yes_options else ()

    @click.command(
        kind.command,
        help=f"{kind.summary}\n\n{kind.description}",
        epilog=f"\b\nExamples:\n{kind.examples}",
    )
    @option_group(*own, _wait_option, target_options, action_options(action), api_options)
    def run(api: ExporterApi, *, as_json: bool, wait_seconds: float | None, yes: bool = False, **values: Any) -> int:
        target = pop_target(values, required=True).document()
        request = action_request(action, values, on_terminal=sys.stdout.isatty() and not as_json)
        body = {**request, "target": target}
        asks = needs_yes(body, yes=yes, as_json=as_json)
        api.find_addresses()  # kubectl takes seconds, in which Ctrl-C ends the command
        requested = confirmed(api, body) if asks else body
        if requested is None:
            return FAILED
        document = act(api, requested, wait_seconds=wait_seconds, say=(lambda _: None) if as_json else note)
        print_result(document, action_tables(document), as_json=as_json)
        # The table of a user with rights to its own processes lacks the processes of others.
        if not as_json and not is_quiet() and (rights := read_rights(api)).get("rights") == "own":
            print(rights_line(rights, "clear" if action == "empty_cache" else "act on"))
        return exit_code(document, waited=wait_seconds != 0)

    return run


def exit_code(document: Mapping[str, Any], *, waited: bool) -> int:
    """Return 0 if every result is done. An action that was not waited for succeeds when the exporter accepts it."""
    if not all(is_done(result["outcome"]) for result in document["results"]):
        return FAILED
    state = document.get("state")
    accepted = not waited and state in ("queued", "running")
    return 0 if state == "done" or accepted else FAILED
