"""Reads a YAML file into a pydantic model. An error is one line with the file, the line, the key and what is accepted.

A model gets the values as the text that the file has: the type of its field decides whether `08` or `no` is a name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.core.spelling import did_you_mean

MAX_FILE_BYTES = 1 << 20

_NULL_TAG = "tag:yaml.org,2002:null"
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "seq", "map"))

Location: TypeAlias = tuple[str | int, ...]
"""The keys and the indices of lists that lead to a value."""

Section = TypeVar("Section", bound="FileSection")


class FileSection(BaseModel):
    """Keys with values in a file. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        keys = ", ".join(fields)
        if not isinstance(given, dict):
            raise section_error("", f"expected keys with values; the keys are {keys}")
        for key in given:
            if key not in fields:  # a mistyped key would have no effect
                advice = did_you_mean(key, fields, f"the keys are {keys}")
                raise section_error(key, f"unknown or unsupported key {key[:64]!r}; {advice}")
        for key, field in fields.items():
            if field.is_required() and key not in given:
                raise section_error("", f"the key {key!r} is missing; the keys are {keys}")
        return given


def section_error(key: str, message: str) -> PydanticCustomError:
    """Return the error of one key of a section, for validators that compare several keys."""
    return PydanticCustomError("section", "{message}", {"key": key, "message": message})


def _read_flag(value: Any) -> Any:
    if value not in ("true", "false"):
        raise ValueError("expected true or false")
    return value


Flag = Annotated[bool, BeforeValidator(_read_flag)]
"""True or false; YAML's other words, such as `yes`, are errors."""


class YamlFile:
    """A parsed file. The constructor may block on the disk; `what` is the kind of file, for messages: "policy file".

    Raises ConfigurationError if the file cannot be read, or is no YAML of keys, lists and values.
    """

    def __init__(self, path: Path, what: str) -> None:
        import yaml  # only an exporter with such a file needs the parser

        self._path = path
        self._lines: dict[Location, int] = {(): 1}
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"cannot read the {what} {str(path)!r}: {reason}") from None
        if len(text) > MAX_FILE_BYTES:
            raise ConfigurationError(f"the {what} {str(path)!r} is longer than {MAX_FILE_BYTES} bytes")
        try:
            # Nodes have lines. The loader of values would also read `no` as False and `08` as an error.
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.document = None if root is None else self._plain(root, (), _line(root))
            """Text, lists and dicts; None for an empty file."""
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise ConfigurationError(f"{path}{line}: invalid YAML: {_one_line(error.problem)}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigurationError(f"{path}: invalid YAML: {_one_line(error)}") from None

    def read(self, section: type[Section], context: Any = None) -> Section:
        """Validate the file; `context` is for the validators of the section."""
        try:
            return section.model_validate(self.document, context=context)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            if first["type"] == "section":
                key = first["ctx"]["key"]
                raise self.error((*first["loc"], key) if key else first["loc"], first["msg"], of=first["loc"]) from None
            value = f"{shown(first['input'])} is invalid: " if isinstance(first["input"], str) else ""
            raise self.error(first["loc"], value + expected(first)) from None

    def error(self, location: Location, message: str, of: Location | None = None) -> ConfigurationError:
        """Return the error of the value at a location; `of` is the section that the message names instead."""
        name = ".".join(str(part)[:64] for part in (location if of is None else of) if part != "[key]")
        return ConfigurationError(f"{self._path}:{self.line(location)}: {f'{name}: ' if name else ''}{message}")

    def line(self, location: Location) -> int:
        """Return the line of a key or an item of a list; of the nearest one around it if there is none."""
        while location not in self._lines:
            location = location[:-1]
        return self._lines[location]

    def _plain(self, node: Any, location: Location, line: int) -> Any:
        """Return the text, list or dict of a node."""
        self._lines[location] = line
        if node.tag == _NULL_TAG:
            raise self.error(location, "has no value")
        if node.tag not in _TAGS:
            raise self.error(location, f"invalid YAML: the tag {node.tag[:64]!r} is not supported")
        if node.id == "scalar":
            return node.value
        if node.id == "sequence":
            return [self._plain(item, (*location, i), _line(item)) for i, item in enumerate(node.value)]
        found: dict[str, Any] = {}
        for key, value in node.value:
            if key.id != "scalar":
                raise ConfigurationError(f"{self._path}:{_line(key)}: a key must be text")
            at = (*location, key.value)
            if key.value in found:
                message = f"the key {key.value[:64]!r} appears twice, first in line {self._lines[at]}"
                raise ConfigurationError(f"{self._path}:{_line(key)}: {message}")
            found[key.value] = self._plain(value, at, _line(key))
        return found


def expected(error: Any) -> str:
    """Return what an error of pydantic expects."""
    context = error.get("ctx", {})
    if "error" in context:
        return str(context["error"])
    message = str(error["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message if message.startswith("expected") else f"expected {message[:1].lower()}{message[1:]}"


def shown(value: Any) -> str:
    """Return a value for a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
