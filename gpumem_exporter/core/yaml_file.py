"""Reads a YAML file into a pydantic model. An error is one line with the file, the line, the key and what is accepted.

A model gets the values as the text that the file has: the type of its field decides whether `08` or `no` is a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gpumem_client.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from yaml.nodes import Node

MAX_FILE_BYTES = 1 << 20

_NULL_TAG = "tag:yaml.org,2002:null"
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "seq", "map"))

Location: TypeAlias = tuple[str | int, ...]
"""The keys and the indices of lists that lead to a value."""

Section = TypeVar("Section", bound="FileSection")


class FileSection(BaseModel):
    """Keys with values in a file. An unknown key is an error: a mistyped one would have no effect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        keys = ", ".join(fields)
        if not isinstance(given, dict):
            raise section_error("", f"expected keys with values; the keys are {keys}")
        for key in given:
            if key not in fields:
                raise section_error(key, f"unknown or unsupported key {key[:64]!r}; the keys are {keys}")
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
    """A parsed file. May block on the disk.

    Args:
        path: the file.
        what: the kind of file, for messages: "policy file".

    Raises:
        ConfigurationError: the file cannot be read, or is no YAML of keys, lists and values.
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


class YamlReader:
    """Reads one file. Each method raises `ConfigurationError` with one line of text.

    Args:
        path: the file.
        what: the name of the file's kind in messages.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what

    def parse(self) -> Node | None:
        """Parse the file and return its root node; None for an empty file. May block on the disk."""
        import yaml  # only an exporter with such a file needs the parser

        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"cannot read the {self._what} {str(self._path)!r}: {reason}") from None
        if len(text) > MAX_FILE_BYTES:
            raise ConfigurationError(f"the {self._what} {str(self._path)!r} is longer than {MAX_FILE_BYTES} bytes")
        try:
            root: Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise ConfigurationError(f"{self._path}{line}: invalid YAML: {_one_line(error.problem)}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigurationError(f"{self._path}: invalid YAML: {_one_line(error)}") from None
        return root

    def root(self, expected: str) -> Node:
        """Parse the file and return its root node; an empty file is an error."""
        root = self.parse()
        if root is None:
            raise ConfigurationError(f"{self._path}: the file is empty; expected {expected}")
        return root

    def mapping(
        self, node: Node, keys: Sequence[str], required: Sequence[str] = (), what: str = "the file"
    ) -> dict[str, Node]:
        """Return the values of a mapping by key.

        Args:
            node: the mapping.
            keys: the known keys.
            required: the keys that must be present.
            what: the mapping's name in messages.
        """
        found = self.entries(node, f"{what}: expected keys with values; the keys are {', '.join(keys)}")
        for name, (key, value) in found.items():
            if name not in keys:
                self.fail(key, f"{what}: unknown key {name[:64]!r}; the keys are {', '.join(keys)}")
            if value.tag == _NULL_TAG:
                self.fail(key, f"{what}: {name} has no value")
        for name in required:
            if name not in found:
                self.fail(node, f"{what}: the key {name!r} is missing; the keys are {', '.join(keys)}")
        return {name: value for name, (_, value) in found.items()}

    def entries(self, node: Node, error: str) -> dict[str, tuple[Node, Node]]:
        """Return the key and value nodes of a mapping by the key's text; fail with `error` for another node."""
        if not is_mapping(node):
            self.fail(node, error)
        found: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if not is_scalar(key):
                self.fail(key, "a key must be text")
            name = str(key.value)
            if name in found:
                self.fail(key, f"the key {name[:64]!r} appears twice, first in line {line_of(found[name][0])}")
            found[name] = key, value
        return found

    def sequence(self, node: Node, key: str) -> Sequence[Node]:
        """Return the items of a list."""
        if _kind(node) != "sequence":
            self.fail(node, f"{key}: expected a list")
        return list(node.value)

    def text(self, node: Node, key: str) -> str:
        """Return a value as it is written."""
        if not is_scalar(node) or node.tag not in _TAGS[:-2] or not node.value:
            self.fail(node, f"{key}: expected a string")
        return str(node.value)

    def choice(self, node: Node, key: str, choices: Sequence[str]) -> str:
        """Return one of several words."""
        text = self.text(node, key)
        if text not in choices:
            self.fail_value(node, key, text, ", ".join(choices))
        return text

    def flag(self, given: Mapping[str, Node], key: str, *, default: bool) -> bool:
        """Return true or false."""
        return default if key not in given else self.choice(given[key], key, ("true", "false")) == "true"

    def count(self, given: Mapping[str, Node], key: str, default: int, most: int) -> int:
        """Return a number from 1 to `most`."""
        if key not in given:
            return default
        text = self.text(given[key], key)
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
            self.fail_value(given[key], key, text, f"an integer from 1 to {most}")
        return int(text)

    def value(self, node: Node, key: str) -> Any:
        """Return a value of YAML's basic types: text, number, boolean, list."""
        import yaml

        try:
            return yaml.constructor.SafeConstructor().construct_document(node)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            self.fail(node, f"{key}: invalid YAML: {_one_line(error)}")

    def fail_value(self, node: Node, key: str, text: str, expected: str) -> NoReturn:
        """Reject the file because of a value."""
        self.fail(node, f"{key}: {text[:64]!r} is invalid: expected {expected}")

    def fail(self, node: Node, message: str) -> NoReturn:
        """Reject the file because of a node."""
        raise ConfigurationError(f"{self._path}:{line_of(node)}: {message}")


def line_of(node: Node) -> int:
    """Return the line where a node starts, counted from 1."""
    return int(node.start_mark.line) + 1


def is_scalar(node: Node) -> bool:
    """Return whether the node is a single value."""
    return _kind(node) == "scalar"


def is_mapping(node: Node) -> bool:
    """Return whether the node has keys with values."""
    return _kind(node) == "mapping"


def _kind(node: Any) -> str:
    return str(node.id)
