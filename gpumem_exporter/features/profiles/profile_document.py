"""Reads the profiles that reporters send.

A profile that passes is consistent: each index exists, and the rows of each device add up to its sums. Nothing of a
profile is ever unpickled or executed. Thread-safe.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import CoreSchema, SchemaValidator, core_schema, from_json

from gpumem_client.profile.profile_types import (
    CAUSES,
    FORMAT,
    MAX_COMPRESSED_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_LISTS,
    MAX_ROWS,
    MAX_VALUES,
    Frame,
    Owner,
    Profile,
    ProfiledDevice,
    Row,
)
from gpumem_client.wire.protocol import MAX_INTEGER, MAX_TEXT_LENGTH, ProcessIdentity
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.reports.report_schema import dataclass_schema

ACTION, OUT_OF_MEMORY = CAUSES
"""Why a profile was taken: a caller requested it, or an out-of-memory error."""
MAX_BODY_BYTES = MAX_COMPRESSED_BYTES
MAX_DEVICES = 64
MAX_NOTES = 64
MAX_TEXT = 4096
"""The maximum length of a path, a function or a name in characters."""
_MAX_KIND = 64
# The pools of PyTorch's allocator. All others are one: its name would be as good as another key for each row.
_POOLS = {name: name for name in ("default", "private")}
_OTHER_POOL = "other"
# The argument of zlib that stands for gzip.
_GZIP = 31


def read_profile(body: bytes) -> tuple[ProcessIdentity, Profile]:
    """Return a profile and the process that it names, from the body of a reporter's request.

    Takes up to 0.2 s of CPU and 30 MiB for the largest profiles that were measured: call it in a thread, one at a time.

    Raises ProfileInvalidError if it is not a profile, is too large, or contradicts itself.
    """
    text = _decompressed(body)
    try:
        # In two steps: the errors of `validate_json` have copies of the invalid values, which may be the whole text.
        document = _VALIDATOR.validate_python(from_json(text, allow_inf_nan=False))
    except ValidationError as error:
        raise _invalid(error) from None
    except ValueError as error:
        raise ProfileInvalidError(f"it is not JSON: {error}") from None
    del document["format"]
    identity: ProcessIdentity = document.pop("process")
    profile = Profile(**document)
    if profile.cause == OUT_OF_MEMORY and not profile.oom_number:
        raise ProfileInvalidError("oom_number: must be the number of the out-of-memory error")
    _require_consistent(profile)
    return identity, profile


def _decompressed(body: bytes) -> bytes:
    # A profile comes from any local user, so everything is bounded before it takes memory: here the decompressed bytes,
    # the lists and the values.
    reader = zlib.decompressobj(_GZIP)
    try:
        text = reader.decompress(body, MAX_DOCUMENT_BYTES + 1)
    except zlib.error as error:
        raise ProfileInvalidError(f"it is not compressed with gzip: {error}") from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ProfileInvalidError(f"it is longer than {MAX_DOCUMENT_BYTES} bytes")
    if not reader.eof or reader.unused_data:
        raise ProfileInvalidError("its compressed data ends too early, or something follows")
    if text.count(b"[") + text.count(b"{") > MAX_LISTS or text.count(b",") > MAX_VALUES:
        raise ProfileInvalidError(f"it has more than {MAX_LISTS} lists or {MAX_VALUES} values")
    return text


def _validator() -> SchemaValidator:
    """Return the validator of a profile as it is sent; a later version may add fields, and values to lists."""
    number = core_schema.int_schema(ge=0, le=MAX_INTEGER)
    number_or_none = core_schema.nullable_schema(number)
    seconds = core_schema.float_schema(ge=0, le=float(MAX_INTEGER))
    text = core_schema.str_schema(max_length=MAX_TEXT)
    # A later version may send another kind. A document has all of them, so they are short.
    kind = core_schema.str_schema(max_length=_MAX_KIND)
    row = [number, core_schema.str_schema(), *[number_or_none] * 2, number, number, *[number_or_none] * 2]
    required = {
        "format": core_schema.literal_schema([FORMAT]),
        "process": _object(ProcessIdentity),
        "id": core_schema.str_schema(min_length=1, max_length=MAX_TEXT_LENGTH),
        "cause": core_schema.literal_schema(list(CAUSES)),
        "devices": _tuple(_object(ProfiledDevice), most=MAX_DEVICES),
        "rows": _tuple(_built(_row, *row), most=MAX_ROWS + MAX_DEVICES),
    }
    optional = {
        "stacks": _tuple(_tuple(number)),
        "frames": _tuple(_built(Frame, text, text, number)),
        "owners": _tuple(_built(Owner, kind, *[core_schema.with_default_schema(text, default="")] * 3)),
        "oom_number": number_or_none,
        "age_seconds": seconds,
        "recorded_seconds": seconds,
        "pause_seconds": seconds,
        "step": number_or_none,
        "notes": _tuple(text, most=MAX_NOTES),
    }
    fields = {name: core_schema.typed_dict_field(schema) for name, schema in required.items()}
    fields |= {name: core_schema.typed_dict_field(schema, required=False) for name, schema in optional.items()}
    config = core_schema.CoreConfig(strict=True, allow_inf_nan=False)
    return SchemaValidator(core_schema.typed_dict_schema(fields, extra_behavior="ignore", config=config))


def _object(cls: type) -> CoreSchema:
    schema: Any = dataclass_schema(cls)
    return {**schema, "strict": False}  # a JSON object, not the dataclass itself


def _tuple(*items: CoreSchema, most: int = MAX_LISTS) -> CoreSchema:
    """Return the schema of a list that starts with these items, of which the last one may be repeated."""
    # A tuple of JSON is a list, so it is not strict. Only its first invalid item is reported: there may be thousands.
    last = len(items) - 1
    return core_schema.tuple_schema([*items], variadic_item_index=last, max_length=most, strict=False, fail_fast=True)


def _built(build: Callable[..., Any], *items: CoreSchema) -> CoreSchema:
    """Return the schema of a list that starts with these items, of which `build` makes the value."""
    schema = _tuple(*items, core_schema.any_schema())
    return core_schema.no_info_after_validator_function(lambda values: build(*values[: len(items)]), schema)


def _row(device: int, pool: str, *rest: Any) -> Row:
    return Row(device, _POOLS.get(pool, _OTHER_POOL), *rest)


_VALIDATOR = _validator()


def _invalid(error: ValidationError) -> ProfileInvalidError:
    wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ProfileInvalidError(": ".join(filter(None, (".".join(map(str, wrong["loc"])), wrong["msg"]))))


def _require_consistent(profile: Profile) -> None:
    """Check the indices, and that the rows of each device add up to its sums."""
    devices = profile.devices
    if not devices or len({device.uuid for device in devices}) < len(devices) or not all(d.uuid for d in devices):
        raise ProfileInvalidError("devices: must have at least one device, each with another uuid")
    for stack in profile.stacks:
        if stack and max(stack) >= len(profile.frames):
            raise ProfileInvalidError(f"stacks: there is no frame {max(stack)}")
    live, peak = [0] * len(devices), [0] * len(devices)
    for row in profile.rows:
        for name, index, known in (
            ("device", row.device, devices),
            ("stack", row.stack, profile.stacks),
            ("owner", row.owner, profile.owners),
        ):
            if index is not None and index >= len(known):
                raise ProfileInvalidError(f"rows: there is no {name} {index}")
        live[row.device] += row.live_bytes
        peak[row.device] += row.peak_bytes or 0
    for index, device in enumerate(devices):
        found, sent = (live[index], peak[index]), (device.allocated_bytes, device.peak_bytes or 0)
        if found != sent:
            raise ProfileInvalidError(f"devices.{index}: its rows have {found} bytes at the end and peak, not {sent}")
