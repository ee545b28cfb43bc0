"""Walks a YAML file node by node, and says in which line something is not as it should be.

The parser's nodes are read, not what it would make of them: they know their lines, nothing is constructed, and how far
the walk goes is for the reader to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpumem_exporter.actions.policy.values import read_value, shown_value
from gpumem_exporter.errors import ConfigurationError

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["MAX_POLICY_BYTES", "NodeReader", "is_mapping", "is_scalar", "line_of"]

MAX_POLICY_BYTES = 256 << 10

_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
_NULL = "tag:yaml.org,2002:null"


class NodeReader:
    """Reads one file. Every method raises `ConfigurationError`, one line with the file, the line and what is right.

    Args:
        path: the file.
        what: what it is called where it cannot be read.
        expected: what an empty one lacks.
    """

    def __init__(
        self, path: Path, what: str = "policy file", expected: str = "the key rules, with a list of them"
    ) -> None:
        self._path = path
        self._what = what
        self._expected = expected

    def compose(self) -> Node:
        """Parse the file; gives its root. May block on the disk."""
        import yaml  # only whoever has such a file pays for the parser

        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_POLICY_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"{self._what} {str(self._path)!r} cannot be read: {reason}") from None
        if len(text) > MAX_POLICY_BYTES:
            raise ConfigurationError(f"{self._what} {str(self._path)!r} is longer than {MAX_POLICY_BYTES} bytes")
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            raise ConfigurationError(f"{self._path}{line}: not YAML: {' '.join(str(error.problem).split())}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigurationError(f"{self._path}: not YAML: {' '.join(str(error).split())}") from None
        if root is None:
            raise ConfigurationError(f"{self._path}: it is empty; expected {self._expected}")
        return root

    def mapping(
        self, node: Node, keys: Sequence[str], required: Sequence[str], what: str = "the file"
    ) -> dict[str, Node]:
        """The values of a mapping by key.

        Args:
            node: the mapping.
            keys: those that there are.
            required: those that must be given.
            what: what it is called in a message.
        """
        if not is_mapping(node):
            self.fail(node, f"{what}: expected keys with values; the keys are {', '.join(keys)}")
        found: dict[str, Node] = {}
        for key, value in node.value:
            name = str(key.value) if is_scalar(key) else ""
            if name not in keys:
                shown = repr(name[:64]) if is_scalar(key) else "that is no text"
                self.fail(key, f"{what}: unknown key {shown}; the keys are {', '.join(keys)}")
            if name in found:
                self.fail(key, f"{what}: the key {name!r} is there twice")
            if value.tag == _NULL:
                self.fail(key, f"{what}: {name} has no value")
            found[name] = value
        for name in required:
            if name not in found:
                self.fail(node, f"{what}: the key {name!r} is missing; the keys are {', '.join(keys)}")
        return found

    def sequence(self, node: Node, key: str) -> Sequence[Node]:
        """The items of a list."""
        if _kind(node) != "sequence":
            self.fail(node, f"{key}: expected a list")
        return list(node.value)

    def text(self, node: Node, key: str) -> str:
        """A value, as it is written."""
        if not is_scalar(node) or node.tag not in _TAGS or not node.value:
            self.fail(node, f"{key}: expected a text")
        return str(node.value)

    def choice(self, node: Node, key: str, choices: Sequence[str]) -> str:
        """One of a few words."""
        text = self.text(node, key)
        if text not in choices:
            self.fail(node, f"{key}: {text[:64]!r} is not right: expected {', '.join(choices)}")
        return text

    def flag(self, given: Mapping[str, Node], key: str, *, default: bool) -> bool:
        """True or false."""
        if key not in given:
            return default
        text = self.text(given[key], key)
        if text not in ("true", "false"):
            self.fail(given[key], f"{key}: {text[:64]!r} is not right: expected true or false")
        return text == "true"

    def count(self, given: Mapping[str, Node], key: str, default: int, most: int) -> int:
        """A whole number from 1 on."""
        if key not in given:
            return default
        text = self.text(given[key], key)
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
            self.fail(given[key], f"{key}: {text[:64]!r} is not right: expected a number from 1 to {most}")
        return int(text)

    def number(self, node: Node, key: str, unit: str, least: float = 0.0, most: float = inf) -> float:
        """A figure in a unit of `policy_values`."""
        text = self.text(node, key)
        try:
            value = read_value(text, unit)
        except ValueError as error:
            self.fail(node, f"{key}: {text[:64]!r} is not right: {error}")
        if not least <= value <= most:
            bounds = f"at least {shown_value(least, unit)}" if value < least else f"at most {shown_value(most, unit)}"
            self.fail(node, f"{key}: {text[:64]!r} is not right: expected {bounds}")
        return value

    def fail(self, node: Node, message: str) -> NoReturn:
        """Refuse the file."""
        raise ConfigurationError(f"{self._path}:{line_of(node)}: {message}")


def line_of(node: Node) -> int:
    """Where a node begins; the first line is 1."""
    return int(node.start_mark.line) + 1


def is_scalar(node: Node) -> bool:
    """It is one value, and neither a list nor keys with values."""
    return _kind(node) == "scalar"


def is_mapping(node: Node) -> bool:
    """It is keys with values."""
    return _kind(node) == "mapping"


def _kind(node: Any) -> str:
    return str(node.id)
