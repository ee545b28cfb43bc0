"""The commands that request an action, from one table; `fleet` has the same ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.cli.action_options import (
    ANSWER_GRACE_SECONDS,
    ClearOptions,
    ClearTargetOptions,
    FractionOptions,
    RequestOptions,
    TargetOptions,
    TerminateOptions,
    TimedOptions,
    checked,
    with_settling,
)
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.clear_question import can_ask, confirmed, engine_waits, waits_for
from gpumem_exporter.cli.clear_requests import ExpectedClear, joined, send_all
from gpumem_exporter.cli.options import ConnectionOptions, command_from_options
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.terminal import print_json
from gpumem_exporter.cli.rights import read_rights, rights_line

__all__ = ["ACTION_COMMANDS", "ActionCommand", "build", "exit_code"]


@dataclass(frozen=True, slots=True)
class ActionCommand:
    """A command that requests an action."""

    name: str
    action: str
    summary: str
    description: str
    examples: str
    options: type[RequestOptions] = TimedOptions
    target: type[TargetOptions] = TargetOptions


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
  gpumem-exporter clear --workload llm-pretrain --group    # all ranks, after the same step
  gpumem-exporter clear --workload notebook --mode idle --deadline 600
  gpumem-exporter clear --pid 4711 --settle 10 --json | jq .still_free_bytes
""",
        ClearOptions,
        ClearTargetOptions,
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
        "Each selected process runs torch.cuda.set_per_process_memory_fraction(F) for the selected devices. This "
        "frees nothing. An allocation that would reserve more than the cap raises an out-of-memory error. The cap "
        "does not count CUDA contexts, NCCL and other libraries.",
        """\
  gpumem-exporter fraction 0.5 --workload notebook
  gpumem-exporter fraction 1 --pid 4711               # remove the cap
""",
        FractionOptions,
    ),
    ActionCommand(
        "terminate",
        "terminate",
        "Terminate processes: SIGTERM, and SIGKILL after ten seconds.",
        "The process must report or be on a device, and `serve --action.allow` must include terminate. The exporter "
        "sends the signals, so it needs the right to signal the process. Only root, the exporter's user, and clients "
        "with the token of --action.token-file may terminate processes.",
        """\
  gpumem-exporter terminate --pid 4711 --dry-run
  gpumem-exporter terminate --pid 4711 --reason "left behind by job 17"
""",
        TerminateOptions,
    ),
)


def build(name: str) -> typer.Typer:
    """Return the command."""
    command = next(command for command in ACTION_COMMANDS if command.name == name)

    def run(target: TargetOptions, request: RequestOptions, connection: ConnectionOptions) -> int:
        return _run(command.action, target, request, connection)

    return command_from_options(
        name,
        run,
        *(command.target, command.options, ConnectionOptions),
        description=f"{command.summary}\n\n{command.description}",
        epilog=f"\b\nExamples:\n{command.examples}",
    )


def _run(action: str, target: TargetOptions, request: RequestOptions, connection: ConnectionOptions) -> int:
    """Request an action, print its results, and return the exit code."""
    on_terminal = sys.stdout.isatty() and not connection.as_json
    options = with_settling(request, on_terminal=on_terminal)
    body = checked({**options.request(action), "target": target.target()})
    waits = _EngineWaits(silent=connection.as_json)
    with ExporterApi(connection.urls(), token=connection.token()) as api:
        if target.asks_first and not request.dry_run and not connection.as_json and can_ask():
            expected = confirmed(api, body, free_mode=_mode_is_free(request))
            if expected is None:
                return FAILED
            wait_seconds = _wait_seconds(target, *expected.requests)
            with _waiting_shown(expected):
                documents = send_all(api, expected, wait_seconds=wait_seconds, observe=waits.show)
        else:
            wait_seconds = _wait_seconds(target, body)
            documents = [api.act(body, wait_seconds=wait_seconds, observe=waits.show)]
        if wait_seconds > 0:
            documents = [_settled(api, each, progress=on_terminal) if _settles(each) else each for each in documents]
        document = joined(documents)
        rights = {} if connection.as_json else read_rights(api)
    if connection.as_json:
        print_json(document)
    else:
        from gpumem_exporter.cli.render.action_tables import action_tables
        from gpumem_exporter.cli.render.terminal import open_console, show

        show(open_console(), action_tables(document, dry_run=request.dry_run))
        if rights.get("rights") == "own":
            print(rights_line(rights, "clear" if action == "empty_cache" else "act on"))
    return exit_code(document, waited=wait_seconds > 0)


def _wait_seconds(target: TargetOptions, *requests: Mapping[str, Any]) -> float:
    if target.wait_seconds is not None:
        return target.wait_seconds
    return max(float(request["deadline_seconds"]) for request in requests) + ANSWER_GRACE_SECONDS


@contextlib.contextmanager
def _waiting_shown(expected: ExpectedClear) -> Iterator[None]:
    """Show what a clear waits for, meanwhile."""
    if not expected.waiting:
        yield
        return
    from gpumem_exporter.cli.render.terminal import open_console, plain

    with open_console().status(plain(f"{waits_for(expected)}. Ctrl-C cancels.")):
        yield


class _EngineWaits:
    """Prints to stderr for which inference engines an action waits, each once."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._shown: set[str] = set()

    def show(self, document: Mapping[str, Any]) -> None:
        """Print the engines that were not printed before."""
        for sentence in () if self._silent else engine_waits(document):
            if sentence not in self._shown:
                self._shown.add(sentence)
                print(f"{sentence} --force does not wait.", file=sys.stderr)


def _settles(document: Mapping[str, Any]) -> bool:
    return bool(document.get("settling") and document.get("freed_bytes"))


def _settled(api: ExporterApi, document: dict[str, Any], *, progress: bool) -> dict[str, Any]:
    """Wait until it is known how much of the freed memory stays free. Ctrl-C ends the wait."""
    from gpumem_exporter.cli.render.terminal import open_console

    settle_seconds, freed = document["settle_seconds"], human_bytes(document["freed_bytes"])
    status = open_console().status("") if progress else None

    def show_progress(elapsed_seconds: float) -> None:
        if status is not None:
            seconds = f"{min(elapsed_seconds, settle_seconds):.0f} of {settle_seconds:g} s"
            status.update(f"Freed {freed}. Waiting to see how much of it stays free: {seconds}")

    wait_seconds = settle_seconds + ANSWER_GRACE_SECONDS
    try:
        with status or contextlib.nullcontext():
            return api.wait_until_settled(document, wait_seconds=wait_seconds, observe=show_progress)
    except KeyboardInterrupt:
        return document


def _mode_is_free(request: RequestOptions) -> bool:
    """Whether the command may choose a mode for each process, because neither `--mode` nor `--group` is given."""
    return isinstance(request, TimedOptions) and request.mode is None and not request.group


def exit_code(document: Mapping[str, Any], *, waited: bool) -> int:
    """Return 0 if every result is done. An action that was not waited for succeeds when the exporter accepts it."""
    outcomes = [result["outcome"] for result in document.get("results") or () if result.get("outcome")]
    if any(outcome != "done" for outcome in outcomes):
        return FAILED
    state = document.get("state")
    accepted = not waited and state in ("queued", "running")
    return 0 if state == "done" or accepted else FAILED
