"""The commands that change something: an action, from its declaration, and what the exporter does with NVML.

`fleet` has the same actions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from gpumem_exporter.actions.kinds import KINDS, ActionKind, is_done
from gpumem_exporter.cli.action_dialog import act, confirmed, needs_yes
from gpumem_exporter.cli.api_client import ExporterApi, rights_line
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
from gpumem_exporter.cli.program import FAILED, one_line
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.terminal import plain, print_result
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
_RELEASE_EXAMPLES = """\b
Examples:
  gpumem-exporter release-nvml --reason "driver upgrade"
  gpumem-exporter release-nvml && nvidia-smi -i 0 -mig 1 && gpumem-exporter attach-nvml
"""
_ATTACH_EXAMPLES = """\b
Examples:
  gpumem-exporter attach-nvml
  gpumem-exporter attach-nvml --url http://gpu-node-7:9844 --reason "upgrade done"
"""

_nvml_options = option_group(
    click.option(
        *("--wait", "wait_seconds"),
        type=Seconds(0, 60),
        metavar="SECONDS",
        default=10.0,
        show_default=True,
        help="How long to wait; 0 does not wait.",
    ),
    click.option("--reason", metavar="TEXT", default="", help="Recorded in the audit log."),
    api_options,
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
        if not as_json and not is_quiet() and (rights := api.rights()).get("rights") == "own":
            print(rights_line(rights, "clear" if action == "empty_cache" else "act on"))
        return exit_code(document, waited=wait_seconds != 0)

    return run


def exit_code(document: Mapping[str, Any], *, waited: bool) -> int:
    """Return 0 if every result is done. An action that was not waited for succeeds when the exporter accepts it."""
    accepted = ("done",) if waited else ("done", "queued", "running")
    done = all(is_done(result["outcome"]) for result in document["results"])
    return 0 if done and document.get("state") in accepted else FAILED


@click.command(epilog=_RELEASE_EXAMPLES)
@_nvml_options
def release_nvml(api: ExporterApi, as_json: bool, **body: Any) -> int:
    """Release NVML for maintenance of the driver.

    The exporter shuts NVML down and unloads its library, so that the driver can be unloaded or a GPU reset. The
    exporter keeps running, and processes keep reporting. Device metrics are absent until attach-nvml or a restart of
    the exporter. Jobs on the GPUs are not touched: they keep the driver in use.
    """
    answer = api.post("/api/v1/nvml/release", body, hold_seconds=body["wait_seconds"])
    open_files, released = answer.get("held") or (), answer.get("state") == "released"
    text = "NVML is released. Run attach-nvml to attach it again."
    if not released:
        text = "The driver has not answered yet. The exporter releases NVML as soon as it does."
    elif open_files:
        text = f"NVML is shut down, but the exporter still has {one_line(', '.join(map(str, open_files)))} open."
    print_result(answer, [plain(text)], as_json=as_json)
    return 0 if (released or body["wait_seconds"] == 0) and not open_files else FAILED


@click.command(epilog=_ATTACH_EXAMPLES)
@_nvml_options
def attach_nvml(api: ExporterApi, as_json: bool, **body: Any) -> int:
    """Attach NVML again after release-nvml.

    The exporter tries the driver at once. If the driver does not answer yet, the exporter attaches as soon as it does.
    """
    answer = api.post("/api/v1/nvml/attach", body, hold_seconds=body["wait_seconds"])
    state = answer.get("state")
    text = "NVML is attached. The exporter reads the driver again."
    if state != "attached":
        error = one_line(str(answer.get("error") or "no answer yet"))
        text = f"The driver does not answer ({error}). The exporter attaches as soon as it does."
    print_result(answer, [plain(text)], as_json=as_json)
    return 0 if state == "attached" or (state == "attaching" and body["wait_seconds"] == 0) else FAILED
