"""What the commands that act share: the target, the request, what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.main import FAILED
from gpumem_exporter.cli.options import ConnectionOptions
from gpumem_exporter.cli.render.terminal import print_json
from gpumem_exporter.errors import ConfigurationError, ExporterAnswerError
from gpumem_exporter.wire.protocol import MODES

__all__ = [
    "ANSWER_GRACE_SECONDS",
    "ActionOptions",
    "RequestOptions",
    "TimedOptions",
    "TimedRequest",
    "ask",
    "exit_code",
    "request_body",
]

ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline an action that began in time may still end."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What an action is asked with, whomever it means."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen and touch nothing.")] = False
    deadline_seconds: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", help="What has not begun by then is not run."),
    ] = 30.0
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the audit log.")] = ""

    def details(self) -> dict[str, Any]:
        """What this command's request has beyond what every request has.

        Raises:
            ConfigurationError: options contradict each other.
        """
        return {}

    def request(self, action: str) -> dict[str, Any]:
        """The action as the API takes it, but for its target and for how long to wait.

        Raises:
            ConfigurationError: options contradict each other, or the deadline is no time.
        """
        if not 0 < self.deadline_seconds < float("inf"):
            raise ConfigurationError(f"--deadline {self.deadline_seconds:g}: must be seconds over 0")
        return {
            "action": action,
            **self.details(),
            "deadline_seconds": self.deadline_seconds,
            "dry_run": self.dry_run,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class TimedRequest(RequestOptions):
    """When an action runs in a process."""

    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="now: at once, on the reporter's thread. step: in the training thread, at the end of a step. idle: "
            "once no step runs and nothing is allocated. Default: now, and step for a group.",
        ),
    ] = None
    group: Annotated[
        bool, typer.Option("--group", help="Every rank of the workload, after the same step; all of them or none.")
    ] = False

    def details(self) -> dict[str, Any]:
        """Mode and group."""
        if self.mode not in (None, *MODES):
            raise ConfigurationError(f"--mode {self.mode}: must be {', '.join(MODES)}")
        if self.group and self.mode not in (None, "step"):
            raise ConfigurationError(f"--group acts at the end of a step; leave out --mode {self.mode}")
        return {"mode": self.mode or ("step" if self.group else "now"), "group": self.group}


@dataclass(frozen=True, kw_only=True)
class ActionOptions(RequestOptions, ConnectionOptions):
    """Whom an action means, and how long to wait for it."""

    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="INDEX", help="Processes on this device: 0, or 0:1 for MIG.")
    ] = None
    uuid: Annotated[
        str | None, typer.Option("--uuid", metavar="UUID", help="Processes on this device: GPU-… or MIG-….")
    ] = None
    pid: Annotated[str | None, typer.Option("--pid", metavar="PID", help="This process, as `info` lists it.")] = None
    workload: Annotated[str | None, typer.Option("--workload", metavar="NAME", help="This workload's processes.")] = (
        None
    )
    rank: Annotated[str | None, typer.Option("--rank", metavar="RANK", help="Processes of this rank.")] = None
    everything: Annotated[bool, typer.Option("--all", help="Every process that reports.")] = False
    wait_seconds: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", help="How long to wait for the end; 0 only asks. Default: until it has ended."
        ),
    ] = None

    def target(self) -> dict[str, Any]:
        """The target as the API takes it.

        Raises:
            ConfigurationError: nothing is chosen, `--all` stands beside something narrower, or the pid is none.
        """
        pid = None if self.pid is None else _pid(self.pid)
        given = {"gpu": self.gpu, "uuid": self.uuid, "pid": pid, "workload": self.workload, "rank": self.rank}
        chosen = {name: value for name, value in given.items() if value is not None}
        if self.everything and chosen:
            names = ", ".join(f"--{name}" for name in chosen)
            raise ConfigurationError(f"--all means every process that reports; leave out either it or {names}")
        if not self.everything and not chosen:
            raise ConfigurationError("no target; choose with --gpu, --uuid, --pid, --workload, --rank, or say --all")
        return {"all": True} if self.everything else chosen


@dataclass(frozen=True, kw_only=True)
class TimedOptions(TimedRequest, ActionOptions):
    """Whom an action means, and when it runs there."""


def _pid(text: str) -> int | str:
    """A process as the API has it: a number, or a text where two processes have the same pid in their namespaces."""
    number, at, namespace = text.partition("@")
    parts = (number, namespace) if at else (number,)
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--pid {text}: must be an integer of 1 or more, or a text such as 1@4026532007")
    return text if at else int(number)


def request_body(action: str, options: ActionOptions) -> dict[str, Any]:
    """The action as the API takes it, but for how long to wait.

    Raises:
        ConfigurationError: no or a contradictory target, or a time that is none.
    """
    if options.wait_seconds is not None and not 0 <= options.wait_seconds < float("inf"):
        raise ConfigurationError(f"--wait {options.wait_seconds:g}: must be 0 or more seconds")
    return {**options.request(action), "target": options.target()}


def ask(action: str, options: ActionOptions) -> int:
    """Ask for an action, print what became of it, and return the exit code.

    Raises:
        ConfigurationError: as `request_body`, or the exporter finds a value wrong.
        ExporterError: it could not be asked for, or was refused.
    """
    body = request_body(action, options)
    wait = options.wait_seconds
    wait_seconds = options.deadline_seconds + ANSWER_GRACE_SECONDS if wait is None else wait
    try:
        with ExporterApi(options.urls(), token=options.token()) as api:
            answer = api.act(body, wait_seconds=wait_seconds)
    except ExporterAnswerError as error:
        if error.status == 422:
            raise ConfigurationError(error.detail) from error
        raise
    if options.as_json:
        print_json(answer)
    else:
        from gpumem_exporter.cli.render.action_tables import action_tables
        from gpumem_exporter.cli.render.terminal import open_console, show

        show(open_console(), action_tables(answer, dry_run=options.dry_run))
    return exit_code(answer, waited=wait != 0)


def exit_code(answer: Mapping[str, Any], *, waited: bool) -> int:
    """0 when every result is done. What was not waited for counts as done when it was taken."""
    if any(result.get("outcome") != "done" for result in _finished(answer)):
        return FAILED
    if answer.get("state") == "done":
        return 0
    return 0 if answer.get("state") in ("queued", "running") and not waited else FAILED


def _finished(answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [result for result in answer.get("results") or () if result.get("outcome")]
