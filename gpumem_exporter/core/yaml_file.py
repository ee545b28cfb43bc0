"""Reads a YAML file of settings. Every error names the file, the line, the key, the value and what is accepted.

The reader walks the parser's nodes, because only they know their lines. It constructs no objects from the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpumem_client.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["MAX_FILE_BYTES", "YamlReader", "is_mapping", "is_scalar", "line_of"]

MAX_FILE_BYTES = 1 << 20

_SCALAR_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
_NULL_TAG = "tag:yaml.org,2002:null"


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
        if not is_scalar(node) or node.tag not in _SCALAR_TAGS or not node.value:
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


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
