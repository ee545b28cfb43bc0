"""Reads profiles: what a reporter sends, and the facts in the files of the store.

A profile that passes is consistent: each index exists, and the rows of each device add up to its sums. Nothing of a
profile is ever unpickled or executed. Thread-safe.
"""

from __future__ import annotations

import math
import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

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
from gpumem_client.wire.protocol import MAX_INTEGER, MAX_LABEL_LENGTH, MAX_TEXT_LENGTH, ProcessIdentity
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.stored_profile import OUT_OF_MEMORY, ProfileFacts

T = TypeVar("T")

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

    Takes up to 0.2 s of CPU and 25 MiB for the largest profiles that were measured: call it in a thread, one at a time.

    Raises ProfileInvalidError if it is not a profile, is too large, or contradicts itself.
    """
    document = _json_object(_decompressed(body))
    if document.get("format") != FORMAT:
        raise ProfileInvalidError(f"format: must be {FORMAT}, not {document.get('format')!r:.64}")
    identity = _built(ProcessIdentity, document.get("process"), "process", MAX_TEXT_LENGTH)
    if not 1 <= identity.pid < 1 << 31 or not identity.session:
        raise ProfileInvalidError("process: must have a pid and a session")
    profile = _profile(document)
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


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        document = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ProfileInvalidError(f"it is not JSON: {error}") from None
    if type(document) is not dict:
        raise ProfileInvalidError("it is not a JSON object")
    return document


def _profile(document: dict[str, Any]) -> Profile:
    def items(name: str, read: Callable[[Any, str], T], most: int = MAX_LISTS) -> tuple[T, ...]:
        values = document.pop(name, [])  # its memory is free when its items are read
        if type(values) is not list or len(values) > most:
            raise ProfileInvalidError(f"{name}: must be a list of at most {most} items")
        return tuple([read(value, name) for value in values])

    simple = {
        name: _checked(document[name], _hints(Profile)[name], name, MAX_TEXT_LENGTH)
        for name in ("id", "cause", "oom_number", "age_seconds", "recorded_seconds", "pause_seconds", "step")
        if name in document
    }
    if simple.get("cause") not in CAUSES or not simple.get("id"):
        raise ProfileInvalidError(f"it must have an id, and a cause of {', '.join(CAUSES)}")
    if simple["cause"] == OUT_OF_MEMORY and not simple.get("oom_number"):
        raise ProfileInvalidError("oom_number: must be the number of the out-of-memory error")
    return Profile(
        devices=items(
            "devices", lambda value, where: _built(ProfiledDevice, value, where, MAX_LABEL_LENGTH), MAX_DEVICES
        ),
        rows=items("rows", _row, MAX_ROWS + MAX_DEVICES),
        stacks=items("stacks", _stack),
        frames=items("frames", _frame),
        owners=items("owners", _owner),
        notes=items("notes", _text, MAX_NOTES),
        **simple,
    )


def _row(value: Any, where: str) -> Row:
    if type(value) is not list or len(value) < len(Row._fields):
        raise ProfileInvalidError(f"{where}: {value!r:.64} is not a row")
    row = Row(*value[: len(Row._fields)])
    if type(row.pool) is not str:
        raise ProfileInvalidError(f"{where}: {row.pool!r:.64} is not a pool")
    if not _is_number(row.device) or not _is_number(row.live_bytes) or not _is_number(row.live_blocks):
        raise ProfileInvalidError(f"{where}: {value!r:.64} has a value that is not a number from 0")
    for number in (row.stack, row.owner, row.peak_bytes, row.peak_blocks):
        if number is not None and not _is_number(number):
            raise ProfileInvalidError(f"{where}: {number!r:.64} is not a number from 0, and not null")
    return row._replace(pool=_POOLS.get(row.pool, _OTHER_POOL))


def _stack(value: Any, where: str) -> tuple[int, ...]:
    if type(value) is not list or not all(map(_is_number, value)):
        raise ProfileInvalidError(f"{where}: {value!r:.64} is not a list of numbers")
    return tuple(value)


def _frame(value: Any, where: str) -> Frame:
    if type(value) is not list or len(value) < len(Frame._fields) or not _is_number(value[2]):
        raise ProfileInvalidError(f"{where}: {value!r:.64} is not a function, a file and a line")
    return Frame(_text(value[0], where), _text(value[1], where), value[2])


def _owner(value: Any, where: str) -> Owner:
    if type(value) is not list or not value:
        raise ProfileInvalidError(f"{where}: {value!r:.64} is not an owner")
    # A later version may send another kind. A document has all of them, so they are short.
    _text(value[0], where, _MAX_KIND)
    return Owner(*(_text(each, where) for each in value[: len(Owner._fields)]))


def _text(value: Any, where: str, most: int = MAX_TEXT) -> str:
    if type(value) is not str or len(value) > most:
        raise ProfileInvalidError(f"{where}: {value!r:.64} is not a text of at most {most} characters")
    return value


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


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
        if row.device >= len(devices):
            raise ProfileInvalidError(f"rows: there is no device {row.device}")
        if row.stack is not None and row.stack >= len(profile.stacks):
            raise ProfileInvalidError(f"rows: there is no stack {row.stack}")
        if row.owner is not None and row.owner >= len(profile.owners):
            raise ProfileInvalidError(f"rows: there is no owner {row.owner}")
        live[row.device] += row.live_bytes
        peak[row.device] += row.peak_bytes or 0
    for index, device in enumerate(devices):
        if live[index] != device.allocated_bytes:
            raise ProfileInvalidError(
                f"devices.{index}: its rows have {live[index]} bytes, and allocated_bytes is {device.allocated_bytes}"
            )
        if peak[index] != (device.peak_bytes or 0):
            raise ProfileInvalidError(
                f"devices.{index}: at the highest moment its rows have {peak[index]} bytes, and peak_bytes is "
                f"{device.peak_bytes}"
            )


def facts_line(facts: ProfileFacts) -> bytes:
    """Return the first line of a file of the store."""
    return to_json(asdict(facts)) + b"\n"


def read_facts(line: bytes) -> ProfileFacts:
    """Return the facts in the first line of a file. Raises ProfileInvalidError if another program wrote the file."""
    _json_object(line)  # refuses infinite numbers
    try:
        return _facts_adapter().validate_json(line, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ProfileInvalidError(f"facts.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


@cache
def _facts_adapter() -> TypeAdapter[ProfileFacts]:
    return TypeAdapter(ProfileFacts)  # takes 3 ms, of no use to an exporter without profiles


def _built(cls: type[T], value: Any, where: str, most: int) -> T:
    """Return a dataclass from a JSON object whose values have the types of the fields. Unknown keys are ignored."""
    if type(value) is not dict:
        raise ProfileInvalidError(f"{where}: must be an object")
    kind: Any = cls
    hints, given = _hints(kind), {}
    for each in fields(kind):
        if each.name in value:
            given[each.name] = _checked(value[each.name], hints[each.name], f"{where}.{each.name}", most)
        elif each.default is MISSING:
            raise ProfileInvalidError(f"{where}.{each.name}: is missing")
    return cls(**given)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _checked(value: Any, hint: Any, where: str, most: int) -> Any:
    """Return a value if it has the type of a field."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if value is None and type(None) in kinds:
        return value
    if int in kinds and _is_number(value):
        return value
    if float in kinds and type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MAX_INTEGER:
        return value
    if str in kinds and type(value) is str and len(value) <= most:
        return value
    if bool in kinds and type(value) is bool:
        return value
    raise ProfileInvalidError(f"{where}: {value!r:.64} is invalid")
