"""The options of an action, and the request that the exporter's API takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.request import (
    DEFAULT_DEADLINE_SECONDS,
    SELECTORS,
    ActionRequest,
    Target,
    invalid_fields,
    mode_for,
)
from gpumem_exporter.cli.options import comma_separated

__all__ = [
    "ANSWER_GRACE_SECONDS",
    "SETTLE_SECONDS",
    "ClearOptions",
    "ClearTargetOptions",
    "FractionOptions",
    "RequestOptions",
    "SelectorOptions",
    "TargetOptions",
    "TerminateOptions",
    "TimedOptions",
    "checked",
    "with_settling",
]

ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline an action that started in time may still run."""

SETTLE_SECONDS = 10.0
"""The settling time of a clear on a terminal."""

_OPTIONS = {"deadline_seconds": "--deadline", "settle_seconds": "--settle", "fraction": "F", "collect_garbage": "--gc"}
"""The options whose names differ from the fields of a request."""


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """Return a request; one without a target is checked as if it had every process.

    Raises:
        ConfigurationError: a value is invalid, or options contradict each other.
    """
    target = Target(**document.get("target", {"all": True}))
    for invalid in invalid_fields(ActionRequest(**{**document, "target": target})):
        name = invalid.field.removeprefix("target.")
        option = _OPTIONS.get(name, f"--{name}")
        raise ConfigurationError(f"invalid {option} {invalid.value}: expected {invalid.expected}")
    return document


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of every action; the fields have the names of a request."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen. Change nothing.")] = False
    deadline_seconds: Annotated[
        float,
        typer.Option(
            "--deadline", metavar="SECONDS", help="A process that has not started the action by then does not run it."
        ),
    ] = DEFAULT_DEADLINE_SECONDS
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded in the audit log.")] = ""

    def request(self, action: str) -> dict[str, Any]:
        """Return the request without its target."""
        return {"action": action, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class TimedOptions(RequestOptions):
    """The options of an action that a process itself performs."""

    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="When the process acts. now: at once, on the reporter's thread. step: in the training thread, at the "
            "end of a step. idle: while no step runs and nothing is allocated. Default: now; step with --group.",
        ),
    ] = None
    group: Annotated[
        bool, typer.Option("--group", help="All ranks of the workload act after the same step, or none does.")
    ] = False

    def request(self, action: str) -> dict[str, Any]:
        """Return the request without its target."""
        return {**super().request(action), "mode": mode_for(self.mode, group=self.group)}


_Forced = Annotated[
    bool,
    typer.Option("--force", help="Do not wait for an inference engine that starts on the GPU; its start may fail."),
]


@dataclass(frozen=True, kw_only=True)
class TerminateOptions(RequestOptions):
    """The options of `terminate`."""

    force: _Forced = False


@dataclass(frozen=True, kw_only=True)
class ClearOptions(TimedOptions):
    """The options of `clear`."""

    force: _Forced = False
    collect_garbage: Annotated[
        bool,
        typer.Option("--gc", help="Run Python's garbage collector first, which also runs finalizers of user code."),
    ] = False
    settle_seconds: Annotated[
        float | None,
        typer.Option(
            "--settle",
            metavar="SECONDS",
            help="Measure after this time how much of the freed memory is still free; 0 does not. Default: 10 on a "
            "terminal, otherwise 0.",
        ),
    ] = None

    def request(self, action: str) -> dict[str, Any]:
        """Return the request without its target."""
        request = super().request(action)
        if not self.settle_seconds:
            del request["settle_seconds"]
        return request


def with_settling(options: RequestOptions, *, on_terminal: bool) -> RequestOptions:
    """Return the options with the default settling time of a clear on a terminal, if none is given."""
    if on_terminal and isinstance(options, ClearOptions) and options.settle_seconds is None and not options.dry_run:
        return replace(options, settle_seconds=SETTLE_SECONDS)
    return options


@dataclass(frozen=True, kw_only=True)
class FractionOptions(TimedOptions):
    """The argument and the options of `fraction`."""

    fraction: Annotated[float, typer.Argument(metavar="F", help="Share of each device's memory: over 0, at most 1.")]
    force: Annotated[
        bool,
        typer.Option("--force", help="Cap also a process that has reserved more. Its next new segment fails."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SelectorOptions:
    """The processes that a command acts on or shows.

    Each option that selects processes is repeatable and takes a list: `--gpu 0 --gpu 1` is `--gpu 0,1`.
    """

    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="INDEX", help="Processes on these devices: 0, or 0:1 for MIG.")
    ] = None
    uuid: Annotated[
        list[str] | None, typer.Option("--uuid", metavar="UUID", help="Processes on these devices: GPU-… or MIG-….")
    ] = None
    pid: Annotated[
        list[str] | None, typer.Option("--pid", metavar="PID", help="These processes, as `info` lists them.")
    ] = None
    workload: Annotated[
        list[str] | None, typer.Option("--workload", metavar="NAME", help="Processes of these workloads.")
    ] = None
    rank: Annotated[list[str] | None, typer.Option("--rank", metavar="RANK", help="Processes of these ranks.")] = None
    user: Annotated[
        list[str] | None, typer.Option("--user", metavar="USER", help="Processes of these users: names or uids.")
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Every process; an action reaches those that report.")] = (
        False
    )

    def selection(self) -> Target:
        """Return the selected processes. A target without a field selects every process.

        Raises:
            ConfigurationError: a value is invalid, or `--all` contradicts another option.
        """
        given: dict[str, Any] = {
            name: comma_separated(values) for name in SELECTORS if (values := getattr(self, name)) is not None
        }
        if self.everything and given:
            names = ", ".join(f"--{name}" for name in given)
            raise ConfigurationError(f"--all selects every process; leave out --all or {names}")
        checked({"action": "empty_cache", **({"target": given} if given else {})})
        return Target(**given)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(SelectorOptions):
    """The processes of one exporter that act, and how long the command waits."""

    wait_seconds: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", help="How long to wait for the result; 0 does not wait. Default: to the end."
        ),
    ] = None

    @property
    def asks_first(self) -> bool:
        """Whether the command asks a person before it acts."""
        return False

    def target(self) -> dict[str, Any]:
        """Return the target as the API takes it.

        Raises:
            ConfigurationError: there is no target, or an option is invalid.
        """
        if self.wait_seconds is not None and not 0 <= self.wait_seconds < float("inf"):
            raise ConfigurationError(f"--wait {self.wait_seconds:g}: must be 0 or more seconds")
        chosen = self.selection().document()
        if not self.everything and not chosen:
            raise ConfigurationError("no target; give --gpu, --uuid, --pid, --workload, --rank, --user or --all")
        return {"all": True} if self.everything else chosen


@dataclass(frozen=True, kw_only=True)
class ClearTargetOptions(TargetOptions):
    """The target of `clear`."""

    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before `clear --all` on a terminal, and clear at once.")
    ] = False

    @property
    def asks_first(self) -> bool:
        """Whether the command asks a person before it acts."""
        return self.everything and not self.yes
