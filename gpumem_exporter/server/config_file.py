"""Reads `--config.file`: YAML with dotted keys (`web.listen-address: …`), nested keys, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumem_exporter.core.yaml_file import YamlReader, is_mapping, line_of

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["FileSetting", "read_config_file"]


class FileSetting(NamedTuple):
    """A setting in the file."""

    value: Any
    line: int


def read_config_file(path: Path, *, known: Sequence[str]) -> dict[str, FileSetting]:
    """Read the settings of a file, by dotted name.

    Raises:
        ConfigurationError: the file cannot be read, is not a YAML mapping, or has a key that is unknown, that appears
            twice, or that has no value.
    """
    return _Reader(path, known).settings()


class _Reader(YamlReader):
    def __init__(self, path: Path, known: Sequence[str]) -> None:
        super().__init__(path, "configuration file")
        self._known = known

    def settings(self) -> dict[str, FileSetting]:
        root = self.parse()
        found: dict[str, FileSetting] = {}
        for name, key, node in self._leaves(root, "") if root is not None else ():
            if name in found:
                self.fail(key, f"the key {name!r} appears twice, first in line {found[name].line}")
            value = self.value(node, name)
            if value is None:
                self.fail(key, f"{name}: has no value")
            found[name] = FileSetting(value, line_of(node))
        return found

    def _leaves(self, node: Node, prefix: str) -> Iterator[tuple[str, Node, Node]]:
        """Yield the dotted name, the key and the value of each setting."""
        entries = self.entries(node, 'expected keys with values, such as `web.listen-address: ":9844"`')
        for text, (key, value) in entries.items():
            name = prefix + text
            if name in self._known and not is_mapping(value):
                yield name, key, value
            elif is_mapping(value) and any(one.startswith(f"{name}.") for one in self._known):
                yield from self._leaves(value, f"{name}.")
            elif name in self._known:
                self.fail(key, f"{name}: expected a value, not keys with values")
            else:
                self.fail(key, f"unknown key {name!r}{_suggestion(name, self._known)}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    import difflib  # slow to import, and only needed for an error

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(known)}"
