"""Takes the README's picture of `gpumem-exporter top`: a real run against the demo, as SVG.

    python .readme/take_top.py [--minutes 0.5] [FILE]

Starts `serve --demo` on a free port, lets its workloads run for some minutes, and draws the screen of `top`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from pathlib import Path

from demo import demo
from rich.terminal_theme import TerminalTheme

from gpumem_client.wire.errors import ExporterError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_view import Node, read_live
from gpumem_exporter.cli.render.node_tables import View
from gpumem_exporter.cli.top.app import Top

COLUMNS, LINES = 120, 34
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
    parser.add_argument("--minutes", type=float, default=0.5, help="to let the demo run (default: %(default)g)")
    arguments = parser.parse_args()
    target: Path = arguments.file
    with demo() as url:
        time.sleep(60 * arguments.minutes)
        target.write_text(asyncio.run(picture(url)), encoding="utf-8")
    print(target)


def named(api: ExporterApi) -> tuple[list[Node], tuple[str, ...]]:
    """Read the exporter's values, with another name than this machine's."""
    live = read_live(api)
    return [Node({**live, "node": {**live["node"], "host": "gpu-node-7"}}, api.url)], ()


def settled(api: ExporterApi) -> tuple[list[Node], tuple[str, ...]]:
    """Return the exporter's values once enough processes report."""
    while True:
        try:
            (node,), warnings = named(api)
            if node.live and sum(job["reporting_count"] for job in node.live["jobs"]) >= LEAST_REPORTING:
                return [node], warnings
        except ExporterError:
            pass
        time.sleep(0.5)


async def picture(url: str) -> str:
    """Draw the screen as an SVG without external resources."""
    api = ExporterApi((url,))
    app = Top(
        lambda: named(api),
        settled(api),
        View(),
        interval_seconds=1.0,
        open_api=lambda address: ExporterApi((address,)),
    )
    app.ansi_theme_dark = THEME
    async with app.run_test(size=(COLUMNS, LINES)) as pilot:
        await pilot.pause(1.5)
        await pilot.press("space")  # the ranks of the first job
        await pilot.pause(0.5)
        svg = app.export_screenshot(title="gpumem-exporter top")
    return FONT_FACE.sub("", svg).replace("Fira Code, monospace", FONTS)


if __name__ == "__main__":
    main()
