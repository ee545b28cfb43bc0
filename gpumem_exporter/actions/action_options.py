"""The one declaration of an action's request: its fields, what they accept, and the actions that accept them.

The HTTP API, the command line, alerts and policies read their options from `OPTIONS` and `SELECTORS`, and check a
request with `invalid_fields`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

from gpumem_client.wire.protocol import ENGINE_ACTIONS, MAX_INTEGER, MAX_LABEL_LENGTH, MODES
from gpumem_exporter.actions.kinds import COMMAND_NAMES, KINDS
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.spelling import did_you_mean

ACTIONS = tuple(KINDS)
GROUP_IS_DEPRECATED = "group is deprecated: mode step acts on all ranks of a job together"
OUTSIDE_ACTIONS = tuple(action for action, kind in KINDS.items() if kind.outside)
"""The actions that reach also processes that only the driver lists, because the exporter itself can act."""
DEFAULT_ACTIONS = tuple(action for action in ACTIONS if action not in OUTSIDE_ACTIONS)
"""The actions that the exporter allows by default: they end no process and interrupt no service."""
DEFAULT_DEADLINE_SECONDS = 30.0
MAX_DEADLINE_SECONDS = 3600.0
"""The maximum of every option in seconds, except the search."""
MAX_REASON_LENGTH = 1000
ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline an action that started in time may still run."""
ENGINE_ANSWER_SECONDS = 180.0
"""The same for an engine, which may copy all of its weights between the device and the host."""

_MAX_VALUES = 1000
# The events of an action have its target, and an event has at most 64 KiB.
_MAX_TARGET_BYTES = 16 << 10
_MAX_PID = 2**31 - 1
_PID_EXPECTED = f"an integer from 1 to {_MAX_PID}, or a string such as 1@4026532007:1001"
# The action of each command.
_OF_COMMAND = {command: action for action, command in COMMAND_NAMES.items()}
_PID = re.compile(r"([1-9][0-9]{0,9})(@[0-9]{1,20}(:[0-9]{1,10}(:[0-9a-z.]{1,64})?)?)?")


# Dataclasses and not pydantic models, because every command of the terminal imports them, and the import of pydantic
# takes longer than most commands.
@dataclass(frozen=True, slots=True)
class RequestOption:
    """A field of a request, as the API, the command line, alerts and policies need it."""

    help: Mapping[str, str]
    """What the option does, by the action that accepts it."""
    flag: str = ""
    """On the command line; an argument has no leading `-`, and an option that is not there is empty."""
    metavar: str = ""
    kind: type = str
    """bool, int, float or str."""
    default: Any = None
    """None: there is no value, or the exporter chooses it."""
    terminal_default: Any = None
    """The default of a command on a terminal, except of a dry run; None if it is the same."""
    choices: tuple[str, ...] = ()
    over: float | None = None
    least: float | None = None
    most: float | None = None
    """The bounds of a number, or the greatest length of a text."""
    unit: str = ""
    """seconds or ratio, if a policy file may have the value with its unit."""

    @property
    def description(self) -> str:
        """The help texts of all actions."""
        return " ".join(dict.fromkeys(self.help.values()))

    @property
    def expected(self) -> str:
        """What the option accepts, whatever the action is."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return ", ".join(self.choices)
        if self.kind is str:
            return f"at most {self.most} characters"
        noun = "an integer" if self.kind is int else "a number of seconds" if self.unit == "seconds" else "a number"
        bounds = f"over {self.over} and at most" if self.least is None else f"from {self.least} to"
        return f"{noun} {bounds} {int(self.most or 0)}"

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type is valid, whatever the action is."""
        if value is None or self.kind is bool:
            return True
        if self.choices:
            return value in self.choices
        size = len(value) if self.kind is str else value
        # Every comparison with NaN is false.
        enough = size > self.over if self.over is not None else self.least is None or size >= self.least
        return enough and (self.most is None or size <= self.most)


_Given = str | int | Sequence[str | int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The processes and devices that a request selects.

    A field admits each of its values; an empty one admits everything. Different fields narrow each other, and
    `orphans` narrows all of them to the processes that a launcher has left behind. Each field but the flags is given as
    a value or several, and becomes a tuple of strings.
    """

    gpu: _Given = None
    uuid: _Given = None
    pid: _Given = None
    """Names of `core.naming`: "4711", or "1@4026532007:1001"."""
    workload: _Given = None
    rank: _Given = None
    user: _Given = None
    """The names or the uids of users."""
    orphans: bool = False
    all: bool = False

    def __post_init__(self) -> None:
        for name in SELECTORS:
            given = getattr(self, name)
            values = [] if given is None else [given] if isinstance(given, (str, int)) else given
            object.__setattr__(self, name, tuple(dict.fromkeys(map(str, values))))

    @property
    def given(self) -> Mapping[str, tuple[str, ...]]:
        """The fields that narrow the target, by selector."""
        return {name: values for name in SELECTORS if (values := getattr(self, name))}

    def admits(self, **values: Sequence[str]) -> bool:
        """Return whether a process with these values of some selectors has one of the target's values of each."""
        return not any(
            wanted and not any(value in wanted for value in values[name])
            for name in values
            for wanted in [getattr(self, name)]
        )

    def document(self) -> dict[str, Any]:
        """Return the target as JSON: several values are a list, and a pid is a number if possible."""
        given = {
            name: [json_pid(value) for value in values] if name == "pid" else list(values)
            for name, values in self.given.items()
        }
        selected = {name: values if len(values) > 1 else values[0] for name, values in given.items()}
        flags = {name: True for name in ("orphans", "all") if getattr(self, name)}
        return {**selected, **flags}

    def describe(self) -> str:
        """Return the target as a caller writes it: `gpu=0,1 workload=llm`."""
        words = [f"{name}={','.join(values)}" for name, values in self.given.items()]
        return " ".join([*words, *(["orphans"] if self.orphans else [])]) or "all"


SELECTORS: Mapping[str, RequestOption] = {
    name: RequestOption(dict.fromkeys(ACTIONS, help_), f"--{name}", metavar)
    for name, metavar, help_ in (
        ("gpu", "INDEX", "Processes on these devices, by NVML index: 0, or 0:1 for a MIG device."),
        ("uuid", "UUID", "Processes on these devices: GPU-… or MIG-…, as NVML spells them."),
        ("pid", "PID", "These processes, as `info` and the label `pid` name them."),
        ("workload", "NAME", "Processes of these workloads."),
        ("rank", "RANK", "Processes of these ranks."),
        ("user", "USER", "Processes of these users: names or uids."),
    )
}
"""The fields of a target that select processes. Each takes a value or several."""
ORPHANS = RequestOption(
    dict.fromkeys(ACTIONS, "Only orphans: processes that their launcher, server or container has left behind."),
    "--orphans",
    kind=bool,
    default=False,
)
"""The field of a target that narrows it further."""

_WITH_MODES = tuple(action for action in ACTIONS if action not in ("profile", *OUTSIDE_ACTIONS))
_FORCED_START = "Do not wait for an inference engine that starts on the GPU; its start may fail."


def _option(
    help_: str | Mapping[str, str],
    flag: str = "",
    metavar: str = "",
    *,
    kind: type = str,
    default: Any = None,
    **limits: Any,
) -> Any:
    """Return a field of `ActionRequest`. A help text alone is for every action."""
    texts = dict.fromkeys(ACTIONS, help_) if isinstance(help_, str) else help_
    option = RequestOption(texts, flag, metavar, kind=kind, default=default, **limits)
    return field(default=default, metadata={"option": option})


def _flag(help_: str | Mapping[str, str], flag: str) -> Any:
    return _option(help_, flag, kind=bool, default=False)


def _seconds(help_: str | Mapping[str, str], flag: str, **limits: Any) -> Any:
    known = {"default": 0.0, "least": 0, "most": MAX_DEADLINE_SECONDS, **limits}
    return _option(help_, flag, "SECONDS", kind=float, unit="seconds", **known)


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """A request for an action. Inside the exporter, it has passed `invalid_fields`."""

    action: str
    target: Target
    mode: str = _option(
        dict.fromkeys(
            _WITH_MODES,
            "When the process acts. auto: as the exporter chooses for its job. now: at once, on the reporter's thread. "
            "step: in the training thread, at the end of a step, with all ranks of its job. idle: while no step runs "
            "and nothing is allocated. Default: auto.",
        ),
        "--mode",
        "MODE",
        choices=("auto", *MODES),
    )
    group: bool = _flag(dict.fromkeys(_WITH_MODES, "Deprecated: the same as mode step."), "--group")
    at_step: int | None = _option(
        dict.fromkeys(_WITH_MODES, "In mode step, the step of all ranks. By default, the exporter chooses one."),
        kind=int,
        least=1,
        most=MAX_INTEGER,
    )
    collect_garbage: bool = _flag(
        {"empty_cache": "Run Python's garbage collector first, which also runs finalizers of user code."}, "--gc"
    )
    fraction: float | None = _option(
        {"set_memory_fraction": "Share of each device's memory: over 0, at most 1."},
        "F",
        kind=float,
        over=0,
        most=1,
        unit="ratio",
    )
    force: bool = _flag(
        {
            "empty_cache": _FORCED_START,
            "terminate": _FORCED_START,
            "set_memory_fraction": "Cap also a process that has reserved more. Its next new segment fails.",
            "release_memory": f"Abort the engine's requests. {_FORCED_START}",
            "resume_memory": f"Wake the engine also if the GPU lacks the memory. {_FORCED_START}",
            "profile": "Profile also a process that stands still for long to read its blocks and objects.",
        },
        "--force",
    )
    keep: str | None = _option(
        {"release_memory": "What stays on the GPU: weights. The engine then releases its key-value cache only."},
        "--keep",
        "COMPONENT",
        choices=("weights",),
    )
    wait_idle_seconds: float = _seconds(
        {"release_memory": "Wait for this time until the engine has no request. 0: refuse if it has requests."},
        "--wait-idle",
    )
    deadline_seconds: float = _seconds(
        "A process that has not started the action by then does not run it. Default: "
        f"{DEFAULT_DEADLINE_SECONDS:g}, and longer for a process that waits for the end of a long step.",
        "--deadline",
        default=None,
        over=0,
        least=None,
    )
    duration_seconds: float = _seconds(
        {
            "profile": "Record allocations for this time, for stacks and the highest moment; 0 shows without a "
            "recording what is allocated now."
        },
        "--duration",
    )
    grace_seconds: float = _seconds(
        {"terminate": "How long a process may take to exit after SIGTERM. Then SIGKILL ends it."},
        "--grace",
        default=30.0,  # as Slurm and Kubernetes have it: jobs that save their state on SIGTERM are made for it
    )
    search_seconds: float = _seconds(
        {
            "profile": "Search for this time for what refers to the tensors that are in no model, optimizer, cache or "
            "variable. The process gets at least half of the time."
        },
        "--search",
        most=10.0,  # the process sends no report meanwhile, and is silent after 15 s
    )
    settle_seconds: float = _seconds(
        dict.fromkeys(
            ("empty_cache", "release_memory"),
            "Measure after this time how much of the freed memory is still free; 0 does not.",
        ),
        "--settle",
        terminal_default=10.0,
    )
    dry_run: bool = _flag("Show what would happen. Change nothing.", "--dry-run")
    reason: str = _option("Recorded in the audit log.", "--reason", "TEXT", default="", most=MAX_REASON_LENGTH)
    free_deadline: bool = False
    """The request has no deadline: the exporter chooses one."""

    def __post_init__(self) -> None:
        if (not self.mode or self.mode == "auto") and self.action in ACTIONS:
            mode = "step" if self.group else "auto" if self.action in _WITH_MODES else "now"
            object.__setattr__(self, "mode", mode)
        if cast("float | None", self.deadline_seconds) is None:
            object.__setattr__(self, "deadline_seconds", DEFAULT_DEADLINE_SECONDS)
            object.__setattr__(self, "free_deadline", True)
        if self.wait_idle_seconds > self.deadline_seconds:
            object.__setattr__(self, "deadline_seconds", self.wait_idle_seconds)


OPTIONS: Mapping[str, RequestOption] = {
    each.name: each.metadata["option"] for each in fields(ActionRequest) if each.metadata
}
"""The fields of a request besides its action and its target."""


class InvalidField(NamedTuple):
    """A field of a request that is invalid."""

    field: str
    """The path as in the API: `target.pid`."""
    value: object
    advice: str
    """What is accepted, after the nearest accepted name."""

    @property
    def message(self) -> str:
        """The error without the field's name."""
        if self.value is None:
            return f"is missing: {self.advice}"
        shown = self.value[:64] if isinstance(self.value, str) else self.value
        return f"{shown!r} is invalid: {self.advice}"


def _invalid(field_: str, value: object, expected: str, known: Sequence[str] = ()) -> InvalidField:
    name = _OF_COMMAND.get(str(value), str(value)) if field_ == "action" else str(value)
    return InvalidField(field_, value, did_you_mean(name, known, f"expected {expected}"))


def longest_seconds(request: Mapping[str, Any]) -> float:
    """Return how long an action may take, without its settling time. The request is its JSON."""
    known = {name: value for name, value in request.items() if name in OPTIONS}
    asked, seconds = ActionRequest(request["action"], Target(), **known), ANSWER_GRACE_SECONDS
    if asked.action in ENGINE_ACTIONS:
        seconds = ENGINE_ANSWER_SECONDS
    elif asked.action == "terminate":
        seconds += asked.grace_seconds
    return asked.deadline_seconds + asked.duration_seconds + asked.search_seconds + seconds


def invalid_fields(request: ActionRequest) -> tuple[InvalidField, ...]:
    """Return what is invalid in a request whose fields have the right types; empty for a valid request."""
    return (*_invalid_target(request.target), *_invalid_options(request))


def _invalid_target(target: Target) -> Iterator[InvalidField]:
    given = target.given
    size = len(json.dumps(given))  # not the document, which reads pids as numbers: they may be too long
    if size > _MAX_TARGET_BYTES:
        yield _invalid("target", size, f"at most {_MAX_TARGET_BYTES} bytes of JSON")
    if not target.all and not target.orphans and not given:
        yield _invalid("target", {}, f"{', '.join(SELECTORS)}, orphans: true or all: true")
    if target.all and given:
        yield _invalid("target.all", True, f"no value beside {', '.join(given)}, because it selects every process")
    for name, values in given.items():
        if len(values) > _MAX_VALUES:
            yield _invalid(f"target.{name}", len(values), f"at most {_MAX_VALUES} values")
            continue
        # An empty workload or rank selects processes without one. Another empty name is usually an unset variable.
        least, expected = 0 if name in ("workload", "rank") else 1, _PID_EXPECTED
        if name != "pid":
            expected = f"{least} to {MAX_LABEL_LENGTH} characters"
        for value in values:
            number = _PID.fullmatch(value) if name == "pid" else None
            valid = int(number[1]) <= _MAX_PID if number else name != "pid" and least <= len(value) <= MAX_LABEL_LENGTH
            if not valid:
                yield _invalid(f"target.{name}", value, expected)
                break


def _invalid_options(request: ActionRequest) -> Iterator[InvalidField]:
    if request.action not in ACTIONS:
        yield _invalid("action", request.action, ", ".join(ACTIONS), ACTIONS)
    unset = {None, False, "now"}
    for name, option in OPTIONS.items():
        value = getattr(request, name)
        if not option.accepts(value):
            yield _invalid(name, value, option.expected, option.choices)
        elif request.action in ACTIONS and request.action not in option.help and value not in unset | {option.default}:
            accept = "accepts" if len(option.help) == 1 else "accept"
            no_value = f"no value, because only {', '.join(option.help)} {accept} it"
            only_now = f"now, because {request.action} has no other mode"
            yield _invalid(name, value, only_now if name == "mode" else no_value)
    if request.group and request.mode in ("now", "idle"):
        yield _invalid("mode", request.mode, "step, because a group acts at the end of a step")
    if request.at_step is not None and request.mode != "step":
        yield _invalid("at_step", request.at_step, "no value without mode step")
    if request.action == "terminate" and request.target.all and not (request.force or request.dry_run):
        yield _invalid("force", False, "true, because all: true terminates every process")
    if request.action == "set_memory_fraction" and request.fraction is None:
        yield _invalid("fraction", None, OPTIONS["fraction"].expected)
