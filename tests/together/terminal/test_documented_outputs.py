"""Every output of a command that a document shows is what the command prints.

`<!-- output: demo -->` before a block of code marks such an output, on the demo's node (`still_demo`). A block
`console` has the commands, each after `$ `. A block `text` is the output of the block `sh` before it. The commands run
in the order of the page. GPUMEM_UPDATE_GOLDEN=1 writes the outputs that differ into the documents.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.servers.still_demo import StillDemo, still_demo
from tests.support.waiting import patient

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MARK = "<!-- output: demo -->"
BLOCK = re.compile(r"^(<!-- [^\n]* -->\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:9844"
HOST = re.compile(r"^\S+(?=  \d\d:\d\d:\d\d  DEMO)", re.MULTILINE)
"""The name of this machine in an output of `info`."""
READS = re.compile(r"gpumem-exporter (info|events|doctor|report)\b")
"""Commands that request nothing, so that time may stand still."""


@dataclass(frozen=True)
class Shown:
    """A block of a document with the outputs of commands."""

    start: int
    end: int
    """The positions of its text in the document."""
    text: str
    commands: tuple[str, ...]
    """For a block `text`, the one before it."""
    prompts: bool
    """Whether the block has the commands, too."""

    def with_outputs(self, outputs: list[str]) -> str:
        """Return the text of the block with these outputs."""
        if not self.prompts:
            return outputs[0]
        return "".join(f"$ {command}\n{output}" for command, output in zip(self.commands, outputs, strict=True))


def shown_outputs(document: str) -> Iterator[Shown]:
    """Yield the marked blocks of a document."""
    before = ""
    for block in BLOCK.finditer(document):
        mark, language, text = block.groups()
        if language == "sh":
            before = text
        if mark is None or mark.strip() != MARK:
            continue
        commands = re.findall(r"^\$ (.*(?:(?<=\\)\n.*)*)", text, re.MULTILINE) if language == "console" else [before]
        yield Shown(*block.span(3), text, tuple(commands), language == "console")


NORMAL = (
    (r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}\b|GPU-[0-9a-f-]{36}", "ID"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r"\buid=\d+", "uid=UID"),
    (r'(?<=": )-?\d[\d.e+-]*', "NUMBER"),
    (r"\b\d[\d.]* ?(?:[KMGT]i)?B\b|\b\d[\d.]*[KMGT]\b", "SIZE"),
    (r"\b\d[\d.]* ?(?:ns|µs|ms|s|min|h|%)(?=\W|$)", "QUANTITY"),
    (r"\b\d\d:\d\d(:\d\d)?\b|\b[A-Z][a-z]{2} \d\d\b", "CLOCK"),
    (r"\b\d{4,}\b", "PID"),
    (r"\S*[█▓▒░·]{2,}\S*", "BAR"),
    (r"[ \t]+", " "),  # widths of columns
)
"""What varies between two runs: patterns and their replacements."""


def normalized(text: str) -> str:
    for pattern, replacement in NORMAL:
        text = re.sub(pattern, replacement, text)
    return text


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if MARK in page.read_text()], ids=lambda page: page.stem)
def test_a_document_shows_what_its_commands_print(page: Path, still: StillDemo, tmp_path: Path) -> None:
    document = page.read_text(encoding="utf-8")
    shown = list(shown_outputs(document))
    reads = all(READS.match(command) for block in shown for command in block.commands)
    with contextlib.nullcontext(still) if reads else still_demo() as demo:
        outputs = [[output_of(command, demo, tmp_path) for command in block.commands] for block in shown]
    for block, texts in reversed(list(zip(shown, outputs, strict=True))):
        text = block.with_outputs(texts)
        if os.environ.get("GPUMEM_UPDATE_GOLDEN"):
            if normalized(text) != normalized(block.text):
                document = document[: block.start] + text + document[block.end :]
        else:
            assert normalized(text) == normalized(block.text), f"GPUMEM_UPDATE_GOLDEN=1 rewrites {page}"
    if document != page.read_text(encoding="utf-8"):
        page.write_text(document, encoding="utf-8")


def output_of(command: str, demo: StillDemo, folder: Path) -> str:
    """Run a command as in a shell; what it prints and its errors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    variables = {
        "GPUMEM_EXPORTER_URL": demo.url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }

    def run() -> str:
        ended = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", f"exec 2>&1\n{command.replace(ADDRESS, demo.url)}"],
            cwd=folder,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
        )
        assert ended.returncode == 0, (command, ended.stdout)
        return HOST.sub("gpu-node-7", ended.stdout.replace(demo.url, ADDRESS))

    if READS.match(command):
        return run()
    with demo.time_passes():
        return run()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.stem)
def test_every_transcript_of_commands_is_marked(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert [text for mark, language, text in blocks if language == "console" and mark.strip() != MARK] == []
    assert [text for _, language, text in blocks if language in ("", "text") and text.startswith("$ ")] == []
