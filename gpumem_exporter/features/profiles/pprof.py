"""Profiles as pprof's `profile.proto`, which `go tool pprof`, Pyroscope, Parca and Grafana read.

The message is encoded here, because the package protobuf is no dependency of the exporter:
https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from gpumem_exporter.features.profiles.profile_lines import Line, OwnerPaths, kind_text, stack_names

T = TypeVar("T")
_VARINT, _LENGTH_DELIMITED = 0, 2


class _Location(NamedTuple):
    function: str
    file: str
    line: int


def encode(
    lines: Iterable[Line],
    devices: Sequence[str],
    *,
    time_unix_seconds: float,
    duration_seconds: float,
    comments: Sequence[str],
) -> bytes:
    """Return lines as a compressed profile. The values are the changes, which are negative where memory was freed.

    `devices` has the label of each device.
    """
    paths = OwnerPaths()
    texts: _Table[str] = _Table({"": 0})
    functions: _Table[tuple[str, str]] = _Table()
    locations: _Table[_Location] = _Table()
    body = bytearray()
    # By the id of the stack, which the lines keep and share: a hash would read all frames of each line.
    packed: dict[int, bytes] = {}
    for name, unit in (("inuse_objects", "count"), ("inuse_space", "bytes")):
        body += _message(1, _number(1, texts[name]), _number(2, texts[unit]))
    for line in lines:
        values = _packed(2, (line.change_blocks, line.change_bytes))
        owner = line.owner and " ".join(filter(None, (kind_text(line.owner.kind), line.owner.name)))
        labels = (("device", devices[line.device]), ("pool", line.pool), ("owner", owner))
        key = id(line.stack) if line.stack else 0
        if not key or key not in packed:
            packed[key] = _packed(1, [locations[each] + 1 for each in _locations(line, paths)])
        body += _message(
            2,
            packed[key],
            values,
            *(_message(3, _number(1, texts[name]), _number(2, texts[text])) for name, text in labels if text),
        )
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
        _number(9, int(time_unix_seconds * 1e9)),
        _number(10, int(duration_seconds * 1e9)),
        *(_number(13, texts[comment]) for comment in comments),
        _number(14, texts["inuse_space"]),
    )
    # The texts are complete only now. A reader takes the fields in any order.
    body += b"".join((*numbers, *(_field(6, text.encode("utf-8", "replace")) for text in texts)))
    return gzip.compress(bytes(body), compresslevel=6, mtime=0)


def _locations(line: Line, paths: OwnerPaths) -> list[_Location]:
    """Return the frames of a line, the innermost first; without a stack, the names of its owner."""
    if line.stack:
        return [_Location(*frame) for frame in line.stack]
    return [_Location(name, "", 0) for name in reversed(stack_names(line, paths))]


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
