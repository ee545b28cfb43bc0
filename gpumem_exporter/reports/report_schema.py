"""The schema of a report, derived from the dataclasses of `wire.protocol`.

The schema has one rule for each type, so it always agrees with the dataclasses, and pydantic builds these from the JSON
text. `wire.protocol` is part of training processes and does not import pydantic.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from gpumem_client.wire.procfs import known_ray_job_id
from gpumem_client.wire.protocol import (
    ENGINE_STATES,
    KV_CACHE_STATES,
    MAX_COMPONENTS,
    MAX_INTEGER,
    MAX_LABEL_LENGTH,
    MAX_PHASES,
    MAX_TEXT_LENGTH,
    OUTCOMES,
    DeviceSample,
    EngineState,
    Report,
)
from gpumem_exporter.edge.problems import FieldError, ProblemError

MAX_DEVICES = 64
"""The maximum number of devices in a report: 16 GPUs with 4 MIG devices each."""
MAX_ENTRIES = 64
"""The maximum number of phases or components of a device, actions of a reporter, and results in a report."""
MAX_OBJECTS = 8192
"""The maximum number of objects and lists in the JSON of a report: nearly twice what 64 results on 64 devices need."""
MAX_REASON_LENGTH = 2000
MAX_KEPT_REASON_LENGTH = 500
MAX_UUID_LENGTH = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""

_PID = core_schema.int_schema(ge=1, le=2**31 - 1)
_AT_LEAST_ONE = core_schema.nullable_schema(core_schema.int_schema(ge=1, le=MAX_INTEGER))
_REQUIRED_TEXT = core_schema.str_schema(min_length=1, max_length=MAX_TEXT_LENGTH)

# The rules of fields that are stricter than their type, by name.
_SPECIAL: Mapping[str, CoreSchema] = {
    "pid": _PID,
    "uuid": core_schema.str_schema(min_length=1, max_length=MAX_UUID_LENGTH),
    "session": _REQUIRED_TEXT,
    "id": _REQUIRED_TEXT,
    "outcome": core_schema.literal_schema(list(OUTCOMES)),
    "path": core_schema.str_schema(max_length=4096),
    "reason": core_schema.str_schema(max_length=MAX_REASON_LENGTH),
    # Clients up to 0.2 send Ray's nil id.
    "ray_job_id": core_schema.no_info_after_validator_function(
        known_ray_job_id, core_schema.str_schema(max_length=MAX_TEXT_LENGTH)
    ),
    "world_size": _AT_LEAST_ONE,
    "planned_reserved_peak_bytes": _AT_LEAST_ONE,
    # Negative if other threads allocated memory while the command ran.
    "freed_bytes": core_schema.nullable_schema(core_schema.int_schema(ge=-MAX_INTEGER, le=MAX_INTEGER)),
}
# The fields of a sample whose names become labels, with the number of names that are kept.
_LABELED = {
    "phase_peak_bytes": MAX_PHASES,
    "component_bytes": MAX_COMPONENTS,
    "component_unmapped_bytes": MAX_COMPONENTS,
}


class ReportReader:
    """Reads the body of a report. Thread-safe."""

    def __init__(self) -> None:
        self._validator = SchemaValidator(report_core_schema())

    def read(self, body: bytes) -> Report:
        """Read one report. Raises ProblemError (422) with the invalid fields."""
        # An object that repeats a field is read again each time, and a small list takes hundreds of bytes.
        if body.count(b"{") + body.count(b"[") > MAX_OBJECTS:
            raise ProblemError.invalid([FieldError("", f"the report has more than {MAX_OBJECTS} objects and lists")])
        try:
            report: Report = self._validator.validate_json(body)
        except ValidationError as error:
            raise ProblemError.of_validation(error.errors(include_url=False, include_input=False)) from None
        found = [*_duplicates(report.devices)]
        for index, sample in enumerate(report.devices):
            found += contradictions(sample, f"devices.{index}")
        if found:
            raise ProblemError.invalid(found)
        return report


def report_core_schema() -> CoreSchema:
    """Return the schema of a report. It is strict: a string is not accepted as a number, or a number as a string."""
    return dataclass_schema(Report)


def dataclass_schema(cls: type) -> CoreSchema:
    """Return the schema of a dataclass of the wire, with the limits of the fields of a report."""
    hints = typing.get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        schema = _SPECIAL.get(field.name) or _type_schema(hints[field.name])
        if field.default is not dataclasses.MISSING:
            schema = core_schema.with_default_schema(schema, default=field.default)
        elif field.default_factory is not dataclasses.MISSING:
            schema = core_schema.with_default_schema(schema, default_factory=field.default_factory)
        fields.append(core_schema.dataclass_field(field.name, schema))
    # Unknown fields are ignored, because a newer reporter may send them.
    return core_schema.dataclass_schema(
        cls,
        core_schema.dataclass_args_schema(cls.__name__, fields, extra_behavior="ignore"),
        [field.name for field in dataclasses.fields(cls)],
        strict=True,
        frozen=True,
        slots=True,
        config=core_schema.CoreConfig(strict=True, allow_inf_nan=False),
    )


def _type_schema(hint: Any) -> CoreSchema:
    """Return the schema of a type that the protocol uses."""
    simple = {
        int: core_schema.int_schema(ge=0, le=MAX_INTEGER),
        float: core_schema.float_schema(ge=0, le=float(MAX_INTEGER)),
        bool: core_schema.bool_schema(),
        str: core_schema.str_schema(max_length=MAX_TEXT_LENGTH),
    }
    if hint in simple:
        return simple[hint]
    if dataclasses.is_dataclass(hint):
        return dataclass_schema(typing.cast(type, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType and len(arguments) == 2 and arguments[1] is type(None):
        return core_schema.nullable_schema(_type_schema(arguments[0]))
    if origin is tuple:
        limit = MAX_DEVICES if dataclasses.is_dataclass(arguments[0]) else MAX_ENTRIES
        return _stopping(core_schema.tuple_variable_schema(_type_schema(arguments[0]), max_length=limit))
    if origin is not None and issubclass(origin, Mapping):
        key, value = (_type_schema(argument) for argument in arguments)
        return _stopping(core_schema.dict_schema(key, value, max_length=MAX_ENTRIES))
    raise TypeError(f"there is no rule for {hint!r}")


def _stopping(schema: Any) -> CoreSchema:
    """Return the schema of a collection that reports its first invalid entry only."""
    # A body has room for 500,000 entries: to report each of a report of 1 MiB took 7 s.
    return {**schema, "fail_fast": True}


def shortened(report: Report) -> Report:
    """Return the report, cut to the limits of labels, phases, components and results; the same object within them."""
    # A reporter of an older version has higher limits, so such a report is not an error. Nor is a newer one that knows
    # more states of an engine or of its cache: the states that this version does not know are left out.
    changes: dict[str, Any] = {}
    identity = report.process
    if len(identity.workload) > MAX_LABEL_LENGTH or len(identity.rank) > MAX_LABEL_LENGTH:
        workload, rank = identity.workload[:MAX_LABEL_LENGTH], identity.rank[:MAX_LABEL_LENGTH]
        changes["process"] = replace(identity, workload=workload, rank=rank)
    devices = tuple([_shortened_sample(sample) if _is_long(sample) else sample for sample in report.devices])
    if report.engine is not None and (engine := _shortened_engine(report.engine)) != report.engine:
        changes["engine"] = engine
    if report.engine is not None or any(sample.kv_cache_bytes for sample in devices):
        devices = tuple(map(_without_contradictions, devices))
    if devices != report.devices:
        changes["devices"] = devices
    # The exporter keeps results for long.
    results = tuple([replace(each, reason=each.reason[:MAX_KEPT_REASON_LENGTH]) for each in report.results])
    if results != report.results:
        changes["results"] = results
    return replace(report, **changes) if changes else report


def _is_long(sample: DeviceSample) -> bool:
    return not sample.kv_cache_bytes.keys() <= set(KV_CACHE_STATES) or any(
        len(values) > limit or max(map(len, values), default=0) > MAX_LABEL_LENGTH
        for values, limit in ((getattr(sample, name), limit) for name, limit in _LABELED.items())
    )


def _shortened_sample(sample: DeviceSample) -> DeviceSample:
    changes: dict[str, Any] = {
        name: {label[:MAX_LABEL_LENGTH]: size for label, size in itertools.islice(getattr(sample, name).items(), limit)}
        for name, limit in _LABELED.items()
    }
    states = sample.kv_cache_bytes
    changes["kv_cache_bytes"] = {state: states[state] for state in KV_CACHE_STATES if state in states}
    return replace(sample, **changes)


def _shortened_engine(engine: EngineState) -> EngineState:
    name, version, model = (text[:MAX_LABEL_LENGTH] for text in (engine.name, engine.version, engine.model))
    state = engine.state if engine.state in ENGINE_STATES else ""
    return replace(engine, name=name, version=version, model=model, state=state)


def _without_contradictions(sample: DeviceSample) -> DeviceSample:
    """Return the sample of an engine without the values that contradict others, which are then unknown."""
    # They are from objects of the engine, which may change between two of the reads. The values of the allocator are
    # right nevertheless, so the report is not refused.
    components, unmapped, kv_cache = sample.component_bytes, sample.component_unmapped_bytes, sample.kv_cache_bytes
    if sample.allocated_bytes is not None and sum(components.values()) > sample.allocated_bytes:
        components = {}
    if sample.unmapped_bytes is not None and sum(unmapped.values()) > sample.unmapped_bytes:
        unmapped = {}
    whole = components.get("kv_cache", sample.allocated_bytes)
    if whole is not None and sum(kv_cache.values()) > whole:
        kv_cache = {}
    if (components, unmapped, kv_cache) == (
        sample.component_bytes,
        sample.component_unmapped_bytes,
        sample.kv_cache_bytes,
    ):
        return sample
    return replace(sample, component_bytes=components, component_unmapped_bytes=unmapped, kv_cache_bytes=kv_cache)


def _duplicates(devices: tuple[DeviceSample, ...]) -> Iterator[FieldError]:
    seen: dict[str, int] = {}
    for index, sample in enumerate(devices):
        first = seen.setdefault(sample.uuid, index)
        if first != index:
            yield FieldError(f"devices.{index}.uuid", f"{sample.uuid!r} is already devices.{first}")


def contradictions(sample: DeviceSample, where: str) -> Iterator[FieldError]:
    """Yield the fields whose values contradict each other."""
    reserved, allocated, reclaimable = sample.reserved_bytes, sample.allocated_bytes, sample.reclaimable_bytes
    if reserved is None:
        return
    if allocated is not None and allocated > reserved:
        yield FieldError(f"{where}.allocated_bytes", f"{allocated} is more than reserved_bytes ({reserved})")
    elif reclaimable is not None and reclaimable > reserved - (allocated or 0):
        yield FieldError(
            f"{where}.reclaimable_bytes",
            f"{reclaimable} is more than reserved_bytes − allocated_bytes ({reserved - (allocated or 0)})",
        )
    elif sample.idle_cache_bytes is not None and (reclaimable is None or sample.idle_cache_bytes > reclaimable):
        yield FieldError(
            f"{where}.idle_cache_bytes", f"{sample.idle_cache_bytes} is more than reclaimable_bytes ({reclaimable})"
        )
