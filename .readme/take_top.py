"""Takes the README's picture of `gpumem-exporter top`: a real run against the demo, as SVG.

    python .readme/take_top.py [--minutes 10] [FILE]

Starts `serve --demo` on a port of its own, lets its workloads run for so long, and draws what `top` shows then.
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.top.cells import whole
from gpumem_exporter.cli.top.frame import Moment, draw
from gpumem_exporter.cli.top.source import Reading, Source
from gpumem_exporter.cli.top.view import View
from gpumem_exporter.errors import ExporterError

COLUMNS, LINES = 124, 40
LEAST_REPORTING = 12

THEME = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [
        *((72, 79, 88), (248, 81, 73), (63, 185, 80), (210, 153, 34)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (201, 209, 217)),
    ],
)
"""Readable on a light page as on a dark one."""
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main() -> None:
    """Run the demo, take the picture, say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("top.svg"), help="%(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="to let the demo run (default: %(default)g)")
    arguments = parser.parse_args()
    target: Path = arguments.file
    address = f"127.0.0.1:{free_port()}"
    exporter = subprocess.Popen(
        [sys.executable, "-m", "gpumem_exporter", "serve", "--demo", "--web.listen-address", address],
        cwd=Path(__file__).parents[1],
    )
    try:
        reading, taken = settled(f"http://{address}", exporter, 60 * arguments.minutes)
        target.write_text(picture(reading, time.monotonic() - taken), encoding="utf-8")
    finally:
        exporter.send_signal(signal.SIGTERM)
        exporter.wait(30)
    print(target)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def settled(url: str, exporter: subprocess.Popen[bytes], runs_for_seconds: float) -> tuple[Reading, float]:
    """What the exporter says when the demo has run for so long, and when (monotonic) it said so."""
    end = time.monotonic() + runs_for_seconds
    while exporter.poll() is None and time.monotonic() < end:
        time.sleep(0.5)
    while True:
        if exporter.poll() is not None:
            raise SystemExit(f"the exporter ended with {exporter.returncode}")
        source = Source((url,), open_api=lambda: ExporterApi((url,)))
        try:
            reading = source.read()
        except ExporterError:
            reading = None
        finally:
            source.close()
        reporting = len({row.pid for row in reading.rows if row.state == "reporting"}) if reading else 0
        if reading and reporting >= LEAST_REPORTING:
            return reading, time.monotonic()
        time.sleep(0.5)


def picture(reading: Reading, age_seconds: float) -> str:
    """The screen as SVG that loads nothing from anywhere."""
    view = View(sort="reclaimable")
    view = view.press("down", view.rows(reading.rows), LINES)
    frame = draw(Moment(reading, age_seconds), view, COLUMNS, LINES, unicode_output=True)
    console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, height=LINES, force_terminal=True, color_system="truecolor"
    )
    console.print(whole(frame.lines))
    svg = console.export_svg(title="gpumem-exporter top", theme=THEME, unique_id="top")
    return FONT_FACE.sub("", svg).replace("Fira Code, monospace", FONTS)


if __name__ == "__main__":
    main()
