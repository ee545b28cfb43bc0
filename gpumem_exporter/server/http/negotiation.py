"""What a scraper's `Accept` and `Accept-Encoding` ask for (RFC 9110, sections 12.4.2 and 12.5)."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["accepts_gzip", "prefers_openmetrics"]

_OPENMETRICS = "application/openmetrics-text"
_TEXT_RANGES = ("text/plain", "text/*", "*/*")


def prefers_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1.0.0 is wanted at least as much as plain text, which is what whoever does not say gets."""
    openmetrics = 0.0
    text: dict[str, float] = {}
    for name, parameters, quality in _choices(accept):
        version = parameters.get("version", "")
        if name == _OPENMETRICS and version in ("", "1.0.0"):
            openmetrics = max(openmetrics, quality)
        elif name in _TEXT_RANGES and version in ("", "0.0.4"):
            text[name] = max(text.get(name, 0.0), quality)
    # The most specific range that fits counts.
    plain = next((text[name] for name in _TEXT_RANGES if name in text), 0.0)
    return openmetrics > 0 and openmetrics >= plain


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether the body may be compressed with gzip."""
    qualities = {name: quality for name, _, quality in _choices(accept_encoding)}
    return qualities.get("gzip", qualities.get("x-gzip", qualities.get("*", 0.0))) > 0


def _choices(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Each element with its parameters and its quality; one that cannot be read is left out."""
    for element in header.split(","):
        name, *rest = (part.strip() for part in element.split(";"))
        if not name:
            continue
        parameters = {}
        for part in rest:
            key, _, value = part.partition("=")
            parameters[key.strip().lower()] = value.strip().strip('"')
        try:
            quality = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if 0 <= quality <= 1:
            yield name.lower(), parameters, quality
