"""Takes the README's pictures of the live page: the demo in Chromium, light and dark.

    python .readme/take.py [--minutes 2]

Starts the demo on a free port and lets it run until the idle cache of each job is known. Needs Chromium on PATH
and the Python package playwright. take_top.py takes the picture of the terminal.

The page shows the host's name. To show another one, as root:

    unshare --uts sh -c 'hostname gpu-node-7 && python .readme/take.py'
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from demo import demo
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH, HEIGHT, MARGIN = 1440, 900, 16
SETTLE_MS = 15_000
"""Some problems must last for a while before the page shows them."""


def main() -> int:
    """Take the pictures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="to let the demo run (default: %(default)g)")
    minutes = parser.parse_args().minutes
    with demo() as url:
        time.sleep(60 * minutes)
        for scheme in ("light", "dark"):
            take(f"{url}/", scheme, HERE / f"page-{scheme}.png")
    return 0


def take(url: str, scheme: str, target: Path) -> None:
    """Take a picture of the page down to the end of the jobs."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        page.locator("#jobs tbody").first.wait_for(state="attached")
        page.wait_for_timeout(SETTLE_MS)
        table = page.locator("#jobs").bounding_box()
        assert table is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": table["y"] + table["height"] + MARGIN}
        page.screenshot(path=target, full_page=True, clip=clip)  # type: ignore[arg-type]
        browser.close()
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
