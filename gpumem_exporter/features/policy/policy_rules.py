"""The rules of a policy, as the file `--policy.file` has them, and the values that their conditions may use.

An unknown value is None: no condition on it is true.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import inf, isfinite, isinf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, model_validator
from typing_extensions import Self

from gpumem_client.wire.protocol import DeviceSample, EngineState
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.action_options import (
    ACTIONS,
    GROUP_IS_DEPRECATED,
    MAX_DEADLINE_SECONDS,
    OPTIONS,
    ActionRequest,
    Target,
    invalid_fields,
)
from gpumem_exporter.actions.engines import MIN_IDLE_SECONDS
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.core.yaml_file import FileSection, Flag, YamlFile, section_error

MAX_RULES = 100
_DAY_SECONDS = 86400.0
# The actions that release memory to the driver, of which some may be taken again soon.
_RELEASING = OPTIONS["settle_seconds"].help
# The actions that free memory: a rule may find that they do not help.
_FREEING = (*_RELEASING, "collect_garbage")
_log = logging.getLogger(__name__)

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# The factors of each kind of value, what is accepted, and how a value is shown.
_UNITS: Mapping[str, tuple[Mapping[str, float], str, Callable[[float], str]]] = {
    "bytes": ({"": 1, "B": 1, **_BINARY, **_DECIMAL}, "bytes, such as 4GiB or 512MiB", lambda x: human_bytes(int(x))),
    "ratio": ({"": 1, "%": 0.01}, "a ratio, such as 5% or 0.05", lambda ratio: f"{100 * ratio:.3g} %"),
    "seconds": ({"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}, "a time, such as 60s, 5m or 1h", human_seconds),
}


def read_quantity(text: object, unit: str) -> float:
    """Read a number with a unit: bytes, ratio (0 to 1) or seconds. Raises ValueError with what is accepted."""
    factors, accepted, _ = _UNITS[unit]
    found = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    value = float(found[1]) * factors.get(found[2], nan) if found is not None else nan
    if not isfinite(value) or (unit == "ratio" and value > 1):
        raise ValueError(f"expected {accepted}")
    return value


def _values(
    sample: DeviceSample,
    device: DeviceReading | None = None,
    engine: EngineState | None = None,
    inactive_seconds: float | None = None,
) -> dict[str, float | None]:
    """Return the values in the words of the metrics. `device` is None if the driver does not answer.

    They are of the process on the device, except `inactive_seconds` and `engine_idle_seconds` (of the process on all
    its devices) and `device_…` (of the device with all its processes).
    """
    allocated, reserved, fragmented = sample.allocated_bytes, sample.reserved_bytes, fragmented_bytes(sample)
    slack = None if reserved is None or allocated is None else reserved - allocated
    memory = None if device is None else device.memory
    free = None if memory is None else memory.free_bytes
    return {
        "slack_bytes": slack,
        "slack_ratio": _ratio(slack, reserved),
        "reclaimable_bytes": sample.reclaimable_bytes,
        "idle_cache_bytes": sample.idle_cache_bytes,
        "fragmented_bytes": fragmented,
        "fragmentation_ratio": _ratio(fragmented, reserved),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "idle_seconds": inactive_seconds,  # the name before 0.4
        "inactive_seconds": inactive_seconds,
        "engine_idle_seconds": None if engine is None or engine.state == "asleep" else engine.idle_seconds,
        "device_free_bytes": free,
        "device_free_ratio": _ratio(free, None if memory is None else memory.total_bytes),
        "device_utilization_ratio": None if device is None else device.utilization_ratio,
    }


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


FIELDS: Mapping[str, str] = {name: name.rpartition("_")[2] for name in _values(DeviceSample(""))}
"""The unit of each value: bytes, ratio or seconds."""

Bytes = Annotated[float, BeforeValidator(partial(read_quantity, unit="bytes"))]
Ratio = Annotated[float, BeforeValidator(partial(read_quantity, unit="ratio"))]
Seconds = Annotated[float, BeforeValidator(partial(read_quantity, unit="seconds"))]


def read_policy(path: str, *, allowed: Collection[str]) -> tuple[Rule, ...]:
    """Read the rules of a file, whose actions `--action.allow` must have. May block on the disk.

    Raises ConfigurationError: one line with the file, the line, the error and what is accepted.
    """
    file = YamlFile(Path(path), "policy file")
    rules = file.read(_Policy, allowed).rules
    for index, rule in enumerate(rules):
        if any(rule.name == earlier.name for earlier in rules[:index]):
            raise file.error(("rules", index), f"another rule has the name {rule.name!r}", of=())
        if rule.request.group:
            _log.warning(GROUP_IS_DEPRECATED, extra={"fields": {"rule": rule.name}})
    return tuple(rules)


class Observation(NamedTuple):
    """One process on one device, at the time of its last sample."""

    process: ReportingProcess
    reporter: Hashable
    """The session of the reporter. A later process with the same pid differs, and so does another program."""
    uuid: str
    values: Mapping[str, float | None]
    """The value of each of `FIELDS`."""


def observations(snapshot: Snapshot, stale_seconds: float) -> Iterator[Observation]:
    """Yield every process on each of its devices, except processes whose last sample is older than `stale_seconds`.

    An exited process may have had the pid of a running process: only the running process is yielded.
    """
    node = snapshot.node
    devices = {device.uuid: device for device in node.devices if device.up} if node is not None and node.up else {}
    for _, process in snapshot.names.reporting:
        if process.sampled_seconds < snapshot.taken_seconds - stale_seconds:
            continue
        identity = process.report.process
        reporter = process.key, identity.start_time_ticks, identity.session
        last_seconds = snapshot.last_active_seconds(process, process.host_pid)
        inactive_seconds = None if last_seconds is None else max(0.0, snapshot.taken_seconds - last_seconds)
        for sample in process.report.devices:
            values = _values(sample, devices.get(sample.uuid), process.report.engine, inactive_seconds)
            yield Observation(process, reporter, sample.uuid, values)


class Bounds(FileSection):
    """A value is strictly between two bounds."""

    over: float = -inf
    under: float = inf

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set or self.over >= self.under:
            raise section_error("", "expected over, under, or both with values between them")
        return self


_BOUNDS = {
    unit: create_model("Bounds", __base__=Bounds, over=(quantity, -inf), under=(quantity, inf))
    for unit, quantity in (("bytes", Bytes), ("ratio", Ratio), ("seconds", Seconds))
}
_CONDITIONS: dict[str, Any] = {name: (_BOUNDS[unit], None) for name, unit in FIELDS.items()}
_When: Any = create_model("_When", __base__=FileSection, **_CONDITIONS)
"""The conditions of a rule, by value. All of them must be true."""


class Do(FileSection):
    """The action of a rule, with options of `ActionRequest`. A time has its unit, so that its key has none."""

    action: str
    mode: str | None = None
    group: Flag = False
    collect_garbage: Flag = False
    fraction: Ratio | None = None
    force: Flag = False
    keep: str | None = None
    wait_idle_seconds: Annotated[Seconds, Field(alias="wait_idle")] = 0.0
    deadline_seconds: Annotated[Seconds | None, Field(alias="deadline")] = None
    duration_seconds: Annotated[Seconds, Field(alias="duration")] = 0.0
    search_seconds: Annotated[Seconds, Field(alias="search")] = 0.0

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        allowed: Collection[str] = info.context or ()
        if self.action in ACTIONS and self.action not in allowed:
            has = ", ".join(sorted(allowed)) or "none"
            raise section_error("action", f"action: {self.action} is not allowed here; --action.allow has {has}")
        for invalid in invalid_fields(self.request):
            key = invalid.field.removesuffix("_seconds")
            raise section_error(key, f"{key}: {invalid.message}")
        return self

    @property
    def request(self) -> ActionRequest:
        """The requested action. The process that the rule finds replaces the target."""
        return ActionRequest(target=Target(pid=1), **self.model_dump(exclude_unset=True))


class StopAfter(FileSection):
    """When a rule stops for a process: after several consecutive actions that did not help."""

    clears: Annotated[int, Field(ge=1, le=100)] = 3
    freed_under: Annotated[Bytes, Field(ge=1)] = float(64 << 20)
    """An action that released less than this did not help."""
    still_free_after: Annotated[Seconds, Field(le=MAX_DEADLINE_SECONDS)] = 10.0
    """Of a clear, only what is still free after this settling time counts. 0: everything that it released counts."""
    resume_after: Annotated[Seconds, Field(ge=1)] = _DAY_SECONDS
    """The rule acts again after this time since the last action."""


class Rule(FileSection):
    """One rule. It is evaluated for each process on each device."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    workloads: Annotated[list[str], Field(min_length=1)]
    """The workloads of the rule, as shell patterns."""
    when: _When
    trigger: Literal["conditions", "alert"] = "conditions"
    """`alert`: the rule acts only if an alert names it, on a process that meets the conditions at that moment."""
    for_seconds: Annotated[Seconds, Field(alias="for", le=_DAY_SECONDS)] = 0.0
    """All conditions must have been true for this time, without a break."""
    do: Do
    cooldown: Annotated[Seconds, Field(ge=1, le=_DAY_SECONDS)] = 300.0
    """The seconds between two actions on a process, whatever the result of the first one."""
    max_per_hour: Annotated[int, Field(ge=1, le=600)] = 12
    """The number of actions per hour on the processes of one user."""
    stop_after: Annotated[StopAfter | None, BeforeValidator(lambda text: None if text == "never" else text)] = (
        StopAfter()
    )
    """None: never. It has an effect with the actions of `_FREEING` only: see `stop`."""
    dry_run: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.do.action not in _FREEING and "stop_after" in self.model_fields_set:
            raise section_error("stop_after", f"stop_after: only {', '.join(_FREEING)} accept it")
        settle_seconds = self.request.settle_seconds
        if self.cooldown < settle_seconds:
            least = human_seconds(settle_seconds)
            raise section_error("cooldown", f"cooldown: expected at least still_free_after of stop_after, {least}")
        if not self.bounds:
            raise section_error("when", f"when: expected at least one of {', '.join(FIELDS)}")
        idle = self.bounds.get("engine_idle_seconds")
        if self.do.action == "release_memory" and not self.do.force and (not idle or idle.over < MIN_IDLE_SECONDS):
            least = human_seconds(MIN_IDLE_SECONDS)
            raise section_error("when", f"when: release_memory expects engine_idle_seconds over at least {least}")
        return self

    @cached_property
    def bounds(self) -> Mapping[str, Bounds]:
        """The bounds of each value that has a condition."""
        return {name: bounds for name, bounds in self.when if bounds is not None}

    def met(self, values: Mapping[str, float | None]) -> str:
        """Return the values and their bounds if all conditions are true, otherwise an empty string."""
        if any((value := values[name]) is None or not b.over < value < b.under for name, b in self.bounds.items()):
            return ""
        texts = []
        for name, each in self.bounds.items():
            *_, show = _UNITS[FIELDS[name]]
            bounds = " and ".join(f"{word} {show(bound)}" for word, bound in each if not isinf(bound))
            texts.append(f"{name} {show(values[name] or 0)} ({bounds})")
        return ", ".join(texts)

    @property
    def stop(self) -> StopAfter | None:
        """When the rule stops for a process; None if it never does."""
        return self.stop_after if self.do.action in _FREEING else None

    @cached_property
    def request(self) -> ActionRequest:
        """The requested action; its target is replaced by the process."""
        stop = self.stop if self.do.action in _RELEASING else None
        settle_seconds = 0.0 if stop is None else stop.still_free_after
        return replace(self.do.request, dry_run=self.dry_run, settle_seconds=settle_seconds)

    def concerns(self, workload: str) -> bool:
        """Return whether the rule is for this workload; `*` matches also processes without one."""
        return any(fnmatchcase(workload, pattern) for pattern in self.workloads)


class _Policy(FileSection):
    rules: Annotated[list[Rule], Field(max_length=MAX_RULES)]
