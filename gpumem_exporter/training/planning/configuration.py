"""Writes planned values into YAML and TOML files, and takes them back.

Only the values themselves change: comments, order, quotes and line ends stay as they are. The first time a file is
changed, what it was is kept beside it as `NAME.backup`; undoing puts that back.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumem_exporter.errors import ConfigurationError

__all__ = ["apply", "backup_of", "diff", "parse_map", "planned_text", "restore"]

Value = int | str
_PACKAGES = {"tomlkit": "tomlkit", "ruamel.yaml": "ruamel.yaml"}


def parse_map(texts: Sequence[str], values: Mapping[str, Value]) -> dict[str, Value]:
    """Read `train.batch_size=batch`: which key of the files gets which of the planned values.

    Raises:
        ConfigurationError: it is written differently, or there is no such value; lists those that there are.
    """
    chosen: dict[str, Value] = {}
    for text in texts:
        key, equals, name = text.partition("=")
        if not (key.strip() and equals):
            raise ConfigurationError(f"--map {text!r}: write KEY=VALUE, such as train.batch_size=batch")
        if name.strip() not in values:
            raise ConfigurationError(f"--map {text!r}: the planned values are {', '.join(values)}")
        chosen[key.strip()] = values[name.strip()]
    return chosen


def planned_text(path: Path, values: Mapping[str, Value]) -> tuple[str, str]:
    """A file's text as it is and with the values in it. Nothing is written.

    Args:
        path: ends in .yaml, .yml or .toml.
        values: by the dotted path of the key (`train.loader.batch_size`, `stages.0.batch`); the key must be there.

    Raises:
        ConfigurationError: the file cannot be read, a key is not in it, or the package for its kind is missing.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{path}: {reason}") from error
    edits: dict[str, Callable[[str, Mapping[str, Value], Path], str]] = {
        ".yaml": _edit_yaml,
        ".yml": _edit_yaml,
        ".toml": _edit_toml,
    }
    edit = edits.get(path.suffix.lower())
    if edit is None:
        raise ConfigurationError(f"{path}: only .yaml, .yml and .toml files can be changed")
    return text, edit(text, values, path)


def diff(path: Path, before: str, after: str) -> str:
    """What would change, as `diff -u` shows it; empty when nothing would."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), str(path), f"{path} (planned)"
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def apply(path: Path, before: str, after: str) -> None:
    """Keep what the file was, unless that is kept already, and write the new text in one go.

    Raises:
        ConfigurationError: the file or its backup cannot be written, or the file has changed since it was read.
    """
    try:
        if path.read_bytes().decode("utf-8") != before:
            raise ConfigurationError(f"{path} has changed meanwhile; nothing is written")
        if not backup_of(path).exists():
            _replace(backup_of(path), before, path)
        _replace(path, after, path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def restore(path: Path) -> None:
    """Put back what a file was before it was changed for the first time; the backup is gone then.

    Raises:
        ConfigurationError: there is no backup, or it cannot be put back.
    """
    try:
        backup_of(path).replace(path.resolve())
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: there is no {backup_of(path).name} to restore it from") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error


def backup_of(path: Path) -> Path:
    """Where a file's former text is kept."""
    return path.with_name(path.name + ".backup")


def _replace(path: Path, text: str, like: Path) -> None:
    path = path.resolve()  # what a link points to is written, the link stays
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(like, name)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _edit_yaml(text: str, values: Mapping[str, Value], path: Path) -> str:
    yaml = _package("ruamel.yaml", path)
    try:
        root = yaml.YAML(typ="rt", pure=True).compose(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is no YAML: {_first_line(error)}") from error
    places = []
    for key, value in values.items():
        name, node = None, root
        for part in key.split("."):
            name, node = _inside(node, part)
            if node is None:
                raise ConfigurationError(f"{path} has no key {key!r}; add it first")
        if not hasattr(node, "value") or not isinstance(node.value, str):
            raise ConfigurationError(f"{path}: {key!r} holds more than one value")
        start, end, new = node.start_mark.index, node.end_mark.index, str(value)
        if start == end and name is not None:
            # Nothing stands there, and the marks are those of what comes next.
            start = end = text.index(":", name.end_mark.index) + 1
            new = f" {new}"
        places.append((start, end, new))
    # The text between two marks is the value alone, quotes included; from the end on, so that the marks stay right.
    for start, end, new in sorted(places, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _inside(node: Any, part: str) -> tuple[Any, Any]:
    """The nodes of a key and of its value, or of an index; None when it is not there."""
    pairs = getattr(node, "value", None)
    if not isinstance(pairs, list):
        return None, None
    if pairs and isinstance(pairs[0], tuple):
        return next(((key, value) for key, value in pairs if key.value == part), (None, None))
    return None, pairs[int(part)] if part.isdecimal() and int(part) < len(pairs) else None


def _edit_toml(text: str, values: Mapping[str, Value], path: Path) -> str:
    tomlkit = _package("tomlkit", path)
    try:
        document = tomlkit.parse(text)
    except tomlkit.exceptions.ParseError as error:
        raise ConfigurationError(f"{path} is no TOML: {_first_line(error)}") from error
    for key, value in values.items():
        *way, last = key.split(".")
        holder: Any = document
        try:
            for part in way:
                holder = holder[int(part) if isinstance(holder, list) else part]
            index = int(last) if isinstance(holder, list) else last
            former = holder[index]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} has no key {key!r}; add it first") from error
        if isinstance(former, dict | list):
            raise ConfigurationError(f"{path}: {key!r} holds more than one value")
        item = tomlkit.item(value)
        if hasattr(former, "trivia"):
            item.trivia.indent, item.trivia.comment_ws = former.trivia.indent, former.trivia.comment_ws
            item.trivia.comment, item.trivia.trail = former.trivia.comment, former.trivia.trail
        holder[index] = item
    return str(tomlkit.dumps(document))


def _package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"changing {path.name} needs the Python package {_PACKAGES[name]}: pip install 'gpumem-exporter[plan]'"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
