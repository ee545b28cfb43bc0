"""Lines of the text formats, which differ only in the header of a counter and in `# EOF`."""

from __future__ import annotations

from gpumem_exporter.collectors.catalog import Metric

__all__ = ["header", "label_text"]


def escape(value: str) -> str:
    r"""Escape `\`, newline and `"` in a label value; the formats allow no other escapes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return `{name="value",…} `, or a space if there are no labels."""
    if not names:
        return " "
    return "{" + ",".join([f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True)]) + "} "


def header(metric: Metric, *, openmetrics: bool) -> bytes:
    """Return the HELP and TYPE lines of a family."""
    name = metric.family if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n".encode()
