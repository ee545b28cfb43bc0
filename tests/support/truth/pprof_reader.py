"""Reads pprof's format with Google's protobuf library; the exporter encodes it by hand.

The fields have the numbers of https://github.com/google/pprof/blob/main/proto/profile.proto.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

_INT = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_MESSAGES: dict[str, dict[str, tuple[int, Any]]] = {
    "Profile": {
        "sample_type": (1, "ValueType"),
        "sample": (2, "Sample"),
        "mapping": (3, "Mapping"),
        "location": (4, "Location"),
        "function": (5, "Function"),
        "string_table": (6, [_TEXT]),
        "time_nanos": (9, _INT),
        "duration_nanos": (10, _INT),
        "comment": (13, [_INT]),
        "default_sample_type": (14, _INT),
    },
    "ValueType": {"type": (1, _INT), "unit": (2, _INT)},
    "Sample": {"location_id": (1, [_INT]), "value": (2, [_INT]), "label": (3, "Label")},
    "Label": {"key": (1, _INT), "str": (2, _INT)},
    "Mapping": {
        "id": (1, _INT),
        "has_functions": (7, _INT),
        "has_filenames": (8, _INT),
        "has_line_numbers": (9, _INT),
    },
    "Location": {"id": (1, _INT), "mapping_id": (2, _INT), "line": (4, "Line")},
    "Line": {"function_id": (1, _INT), "line": (2, _INT)},
    "Function": {"id": (1, _INT), "name": (2, _INT), "system_name": (3, _INT), "filename": (4, _INT)},
}
"""The fields of each message: their number and type. A list is repeated, and so is a message."""


@dataclass(frozen=True)
class Sample:
    """One sample: its frames, the innermost first, its values by type, and its labels."""

    frames: tuple[tuple[str, str, int], ...]
    values: dict[str, int]
    labels: dict[str, str]


@dataclass(frozen=True)
class Pprof:
    """A profile in pprof's format."""

    types: tuple[tuple[str, str], ...]
    default_type: str
    samples: tuple[Sample, ...]
    time_nanos: int
    duration_nanos: int
    comments: tuple[str, ...]


def read_pprof(body: bytes) -> Pprof:
    """Return a compressed profile; fails if an index is missing or a field is unknown."""
    raw = _profile_class()()
    raw.ParseFromString(gzip.decompress(body))
    assert not _unknown(raw)
    text = list(raw.string_table)
    assert text[0] == ""
    mappings = {mapping.id for mapping in raw.mapping}
    functions = {each.id: (text[each.name], text[each.filename]) for each in raw.function}
    locations = {}
    for location in raw.location:
        assert location.mapping_id in mappings
        (line,) = location.line
        locations[location.id] = (*functions[line.function_id], line.line)
    types = tuple((text[each.type], text[each.unit]) for each in raw.sample_type)
    samples = tuple(
        Sample(
            tuple(locations[each] for each in sample.location_id),
            dict(zip((name for name, _ in types), sample.value, strict=True)),
            {text[label.key]: text[label.str] for label in sample.label},
        )
        for sample in raw.sample
    )
    comments = tuple(text[each] for each in raw.comment)
    return Pprof(types, text[raw.default_sample_type], samples, raw.time_nanos, raw.duration_nanos, comments)


def _unknown(message: Any) -> bool:
    children = [each for _, value in message.ListFields() if not isinstance(value, (int, str)) for each in value]
    return len(UnknownFieldSet(message)) > 0 or any(_unknown(each) for each in children if hasattr(each, "ListFields"))


def _profile_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="pprof.proto", package="pprof", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            repeated = isinstance(kind, (str, list))
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                field.type, field.type_name = field.TYPE_MESSAGE, f".pprof.{kind}"
            else:
                field.type = kind[0] if isinstance(kind, list) else kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pprof.Profile"))
