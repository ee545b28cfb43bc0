"""A GPU report's Markdown: who measured what, the disagreements, and each claim's figures, emulated and real."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.claims.comparison import Compared, Row, Verdict

__all__ = ["file_name", "markdown"]

_LONGEST_CELL = 200
_LONGEST_TRACE = 3000

_READING = """\
Figures are bytes unless their name says otherwise. Each was measured by the same code on an emulated node that was
made as large as this device, and on the device itself; `a = b` are figures that are one number. *agrees* means: each is
what the process, the driver or arithmetic says it must be in its own place, and the two are equal, or as near as they
must be. Where they are not, it is the emulated node that has to be corrected."""

_SECTIONS = (
    (Verdict.NO, "Disagreements"),
    (Verdict.YES, "What agrees"),
    (Verdict.NOT_HERE, "What could not be tried"),
    (Verdict.REPORTED, "Figures of which nothing is claimed"),
)


def file_name(model: str, driver: str, torch: str) -> str:
    """`gpu-report-<model>-<driver>-<torch>.md`, of characters that any file system takes; torch's build is left out."""
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in (model, driver, torch.partition("+")[0]))
    return f"gpu-report-{'-'.join(part or 'unknown' for part in parts)}.md"


def markdown(title: str, about: Mapping[str, str], notes: Sequence[str], compared: Sequence[Compared]) -> str:
    """The whole page.

    Args:
        title: its heading.
        about: the lines of the table at its head.
        notes: what must be known of it before all else.
        compared: the claims in the order measured.
    """
    lines = [f"# {title}", "", *(f"**{note}**\n" for note in notes)]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {_cell(text)} |" for name, text in about.items())]
    lines += ["", _READING]
    for verdict, heading in _SECTIONS:
        rows = list(_rows(compared, verdict))
        if rows or verdict is Verdict.NO:
            lines += ["", f"## {heading}", ""]
            lines += _table(rows) if rows else ["None."]
    lines += _traces(compared)
    return "\n".join(lines) + "\n"


def _rows(compared: Iterable[Compared], verdict: Verdict) -> Iterator[tuple[str, Row]]:
    """The rows of one section; those of a claim that read alike are one, but where they disagree."""
    for each in compared:
        rows = [row for row in each.rows if row.verdict is verdict]
        if verdict is not Verdict.NO:
            rows = _merged(rows)
        yield from ((each.claim if number == 0 else "", row) for number, row in enumerate(rows))


def _merged(rows: Sequence[Row]) -> list[Row]:
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names.setdefault((row.emulated, row.real), []).append(row.figure)
    return [Row(" = ".join(figures), emulated, real, rows[0].verdict) for (emulated, real), figures in names.items()]


def _table(rows: Iterable[tuple[str, Row]]) -> list[str]:
    lines = ["| claim | figure | emulated | real | agrees |", "| --- | --- | ---: | ---: | --- |"]
    for claim, row in rows:
        cells = (claim, row.figure, _short(row.emulated) or "–", _short(row.real) or "–", row.verdict.value)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return lines


def _traces(compared: Iterable[Compared]) -> list[str]:
    lines = []
    for each in compared:
        for column, measured in (("emulated", each.emulated), ("real", each.real)):
            if measured is not None and measured.trace:
                lines += ["", f"### {each.claim}: {column}", "", "```text"]
                lines += [measured.trace[-_LONGEST_TRACE:].strip().replace("```", "'''"), "```"]
    return ["", "## What failed, and where", *lines] if lines else []


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} …"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
