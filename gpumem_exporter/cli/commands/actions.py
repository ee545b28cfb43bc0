"""The commands that request an action, from one table; `fleet` has the same ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.cli.api_client import ExporterApi, read_rights, rights_line
from gpumem_exporter.cli.clear import act, can_ask, confirmed
from gpumem_exporter.cli.options import (
    action_options,
    action_request,
    api_options,
    option_group,
    pop_action_target,
    target_options,
    yes_to_terminate,
)
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.terminal import print_result
from gpumem_exporter.cli.termination import confirmed_termination, must_ask
from gpumem_exporter.cli.usage import is_quiet, note


@dataclass(frozen=True, slots=True)
class ActionCommand:
    """A command that requests an action."""

    name: str
    action: str
    summary: str
    description: str
    examples: str


ACTION_COMMANDS = (
    ActionCommand(
        "clear",
        "empty_cache",
        "Release cached memory to the driver.",
        "Each selected process runs torch.cuda.empty_cache(). No tensor is touched. A process clears all of its "
        "devices: PyTorch has no other way. The next allocations take memory from the driver again, which costs some "
        "milliseconds once.",
        """\
  gpumem-exporter clear --all --dry-run               # how much a clear would free
  gpumem-exporter clear --gpu 0,1                     # as --gpu 0 --gpu 1
  gpumem-exporter clear --workload notebook --gc --reason "make room for the release run"
  gpumem-exporter clear --workload llm-pretrain       # all ranks, after the same step
  gpumem-exporter clear --workload notebook --mode idle --deadline 600
  gpumem-exporter clear --pid 4711 --settle 10 --json | jq .still_free_bytes
""",
    ),
    ActionCommand(
        "gc",
        "collect_garbage",
        "Run Python's garbage collector in processes.",
        "It frees tensors in reference cycles, and runs finalizers of user code. The memory stays in the allocator's "
        "cache; `clear --gc` also releases it to the driver.",
        """\
  gpumem-exporter gc --pid 4711
  gpumem-exporter gc --workload notebook --reason "tensors in reference cycles"
  gpumem-exporter clear --workload notebook --gc      # collect, then release the cache
""",
    ),
    ActionCommand(
        "reset-peak",
        "reset_peak",
        "Reset the peak memory statistics of processes.",
        "Each selected process runs torch.cuda.reset_peak_memory_stats() for the selected devices. This also resets "
        "what torch.cuda.max_memory_allocated() returns to user code.",
        """\
  gpumem-exporter reset-peak --all
  gpumem-exporter reset-peak --workload llm-pretrain --rank 0 --reason "after the warm-up"
""",
    ),
    ActionCommand(
        "snapshot",
        "snapshot",
        "Write memory snapshots of processes.",
        "Each selected process writes PyTorch's own pickle, for https://pytorch.org/memory_viz, into its "
        "GPUMEM_SNAPSHOT_DIR, by default a folder of its user in the temporary directory. The result has the path. "
        "If torch.cuda.memory._record_memory_history() is active in the process, the snapshot also has the code that "
        "allocated each block.",
        """\
  gpumem-exporter snapshot --pid 4711
  gpumem-exporter snapshot --workload llm-pretrain --rank 0 --mode step
""",
    ),
    ActionCommand(
        "fraction",
        "set_memory_fraction",
        "Cap the memory that processes may reserve.",
        "Each selected process runs torch.cuda.set_per_process_memory_fraction(F) for the selected devices. F is the "
        "share of each device's memory, over 0 and at most 1. This "
        "frees nothing. An allocation that would reserve more than the cap raises an out-of-memory error. The cap "
        "does not count CUDA contexts, NCCL and other libraries.",
        """\
  gpumem-exporter fraction 0.5 --workload notebook
  gpumem-exporter fraction 1 --pid 4711               # remove the cap
""",
    ),
    ActionCommand(
        "sleep",
        "release_memory",
        "Let vLLM release its memory.",
        "The vLLM of each selected process offloads its weights to the host and drops its key-value cache, as a "
        "whole, on all its GPUs. Requests that arrive while it sleeps wait until it wakes. "
        "An engine that has requests is refused, unless --wait-idle or --force is given. What is freed is "
        "what the driver no longer lists, and the rest is what stays resident: CUDA graphs, context, NCCL. "
        "`serve --action.allow` must include release_memory.",
        """\
  gpumem-exporter sleep --workload chat --dry-run
  gpumem-exporter sleep --workload chat --wait-idle 30
  gpumem-exporter sleep --workload chat --keep weights     # only the key-value cache: wakes faster
""",
    ),
    ActionCommand(
        "wake",
        "resume_memory",
        "Let vLLM take its memory again.",
        "The vLLM of each selected process takes the memory again that it released, and serves. It is refused if a "
        "GPU lacks the memory. `serve --action.allow` must include resume_memory.",
        """\
  gpumem-exporter wake --workload chat --dry-run
  gpumem-exporter wake --workload chat
""",
    ),
    ActionCommand(
        "terminate",
        "terminate",
        "Terminate processes: SIGTERM, and SIGKILL after --grace.",
        "The process must report or be on a device, and `serve --action.allow` must include terminate. The exporter "
        "sends the signals, so it needs the right to signal the process. Only root, the exporter's user, and clients "
        "with the token of --action.token-file may terminate processes. On a terminal, the command first shows what it "
        "would end, and asks. Without a terminal, and with --json, it needs --yes.",
        """\
  gpumem-exporter terminate --orphans --dry-run       # what launchers and servers have left behind
  gpumem-exporter terminate --orphans --yes           # without a question, as for cron
  gpumem-exporter terminate --pid 4711 --grace 120 --reason "left behind by job 17"
""",
    ),
)


_yes_options = {
    "clear": click.option("--yes", is_flag=True, help="Do not ask before `clear --all` on a terminal."),
    "terminate": yes_to_terminate,
}
_wait_option = click.option(
    "--wait",
    "wait_seconds",
    type=float,
    metavar="SECONDS",
    help="How long to wait for the result; 0 does not wait. Default: to the end.",
)


def _click_command(command: ActionCommand) -> click.Command:
    own = (_yes_options[command.name],) if command.name in _yes_options else ()

    @click.command(
        command.name,
        help=f"{command.summary}\n\n{command.description}",
        epilog=f"\b\nExamples:\n{command.examples}",
    )
    @option_group(*own, _wait_option, target_options, action_options(command.action), api_options)
    def run(api: ExporterApi, **values: Any) -> int:
        return _run(api, command.action, **values)

    return run


clear, gc, reset_peak, snapshot, fraction, sleep, wake, terminate = map(_click_command, ACTION_COMMANDS)


def _run(
    api: ExporterApi, action: str, *, as_json: bool, wait_seconds: float | None, yes: bool = False, **values: Any
) -> int:
    """Request an action, print its results, and return the exit code."""
    on_terminal = sys.stdout.isatty() and not as_json
    target = pop_action_target(values)
    if wait_seconds is not None and not 0 <= wait_seconds < float("inf"):
        raise ConfigurationError(f"--wait {wait_seconds:g}: must be 0 or more seconds")
    body = {**action_request(action, values, on_terminal=on_terminal), "target": target}
    able = not (yes or as_json) and can_ask()
    asks = action == "empty_cache" and target == {"all": True} and able and not body["dry_run"]
    asks_to_end = must_ask(body, yes=yes, as_json=as_json)
    api.find_addresses()  # kubectl takes seconds, which are no part of --wait
    if asks and not confirmed(api.submit({**body, "dry_run": True})):
        return FAILED
    requested = confirmed_termination(api, body) if asks_to_end else body
    if requested is None:
        return FAILED
    document = act(api, requested, wait_seconds=wait_seconds, say=(lambda _: None) if as_json else _print_new())
    print_result(document, action_tables(document), as_json=as_json)
    # The table of a user with rights to its own processes lacks the processes of others.
    if not as_json and not is_quiet() and (rights := read_rights(api)).get("rights") == "own":
        print(rights_line(rights, "clear" if action == "empty_cache" else "act on"))
    return exit_code(document, waited=wait_seconds != 0)


def _print_new() -> Callable[[str], None]:
    """Return a function that prints a text to stderr, each text once."""
    printed: set[str] = set()

    def print_new(text: str) -> None:
        if text not in printed:
            printed.add(text)
            note(text)

    return print_new


def exit_code(document: Mapping[str, Any], *, waited: bool) -> int:
    """Return 0 if every result is done. An action that was not waited for succeeds when the exporter accepts it."""
    if not all(is_done(result["outcome"]) for result in document["results"]):
        return FAILED
    state = document.get("state")
    accepted = not waited and state in ("queued", "running")
    return 0 if state == "done" or accepted else FAILED
