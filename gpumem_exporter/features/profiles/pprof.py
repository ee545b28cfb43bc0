"""Profiles as pprof's `profile.proto`, which `go tool pprof`, Pyroscope, Parca and Grafana read.

The message is encoded here, because the package protobuf is no dependency of the exporter:
https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from typing import TypeVar

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import Line, Stack, bounded, kind_text, owner_path
from gpumem_exporter.features.profiles.stored_profile import StoredProfile, device_names

T = TypeVar("T")
# The length of all samples, without the names, which they share.
_MAX_LENGTH = 8 << 20
# The length of the names of all modules. The names in a path of 4096 characters could take 4 MiB: without the limit, a
# profile of 1 KiB became a page of 240 MB. The owners that follow have one name.
_MAX_PATHS_LENGTH = 4 << 20
_VARINT, _LENGTH_DELIMITED = 0, 2


def encode(profile: StoredProfile | Difference, changed: Iterable[Line]) -> bytes:
    """Return rows as a compressed profile, the first ones in full. The values are the changes.

    A change is negative where memory was freed.
    """
    stored = profile.after if isinstance(profile, Difference) else profile
    devices = device_names(profile.uuids, profile.gpus)
    paths = _OwnerPaths()
    texts: _Table[str] = _Table({"": 0})
    functions: _Table[tuple[str, str]] = _Table()
    locations: _Table[Frame] = _Table()
    body = bytearray()
    stacks: dict[Stack, bytes] = {}
    for name, unit in (("inuse_objects", "count"), ("inuse_space", "bytes")):
        body += _message(1, _number(1, texts[name]), _number(2, texts[unit]))

    def sample(line: Line) -> bytes:
        if line.stack is None:
            at = _packed(1, [locations[Frame(name, "", 0)] + 1 for name in reversed(paths.of(line.owner))])
        elif line.stack in stacks:
            at = stacks[line.stack]
        else:
            at = stacks[line.stack] = _packed(1, [locations[each] + 1 for each in line.stack.frames])
        owner = line.owner and " ".join(filter(None, (kind_text(line.owner.kind), line.owner.name)))
        labels = (("device", devices[line.device]), ("pool", line.pool), ("owner", owner))
        return _message(
            2,
            at,
            _packed(2, (line.change_blocks, line.change_bytes)),
            *(_message(3, _number(1, texts[name]), _number(2, texts[text])) for name, text in labels if text),
        )

    for each in bounded(changed, sample, _MAX_LENGTH):
        body += each
    # Says that the names are complete: otherwise pprof looks for a program to read them from.
    body += _message(3, _number(1, 1), *(_number(flag, 1) for flag in (7, 8, 9)))
    for number, location in enumerate(locations, 1):
        function = functions[location.function, location.file] + 1
        of_line = _message(4, _number(1, function), _number(2, location.line))
        body += _message(4, _number(1, number), _number(2, 1), of_line)
    for number, (name, file) in enumerate(functions, 1):
        body += _message(
            5, _number(1, number), _number(2, texts[name]), _number(3, texts[name]), _number(4, texts[file])
        )
    numbers = (
        _number(9, int(stored.time_unix_seconds * 1e9)),
        _number(10, int(stored.recorded_seconds * 1e9)),
        *(_number(13, texts[comment]) for comment in profile.notes),
        _number(14, texts["inuse_space"]),
    )
    # The texts are complete only now. A reader takes the fields in any order.
    body += b"".join((*numbers, *(_field(6, text.encode("utf-8", "replace")) for text in texts)))
    return gzip.compress(bytes(body), compresslevel=6, mtime=0)


class _OwnerPaths:
    """The names of owners as the frames of a stack, from the kind to the full name: see `owner_path`."""

    def __init__(self) -> None:
        self._length = 0

    def of(self, owner: Owner | None) -> list[str]:
        """Return the names of an owner."""
        names, path = owner_path(owner)
        if not path:
            return names
        self._length += len(path) * (path.count(".") + 2) // 2
        if self._length > _MAX_PATHS_LENGTH:
            return [*names, path]
        parts = path.split(".")
        return [*names, *(".".join(parts[: i + 1]) for i in range(len(parts)))]


class _Table(dict[T, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: T) -> int:
        self[key] = number = len(self)
        return number


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int64 is ten bytes
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _field(field, b"".join(map(_varint, values)))


def _message(field: int, *parts: bytes) -> bytes:
    return _field(field, b"".join(parts))
