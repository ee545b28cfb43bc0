"""Writes planned values into YAML and TOML files.

Only the values change. Comments, order and line ends stay. The first change of a file saves the original as
`NAME.backup`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ConfigurationError


def parse_map(texts: Sequence[str], values: Mapping[str, int]) -> dict[str, int]:
    """Parse assignments such as `train.batch_size=batch`, and return the planned value of each key."""
    chosen: dict[str, int] = {}
    for text in texts:
        key, equals, name = text.partition("=")
        if not (key.strip() and equals):
            raise ConfigurationError(f"invalid --map {text!r}: write KEY=VALUE, such as train.batch_size=batch")
        if name.strip() not in values:
            raise ConfigurationError(f"invalid --map {text!r}: the planned values are {', '.join(values)}")
        chosen[key.strip()] = values[name.strip()]
    return chosen


def planned_text(path: Path, values: Mapping[str, int]) -> tuple[str, str]:
    """Return the text of a .yaml, .yml or .toml file before and after the change. Writes nothing.

    The planned values are by the dotted path of an existing key, such as `train.loader.batch_size` or `stages.0.batch`.
    """
    edit = {".yaml": _edit_yaml, ".yml": _edit_yaml, ".toml": _edit_toml}.get(path.suffix.lower())
    if edit is None:
        raise ConfigurationError(f"{path}: only .yaml, .yml and .toml files can be changed")
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return text, edit(text, values, path)


def diff(path: Path, before: str, after: str) -> str:
    """Return the change as `diff -u` shows it; empty if there is none."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), str(path), f"{path} (planned)"
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def apply(path: Path, before: str, after: str) -> None:
    """Write the new text. Keep the original in the backup, unless there is one already."""
    try:
        if not backup_of(path).exists():
            backup_of(path).write_bytes(before.encode("utf-8"))
        path.write_bytes(after.encode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def backup_of(path: Path) -> Path:
    """Return the path of a file's backup."""
    return path.with_name(path.name + ".backup")


def _edit_yaml(text: str, values: Mapping[str, int], path: Path) -> str:
    yaml = _package("ruamel.yaml", path)
    try:
        root = yaml.YAML(typ="rt", pure=True).compose(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    # Only the text of the values is replaced: a dump of the document would change quotes, indents and long lines.
    places = []
    for key, value in values.items():
        name, node = None, root
        for part in key.split("."):
            name, node = _inside(node, part)
            if node is None:
                raise ConfigurationError(f"{path} has no key {key!r}; add it first")
        if not isinstance(getattr(node, "value", None), str) or node.style in ("|", ">"):
            raise ConfigurationError(f"{path}: {key!r} is not a single value")
        if node.anchor:
            raise ConfigurationError(
                f"{path}: {key!r} has the anchor &{node.anchor}, so other keys may repeat its value"
            )
        start, end, new = node.start_mark.index, node.end_mark.index, str(value)
        if start == end and name is not None:
            # The key has no value, and the marks show where the next token starts. Insert after the colon.
            start = end = text.index(":", name.end_mark.index) + 1
            new = f" {new}"
        places.append((start, end, new))
    # Two marks enclose the value with its quotes. Replacing from the end keeps the other marks valid.
    for start, end, new in sorted(places, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _inside(node: Any, part: str) -> tuple[Any, Any]:
    """Return the nodes of a key and its value, or of an index; None if it is missing."""
    pairs = getattr(node, "value", None)
    if not isinstance(pairs, list):
        return None, None
    if pairs and isinstance(pairs[0], tuple):
        return next(((key, value) for key, value in pairs if key.value == part), (None, None))
    return None, pairs[int(part)] if part.isdecimal() and int(part) < len(pairs) else None


def _edit_toml(text: str, values: Mapping[str, int], path: Path) -> str:
    tomlkit = _package("tomlkit", path)
    try:
        document = tomlkit.parse(text)
    except tomlkit.exceptions.ParseError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {' '.join(str(error).split())}") from error
    for key, value in values.items():
        *parents, last = key.split(".")
        holder: Any = document
        try:
            for part in parents:
                holder = holder[int(part) if isinstance(holder, list) else part]
            index = int(last) if isinstance(holder, list) else last
            former = holder[index]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} has no key {key!r}; add it first") from error
        if isinstance(former, dict | list):
            raise ConfigurationError(f"{path}: {key!r} is not a single value")
        holder[index] = value
    return str(tomlkit.dumps(document))


def _package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"changing {path.name} needs the Python package {name}: pip install {name}") from error
