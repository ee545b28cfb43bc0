"""Takes the README's picture of `gpumem-exporter top`: a real run against the demo, as SVG.

    python .readme/take_top.py [--minutes 10] [FILE]

Starts `serve --demo` on a free port, lets its workloads run for some minutes, and draws the screen of `top`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import time
from pathlib import Path

from demo import demo
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from gpumem_client.wire.errors import ExporterError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.top.cells import join_lines
from gpumem_exporter.cli.top.frame import Display, draw
from gpumem_exporter.cli.top.source import Reading, Source
from gpumem_exporter.cli.top.view import View

COLUMNS, LINES = 134, 40
LEAST_REPORTING = 12

THEME = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [
        *((72, 79, 88), (248, 81, 73), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (201, 209, 217)),
    ],
)
"""Readable on light and dark pages."""
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main() -> None:
    """Run the demo, take the picture and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("top.svg"), help="%(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="to let the demo run (default: %(default)g)")
    arguments = parser.parse_args()
    target: Path = arguments.file
    with demo() as url:
        time.sleep(60 * arguments.minutes)
        reading, taken = settled(url)
        target.write_text(picture(reading, time.monotonic() - taken), encoding="utf-8")
    print(target)


def settled(url: str) -> tuple[Reading, float]:
    """Return the exporter's values once enough processes report, and their monotonic time."""
    while True:
        source = Source((url,), open_api=lambda: ExporterApi((url,)))
        with contextlib.closing(source), contextlib.suppress(ExporterError):
            reading = source.read()
            if len({row.pid for row in reading.rows if row.state == "reporting"}) >= LEAST_REPORTING:
                return reading, time.monotonic()
        time.sleep(0.5)


def picture(reading: Reading, age_seconds: float) -> str:
    """Draw the screen as an SVG without external resources."""
    view = View(sort="idle-cache")
    view = view.press("down", view.rows(reading.rows), LINES)
    frame = draw(Display(reading, age_seconds), view, COLUMNS, LINES)
    console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, height=LINES, force_terminal=True, color_system="truecolor"
    )
    console.print(join_lines(frame.lines))
    svg = console.export_svg(title="gpumem-exporter top", theme=THEME, unique_id="top")
    return FONT_FACE.sub("", svg).replace("Fira Code, monospace", FONTS)


if __name__ == "__main__":
    main()
