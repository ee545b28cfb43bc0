"""Writes the table of values in gpumem-exporter/README.md from the comments in values.yaml.

Run it after a change there, and commit both. The comment above a key describes its value. A mapping without a comment
is a group of values. Needs PyYAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent / "gpumem-exporter"
HEADING = "## Values\n"


def readme() -> str:
    """Return the text of README.md, with a current table."""
    written = (CHART / "README.md").read_text(encoding="utf-8")
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    rows = "".join(
        f"| `{key}` | {value} | {comment} |\n" for key, value, comment in _values(text.splitlines(), yaml.compose(text))
    )
    return f"{written.partition(HEADING)[0]}{HEADING}\n| value | default | meaning |\n| --- | --- | --- |\n{rows}"


def _values(lines: list[str], node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if comment := _comment_above(lines, key.start_mark.line):
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield name, "" if default in ('""', "{}", "[]") else f"`{default}`", comment
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _values(lines, value, f"{name}.")
        else:
            raise ValueError(f"values.yaml: {name} has no comment")


def _comment_above(lines: list[str], number: int) -> str:
    comment: list[str] = []
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        comment.insert(0, lines[number].lstrip("# "))
    return " ".join(comment)


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme(), encoding="utf-8")
