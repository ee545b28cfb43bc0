"""The file of `--config.file`: YAML, with dotted keys (`web.listen-address: …`), nested ones, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpumem_exporter.errors import ConfigurationError

__all__ = ["MAX_CONFIG_BYTES", "read_config_file"]

MAX_CONFIG_BYTES = 1 << 20


def read_config_file(path: Path, *, known: Sequence[str]) -> dict[str, Any]:
    """Read the settings of a file, by dotted name.

    Raises:
        ConfigurationError: it cannot be read, is no YAML mapping, or has a key that is unknown, double or empty.
    """
    import yaml  # only whoever has such a file pays for the parser

    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"configuration file {str(path)!r} cannot be read: {error.strerror}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"configuration file {str(path)!r} is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigurationError(f'{path}: expected keys with values, such as `web.listen-address: ":9844"`')
    found: dict[str, Any] = {}
    for key, value in _flatten(document, ""):
        if key not in known:
            raise ConfigurationError(f"{path}: unknown key {key!r}{_near(key, known)}")
        if key in found:
            raise ConfigurationError(f"{path}: key {key!r} is there twice")
        if value is None:
            raise ConfigurationError(f"{path}: {key}: has no value")
        found[key] = value
    return found


def _flatten(mapping: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _near(key: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(known)}"
