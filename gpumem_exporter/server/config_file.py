"""Reads `--config.file`: YAML with dotted keys (`web.listen-address: …`), nested keys, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpumem_exporter.core.yaml_file import YamlFile


class FileSetting(NamedTuple):
    """A setting in the file."""

    value: Any
    """Text or a list, as `Settings` accepts them from the environment as well."""
    line: int


def read_config_file(path: Path, *, known: Sequence[str]) -> dict[str, FileSetting]:
    """Read the settings of a file, by dotted name.

    Raises:
        ConfigurationError: the file cannot be read, is not a YAML mapping, or has a key that is unknown, that appears
            twice, or that has no value.
    """
    file = YamlFile(path, "configuration file")
    found: dict[str, FileSetting] = {}
    for location, value in _leaves(file, known):
        name = ".".join(location)
        if name in found:
            raise file.error(location, f"the key {name!r} appears twice, first in line {found[name].line}", of=())
        found[name] = FileSetting(value, file.line(location))
    return found


def _leaves(file: YamlFile, known: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the location and the value of each setting."""
    sections: list[tuple[tuple[str, ...], Any]] = [((), {} if file.document is None else file.document)]
    for location, section in sections:
        if not isinstance(section, dict):
            raise file.error(location, 'expected keys with values, such as `web.listen-address: ":9844"`')
        for key, value in section.items():
            name = ".".join((*location, key))
            if name in known:
                if isinstance(value, dict):
                    raise file.error((*location, key), "expected a value, not keys with values")
                yield (*location, key), value
            elif any(each.startswith(f"{name}.") for each in known):
                sections.append(((*location, key), value))
            else:
                raise file.error((*location, key), f"unknown key {name!r}{_suggestion(name, known)}", of=())


def _suggestion(name: str, known: Sequence[str]) -> str:
    import difflib  # slow to import, and only needed for an error

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(known)}"
